//! Assignment of CPUs: one for the flood, the others for everything else.

use std::{fs, io, thread::available_parallelism, time::Duration};

use anyhow::{Context, Result, ensure};
use nix::{
    libc,
    sched::{CpuSet, sched_setaffinity},
    time::{ClockId, clock_gettime},
    unistd::Pid,
};

/// Returns the CPU of the flood.
pub(crate) fn busy() -> Result<usize> {
    Ok(available_parallelism()?.get() - 1)
}

/// Pins a thread (0: the calling one) to a CPU.
pub(crate) fn stay(thread: i32, cpu: usize) -> Result<()> {
    let mut one = CpuSet::new();
    one.set(cpu)?;
    sched_setaffinity(Pid::from_raw(thread), &one).context("staying on one CPU failed")
}

/// Gives a thread priority over all less urgent ones.
pub(crate) fn run_first(thread: i32) -> Result<()> {
    let parameters = libc::sched_param { sched_priority: 1 };
    // SAFETY: the parameters outlive the call.
    let result = unsafe { libc::sched_setscheduler(thread, libc::SCHED_FIFO, &raw const parameters) };
    ensure!(result == 0, "making a thread urgent failed: {}", io::Error::last_os_error());
    Ok(())
}

/// Returns the CPU time of a thread, which sleeps, so that it is complete.
pub(crate) fn spent(thread: i32) -> Result<Duration> {
    let text = fs::read_to_string(format!("/proc/{thread}/schedstat")).context("no CPU time of a thread")?;
    let nanoseconds = text.split_whitespace().next().context("an empty schedstat")?;
    Ok(Duration::from_nanos(nanoseconds.parse()?))
}

/// Keeps a thread (0: the calling one) off a CPU, if there is another one.
pub(crate) fn keep_off(thread: i32, busy: usize) -> Result<()> {
    let mut others = CpuSet::new();
    let mut any = false;
    for cpu in (0..available_parallelism()?.get()).filter(|cpu| *cpu != busy) {
        others.set(cpu)?;
        any = true;
    }
    if any {
        sched_setaffinity(Pid::from_raw(thread), &others).context("leaving a CPU failed")?;
    }
    Ok(())
}

/// Does the same as [`keep_off`] for all threads of a process.
pub(crate) fn keep_process_off(process: u32, busy: usize) -> Result<()> {
    for thread in fs::read_dir(format!("/proc/{process}/task"))? {
        keep_off(thread?.file_name().to_string_lossy().parse()?, busy)?;
    }
    Ok(())
}

/// The time of processors that this process has had so far, with all that the kernel has done
/// within it, and the thread to which the kernel leaves packets of a CPU that are too many
/// (ksoftirqd). Other processes that run there as well do not count.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spent {
    late: i32,
    total: Duration,
}

impl Spent {
    /// Returns the time so far, with that CPU's thread.
    pub(crate) fn on(cpu: usize) -> Result<Self> {
        let name = format!("ksoftirqd/{cpu}");
        for process in fs::read_dir("/proc")? {
            let path = process?.path();
            // A process may have ended meanwhile.
            let is_it = fs::read_to_string(path.join("comm")).is_ok_and(|comm| comm.trim_end() == name);
            if is_it && let Some(number) = path.file_name().and_then(|name| name.to_str()?.parse().ok()) {
                return Self { late: number, total: Duration::ZERO }.now();
            }
        }
        anyhow::bail!("there is no {name}")
    }

    fn now(self) -> Result<Self> {
        let own = Duration::from(clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID)?);
        // The first number: nanoseconds.
        let late = fs::read_to_string(format!("/proc/{}/schedstat", self.late))?;
        let late = late.split(' ').next().unwrap_or_default().parse()?;
        Ok(Self { total: own + Duration::from_nanos(late), ..self })
    }

    /// Returns the time since then.
    pub(crate) fn since(self) -> Result<Duration> {
        Ok(self.now()?.total.saturating_sub(self.total))
    }
}
