//! What the agent has left word of: see [`abi::Agent`].

use std::{net::SocketAddr, time::Duration};

use anyhow::Result;
use traffic_policy_ebpf::abi::{Address4, Agent, State, Usage};

use super::Pinned;
use crate::dataplane::{kernel, pins, tables::FromWire};

/// The agent, as the maps tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    word: Agent,
    now: u64,
}

impl Report {
    fn since(&self, then: u64) -> Option<Duration> {
        (then != 0).then(|| Duration::from_nanos(self.now.saturating_sub(then)))
    }

    /// Since its start.
    #[must_use]
    pub fn started(&self) -> Option<Duration> {
        self.since(self.word.started)
    }

    /// Since its last sign of life: of a running agent, two seconds at most.
    #[must_use]
    pub fn seen(&self) -> Option<Duration> {
        self.since(self.word.seen)
    }

    /// Since the maps were last made equal to what was desired; `None` if they never were.
    #[must_use]
    pub fn synced(&self) -> Option<Duration> {
        self.since(self.word.synced)
    }

    /// Since writes have been failing; `None` if they are not.
    #[must_use]
    pub fn failing(&self) -> Option<Duration> {
        self.since(self.word.failing)
    }

    /// Its process, in its own PID namespace.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.word.pid
    }

    /// Where it answers `/healthz` and `/status`, if it has said so.
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        let port = u16::try_from(self.word.port).ok().filter(|port| *port != 0)?;
        let wide = self.word.address;
        let ip = if self.word.ipv6 == 0 { (wide[0] as Address4).to_ip() } else { wide.to_ip() };
        Some(SocketAddr::new(ip, port))
    }

    /// The clock of flows, carried on from the last sign of life.
    ///
    /// # Errors
    /// No agent has said what time it is.
    pub(super) fn clock(&self) -> Result<Clock> {
        let Agent { seen, jiffies, hz, .. } = self.word;
        anyhow::ensure!(hz != 0 && seen != 0, "no agent has told the time yet: wait until `run` is ready");
        let ticks = u128::from(self.now.saturating_sub(seen)) * u128::from(hz) / 1_000_000_000;
        Ok(Clock { jiffies: jiffies.wrapping_add(ticks as u32), hz })
    }
}

/// The time in jiffies.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    /// Low half.
    pub jiffies: u32,
    /// Per second.
    pub hz: u32,
}

impl Clock {
    /// Since a packet that came at `last`.
    pub fn idle(&self, last: u32) -> Duration {
        let ticks = self.jiffies.wrapping_sub(last);
        // A packet of this very moment is a tick ahead.
        let ticks = if ticks > u32::MAX / 2 { 0 } else { ticks };
        Duration::from_millis(u64::from(ticks) * 1000 / u64::from(self.hz))
    }
}

impl Pinned {
    /// What the agent has left word of.
    ///
    /// # Errors
    /// The map cannot be read.
    pub fn report(&self) -> Result<Report> {
        Ok(Report { word: self.element("AGENT")?, now: kernel::monotonic()? })
    }

    /// Whether an agent holds these pins at present.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn is_held(&self) -> Result<bool> {
        Ok(pins::Look::at(&self.root)?.used_by.is_some())
    }

    /// Words that the agent writes for the packet path.
    ///
    /// # Errors
    /// The map cannot be read.
    pub fn state(&self) -> Result<State> {
        self.element("STATE")
    }

    /// Words that the packet path writes.
    ///
    /// # Errors
    /// The map cannot be read.
    pub fn usage(&self) -> Result<Usage> {
        self.element("USAGE")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_goes_on_without_an_agent() {
        let word = Agent { seen: 5_000_000_000, jiffies: u32::MAX - 10, hz: 250, ..Agent::default() };
        let report = Report { word, now: 7_000_000_000 };
        let clock = report.clock().unwrap();
        assert_eq!(clock.jiffies, 489, "500 ticks later, over the end of the word");
        assert_eq!(clock.idle(u32::MAX - 10), Duration::from_secs(2));
        assert_eq!(clock.idle(490), Duration::ZERO, "a tick ahead");
        assert_eq!(report.seen(), Some(Duration::from_secs(2)));
        assert_eq!(report.synced(), None);
        assert!(Report { word: Agent::default(), now: 1 }.clock().is_err());
    }
}
