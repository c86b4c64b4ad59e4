//! Machines that have cgroups of both versions mounted, which crun refuses, whether or not it is to make any.
//!
//! There crun runs in a mount namespace of its own that shows version 2 alone, where it is on other machines.

use std::ffi::CString;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

const CGROUPS: &str = "/sys/fs/cgroup";
const SECOND: &str = "/sys/fs/cgroup/unified";

fn is_hybrid() -> bool {
    Path::new(SECOND).join("cgroup.procs").exists()
}

/// Lets a command see what it would see on a machine with version 2 alone.
///
/// # Errors
/// None that a machine gives.
pub fn hide(command: &mut Command) -> Result<()> {
    if !is_hybrid() {
        return Ok(());
    }
    let (root, from, to) = (CString::new("/")?, CString::new(SECOND)?, CString::new(CGROUPS)?);
    let enter = move || -> io::Result<()> {
        unshare(CloneFlags::CLONE_NEWNS)?;
        let none = None::<&Path>;
        // Else the next mount would be one of the machine's, too.
        mount(none, root.as_c_str(), none, MsFlags::MS_PRIVATE | MsFlags::MS_REC, none)?;
        mount(Some(from.as_c_str()), to.as_c_str(), none, MsFlags::MS_BIND, none)?;
        Ok(())
    };
    // SAFETY: bare system calls; the closure allocates nothing after fork.
    unsafe { command.pre_exec(enter) };
    Ok(())
}

/// The path of a cgroup's folder after [`hide`].
pub(super) fn path(folder: &Path) -> PathBuf {
    match folder.strip_prefix(SECOND) {
        Ok(below) if is_hybrid() => Path::new(CGROUPS).join(below),
        _ => folder.to_owned(),
    }
}
