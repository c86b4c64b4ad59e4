//! The heartbeat of the agent, as it left it in the map `tp_heartbeat`: [`AgentHeartbeat`].

use std::{fs, net::SocketAddr, time::Duration};

use anyhow::Result;
use traffic_policy_ebpf::abi::{AgentHeartbeat, TableUsage};

use super::pinned::Pinned;
use crate::dataplane::{bpf::pins, clock, maps::keys::from_wide};

/// A running agent gives a sign of life every two seconds, or a little later on a busy node.
const FRESH: Duration = Duration::from_secs(5);

/// The agent, as the maps tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heartbeat {
    word: AgentHeartbeat,
    now: u64,
}

impl Heartbeat {
    fn since(&self, then: u64) -> Option<Duration> {
        (then != 0).then(|| Duration::from_nanos(self.now.saturating_sub(then)))
    }

    /// Since it had loaded its programs; `None` while it loads them.
    #[must_use]
    pub fn started(&self) -> Option<Duration> {
        self.since(self.word.started)
    }

    /// Since its last sign of life: of a running agent, two seconds at most.
    #[must_use]
    pub fn seen(&self) -> Option<Duration> {
        self.since(self.word.seen)
    }

    /// An agent was alive so lately that it probably still is.
    #[must_use]
    pub fn is_fresh(&self) -> bool {
        self.seen().is_some_and(|seen| seen < FRESH)
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

    /// Address of `/healthz` and `/status`, if the agent has recorded one.
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        let port = u16::try_from(self.word.port).ok().filter(|port| *port != 0)?;
        Some(SocketAddr::new(from_wide(self.word.address, self.word.ipv6 != 0), port))
    }

    /// The clock of flows, carried on from the last sign of life.
    ///
    /// # Errors
    /// No agent has said what time it is.
    pub(super) fn clock(&self) -> Result<Clock> {
        let AgentHeartbeat { seen, jiffies, hz, .. } = self.word;
        anyhow::ensure!(hz != 0 && seen != 0, "no agent has told the time yet: wait until `run` is ready");
        let ticks = u128::from(self.now.saturating_sub(seen)) * u128::from(hz) / 1_000_000_000;
        Ok(Clock { jiffies: jiffies.wrapping_add(ticks as u32), hz })
    }
}

/// Time for which a full table is reported.
const FULL_TOLD: Duration = Duration::from_secs(3600);

impl Heartbeat {
    /// Since a flow last found no room in a flow table; `None` if none did in the last hour, or the heartbeat has no clock.
    #[must_use]
    pub fn full(&self, usage: &TableUsage) -> Option<Duration> {
        let clock = self.clock().ok()?;
        let ticks = clock.jiffies.wrapping_sub(usage.full_at);
        // A packet of this very moment is a little ahead of a clock that is carried on.
        let ticks = if ticks.wrapping_neg() <= clock.hz { 0 } else { ticks };
        let since = Duration::from_millis(u64::from(ticks) * 1000 / u64::from(clock.hz));
        (usage.full_at != 0 && since < FULL_TOLD).then_some(since)
    }
}

/// Whether an agent holds the pins, and what it does; the process is in the agent's own PID namespace, where that is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    Absent,
    /// Maps are there, programs are being loaded: what an earlier agent attached goes on.
    Loading {
        process: u32,
    },
    Running {
        process: u32,
    },
}

/// The process that holds the lock.
#[derive(Clone, Copy, Debug)]
struct Holder {
    process: u32,
    /// In this process's PID namespace: its number is the one by which it calls itself.
    near: bool,
}

impl Presence {
    /// `fresh`: there may be a lock that cannot be seen here, and a sign of life is recent.
    fn of(word: &AgentHeartbeat, holder: Option<Holder>, fresh: bool) -> Self {
        match holder {
            None if fresh => Self::Running { process: word.pid },
            None => Self::Absent,
            // It has not come to leaving word of itself.
            Some(Holder { process, near: true }) if process != word.pid => Self::Loading { process },
            Some(Holder { process, .. }) if word.started == 0 => {
                Self::Loading { process: if word.pid == 0 { process } else { word.pid } }
            }
            Some(_) => Self::Running { process: word.pid },
        }
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

impl Heartbeat {
    /// Reads the agent's heartbeat.
    ///
    /// # Errors
    /// The map cannot be read.
    pub fn read(pinned: &Pinned) -> Result<Self> {
        Ok(Self { word: pinned.element("tp_heartbeat")?, now: clock::monotonic()? })
    }
}

impl Presence {
    /// Whether an agent holds these pins at present. Where its lock may be invisible, a fresh sign of life will do.
    ///
    /// # Errors
    /// The folder or the map cannot be read.
    pub fn read(pinned: &Pinned) -> Result<Self> {
        let namespace = |process: &str| fs::read_link(format!("/proc/{process}/ns/pid")).ok();
        let holder = pins::Look::at(pinned.root())?.used_by.map(|process| {
            let near = namespace("self").is_some_and(|own| namespace(&process.to_string()) == Some(own));
            Holder { process, near }
        });
        let heartbeat = Heartbeat::read(pinned)?;
        Ok(Self::of(&heartbeat.word, holder, !pins::sees_all_locks() && heartbeat.is_fresh()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presence_of_an_agent() {
        let word = |started, pid| AgentHeartbeat { started, pid, ..AgentHeartbeat::default() };
        let holder = |process, near| Some(Holder { process, near });
        let (new, old, taken) = (word(0, 0), word(9, 41), word(0, 42));
        for (word, holder, fresh, expected) in [
            (new, None, false, Presence::Absent),
            (old, None, false, Presence::Absent),
            (old, None, true, Presence::Running { process: 41 }),
            (old, holder(41, true), true, Presence::Running { process: 41 }),
            // Its first start, before and after it says who it is.
            (new, holder(42, true), false, Presence::Loading { process: 42 }),
            (taken, holder(42, true), false, Presence::Loading { process: 42 }),
            // It takes over, and the earlier one's last sign of life is of a moment ago.
            (old, holder(42, true), true, Presence::Loading { process: 42 }),
            (taken, holder(42, true), true, Presence::Loading { process: 42 }),
            // Seen from the host of its container, where it has another number.
            (old, holder(9041, false), true, Presence::Running { process: 41 }),
            (taken, holder(9042, false), false, Presence::Loading { process: 42 }),
            (new, holder(9042, false), false, Presence::Loading { process: 9042 }),
            // One that was killed while it loaded.
            (taken, None, false, Presence::Absent),
        ] {
            assert_eq!(Presence::of(&word, holder, fresh), expected, "{word:?} {holder:?} {fresh}");
        }
    }

    #[test]
    fn the_clock_goes_on_without_an_agent() {
        let word = AgentHeartbeat {
            seen: 5_000_000_000,
            jiffies: u32::MAX - 10,
            hz: 250,
            ..AgentHeartbeat::default()
        };
        let report = Heartbeat { word, now: 7_000_000_000 };
        let clock = report.clock().unwrap();
        assert_eq!(clock.jiffies, 489, "500 ticks later, over the end of the word");
        assert_eq!(clock.idle(u32::MAX - 10), Duration::from_secs(2));
        assert_eq!(clock.idle(490), Duration::ZERO, "a tick ahead");
        assert_eq!(report.seen(), Some(Duration::from_secs(2)));
        let full = |full_at| report.full(&TableUsage { full_at, ..TableUsage::default() });
        assert_eq!(full(489 - 250), Some(Duration::from_secs(1)));
        assert_eq!(full(490), Some(Duration::ZERO), "a tick ahead");
        assert_eq!(full(0), None, "never");
        assert_eq!(full(489_u32.wrapping_sub(3600 * 250)), None, "long ago");
        assert_eq!(full(489 + (1 << 31) - 1), None, "so long ago that it looks as if it were ahead");
        assert!(report.is_fresh() && !Heartbeat { now: 10_000_000_000, ..report }.is_fresh());
        assert_eq!(report.synced(), None);
        assert!(Heartbeat { word: AgentHeartbeat::default(), now: 1 }.clock().is_err());
    }
}
