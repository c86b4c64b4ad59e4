//! Time: how long flows may be idle, and the effect of a sweep on them.

use std::net::SocketAddr;

use traffic_policy_ebpf::tcp::Timeouts;
use traffic_policy_testing::harness::HZ;

use super::{Ended, Flow, Model};
use crate::{segment::Protocol, topology::Endpoint};

/// Time-outs in jiffies, far enough apart that a slow machine confuses none with another.
pub const TIMEOUTS: Timeouts = Timeouts {
    established: 1_000_000,
    half_closed: 500_000,
    finished: 60_000,
    reset: 20_000,
    unassured: 300_000,
    udp: 40_000,
    udp_answered: 90_000,
};
/// Time-out of an assured SCTP association in jiffies: that of conntrack, which is not configured.
const ASSOCIATION: u32 = 210 * HZ;
/// Jiffies around a time-out within which the result is undetermined: a run takes some time itself.
pub const SLACK: u64 = 5_000;
/// Jiffies after which a port of an unanswered SYN, or of unassured datagrams, may be taken: ten
/// seconds.
const SILENT: u64 = 10 * HZ as u64;
/// Steps of time, each of which exceeds one more time-out.
pub const STEPS: [u32; 6] = [8_000, 30_000, 50_000, 100_000, 350_000, 1_100_000];

/// The fate of a flow in a sweep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Stays,
    Goes,
    Either,
}

/// The reply entry of a flow that was replaced: its last replies may still find it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stale {
    pub protocol: Protocol,
    pub source: SocketAddr,
    pub target: SocketAddr,
    pub last: u64,
    pub found_over: u8,
}

impl Stale {
    pub fn is(&self, protocol: Protocol, source: SocketAddr, target: SocketAddr) -> bool {
        (self.protocol, self.source, self.target) == (protocol, source, target)
    }
}

impl Flow {
    fn idle(&self, clock: u64) -> u64 {
        clock - self.last[0].max(self.last[1])
    }

    /// Returns the longest possible idle time: not all packets of the flow belong to it for
    /// certain.
    fn longest_idle(&self, clock: u64) -> u64 {
        self.belonged.most(clock)
    }

    /// Returns the shortest and the longest permitted idle time, as far as the state is certain.
    fn limits(&self) -> (u32, u32) {
        let one = |limit| (limit, limit);
        match (self.protocol, self.loose, self.assured) {
            (Protocol::Tcp, ..) => {}
            (Protocol::Udp, true, _) => return (TIMEOUTS.udp, TIMEOUTS.udp_answered),
            (Protocol::Udp, false, true) => return one(TIMEOUTS.udp_answered),
            (Protocol::Udp, false, false) => return one(TIMEOUTS.udp),
            (Protocol::Sctp, _, assured) => {
                return one(match assured {
                    _ if self.association.is_over() => TIMEOUTS.reset,
                    _ if self.association.is_shutting_down() => TIMEOUTS.finished,
                    false => TIMEOUTS.unassured,
                    true => ASSOCIATION,
                });
            }
        }
        if self.loose || self.ended == Ended::Unspecified {
            return (TIMEOUTS.reset, TIMEOUTS.established);
        }
        one(match (self.ended, self.assured) {
            (Ended::Yes, _) if self.reset => TIMEOUTS.reset,
            (Ended::Yes, _) => TIMEOUTS.finished,
            (_, false) => TIMEOUTS.unassured,
            _ if self.hosts.iter().all(|host| host.fin) => TIMEOUTS.finished,
            _ if self.hosts.iter().any(|host| host.fin) => TIMEOUTS.half_closed,
            _ => TIMEOUTS.established,
        })
    }

    /// Whether another flow may take its port: its connection ended long ago (RFC 6191).
    pub fn gives_way(&self, clock: u64) -> bool {
        self.protocol != Protocol::Udp && self.ended == Ended::Yes && !self.loose && self.idle(clock) > SLACK
    }

    /// Whether another flow may have taken its port: it is unassured, and no packet has come for
    /// ten seconds. A middlebox that does not see all of it may be mistaken.
    pub fn may_give_way(&self, clock: u64) -> bool {
        self.loose || !self.assured && self.longest_idle(clock) >= SILENT
    }

    /// Sweeps the flow: a sweep notices that it was idle for too long, and the next sweep that
    /// finds it unchanged removes it.
    fn sweep(&mut self, clock: u64) -> Fate {
        let (idle, (least, most)) = (self.idle(clock), self.limits());
        if self.longest_idle(clock) + SLACK < least.into() {
            return Fate::Stays;
        }
        let noticed_before = self.noticed;
        self.noticed = true;
        if idle <= u64::from(most) + SLACK {
            return Fate::Either;
        }
        self.found_over += 1;
        match self.found_over {
            1 if noticed_before => Fate::Either,
            1 => Fate::Stays,
            _ => Fate::Goes,
        }
    }
}

impl Model {
    /// Returns the fate of each flow in a sweep. Stale entries that must be removed by now are
    /// forgotten. A flow whose endpoint is `removed` in this sweep may stay until the next one: its
    /// state differs from that of a moment before, as if a packet had come.
    pub fn sweep(&mut self, removed: Option<(usize, Endpoint)>) -> Vec<Fate> {
        let clock = self.clock;
        self.stale.retain_mut(|stale| {
            stale.found_over += u8::from(clock - stale.last > u64::from(TIMEOUTS.unassured) + SLACK);
            stale.found_over < 2
        });
        let fate = |flow: &mut Flow| match flow.sweep(clock) {
            Fate::Goes if !flow.removed && removed == Some((flow.service, flow.endpoint)) => Fate::Either,
            fate => fate,
        };
        self.flows.iter_mut().map(fate).collect()
    }
}
