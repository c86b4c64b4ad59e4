//! A cgroup of a single test on cgroup2.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result};

/// A new cgroup at the top of the hierarchy, removed when dropped; its processes must have exited
/// by then.
#[derive(Debug)]
pub struct Cgroup(PathBuf);

impl Cgroup {
    pub fn create(name: &str) -> Result<Self> {
        let path = mounted()?.join(format!("{name}-{}", std::process::id()));
        fs::create_dir(&path).with_context(|| format!("making the cgroup {}", path.display()))?;
        Ok(Self(path))
    }

    /// Makes a cgroup below this one. Drop it before its parent.
    pub fn below(&self, name: &str) -> Result<Self> {
        let path = self.0.join(name);
        fs::create_dir(&path).with_context(|| format!("making the cgroup {}", path.display()))?;
        Ok(Self(path))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Makes a command start inside the cgroup when it is spawned.
    pub fn enter_on_exec(&self, command: &mut Command) -> Result<()> {
        let list = self.0.join("cgroup.procs");
        let mut list = File::options().write(true).open(&list).with_context(|| list.display().to_string())?;
        // SAFETY: a bare system call; 0 stands for the caller. The closure allocates nothing after
        // fork.
        unsafe { command.pre_exec(move || list.write_all(b"0")) };
        Ok(())
    }

    /// Moves a process into the cgroup.
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
                    sleep(Duration::from_millis(10));
                }
                Err(error) => return eprintln!("{}: {error}", self.0.display()),
                Ok(()) => return,
            }
        }
        eprintln!("{} is still in use", self.0.display());
    }
}

/// The mount point of cgroup2: `/sys/fs/cgroup`, or a folder in it where version 1 is in use too.
fn mounted() -> Result<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    let mut mounts = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let found = mounts.find(|fields| fields.get(2) == Some(&"cgroup2"));
    Ok(found.context("no cgroup2 is mounted: mount -t cgroup2 none /sys/fs/cgroup/unified")?[1].into())
}
