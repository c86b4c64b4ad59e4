//! Session affinity: the endpoint that a client had from a Service's list, and since when.

use std::{
    net::IpAddr,
    time::{Duration, Instant},
};

use traffic_policy_testing::harness::HZ;

use super::Model;
use crate::topology::{AFFINITY, Endpoint};

/// Client, Service, and whether the list holds only this node's endpoints.
pub(super) type Key = (IpAddr, usize, bool);

/// The endpoint that a client was given last.
#[derive(Clone, Copy, Debug)]
pub(super) struct Held {
    /// The endpoint; `None` for one of the list that was not observed yet.
    endpoint: Option<Endpoint>,
    /// Time on the model's clock; `seen` is the time on this machine's.
    since: u64,
    seen: Instant,
}

/// Rounding error in seconds: the program writes a time down once a second, and reads a clock of
/// ticks.
const ROUNDING: u64 = 2;

impl Held {
    /// Whether the affinity still lasts; `None` if that is undetermined.
    fn lasts(&self, clock: u64) -> Option<bool> {
        let least = (clock - self.since) / u64::from(HZ);
        let most = least + self.seen.elapsed().as_secs() + 1 + ROUNDING;
        let lasts = u64::from(AFFINITY);
        if most < lasts {
            Some(true)
        } else if least > lasts + ROUNDING {
            Some(false)
        } else {
            None
        }
    }
}

/// Converts jiffies as on the model's clock.
pub fn duration(jiffies: u32) -> Duration {
    Duration::from_secs(u64::from(jiffies)) / HZ
}

impl Model {
    /// Returns the endpoints that a new flow of a client may get.
    pub fn candidates(&self, client: IpAddr, service: usize) -> Vec<Endpoint> {
        let of = &self.services[service];
        let all = of.candidates();
        if !of.affinity {
            return all;
        }
        // A client that used the other list, before a change of policy, keeps its endpoint as well.
        for local in [of.uses_local(), !of.uses_local()] {
            let Some(held) = self.affinity.get(&(client, service, local)) else { continue };
            match (held.lasts(self.clock), held.endpoint) {
                (Some(false), _) => {}
                (Some(true), Some(endpoint)) if all.contains(&endpoint) => return vec![endpoint],
                (Some(true), Some(_)) => {}
                _ => return all,
            }
        }
        all
    }

    /// Records that a new flow got this endpoint, or one of the candidates.
    pub fn chosen(&mut self, client: IpAddr, service: usize, endpoint: Option<Endpoint>) {
        let of = self.services[service];
        if !of.affinity {
            return;
        }
        let candidates = self.candidates(client, service);
        let only = if candidates.len() == 1 { candidates.first().copied() } else { None };
        let held = Held { endpoint: endpoint.or(only), since: self.clock, seen: self.given };
        self.affinity.insert((client, service, of.uses_local()), held);
    }
}
