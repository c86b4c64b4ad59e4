//! Assignment of CPUs: one for the measuring process, the others for its subject.

use std::{fs, process};

use anyhow::{Context, Result};
use nix::{
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    unistd::Pid,
};

/// Returns the CPUs that this process may use, in order.
pub(super) fn all() -> Result<Vec<usize>> {
    let set = sched_getaffinity(Pid::from_raw(0))?;
    Ok((0..CpuSet::count()).filter(|cpu| set.is_set(*cpu).unwrap_or(false)).collect())
}

/// Restricts the calling thread to these CPUs.
pub(super) fn run_on(cpus: &[usize]) -> Result<()> {
    confine(Pid::from_raw(0), cpus)
}

fn confine(thread: Pid, cpus: &[usize]) -> Result<()> {
    let mut set = CpuSet::new();
    cpus.iter().try_for_each(|cpu| set.set(*cpu))?;
    sched_setaffinity(thread, &set).with_context(|| format!("confining thread {thread} failed"))
}

/// Restricts all threads of this process and of another one to these CPUs.
pub(super) fn confine_all(other: u32, cpus: &[usize]) -> Result<()> {
    for process in [process::id(), other] {
        for thread in fs::read_dir(format!("/proc/{process}/task"))? {
            let thread = thread?.file_name().to_string_lossy().parse()?;
            match confine(Pid::from_raw(thread), cpus) {
                Err(error) if error.downcast_ref() == Some(&nix::errno::Errno::ESRCH) => {}
                result => result?,
            }
        }
    }
    Ok(())
}
