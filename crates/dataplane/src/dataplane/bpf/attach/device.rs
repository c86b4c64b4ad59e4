//! Programs on devices: attached by pinned links, taken over, and replaced without a gap.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, anyhow};
use aya::{
    Ebpf,
    programs::{ProgramError, SchedClassifier, TcAttachType, Xdp, XdpMode, links::FdLink, xdp::XdpLink},
};

use super::{
    super::{introspect, pins::remove_link},
    Interface, cgroup, drivers, pod, tc,
    xdp_errors::Refusing,
};
use crate::dataplane::{kernel::Kernel, sys};

/// The value of `--attach`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Mode {
    /// XDP on devices with a real wire, TC on veth and other virtual devices.
    Auto,
    /// XDP in the driver.
    Xdp,
    /// XDP in the stack: slow, works everywhere.
    XdpGeneric,
    /// TC only.
    Tc,
}

impl Mode {
    /// Whether the mode demands XDP, with no fallback.
    pub fn is_xdp(self) -> bool {
        matches!(self, Self::Xdp | Self::XdpGeneric)
    }
}

/// The attach mode of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attached {
    XdpDriver,
    XdpGeneric,
    Tc,
}

impl std::fmt::Display for Attached {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::XdpDriver => "xdp",
            Self::XdpGeneric => "xdp-generic",
            Self::Tc => "tc",
        })
    }
}

/// The pinned links of a device.
#[derive(Clone, Debug)]
pub struct Links {
    folder: PathBuf,
    device: String,
    ifindex: u32,
    /// The largest IP packet, in bytes.
    mtu: u32,
    /// Whether the device's packets begin with an Ethernet header.
    ethernet: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hook {
    /// The kernel keeps the mode of a link, so each mode has its own pin.
    Xdp,
    XdpGeneric,
    Ingress,
    Egress,
}

impl Hook {
    const fn name(self) -> &'static str {
        match self {
            Self::Xdp => "xdp",
            Self::XdpGeneric => "xdpgeneric",
            Self::Ingress => "ingress",
            Self::Egress => "egress",
        }
    }

    /// The name of its program, on a device whose packets begin with an Ethernet header or with an
    /// IP header.
    const fn program(self, ethernet: bool) -> &'static str {
        match self {
            Self::Xdp | Self::XdpGeneric => "tp_xdp_ingress",
            Self::Ingress if ethernet => "tp_tc_ingress",
            Self::Ingress => "tp_l3_ingress",
            Self::Egress if ethernet => "tp_tc_egress",
            Self::Egress => "tp_l3_egress",
        }
    }

    /// The name of the hook, as users know it.
    const fn place(self) -> &'static str {
        match self {
            Self::Xdp | Self::XdpGeneric => "XDP",
            Self::Ingress => "TC ingress",
            Self::Egress => "TC egress",
        }
    }
}

impl Links {
    pub fn new(folder: &Path, interface: &Interface) -> Self {
        let Interface { name, ifindex, mtu, ethernet, .. } = interface;
        Self {
            folder: folder.to_owned(),
            device: name.clone(),
            ifindex: *ifindex,
            mtu: *mtu,
            ethernet: *ethernet,
        }
    }

    /// Returns the path of a pin. The pin is found by the device's number alone: a renamed device
    /// is the same one, and keeps the name that it had when it was attached to; a device that was
    /// recreated under its old name is another one.
    fn path(&self, hook: Hook) -> PathBuf {
        let mine = format!("{}-{}-", hook.name(), self.ifindex);
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let held = entries.map(|entry| entry.path()).find(|path| {
            path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(&mine))
        });
        held.unwrap_or_else(|| self.folder.join(format!("{mine}{}", self.device.replace('.', "_"))))
    }

    /// Returns the hooks whose programs are no longer attached, or have been replaced.
    pub fn lost(&self, object: &Ebpf, attached: Attached, kernel: Kernel) -> Vec<&'static str> {
        let mut lost = Vec::new();
        for hook in linked(attached, kernel) {
            let held = sys::link_info(&self.path(hook)).ok();
            let program = object
                .program(hook.program(self.ethernet))
                .and_then(|program| Some(program.info().ok()?.id()));
            let intact =
                held.is_some_and(|link| link.target[0] == self.ifindex && Some(link.program) == program);
            if !intact {
                lost.push(hook.place());
            }
        }
        lost
    }

    /// Attaches the programs according to `mode`; those of an earlier agent are replaced in one
    /// step. `wire`: the device stands for a real wire. XDP sees Ethernet frames only; TC handles
    /// the packets of other devices.
    ///
    /// # Errors
    /// The device accepts no XDP program, see `xdp_errors`; or the kernel refuses otherwise.
    pub fn attach(&self, object: &mut Ebpf, mode: Mode, wire: bool, kernel: Kernel) -> Result<Attached> {
        self.attach_tc(object, Hook::Egress, kernel)?;
        self.attach_tc(object, Hook::Ingress, kernel)?;
        let attached = match mode {
            Mode::Tc => Attached::Tc,
            _ if !self.ethernet => Attached::Tc,
            Mode::Auto if !wire => Attached::Tc,
            Mode::Auto => match self.attach_xdp(object, Hook::Xdp, kernel) {
                Ok(()) => Attached::XdpDriver,
                Err(error) => {
                    tracing::warn!(
                        device = self.device,
                        "XDP is not possible here, TC takes all packets: {error:#}"
                    );
                    Attached::Tc
                }
            },
            Mode::Xdp => self.attach_xdp(object, Hook::Xdp, kernel).map(|()| Attached::XdpDriver)?,
            Mode::XdpGeneric => {
                self.attach_xdp(object, Hook::XdpGeneric, kernel).map(|()| Attached::XdpGeneric)?
            }
        };
        if attached == Attached::Tc {
            // An earlier agent may have run in another mode.
            self.detach_xdp()?;
        }
        Ok(attached)
    }

    fn attach_xdp(&self, object: &mut Ebpf, hook: Hook, kernel: Kernel) -> Result<()> {
        let (mode, other) = match hook {
            Hook::XdpGeneric => (XdpMode::Skb, Hook::Xdp),
            _ => (XdpMode::Driver, Hook::XdpGeneric),
        };
        let program: &mut Xdp = object
            .program_mut(hook.program(true))
            .with_context(|| format!("the packet path has no program {}", hook.program(true)))?
            .try_into()?;
        remove_link(&self.path(other))?;
        let path = self.path(hook);
        if let Some(link) = tc::pinned(&path)
            && let Ok(link) = XdpLink::try_from(link)
        {
            match program.attach_to_link(link) {
                Ok(id) => {
                    // The pin keeps the link; this handle of it can be closed.
                    drop(program.take_link(id)?);
                    return Ok(());
                }
                Err(error) => tracing::debug!(device = self.device, "the pinned XDP link is dead: {error}"),
            }
        }
        remove_link(&path)?;
        let id = program
            .attach_to_if_index(self.ifindex, mode)
            .map_err(|error| self.explain_xdp(hook, kernel, &error))?;
        let link: FdLink = program.take_link(id)?.try_into().context("XDP was attached without a link")?;
        link.pin(&path).with_context(|| format!("{} cannot be pinned", path.display()))?;
        Ok(())
    }

    fn explain_xdp(&self, hook: Hook, kernel: Kernel, error: &ProgramError) -> anyhow::Error {
        let driver = introspect::driver(&self.device);
        let refusing = Refusing {
            name: &self.device,
            driver: driver.as_deref(),
            mtu: self.mtu,
            page: introspect::page_size(),
            kernel,
            virtio: drivers::virtio_features(&self.device, self.ifindex, driver.as_deref()),
            generic: hook == Hook::XdpGeneric,
        };
        anyhow!("{}", refusing.explain(error))
    }

    fn attach_tc(&self, object: &mut Ebpf, hook: Hook, kernel: Kernel) -> Result<()> {
        let name = hook.program(self.ethernet);
        let attach_type = if hook == Hook::Egress { TcAttachType::Egress } else { TcAttachType::Ingress };
        let program: &mut SchedClassifier = object
            .program_mut(name)
            .with_context(|| format!("the packet path has no program {name}"))?
            .try_into()?;
        let context = || format!("attaching {name} to {} failed", self.device);
        tc::put(program, &self.device, attach_type, &self.path(hook), kernel).with_context(context)
    }

    /// Detaches both kinds of XDP program, which leaves the packets to TC.
    pub fn detach_xdp(&self) -> Result<()> {
        remove_link(&self.path(Hook::Xdp))?;
        remove_link(&self.path(Hook::XdpGeneric))
    }

    /// Detaches everything from this device.
    pub fn detach(&self) -> Result<()> {
        for hook in [Hook::Xdp, Hook::XdpGeneric, Hook::Ingress, Hook::Egress] {
            remove_link(&self.path(hook))?;
        }
        Ok(())
    }
}

/// Removes links of devices whose numbers are not in `present`: they are dead, or no longer wanted.
/// Returns the number of removed links.
pub fn retain(folder: &Path, present: &[u32]) -> Result<usize> {
    let mut removed = 0;
    for entry in fs::read_dir(folder).with_context(|| format!("{} cannot be read", folder.display()))? {
        let path = entry?.path();
        if cgroup::is_link(&path) || pod::is_link(&path) {
            continue;
        }
        let ifindex = path
            .file_name()
            .and_then(|name| name.to_str())
            .and_then(|name| name.split('-').nth(1))
            .and_then(|number| number.parse::<u32>().ok());
        if ifindex.is_none_or(|ifindex| !present.contains(&ifindex)) {
            remove_link(&path)?;
            removed += 1;
        }
    }
    Ok(removed)
}

/// Returns the numbers of the devices with XDP in the stack, according to their pinned links.
pub fn generic_devices(folder: &Path) -> Vec<u32> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    entries
        .filter_map(|entry| {
            let name = entry.ok()?.file_name().into_string().ok()?;
            let mut parts = name.split('-');
            (parts.next()? == Hook::XdpGeneric.name()).then(|| parts.next()?.parse().ok())?
        })
        .collect()
}

/// Returns the hooks that have links on a device of this attach mode: below Linux 6.6, TC programs
/// are filters without links.
fn linked(attached: Attached, kernel: Kernel) -> impl Iterator<Item = Hook> {
    let xdp = match attached {
        Attached::XdpDriver => Some(Hook::Xdp),
        Attached::XdpGeneric => Some(Hook::XdpGeneric),
        Attached::Tc => None,
    };
    let tc = kernel.has_tcx().then_some([Hook::Ingress, Hook::Egress]);
    xdp.into_iter().chain(tc.into_iter().flatten())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn xdp_has_a_link_on_every_kernel() {
        let [old, new] = [1, 6].map(|minor| Kernel { major: 6, minor });
        let hooks = |attached, kernel| linked(attached, kernel).collect::<Vec<_>>();
        assert_eq!(hooks(Attached::XdpDriver, old), [Hook::Xdp]);
        assert_eq!(hooks(Attached::XdpGeneric, old), [Hook::XdpGeneric]);
        assert_eq!(hooks(Attached::Tc, old), []);
        assert_eq!(hooks(Attached::XdpDriver, new), [Hook::Xdp, Hook::Ingress, Hook::Egress]);
        assert_eq!(hooks(Attached::Tc, new), [Hook::Ingress, Hook::Egress]);
    }
}
