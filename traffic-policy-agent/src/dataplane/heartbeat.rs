//! Heartbeat of the agent in the map `AGENT`: that it lives, since when the maps are in sync, where it answers.

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
        Tables,
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
pub fn loading(tables: &mut Tables) -> Earlier {
    let words = &mut tables.agent;
    let earlier = Earlier { started: words.load(agent::started), pid: words.load(agent::pid) };
    words.store(agent::started, 0);
    words.store(agent::pid, std::process::id());
    earlier
}

/// After a start that failed: the last word is the earlier agent's again.
pub fn restore(tables: &mut Tables, earlier: Earlier) {
    tables.agent.store(agent::started, earlier.started);
    tables.agent.store(agent::pid, earlier.pid);
}

/// The programs are loaded; `hz`: jiffies per second.
///
/// # Errors
/// See [`beat`].
pub fn begin(tables: &mut Tables, object: &Ebpf, hz: u32) -> Result<()> {
    let words = &mut tables.agent;
    words.store(agent::hz, hz);
    words.store(agent::started, clock::monotonic()?);
    words.store(agent::failing, 0);
    words.store(agent::pid, std::process::id());
    beat(tables, object)
}

/// Where `/healthz` and `/status` are answered.
pub fn address(tables: &mut Tables, address: SocketAddr) {
    let words = &mut tables.agent;
    words.store(agent::address, wide(address.ip()));
    words.store(agent::ipv6, u32::from(address.is_ipv6()));
    words.store(agent::port, address.port().into());
}

/// A sign of life, with which idle times in jiffies can be read by another clock.
///
/// # Errors
/// The kernel refuses to tell the time.
pub fn beat(tables: &mut Tables, object: &Ebpf) -> Result<()> {
    let (seen, jiffies) = (clock::monotonic()?, test_run::raw_tracepoint(object, "clock")?);
    tables.agent.store(agent::jiffies, jiffies);
    tables.agent.store(agent::seen, seen);
    end_monitor(tables, seen);
    Ok(())
}

/// The maps hold all that is desired.
///
/// # Errors
/// None on Linux.
pub fn synced(tables: &mut Tables) -> Result<()> {
    tables.agent.store(agent::synced, clock::monotonic()?);
    tables.agent.store(agent::failing, 0);
    Ok(())
}

/// Writing the maps failed.
///
/// # Errors
/// None on Linux.
pub fn failing(tables: &mut Tables) -> Result<()> {
    if tables.agent.load(agent::failing) == 0 {
        tables.agent.store(agent::failing, clock::monotonic()?);
    }
    Ok(())
}

/// Forgets a listener that was killed: from now on packets need not even look at the clock.
fn end_monitor(tables: &mut Tables, now: u64) {
    let until = tables.state.load(state::monitor_until);
    if until == 0 || until > now {
        return;
    }
    // SAFETY: an aligned word of the mapped element, which lives as long as the tables. Compared, for a new listener
    // may have written it meanwhile.
    let word = unsafe { AtomicU64::from_ptr(state::monitor_until(tables.state.pointer())) };
    let _ = word.compare_exchange(until, 0, Ordering::Relaxed, Ordering::Relaxed);
}
