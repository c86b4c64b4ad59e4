//! The attached programs, according to the pins of their links.

use std::{fs, io::ErrorKind};

use anyhow::{Context, Result};
use traffic_policy_ebpf::abi::DeviceInfo;

use super::pinned::Pinned;
use crate::dataplane::{
    bpf::pins,
    kernel::Kernel,
    sys::{self, LinkInfo},
};

/// A program on a device or cgroup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    pub hook: LinkHook,
    /// The number of the device; 0 for a cgroup.
    pub ifindex: u32,
    /// The name of the device, or `cgroup` and its number (that of its folder).
    pub target: String,
    /// The call of sockets that runs it, for a cgroup: `connect4`.
    pub call: Option<String>,
    /// The kernel's number of the program; `None` for a filter of a clsact qdisc, which has no pin.
    pub program: Option<u32>,
    /// Whether its device or cgroup still exists.
    pub present: bool,
}

/// The hook and kind of a program's link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LinkHook {
    Xdp,
    XdpGeneric,
    TcIngress,
    TcEgress,
    /// TC ingress of the host side of a pod's device.
    TcPod,
    /// TC egress there.
    TcPodOut,
    /// TC ingress of the device where the packets of a divided aggregate of SCTP arrive.
    TcDivided,
    /// The hook of filters before Linux 6.6.
    Clsact,
    Cgroup,
}

impl LinkHook {
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Xdp => "xdp (driver)",
            Self::XdpGeneric => "xdp (generic)",
            Self::TcIngress => "tc-ingress",
            Self::TcEgress => "tc-egress",
            Self::TcPod => "tc-ingress (pod)",
            Self::TcPodOut => "tc-egress (pod)",
            Self::TcDivided => "tc-ingress (sctp)",
            Self::Clsact => "tc-ingress, tc-egress (clsact)",
            Self::Cgroup => "cgroup",
        }
    }
}

impl Link {
    /// Returns the programs attached by links that are pinned here, and on kernels before 6.6 the
    /// devices with filters.
    pub fn all(pinned: &Pinned) -> Result<Vec<Self>> {
        let mut links = Vec::new();
        let folder = pins::links_below(pinned.root());
        for entry in fs::read_dir(&folder).with_context(|| format!("{} cannot be read", folder.display()))? {
            let path = entry?.path();
            let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
            match sys::link_info(&path) {
                Ok(link) => links.push(parse(name, &link)),
                // The agent has removed it in the meantime.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => {
                    return Err(error).with_context(|| format!("{} cannot be read", path.display()));
                }
            }
        }
        if !Kernel::running()?.has_tcx() {
            for (ifindex, _) in pinned.map("tp_devices")?.entries::<u32, DeviceInfo>()? {
                let name = device_name(ifindex);
                let present = name.is_some();
                let target = name.unwrap_or_default();
                links.push(Link {
                    hook: LinkHook::Clsact,
                    ifindex,
                    target,
                    call: None,
                    program: None,
                    present,
                });
            }
        }
        links.sort_by(|a, b| (&a.target, a.hook, &a.call).cmp(&(&b.target, b.hook, &b.call)));
        Ok(links)
    }
}

/// Returns the name of a device of this network namespace.
#[must_use]
pub fn device_name(ifindex: u32) -> Option<String> {
    let name = nix::net::if_::if_indextoname(ifindex).ok()?.to_string_lossy().into_owned();
    // nix takes the null pointer of an unknown number for success, and returns the empty name.
    (!name.is_empty()).then_some(name)
}

/// Parses the name of a pin, `HOOK-NUMBER-DEVICE` or `cgroup-NUMBER-CALL`.
fn parse(name: &str, link: &LinkInfo) -> Link {
    let mut parts = name.splitn(3, '-');
    let hook = match parts.next() {
        Some("xdp") => LinkHook::Xdp,
        Some("xdpgeneric") => LinkHook::XdpGeneric,
        Some("ingress") => LinkHook::TcIngress,
        Some("egress") => LinkHook::TcEgress,
        Some("pod") => LinkHook::TcPod,
        Some("podout") => LinkHook::TcPodOut,
        Some("divider") => LinkHook::TcDivided,
        _ => LinkHook::Cgroup,
    };
    let number = parts.next().unwrap_or_default();
    let rest = parts.next().unwrap_or_default();
    let (program, present) = (Some(link.program), link.target != [0; 2]);
    if hook == LinkHook::Cgroup {
        let (target, call) = (format!("cgroup {number}"), Some(rest.to_owned()));
        return Link { hook, ifindex: 0, target, call, program, present };
    }
    let ifindex = number.parse().unwrap_or(0);
    // Dots are missing from the pin's name.
    let target = device_name(ifindex).unwrap_or_else(|| rest.to_owned());
    Link { hook, ifindex, target, call: None, program, present }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pins_by_name() {
        let on = LinkInfo { program: 9, target: [4_000_001, 0], ..LinkInfo::default() };
        let link = parse("xdpgeneric-4000001-eth0_100", &on);
        assert_eq!(
            (link.hook, link.ifindex, link.target.as_str()),
            (LinkHook::XdpGeneric, 4_000_001, "eth0_100")
        );
        assert!(link.present);
        assert!(!parse("ingress-4000001-eth0", &LinkInfo::default()).present, "the device is gone");
        let divided = parse("divider-4000001-tp-sctp1", &on);
        assert_eq!((divided.hook, divided.target.as_str()), (LinkHook::TcDivided, "tp-sctp1"));
        let cgroup = parse("cgroup-1234-connect4", &on);
        assert_eq!(
            (cgroup.hook, cgroup.ifindex, cgroup.target.as_str()),
            (LinkHook::Cgroup, 0, "cgroup 1234")
        );
        assert_eq!(cgroup.call.as_deref(), Some("connect4"));
    }
}
