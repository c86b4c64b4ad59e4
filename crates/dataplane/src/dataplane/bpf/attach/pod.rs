//! The program on the host side of pods' devices, `tp_tc_pod` at TC ingress: attached by pinned
//! links named `pod-NUMBER-NAME`, or below Linux 6.6 by a filter.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use aya::{
    Ebpf,
    programs::{SchedClassifier, TcAttachType},
};

use super::{
    super::{introspect, pins::remove_link},
    clsact, tc,
};
use crate::{
    dataplane::{kernel::Kernel, sys},
    node::pod_links::{self, PodLink},
};

pub const PROGRAM: &str = "tp_tc_pod";
/// The beginning of the names of pinned links.
pub const HOOK: &str = "pod";

/// enum bpf_attach_type
const TCX_INGRESS: u32 = 46;
const TCX_EGRESS: u32 = 47;
const NETKIT_PRIMARY: u32 = 54;
const NETKIT_PEER: u32 = 55;

/// Attaches the program; that of an earlier agent is replaced in one step.
///
/// # Errors
/// The kernel refuses, or the link cannot be pinned.
pub fn attach(object: &mut Ebpf, links: &Path, link: &PodLink, kernel: Kernel) -> Result<()> {
    let program: &mut SchedClassifier = object
        .program_mut(PROGRAM)
        .with_context(|| format!("the packet path has no program {PROGRAM}"))?
        .try_into()?;
    let path = path(links, link.index)
        .unwrap_or_else(|| links.join(format!("{HOOK}-{}-{}", link.index, link.name.replace('.', "_"))));
    tc::put(program, &link.name, TcAttachType::Ingress, &path, kernel)
        .with_context(|| format!("attaching {PROGRAM} to {} failed", link.name))
}

/// Whether the program is still on a device to which it was attached by a link.
pub fn is_intact(object: &Ebpf, links: &Path, index: u32) -> bool {
    let program = object.program(PROGRAM).and_then(|program| Some(program.info().ok()?.id()));
    let held = path(links, index).and_then(|path| sys::link_info(&path).ok());
    held.is_some_and(|held| held.target[0] == index && Some(held.program) == program)
}

/// Detaches the program.
///
/// # Errors
/// The pin of its link cannot be removed.
pub fn detach(links: &Path, index: u32, kernel: Kernel) -> Result<()> {
    if !kernel.has_tcx() {
        clsact::detach(index);
    }
    path(links, index).map_or(Ok(()), |path| remove_link(&path))
}

/// Whether a pin is a link of this program.
pub(super) fn is_link(path: &Path) -> bool {
    path.file_name().and_then(|name| name.to_str()).and_then(number).is_some()
}

/// Returns the devices with pinned links.
pub fn linked(links: &Path) -> Vec<u32> {
    let entries = fs::read_dir(links).into_iter().flatten().flatten();
    entries.filter_map(|entry| number(entry.file_name().to_str()?)).collect()
}

/// Returns why the program must not be on a device: what others have put there would be passed by.
///
/// # Errors
/// The kernel refuses to tell, or the device is gone.
pub fn obstacle(links: &Path, link: &PodLink, kernel: Kernel) -> Result<Option<String>> {
    if let Some(master) = &link.other_master {
        return Ok(Some(format!("its master {master} is no bridge of the kernel")));
    }
    if link.qdisc != "noqueue" {
        return Ok(Some(format!("it has the queueing discipline {}", link.qdisc)));
    }
    let filters = pod_links::filters(link.index).context("listing TC filters failed")?;
    let is_own = |(info, handle): &(u32, u32)| !kernel.has_tcx() && introspect::is_own_filter(*info, *handle);
    if filters.iter().any(|filter| !is_own(filter)) {
        return Ok(Some("a TC filter is on it".to_owned()));
    }
    let own = path(links, link.index).and_then(|path| sys::link_info(&path).ok()).map(|held| held.program);
    let mut hooks = Vec::new();
    if kernel.has_tcx() {
        hooks.extend([(TCX_INGRESS, "TC ingress"), (TCX_EGRESS, "TC egress")]);
    }
    if link.netkit {
        hooks.extend([(NETKIT_PRIMARY, "netkit"), (NETKIT_PEER, "netkit (peer)")]);
    }
    for (hook, name) in hooks {
        let programs = sys::programs_of_device(link.index, hook).context("listing programs failed")?;
        if let Some(id) = programs.into_iter().find(|id| Some(*id) != own) {
            return Ok(Some(format!("program {id} of another is on it, at {name}")));
        }
    }
    Ok(None)
}

/// Returns the path of a device's pinned link, whatever the name was that the device had then.
fn path(links: &Path, index: u32) -> Option<PathBuf> {
    let entries = fs::read_dir(links).into_iter().flatten().flatten();
    let held = |entry: &fs::DirEntry| entry.file_name().to_str().and_then(number) == Some(index);
    entries.into_iter().find(held).map(|entry| entry.path())
}

/// Returns the device's number in the name of a pinned link of this program.
fn number(name: &str) -> Option<u32> {
    name.strip_prefix(HOOK)?.strip_prefix('-')?.split('-').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pins_by_number() {
        assert_eq!(number("pod-12-cali1"), Some(12));
        for other in ["ingress-12-eth0", "pods-12-x", "pod-x-eth0", "cgroup-1-connect4"] {
            assert_eq!(number(other), None, "{other}");
        }
    }
}
