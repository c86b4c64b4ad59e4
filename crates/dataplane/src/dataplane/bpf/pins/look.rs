//! Read-only view of a `--pin-dir`: the pins below it, and the agent that uses them.

use std::{fs, os::unix::fs::MetadataExt as _, path::Path};

use anyhow::Result;
use nix::sys::stat::{major, minor};
use traffic_policy_ebpf::abi::ABI_VERSION;

use super::{is_version, list, on_bpffs};

/// The pins below a `--pin-dir`, read before any of them is changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Look {
    /// Whether the folder is on a BPF file system, or would be if it were created.
    pub on_bpffs: bool,
    /// Whether this layout version is pinned.
    pub pinned: bool,
    /// The other layout versions that are pinned, by the names of their folders.
    pub other_versions: Vec<String>,
    /// The process of the agent that uses the folder. It is only known from the agent's PID
    /// namespace or one above it: /proc/locks omits locks of processes that are not visible
    /// (`locks_show` in fs/locks.c), see [`sees_all_locks`].
    pub used_by: Option<u32>,
}

impl Look {
    /// Examines the folder without changing it, and without taking the lock, which would block an
    /// agent that starts in the meantime.
    pub fn at(root: &Path) -> Result<Self> {
        let own = format!("v{ABI_VERSION}");
        let mut look = Self { on_bpffs: on_bpffs(root)?, ..Self::default() };
        for version in list(root)? {
            let name = version.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if name == own {
                look.pinned = true;
            } else if is_version(&name) {
                look.other_versions.push(name);
            }
        }
        if let Ok(root) = fs::metadata(root) {
            let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
            look.used_by = holder(&locks, root.dev(), root.ino());
        }
        Ok(look)
    }
}

/// Returns the process that holds the lock on a file, from /proc/locks:
/// `1: FLOCK ADVISORY WRITE 123 00:1b:456 0 EOF`.
fn holder(locks: &str, device: u64, inode: u64) -> Option<u32> {
    let file = format!("{:02x}:{:02x}:{inode}", major(device), minor(device));
    locks.lines().find_map(|line| {
        let fields: Vec<_> = line.split_whitespace().collect();
        let held = fields.get(1) == Some(&"FLOCK") && fields.get(5) == Some(&file.as_str());
        if held { fields[4].parse().ok() } else { None }
    })
}

/// Whether /proc/locks shows every process: it does in the initial PID namespace, whose number is
/// fixed (`PROC_PID_INIT_INO` in linux/proc_ns.h).
pub fn sees_all_locks() -> bool {
    const FIRST: u64 = 0xefff_fffc;
    fs::metadata("/proc/self/ns/pid").is_ok_and(|namespace| namespace.ino() == FIRST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holders_of_locks() {
        let locks = "1: POSIX  ADVISORY  WRITE 5 00:1b:456 0 EOF\n2: FLOCK  ADVISORY  WRITE 123 00:1b:456 0 EOF\n2: -> FLOCK  ADVISORY  WRITE 124 00:1b:456 0 EOF\n";
        assert_eq!(holder(locks, 0x1b, 456), Some(123));
        assert_eq!(holder(locks, 0x1b, 457), None);
    }
}
