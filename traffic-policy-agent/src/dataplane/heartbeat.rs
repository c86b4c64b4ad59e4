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
        mmap::{agent, state},
    },
};

/// What an earlier agent had left, see [`loading`].
#[derive(Clone, Copy, Debug)]
pub struct Earlier {
    started: u64,
    pid: u32,
}

/// This process has the maps and loads its programs: it has not started yet. Returns what was there before.
pub fn loading(maps: &mut Maps) -> Earlier {
    let words = &mut maps.agent;
    let earlier = Earlier { started: words.load(agent::started), pid: words.load(agent::pid) };
    words.store(agent::started, 0);
    words.store(agent::pid, std::process::id());
    earlier
}

/// After a start that failed: the last word is the earlier agent's again.
pub fn restore(maps: &mut Maps, earlier: Earlier) {
    maps.agent.store(agent::started, earlier.started);
    maps.agent.store(agent::pid, earlier.pid);
}

/// The programs are loaded; `hz`: jiffies per second.
///
/// # Errors
/// See [`beat`].
pub fn begin(maps: &mut Maps, object: &Ebpf, hz: u32) -> Result<()> {
    let words = &mut maps.agent;
    words.store(agent::hz, hz);
    words.store(agent::started, clock::monotonic()?);
    words.store(agent::failing, 0);
    words.store(agent::pid, std::process::id());
    beat(maps, object)
}

/// Where `/healthz` and `/status` are answered.
pub fn address(maps: &mut Maps, address: SocketAddr) {
    let words = &mut maps.agent;
    words.store(agent::address, wide(address.ip()));
    words.store(agent::ipv6, u32::from(address.is_ipv6()));
    words.store(agent::port, address.port().into());
}

/// A sign of life, with which idle times in jiffies can be read by another clock.
///
/// # Errors
/// The kernel refuses to tell the time.
pub fn beat(maps: &mut Maps, object: &Ebpf) -> Result<()> {
    let (seen, jiffies) = (clock::monotonic()?, test_run::raw_tracepoint(object, "tp_clock")?);
    maps.agent.store(agent::jiffies, jiffies);
    maps.agent.store(agent::seen, seen);
    end_monitor(maps, seen);
    Ok(())
}

/// The maps hold all that is desired.
///
/// # Errors
/// None on Linux.
pub fn synced(maps: &mut Maps) -> Result<()> {
    maps.agent.store(agent::synced, clock::monotonic()?);
    maps.agent.store(agent::failing, 0);
    Ok(())
}

/// Writing the maps failed.
///
/// # Errors
/// None on Linux.
pub fn failing(maps: &mut Maps) -> Result<()> {
    if maps.agent.load(agent::failing) == 0 {
        maps.agent.store(agent::failing, clock::monotonic()?);
    }
    Ok(())
}

/// Forgets a listener that was killed: from now on packets need not even look at the clock.
fn end_monitor(maps: &mut Maps, now: u64) {
    let until = maps.state.load(state::monitor_until);
    if until == 0 || until > now {
        return;
    }
    // SAFETY: an aligned word of the mapped element, which lives as long as the tables. Compared, for a new listener
    // may have written it meanwhile.
    let word = unsafe { AtomicU64::from_ptr(state::monitor_until(maps.state.pointer())) };
    let _ = word.compare_exchange(until, 0, Ordering::Relaxed, Ordering::Relaxed);
}
