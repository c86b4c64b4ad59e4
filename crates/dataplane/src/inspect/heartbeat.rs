//! The agent's heartbeat, as it left it in the map `tp_heartbeat`: [`AgentHeartbeat`].

use std::{fs, net::SocketAddr, time::Duration};

use anyhow::Result;
use traffic_policy_ebpf::abi::{AgentHeartbeat, TableUsage};

use super::pinned::Pinned;
use crate::dataplane::{bpf::pins, clock, maps::keys::from_wide};

/// The age up to which a sign of life is fresh: a running agent gives one every two seconds, or a
/// little later on a busy node.
const FRESH: Duration = Duration::from_secs(5);

/// The state of the agent according to the maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heartbeat {
    word: AgentHeartbeat,
    now: u64,
}

impl Heartbeat {
    fn since(&self, then: u64) -> Option<Duration> {
        (then != 0).then(|| Duration::from_nanos(self.now.saturating_sub(then)))
    }

    /// Returns the time since the agent had loaded its programs; `None` while it loads them.
    #[must_use]
    pub fn started(&self) -> Option<Duration> {
        self.since(self.word.started)
    }

    /// Returns the time since the agent's last sign of life: up to about two seconds for a running
    /// agent.
    #[must_use]
    pub fn seen(&self) -> Option<Duration> {
        self.since(self.word.seen)
    }

    /// Whether the last sign of life is so recent that the agent probably still runs.
    #[must_use]
    pub fn is_fresh(&self) -> bool {
        self.seen().is_some_and(|seen| seen < FRESH)
    }

    /// Returns the time since the maps were last made equal to the desired state; `None` if they
    /// never were.
    #[must_use]
    pub fn synced(&self) -> Option<Duration> {
        self.since(self.word.synced)
    }

    /// Returns the time since writes have been failing; `None` if they are not.
    #[must_use]
    pub fn failing(&self) -> Option<Duration> {
        self.since(self.word.failing)
    }

    /// Returns the address of `/healthz` and `/status`, if the agent has recorded one.
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        let port = u16::try_from(self.word.port).ok().filter(|port| *port != 0)?;
        Some(SocketAddr::new(from_wide(self.word.address, self.word.ipv6 != 0), port))
    }

    /// Returns the clock of flows, extrapolated from the last sign of life.
    ///
    /// # Errors
    /// No agent has recorded the time.
    pub(super) fn clock(&self) -> Result<Clock> {
        let AgentHeartbeat { seen, jiffies, hz, .. } = self.word;
        anyhow::ensure!(hz != 0 && seen != 0, "no agent has told the time yet: wait until `run` is ready");
        let ticks = u128::from(self.now.saturating_sub(seen)) * u128::from(hz) / 1_000_000_000;
        Ok(Clock { jiffies: jiffies.wrapping_add(ticks as u32), hz })
    }
}

/// The time for which a full table is reported.
const FULL_TOLD: Duration = Duration::from_secs(3600);

impl Heartbeat {
    /// Returns the time since a flow last found no room in a flow table; `None` if none did in the
    /// last hour, or the heartbeat has no clock.
    #[must_use]
    pub fn full(&self, usage: &TableUsage) -> Option<Duration> {
        let clock = self.clock().ok()?;
        let ticks = clock.jiffies.wrapping_sub(usage.full_at);
        // A packet of this very moment is a little ahead of an extrapolated clock.
        let ticks = if ticks.wrapping_neg() <= clock.hz { 0 } else { ticks };
        let since = Duration::from_millis(u64::from(ticks) * 1000 / u64::from(clock.hz));
        (usage.full_at != 0 && since < FULL_TOLD).then_some(since)
    }
}

/// Whether an agent holds the pins, and its state. The process number is that of the agent's own
/// PID namespace, if it is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    Absent,
    /// The maps exist and programs are being loaded: the programs that an earlier agent attached
    /// continue to run.
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
    /// Whether it is in this process's PID namespace, so that its number is the one that it has
    /// recorded itself.
    near: bool,
}

impl Presence {
    /// Evaluates a heartbeat. `fresh`: there may be a lock that is invisible here, and a sign of
    /// life is recent.
    fn of(word: &AgentHeartbeat, holder: Option<Holder>, fresh: bool) -> Self {
        match holder {
            None if fresh => Self::Running { process: word.pid },
            None => Self::Absent,
            // The process has not recorded itself yet.
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
    /// The low half of the jiffies counter.
    pub jiffies: u32,
    /// The jiffies per second.
    pub hz: u32,
}

impl Clock {
    /// Returns the time since a packet that arrived at `last`.
    pub fn idle(&self, last: u32) -> Duration {
        let ticks = self.jiffies.wrapping_sub(last);
        // A packet of this very moment is a tick ahead.
        let ticks = if ticks > u32::MAX / 2 { 0 } else { ticks };
        Duration::from_millis(u64::from(ticks) * 1000 / u64::from(self.hz))
    }
}

impl Heartbeat {
    /// Reads the agent's heartbeat.
    pub fn read(pinned: &Pinned) -> Result<Self> {
        Ok(Self { word: pinned.element("tp_heartbeat")?, now: clock::monotonic()? })
    }
}

impl Presence {
    /// Whether an agent currently holds these pins. If its lock may be invisible, a fresh sign of
    /// life suffices.
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
            // An agent starts for the first time, before and after it records itself.
            (new, holder(42, true), false, Presence::Loading { process: 42 }),
            (taken, holder(42, true), false, Presence::Loading { process: 42 }),
            // An agent takes over, and the earlier one's last sign of life is recent.
            (old, holder(42, true), true, Presence::Loading { process: 42 }),
            (taken, holder(42, true), true, Presence::Loading { process: 42 }),
            // The agent is seen from the host of its container, where it has another number.
            (old, holder(9041, false), true, Presence::Running { process: 41 }),
            (taken, holder(9042, false), false, Presence::Loading { process: 42 }),
            (new, holder(9042, false), false, Presence::Loading { process: 9042 }),
            // An agent was killed while it loaded.
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
