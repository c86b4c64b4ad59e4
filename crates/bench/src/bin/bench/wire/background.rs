//! A flood that lasts while other work is done.

use std::{sync::mpsc, thread, time::Duration};

use anyhow::{Context, Result, ensure};
use nix::{
    libc,
    sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction},
    time::{ClockId, clock_gettime},
    unistd::gettid,
};

use traffic_policy_bench_ebpf::traffic::BATCH;

use super::{
    generator::{Send, Traffic},
    subject::Subject,
};

/// Signal that interrupts the sending system call.
const STOP: Signal = Signal::SIGUSR1;
/// Time for which the flood runs before anything else begins.
const LEAD: Duration = Duration::from_millis(50);

/// Does work while packets of open flows go to the same node at this rate per second; with 0, the
/// sender has nothing to send, but keeps its CPU from sleeping. Also returns the number of them
/// that arrived per second.
pub(crate) fn flooded<T>(
    subject: &Subject,
    traffic: &mut Traffic,
    rate: f64,
    work: impl FnOnce() -> Result<T>,
) -> Result<(T, f64)> {
    extern "C" fn nothing(_: libc::c_int) {}
    let action = SigAction::new(SigHandler::Handler(nothing), SaFlags::empty(), SigSet::empty());
    // SAFETY: the handler does nothing.
    unsafe { sigaction(STOP, &action) }.context("making the flood stoppable failed")?;

    traffic.aim(subject.kind.path(), Send::Requests, super::FLOWS, 0)?;
    // One packet an hour counts as none.
    let (rate, burst) = if rate == 0.0 { (1.0 / 3_600.0, 1) } else { (rate, BATCH) };
    traffic.pace(rate, burst)?;
    let before = traffic.begin(u32::MAX)?;
    let traffic = &*traffic;
    let worked = thread::scope(|scope| -> Result<T> {
        let (name, named) = mpsc::channel();
        let sender = scope.spawn(move || {
            subject.fixture.client.run(|| {
                // The send fails only if the receiver has been dropped.
                let _ = name.send(gettid());
                traffic.send(u32::MAX)
            })
        });
        let thread = named.recv().context("the flood has not begun")?;
        thread::sleep(LEAD);
        let worked = work();
        let over = sender.is_finished();
        while !sender.is_finished() {
            // SAFETY: the thread belongs to this process; at worst it has ended.
            unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread.as_raw(), STOP as libc::c_int) };
            thread::sleep(Duration::from_millis(5));
        }
        let sent = sender.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        if over {
            sent.context("the flood ended by itself")?;
        }
        worked
    })?;
    let now = Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC)?);
    let run = traffic.end(before, now)?;
    let arrived = run.counts.of(subject.wanted()) as f64;
    let lost = 1.0 - arrived / run.sent as f64;
    ensure!(lost < 0.01, "{:.1} % of the packets in the background were lost", lost * 100.0);
    Ok((worked, arrived / run.took.as_secs_f64()))
}
