//! The programs on the host side of pods' devices, attached by pinned links named `pod-NUMBER-NAME`
//! (TC ingress) and `podout-NUMBER-NAME` (TC egress), or below Linux 6.6 by filters.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use aya::{
    Ebpf,
    programs::{SchedClassifier, TcAttachType},
};
use traffic_policy_ebpf::abi::pod_flags;

use super::{
    super::{introspect, pins::remove_link},
    clsact, tc,
};
use crate::{
    dataplane::{kernel::Kernel, sys},
    node::pod_links::{self, PodLink},
};

/// The program at TC ingress with `--local-delivery direct` alone.
pub const DIRECT: &str = "tp_tc_pod";
/// The program at TC ingress with `--pod-services on`, which jumps to the other one.
const FROM_POD: &str = "tp_pod_ingress";
const TO_POD: &str = "tp_pod_egress";

/// A hook of a pod's device.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Hook {
    Ingress,
    Egress,
}

impl Hook {
    const ALL: [Self; 2] = [Self::Ingress, Self::Egress];

    /// The beginning of the names of pinned links.
    const fn prefix(self) -> &'static str {
        if matches!(self, Self::Ingress) { "pod" } else { "podout" }
    }

    const fn attach_type(self) -> TcAttachType {
        if matches!(self, Self::Ingress) { TcAttachType::Ingress } else { TcAttachType::Egress }
    }

    /// The program for a device with these [`pod_flags`].
    const fn program(self, flags: u16) -> Option<&'static str> {
        match self {
            Self::Ingress if flags & pod_flags::SERVICES != 0 => Some(FROM_POD),
            Self::Ingress if flags & pod_flags::DIRECT != 0 => Some(DIRECT),
            Self::Egress if flags & pod_flags::SERVICES != 0 => Some(TO_POD),
            _ => None,
        }
    }
}

/// enum bpf_attach_type
const TCX_INGRESS: u32 = 46;
const TCX_EGRESS: u32 = 47;
const NETKIT_PRIMARY: u32 = 54;
const NETKIT_PEER: u32 = 55;

/// Attaches the programs of a device with these [`pod_flags`]; those of an earlier agent are
/// replaced in one step, and what the device no longer needs is detached.
pub fn attach(object: &mut Ebpf, links: &Path, link: &PodLink, flags: u16, kernel: Kernel) -> Result<()> {
    for hook in Hook::ALL {
        let Some(name) = hook.program(flags) else {
            detach_at(links, link.index, hook, kernel)?;
            continue;
        };
        let program: &mut SchedClassifier = object
            .program_mut(name)
            .with_context(|| format!("the packet path has no program {name}"))?
            .try_into()?;
        let path = path(links, link.index, hook).unwrap_or_else(|| {
            links.join(format!("{}-{}-{}", hook.prefix(), link.index, link.name.replace('.', "_")))
        });
        tc::put(program, &link.name, hook.attach_type(), &path, kernel)
            .with_context(|| format!("attaching {name} to {} failed", link.name))?;
    }
    Ok(())
}

/// Whether the programs for these [`pod_flags`] are still on a device to which they were attached
/// by links.
pub fn is_intact(object: &Ebpf, links: &Path, index: u32, flags: u16) -> bool {
    Hook::ALL.into_iter().all(|hook| {
        let held = path(links, index, hook).and_then(|path| sys::link_info(&path).ok());
        let Some(name) = hook.program(flags) else { return held.is_none() };
        let program = object.program(name).and_then(|program| Some(program.info().ok()?.id()));
        held.is_some_and(|held| held.target[0] == index && Some(held.program) == program)
    })
}

/// Detaches the programs.
pub fn detach(links: &Path, index: u32, kernel: Kernel) -> Result<()> {
    Hook::ALL.into_iter().try_for_each(|hook| detach_at(links, index, hook, kernel))
}

fn detach_at(links: &Path, index: u32, hook: Hook, kernel: Kernel) -> Result<()> {
    if !kernel.has_tcx() {
        clsact::detach_at(index, hook.attach_type());
    }
    path(links, index, hook).map_or(Ok(()), |path| remove_link(&path))
}

/// Whether a pin is a link of these programs.
pub(super) fn is_link(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    name.is_some_and(|name| Hook::ALL.into_iter().any(|hook| number(name, hook).is_some()))
}

/// Returns the devices with pinned links.
pub fn linked(links: &Path) -> Vec<u32> {
    let entries = fs::read_dir(links).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter_map(|name| Hook::ALL.into_iter().find_map(|hook| number(&name, hook))).collect()
}

/// The reasons for which programs must not be on a pod's device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Obstacles {
    /// The obstacles to direct delivery: others' programs and queues would be passed by.
    pub direct: Option<String>,
    /// The obstacles to the pod's Services: others' programs would see one direction of a
    /// connection translated, and the other one not.
    pub services: Option<String>,
}

/// Returns why programs must not be on a device.
pub fn obstacles(links: &Path, link: &PodLink, kernel: Kernel) -> Result<Obstacles> {
    let services = others(links, link, kernel)?;
    let queue = Some(format!("it has the queueing discipline {}", link.qdisc));
    let direct = services.clone().or(queue.filter(|_| link.qdisc != "noqueue"));
    Ok(Obstacles { direct, services })
}

/// Returns what others have done with a device.
fn others(links: &Path, link: &PodLink, kernel: Kernel) -> Result<Option<String>> {
    if let Some(reason) = link.unsuited {
        return Ok(Some(reason.to_owned()));
    }
    if let Some(master) = &link.other_master {
        return Ok(Some(format!("its master {master} is no bridge of the kernel")));
    }
    let filters = pod_links::filters(link.index).context("listing TC filters failed")?;
    let is_own = |(info, handle): &(u32, u32)| !kernel.has_tcx() && introspect::is_own_filter(*info, *handle);
    if filters.iter().any(|filter| !is_own(filter)) {
        return Ok(Some("a TC filter is on it".to_owned()));
    }
    let held = Hook::ALL.into_iter().filter_map(|hook| path(links, link.index, hook));
    let own: Vec<u32> = held.filter_map(|path| Some(sys::link_info(&path).ok()?.program)).collect();
    let mut hooks = Vec::new();
    if kernel.has_tcx() {
        hooks.extend([(TCX_INGRESS, "TC ingress"), (TCX_EGRESS, "TC egress")]);
    }
    if link.netkit {
        hooks.extend([(NETKIT_PRIMARY, "netkit"), (NETKIT_PEER, "netkit (peer)")]);
    }
    for (hook, name) in hooks {
        let programs = sys::programs_of_device(link.index, hook).context("listing programs failed")?;
        if let Some(id) = programs.into_iter().find(|id| !own.contains(id)) {
            return Ok(Some(format!("program {id} of another is on it, at {name}")));
        }
    }
    Ok(None)
}

/// Returns the path of a device's pinned link, whatever the name was that the device had then.
fn path(links: &Path, index: u32, hook: Hook) -> Option<PathBuf> {
    let entries = fs::read_dir(links).into_iter().flatten().flatten();
    let held =
        |entry: &fs::DirEntry| entry.file_name().to_str().and_then(|it| number(it, hook)) == Some(index);
    entries.into_iter().find(held).map(|entry| entry.path())
}

/// Returns the device's number in the name of a pinned link at this hook.
fn number(name: &str, hook: Hook) -> Option<u32> {
    name.strip_prefix(hook.prefix())?.strip_prefix('-')?.split('-').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pins_by_number() {
        assert_eq!(number("pod-12-cali1", Hook::Ingress), Some(12));
        assert_eq!(number("podout-12-cali1", Hook::Egress), Some(12));
        for other in ["ingress-12-eth0", "pods-12-x", "pod-x-eth0", "cgroup-1-connect4", "podout-1-x"] {
            assert_eq!(number(other, Hook::Ingress), None, "{other}");
        }
    }

    #[test]
    fn programs_by_flags() {
        let of = |flags| Hook::ALL.map(|hook| hook.program(flags));
        assert_eq!(of(pod_flags::DIRECT), [Some(DIRECT), None]);
        assert_eq!(of(pod_flags::SERVICES), [Some(FROM_POD), Some(TO_POD)]);
        assert_eq!(of(pod_flags::DIRECT | pod_flags::SERVICES), [Some(FROM_POD), Some(TO_POD)]);
        assert_eq!(of(0), [None, None]);
    }
}
