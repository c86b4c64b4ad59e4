//! Receiving on one CPU, independent of the sender (threaded NAPI).
//!
//! Frames that a veth receives are otherwise handled on the CPU that sent them, or where its
//! receiver happens to run already: a flood of one CPU and requests of another would disturb each
//! other. A device's receiver with a thread of its own (threaded NAPI) stays where it is put, as
//! the interrupts of a real device's queue do.

use std::{collections::BTreeSet, fs, path::Path};

use anyhow::{Context, Result, ensure};
use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
};
use traffic_policy_testing::netns::Namespace;

use super::cpu::{run_first, stay};

/// Gives a device's receiver a thread that stays on this CPU, and returns its number; none if it
/// had one before. The device must have a receiver: GRO, or an XDP program.
pub(crate) fn receive_on(namespace: &Namespace, device: &str, cpu: usize) -> Result<Vec<i32>> {
    let before = threads(device)?;
    let changed = namespace
        .run(|| -> Result<bool> {
            // A sysfs shows the devices of the namespace that mounts it. This mount is private to
            // the thread and ends with it.
            unshare(CloneFlags::CLONE_NEWNS)?;
            mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)?;
            mount(Some("sysfs"), "/sys", Some("sysfs"), MsFlags::empty(), None::<&str>)?;
            let threaded = Path::new("/sys/class/net").join(device).join("threaded");
            if fs::read_to_string(&threaded)?.trim() == "1" {
                return Ok(false);
            }
            fs::write(&threaded, "1")?;
            Ok(true)
        })
        .with_context(|| format!("a thread for what {device} receives"))?;
    if !changed {
        return Ok(Vec::new());
    }
    let made: Vec<_> = threads(device)?.difference(&before).copied().collect();
    ensure!(!made.is_empty(), "no thread receives for {device}");
    // Like an interrupt, it preempts the sender.
    made.iter().try_for_each(|thread| stay(*thread, cpu).and_then(|()| run_first(*thread)))?;
    Ok(made)
}

/// Returns the receiver threads of all devices of this name.
fn threads(device: &str) -> Result<BTreeSet<i32>> {
    let start = format!("napi/{device}-");
    let mut threads = BTreeSet::new();
    for process in fs::read_dir("/proc")? {
        let process = process?;
        let Ok(id) = process.file_name().to_string_lossy().parse() else { continue };
        // A process may have ended meanwhile.
        let name = fs::read_to_string(process.path().join("comm")).unwrap_or_default();
        if name.starts_with(&start) {
            threads.insert(id);
        }
    }
    Ok(threads)
}
