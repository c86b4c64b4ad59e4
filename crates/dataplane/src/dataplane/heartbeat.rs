//! The agent's heartbeat in the map `tp_heartbeat`: a sign of life, the time since which the maps
//! are in sync, and the agent's address.

use std::{
    net::SocketAddr,
    sync::atomic::{AtomicU64, Ordering},
};

use anyhow::Result;
use aya::Ebpf;

use super::{
    Dataplane,
    bpf::test_run,
    clock,
    maps::{
        Maps,
        keys::wide,
        mmap::{config, heartbeat},
    },
};

/// The heartbeat of an earlier agent, see [`loading`].
#[derive(Clone, Copy, Debug)]
pub struct Earlier {
    started: u64,
    pid: u32,
}

/// Records that this process has the maps and loads its programs, but has not started yet. Returns
/// the earlier heartbeat.
pub fn loading(maps: &mut Maps) -> Earlier {
    let words = &mut maps.heartbeat;
    let earlier = Earlier { started: words.load(heartbeat::started), pid: words.load(heartbeat::pid) };
    words.store(heartbeat::started, 0);
    words.store(heartbeat::pid, std::process::id());
    earlier
}

/// Restores the earlier agent's heartbeat after a failed start.
pub fn restore(maps: &mut Maps, earlier: Earlier) {
    maps.heartbeat.store(heartbeat::started, earlier.started);
    maps.heartbeat.store(heartbeat::pid, earlier.pid);
}

/// Records that the programs are loaded. `hz`: jiffies per second.
pub fn begin(maps: &mut Maps, object: &Ebpf, hz: u32) -> Result<()> {
    let words = &mut maps.heartbeat;
    words.store(heartbeat::hz, hz);
    words.store(heartbeat::started, clock::monotonic()?);
    words.store(heartbeat::failing, 0);
    words.store(heartbeat::pid, std::process::id());
    beat(maps, object)
}

impl Dataplane {
    /// Records the address of `/healthz` and `/status`, which `status` queries.
    pub fn report_address(&mut self, address: SocketAddr) {
        let words = &mut self.maps.heartbeat;
        words.store(heartbeat::address, wide(address.ip()));
        words.store(heartbeat::ipv6, u32::from(address.is_ipv6()));
        words.store(heartbeat::port, address.port().into());
    }
}

/// Records a sign of life, with which idle times in jiffies can be converted to another clock.
pub fn beat(maps: &mut Maps, object: &Ebpf) -> Result<()> {
    let (seen, jiffies) = at_once(clock::monotonic, || test_run::raw_tracepoint(object, "tp_clock"))?;
    maps.heartbeat.store(heartbeat::jiffies, jiffies);
    maps.heartbeat.store(heartbeat::seen, seen);
    end_monitor(maps, seen);
    Ok(())
}

/// The number of times that both clocks are read, unless they are read at once.
const READS: usize = 4;
/// The nanoseconds within which both clocks are read: a jiffy, at the shortest.
const AT_ONCE: u64 = 1_000_000;

/// Returns the time and the jiffies of one moment. On a busy node the agent may lose its CPU
/// between the two, and idle times would be longer by that until the next sign of life.
fn at_once(time: impl Fn() -> Result<u64>, mut jiffies: impl FnMut() -> Result<u32>) -> Result<(u64, u32)> {
    let mut before = time()?;
    let mut nearest = (u64::MAX, before, 0);
    for _ in 0..READS {
        let ticks = jiffies()?;
        let after = time()?;
        nearest = nearest.min((after.saturating_sub(before), before, ticks));
        if nearest.0 <= AT_ONCE {
            break;
        }
        before = after;
    }
    Ok((nearest.1, nearest.2))
}

/// Records that the maps hold the desired state.
pub fn synced(maps: &mut Maps) -> Result<()> {
    maps.heartbeat.store(heartbeat::synced, clock::monotonic()?);
    maps.heartbeat.store(heartbeat::failing, 0);
    Ok(())
}

/// Records that writing the maps failed.
///
/// # Errors
/// clock_gettime(2) knows no CLOCK_MONOTONIC, which does not happen on Linux.
pub fn failing(maps: &mut Maps) -> Result<()> {
    if maps.heartbeat.load(heartbeat::failing) == 0 {
        maps.heartbeat.store(heartbeat::failing, clock::monotonic()?);
    }
    Ok(())
}

/// Forgets a listener that was killed: from now on packets need not even read the clock.
fn end_monitor(maps: &mut Maps, now: u64) {
    let until = maps.config.load(config::monitor_until);
    if until == 0 || until > now {
        return;
    }
    // SAFETY: an aligned word of the mapped element, which lives as long as the tables. It is
    // compared because a new listener may have written it in the meantime.
    let word = unsafe { AtomicU64::from_ptr(config::monitor_until(maps.config.pointer())) };
    let _ = word.compare_exchange(until, 0, Ordering::Relaxed, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn clocks_that_were_read_apart_are_read_again() {
        let now = Cell::new(0);
        // How long each read of the jiffies takes, in milliseconds.
        for (delays, seen) in [([0, 9, 9, 9], 0), ([1_500, 0, 9, 9], 1_500), ([30, 20, 10, 40], 50)] {
            now.set(0);
            let mut delays = delays.into_iter();
            let jiffies = || {
                let began = now.get();
                now.set(began + delays.next().unwrap() * 1_000_000);
                Ok((began / 1_000_000) as u32)
            };
            assert_eq!(at_once(|| Ok(now.get()), jiffies).unwrap(), (seen * 1_000_000, seen as u32));
        }
    }
}
