//! Machines with cgroups of both versions mounted, which crun refuses even if it is to make none.
//!
//! There crun runs in a mount namespace of its own that shows version 2 alone, at its usual place.

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

/// Makes a command see the mounts of a machine with version 2 alone.
pub fn hide(command: &mut Command) -> Result<()> {
    if !is_hybrid() {
        return Ok(());
    }
    let (root, from, to) = (CString::new("/")?, CString::new(SECOND)?, CString::new(CGROUPS)?);
    let enter = move || -> io::Result<()> {
        unshare(CloneFlags::CLONE_NEWNS)?;
        let none = None::<&Path>;
        // Otherwise the next mount would propagate to the machine.
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
