//! What the agent leaves word of in the maps: that it lives, since when they are in sync, where it answers.

use std::{
    net::SocketAddr,
    sync::atomic::{AtomicU64, Ordering},
};

use anyhow::Result;

use super::{
    Dataplane,
    bpf::test_run,
    clock,
    maps::{
        Tables,
        keys::wide,
        mmap::{agent, state},
    },
};

/// Says that this process has the maps and loads its programs: that it has not started yet. Returns what was said before.
pub(super) fn say_loading(tables: &mut Tables) -> (u64, u32) {
    let words = &mut tables.agent;
    let before = (words.load(agent::started), words.load(agent::pid));
    words.store(agent::started, 0);
    words.store(agent::pid, std::process::id());
    before
}

/// After a start that failed: the last word is the earlier agent's again.
pub(super) fn take_back(tables: &mut Tables, (started, pid): (u64, u32)) {
    tables.agent.store(agent::started, started);
    tables.agent.store(agent::pid, pid);
}

impl Dataplane {
    pub(super) fn begin_report(&mut self) -> Result<()> {
        let words = &mut self.tables.agent;
        words.store(agent::started, clock::monotonic()?);
        words.store(agent::failing, 0);
        words.store(agent::pid, std::process::id());
        self.report_life()
    }

    /// Where `/healthz` and `/status` are answered.
    pub fn report_address(&mut self, address: SocketAddr) {
        let words = &mut self.tables.agent;
        words.store(agent::address, wide(address.ip()));
        words.store(agent::ipv6, u32::from(address.is_ipv6()));
        words.store(agent::port, address.port().into());
    }

    /// A sign of life, with which idle times in jiffies can be told by another clock.
    pub(super) fn report_life(&mut self) -> Result<()> {
        let (seen, jiffies) = (clock::monotonic()?, test_run::raw_tracepoint(&self.object, "clock")?);
        self.tables.agent.store(agent::jiffies, jiffies);
        self.tables.agent.store(agent::seen, seen);
        self.end_monitor(seen);
        Ok(())
    }

    /// The maps hold all that is desired.
    pub(super) fn report_sync(&mut self) -> Result<()> {
        let words = &mut self.tables.agent;
        words.store(agent::synced, clock::monotonic()?);
        words.store(agent::failing, 0);
        Ok(())
    }

    pub(super) fn report_failure(&mut self) -> Result<()> {
        if self.tables.agent.load(agent::failing) == 0 {
            self.tables.agent.store(agent::failing, clock::monotonic()?);
        }
        Ok(())
    }

    /// Forgets a listener that was killed: from now on packets need not even look at the clock.
    fn end_monitor(&mut self, now: u64) {
        let until = self.tables.state.load(state::monitor_until);
        if until == 0 || until > now {
            return;
        }
        // SAFETY: an aligned word of the mapped element, which lives as long as the tables. Compared, for a new listener
        // may have written it meanwhile.
        let word = unsafe { AtomicU64::from_ptr(state::monitor_until(self.tables.state.pointer())) };
        let _ = word.compare_exchange(until, 0, Ordering::Relaxed, Ordering::Relaxed);
    }
}
