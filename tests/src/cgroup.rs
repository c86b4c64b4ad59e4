//! A cgroup of a test's own on cgroup2.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result};

/// A new cgroup at the top of the hierarchy, removed with this value; its processes must have ended by then.
#[derive(Debug)]
pub struct Cgroup(PathBuf);

impl Cgroup {
    pub fn create(name: &str) -> Result<Self> {
        let path = mounted()?.join(format!("{name}-{}", std::process::id()));
        fs::create_dir(&path).with_context(|| format!("making the cgroup {}", path.display()))?;
        Ok(Self(path))
    }

    /// A cgroup below this one. Drop it first.
    pub fn below(&self, name: &str) -> Result<Self> {
        let path = self.0.join(name);
        fs::create_dir(&path).with_context(|| format!("making the cgroup {}", path.display()))?;
        Ok(Self(path))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Moves a process in.
    pub fn add(&self, process: u32) -> Result<()> {
        let list = self.0.join("cgroup.procs");
        fs::write(&list, process.to_string())
            .with_context(|| format!("moving {process} to {}", list.display()))
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A process leaves its cgroup some time after it was killed.
        for _ in 0..100 {
            match fs::remove_dir(&self.0) {
                Err(error) if error.kind() == std::io::ErrorKind::ResourceBusy => {
                    sleep(Duration::from_millis(10))
                }
                Err(error) => return eprintln!("{}: {error}", self.0.display()),
                Ok(()) => return,
            }
        }
        eprintln!("{} is still in use", self.0.display());
    }
}

/// Where cgroup2 is mounted: `/sys/fs/cgroup`, or a folder in it where version 1 is in use too.
fn mounted() -> Result<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    let mut mounts = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let found = mounts.find(|fields| fields.get(2) == Some(&"cgroup2"));
    Ok(found.context("no cgroup2 is mounted: mount -t cgroup2 none /sys/fs/cgroup/unified")?[1].into())
}
