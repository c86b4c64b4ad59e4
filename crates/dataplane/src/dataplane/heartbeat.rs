//! Heartbeat of the agent in the map `tp_heartbeat`: that it lives, since when the maps are in sync, where it answers.

use std::{
    net::SocketAddr,
    sync::atomic::{AtomicU64, Ordering},
};

use anyhow::Result;
use aya::Ebpf;

use super::{
    bpf::test_run,
    clock,
    maps::{
        Maps,
        keys::wide,
        mmap::{config, heartbeat},
    },
};

/// Heartbeat of an earlier agent, see [`loading`].
#[derive(Clone, Copy, Debug)]
pub struct Earlier {
    started: u64,
    pid: u32,
}

/// This process has the maps and loads its programs: it has not started yet. Returns what was there before.
pub fn loading(maps: &mut Maps) -> Earlier {
    let words = &mut maps.heartbeat;
    let earlier = Earlier { started: words.load(heartbeat::started), pid: words.load(heartbeat::pid) };
    words.store(heartbeat::started, 0);
    words.store(heartbeat::pid, std::process::id());
    earlier
}

/// After a start that failed: the last word is the earlier agent's again.
pub fn restore(maps: &mut Maps, earlier: Earlier) {
    maps.heartbeat.store(heartbeat::started, earlier.started);
    maps.heartbeat.store(heartbeat::pid, earlier.pid);
}

/// The programs are loaded; `hz`: jiffies per second.
///
/// # Errors
/// See [`beat`].
pub fn begin(maps: &mut Maps, object: &Ebpf, hz: u32) -> Result<()> {
    let words = &mut maps.heartbeat;
    words.store(heartbeat::hz, hz);
    words.store(heartbeat::started, clock::monotonic()?);
    words.store(heartbeat::failing, 0);
    words.store(heartbeat::pid, std::process::id());
    beat(maps, object)
}

/// Records the address of `/healthz` and `/status`.
pub fn address(maps: &mut Maps, address: SocketAddr) {
    let words = &mut maps.heartbeat;
    words.store(heartbeat::address, wide(address.ip()));
    words.store(heartbeat::ipv6, u32::from(address.is_ipv6()));
    words.store(heartbeat::port, address.port().into());
}

/// A sign of life, with which idle times in jiffies can be read by another clock.
///
/// # Errors
/// The kernel refuses to tell the time.
pub fn beat(maps: &mut Maps, object: &Ebpf) -> Result<()> {
    let (seen, jiffies) = (clock::monotonic()?, test_run::raw_tracepoint(object, "tp_clock")?);
    maps.heartbeat.store(heartbeat::jiffies, jiffies);
    maps.heartbeat.store(heartbeat::seen, seen);
    end_monitor(maps, seen);
    Ok(())
}

/// The maps hold all that is desired.
///
/// # Errors
/// None on Linux.
pub fn synced(maps: &mut Maps) -> Result<()> {
    maps.heartbeat.store(heartbeat::synced, clock::monotonic()?);
    maps.heartbeat.store(heartbeat::failing, 0);
    Ok(())
}

/// Writing the maps failed.
///
/// # Errors
/// None on Linux.
pub fn failing(maps: &mut Maps) -> Result<()> {
    if maps.heartbeat.load(heartbeat::failing) == 0 {
        maps.heartbeat.store(heartbeat::failing, clock::monotonic()?);
    }
    Ok(())
}

/// Forgets a listener that was killed: from now on packets need not even look at the clock.
fn end_monitor(maps: &mut Maps, now: u64) {
    let until = maps.config.load(config::monitor_until);
    if until == 0 || until > now {
        return;
    }
    // SAFETY: an aligned word of the mapped element, which lives as long as the tables. Compared, for a new listener
    // may have written it meanwhile.
    let word = unsafe { AtomicU64::from_ptr(config::monitor_until(maps.config.pointer())) };
    let _ = word.compare_exchange(until, 0, Ordering::Relaxed, Ordering::Relaxed);
}
