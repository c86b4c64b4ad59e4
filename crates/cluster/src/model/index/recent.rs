//! Services that the other nodes may not know yet: what is forwarded to them names its endpoint.
//!
//! A node that does not know a Service routes a packet to it on, as any to a foreign address, and
//! it may come back until its TTL ends. An agent that lags behind is out of sync after a minute,
//! and says so to the other nodes.

use std::collections::{BTreeMap, BTreeSet};

use super::Index;
use crate::model::{Dispatch, ServiceName, service_port::Wanted};

/// The calls of [`Index::age_services`] until a Service that has changed is known to all nodes.
const CALLS: u8 = 4;

/// The Services that have changed lately.
#[derive(Clone, Debug, Default)]
pub(super) struct Recent {
    /// Whether Services are followed; otherwise none is recent.
    is_on: bool,
    /// Each with the number of calls that are missing.
    missing: BTreeMap<ServiceName, u8>,
    /// Services that were known before the agent's start, and have not been listed yet.
    known: BTreeSet<ServiceName>,
}

impl Recent {
    /// Notes a Service that is new or differs from the `former` one.
    pub(super) fn note(&mut self, name: &ServiceName, is_first: bool) {
        let is_known = is_first && self.known.remove(name);
        if self.is_on && !is_known {
            self.missing.insert(name.clone(), CALLS);
        }
    }

    pub(super) fn forget(&mut self, name: &ServiceName) {
        self.missing.remove(name);
    }

    /// Returns the Services that are recent no longer.
    fn age(&mut self) -> Vec<ServiceName> {
        let mut aged = Vec::new();
        self.missing.retain(|name, missing| {
            *missing -= 1;
            if *missing == 0 {
                aged.push(name.clone());
            }
            *missing > 0
        });
        aged
    }
}

impl Index {
    /// Has packets of Services that have changed lately name their endpoints from now on. `known`:
    /// those that were sent without before this agent's start, as long as they do not change again.
    pub fn follow_recent(&mut self, known: BTreeSet<ServiceName>) {
        self.recent = Recent { is_on: true, known, ..Recent::default() };
    }

    /// Notes that a quarter of the time has passed in which all nodes hear of a change. Returns
    /// whether anything may have to be written.
    pub fn age_services(&mut self) -> bool {
        // What is listed for the first time after the initial lists is new.
        if self.synced {
            self.recent.known.clear();
        }
        let aged = self.recent.age();
        let any = !aged.is_empty();
        self.dirty.extend(aged);
        any && self.synced
    }

    /// Whether other nodes may not know this Service as it is.
    pub(super) fn is_recent(&self, name: &ServiceName) -> bool {
        self.recent.missing.contains_key(name)
    }
}

impl Wanted {
    /// Has packets to all endpoints name these.
    pub(super) fn name_endpoints(&mut self) {
        for (_, port) in &mut self.ports {
            for endpoint in &mut std::sync::Arc::make_mut(port).cluster {
                endpoint.opens = endpoint.opens.map(Dispatch::within);
                endpoint.held = endpoint.held.map(Dispatch::within);
            }
        }
    }
}
