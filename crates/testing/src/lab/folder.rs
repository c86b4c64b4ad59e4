//! The folder of a lab (manifests, logs, a bpffs of its own), and the removal of what dead labs
//! left behind.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use crate::netns::Namespace;

const LABS: &str = "/run/traffic-policy-lab";

/// A lab's folder; removed when dropped, unless kept.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    kept: bool,
}

impl Folder {
    /// Creates the folder. If its name is `tp-<process>-…`, a later lab removes it after the
    /// process was killed.
    pub fn create(lab: &str) -> Result<Self> {
        let path = path(lab);
        fs::create_dir_all(LABS).with_context(|| format!("creating {LABS}"))?;
        fs::create_dir(&path)
            .with_context(|| format!("{} cannot be made; is the lab up already?", path.display()))?;
        let folder = Self { path, kept: false };
        for path in [folder.bpffs(), folder.manifests(), folder.logs()] {
            fs::create_dir(&path).with_context(|| format!("creating {}", path.display()))?;
        }
        let bpffs = folder.bpffs();
        mount(Some("bpf"), &bpffs, Some("bpf"), MsFlags::empty(), None::<&str>)
            .with_context(|| format!("mounting a bpffs at {}", bpffs.display()))?;
        Ok(folder)
    }

    /// Leaves the folder in place.
    pub(super) fn keep(&mut self) {
        self.kept = true;
    }

    /// A bpffs of this lab alone.
    pub fn bpffs(&self) -> PathBuf {
        self.path.join("bpffs")
    }

    pub fn manifests(&self) -> PathBuf {
        self.path.join("manifests")
    }

    pub fn logs(&self) -> PathBuf {
        self.path.join("logs")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if !self.kept
            && let Err(error) = remove(&self.path)
        {
            eprintln!("{error:#}");
        }
    }
}

/// An id that names the process, so that its leftovers are recognised once it is dead.
pub(super) fn unused_id() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("tp-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// The folder of a persistent lab, whether or not it exists.
pub(super) fn path(lab: &str) -> PathBuf {
    Path::new(LABS).join(lab)
}

/// Removes a lab's folder; one that is gone already is not an error.
pub(super) fn remove(path: &Path) -> Result<()> {
    let bpffs = path.join("bpffs");
    match umount2(&bpffs, MntFlags::MNT_DETACH) {
        Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => {}
        Err(error) => return Err(error).with_context(|| format!("unmounting {}", bpffs.display())),
    }
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("removing {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// The names of all labs that have a folder.
pub(super) fn labs() -> Vec<String> {
    let entries = fs::read_dir(LABS).into_iter().flatten().flatten();
    let mut names: Vec<_> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// Removes the namespaces and folders of test labs whose process is dead (killed before it could
/// remove them). Those of other living processes, and persistent labs, stay.
pub fn remove_leftovers() -> Result<()> {
    let dead = |name: &str| {
        let pid = name.strip_prefix("tp-").and_then(|rest| rest.split('-').next()?.parse::<u32>().ok());
        pid.is_some_and(|pid| !Path::new("/proc").join(pid.to_string()).exists())
    };
    for name in Namespace::names("tp-").iter().filter(|name| dead(name)) {
        Namespace::remove(name)?;
    }
    for name in labs().iter().filter(|name| dead(name)) {
        remove(&path(name))?;
    }
    Ok(())
}
