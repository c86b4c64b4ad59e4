//! Detection of other agents' programs on the same devices, pinned elsewhere on this BPF file
//! system: each packet would be handled twice.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Result, bail};
use nix::sys::statfs::{BPF_FS_MAGIC, statfs};

use super::{
    bpf::pins,
    kernel::{self, Kernel},
    maps::reader::Reader,
    sys,
};

/// The depth below the mount point to which pin folders are searched for.
const DEPTH: usize = 4;

/// Refuses a device with programs that are pinned below another folder than `root`.
///
/// # Errors
/// The error names the device and the folder.
pub fn refuse(root: &Path, device: &str, ifindex: u32) -> Result<()> {
    let Ok(netns) = kernel::netns_cookie() else { return Ok(()) };
    // The search finds canonical paths: under another name, the agent's own pins would be those of
    // a rival.
    let root = root.canonicalize().unwrap_or_else(|_| root.to_owned());
    let mut found = Vec::new();
    search(&mount_point(&root), &root, DEPTH, &mut found);
    for rival in found {
        if is_on(&rival, ifindex, netns) {
            let folder = rival.parent().unwrap_or(&rival).display();
            bail!(
                "programs of another traffic-policy-agent are on {device}, pinned below {folder}: stop that agent and run `traffic-policy-agent cleanup --pin-dir {folder}`, or start this one with --pin-dir {folder}"
            );
        }
    }
    Ok(())
}

/// Returns the topmost folder of the same BPF file system.
fn mount_point(root: &Path) -> PathBuf {
    let is_bpffs = |folder: &&Path| statfs(*folder).is_ok_and(|kind| kind.filesystem_type() == BPF_FS_MAGIC);
    root.ancestors().take_while(is_bpffs).last().unwrap_or(root).to_owned()
}

/// Finds folders of a layout version (`v2`) below `folder`, except for those of `own`.
fn search(folder: &Path, own: &Path, depth: usize, found: &mut Vec<PathBuf>) {
    if folder == own || depth == 0 {
        return;
    }
    found.extend(pins::versions(folder).unwrap_or_default().into_iter().map(|version| folder.join(version)));
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            search(&entry.path(), own, depth - 1, found);
        }
    }
}

/// Whether the version's programs are on the device of this network namespace: devices of others
/// have the same numbers.
fn is_on(version: &Path, ifindex: u32, netns: u64) -> bool {
    let maps = pins::maps_of(version);
    let has_link = || {
        let links = fs::read_dir(version.join("links")).into_iter().flatten().flatten();
        links.filter_map(|link| sys::link_info(&link.path()).ok()).any(|link| {
            // enum bpf_link_type: BPF_LINK_TYPE_XDP, BPF_LINK_TYPE_TCX.
            matches!(link.kind, 6 | 11) && link.target[0] == ifindex
        })
    };
    // A filter has no link, and does not show its owner. An agent forgets a device when it removes
    // its filters.
    let has_filters = || {
        let devices = Reader::open(&maps, "tp_devices").or_else(|_| Reader::open(&maps, "DEVICES"));
        let devices = devices.and_then(|devices| devices.keys::<u32>());
        devices.is_ok_and(|devices| devices.contains(&ifindex))
    };
    let by_links = Kernel::running().is_ok_and(Kernel::has_tcx);
    // The namespace is the first word of the description of the node, in every layout so far. The
    // map is called `NODE` before version 3.
    let node = Reader::open(&maps, "tp_local_node").or_else(|_| Reader::open(&maps, "NODE"));
    let of = node
        .and_then(|node| node.bytes_of(0))
        .ok()
        .and_then(|bytes| bytes.first_chunk().map(|word| u64::from_ne_bytes(*word)));
    of == Some(netns) && (has_link() || !by_links && has_filters())
}
