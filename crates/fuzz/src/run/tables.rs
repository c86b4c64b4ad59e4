//! Comparison of the flow table with the model, and the invariants of every table.

use std::collections::HashSet;

use traffic_policy_ebpf::tcp::{ANSWERED, ASSURED, FIN, RST};
use traffic_policy_testing::{harness::FlowEntry, lab::Family};

use super::Run;
use crate::{
    model::{Association, Count, Ended, Flow, From, Stale},
    segment::Protocol,
};

/// Whether an entry is the reply entry of a request entry.
pub fn is_reply_of(reply: &FlowEntry, request: &FlowEntry) -> bool {
    !reply.is_request()
        && reply.protocol == request.protocol
        && (reply.from, reply.to) == (request.new_to, request.new_from)
        && (reply.new_from, reply.new_to) == (request.to, request.from)
}

/// Verifies the rules of every table, independent of the model: request entries have their reply
/// entries, and no two flows share a port towards one endpoint.
///
/// # Errors
/// The first rule that is violated.
pub fn sound(entries: &[FlowEntry]) -> Result<(), String> {
    let mut taken = HashSet::new();
    for request in entries.iter().filter(|entry| entry.is_request()) {
        if !taken.insert((request.protocol, request.new_from, request.new_to)) {
            return Err(format!("two flows share a port: {request:?}"));
        }
        if !entries.iter().any(|entry| is_reply_of(entry, request)) {
            return Err(format!("no reply entry of {request:?}"));
        }
    }
    Ok(())
}

impl Flow {
    pub(super) fn has_request(&self, entry: &FlowEntry) -> bool {
        entry.is_request()
            && entry.protocol == self.protocol.number()
            && entry.from == self.client
            && entry.to == self.frontend
    }

    pub(super) fn has_reply(&self, entry: &FlowEntry, family: Family) -> bool {
        !entry.is_request()
            && entry.protocol == self.protocol.number()
            && (entry.from, entry.to) == (self.target(family), self.source)
    }

    /// Compares the counts and states of a flow's entries.
    fn compare(&self, request: &FlowEntry, reply: &FlowEntry) -> Result<(), String> {
        for (entry, from) in [(request, From::Client), (reply, From::Endpoint)] {
            let (counted, count) = (Count { packets: entry.packets, bytes: entry.bytes }, self.counted(from));
            if counted != count {
                return Err(format!("{from:?}: counted {counted:?} instead of {count:?} of {self:?}"));
            }
        }
        if self.loose {
            return Ok(());
        }
        let assured = request.state & ASSURED != 0;
        if assured != self.assured {
            return Err(format!("assured: {assured}, but {self:?}"));
        }
        if self.protocol == Protocol::Sctp {
            return self.compare_association(request, reply);
        }
        if self.protocol == Protocol::Udp || !assured || self.ended == Ended::Unspecified {
            return Ok(());
        }
        for (entry, host) in [request, reply].into_iter().zip(&self.hosts) {
            if self.ended == Ended::No && (entry.state & RST != 0 || (entry.state & FIN != 0) != host.fin) {
                return Err(format!("state {:#x}, but {self:?}", entry.state));
            }
        }
        Ok(())
    }

    /// Compares the tags and the states of an association.
    fn compare_association(&self, request: &FlowEntry, reply: &FlowEntry) -> Result<(), String> {
        let Association { client, endpoint, asked, answered, assured, shut, over, .. } = self.association;
        let endpoint = endpoint.unwrap_or(0);
        let tags = (request.tags, reply.tags);
        if tags != ((client, endpoint), (endpoint, client)) {
            return Err(format!("tags {tags:x?}, but {self:x?}"));
        }
        let restart = u32::from_be(request.asked);
        if assured && restart != asked.unwrap_or(0) {
            return Err(format!("a restart with the tag {restart:#x}, but {self:x?}"));
        }
        let bits = |from: From| {
            let of = |is: bool, bit| if is { bit } else { 0 };
            of(assured, ASSURED) | of(shut[from as usize], FIN) | of(over[from as usize], RST)
        };
        let wanted = (bits(From::Client), bits(From::Endpoint) | if answered { ANSWERED } else { 0 });
        let states = (request.state & STATES, reply.state & STATES);
        if states != wanted {
            return Err(format!("states {states:x?} instead of {wanted:x?} of {self:x?}"));
        }
        Ok(())
    }
}

/// The bits of a state that packets set.
const STATES: u8 = ASSURED | ANSWERED | FIN | RST;

impl Run<'_> {
    /// Verifies that the flow table holds the model's flows, each with both entries, and no others.
    pub(super) fn compare_tables(&self) -> Result<(), String> {
        let entries = self.harness.flows(self.path.family);
        sound(&entries)?;
        let requests: Vec<_> = entries.iter().filter(|entry| entry.is_request()).collect();
        for flow in &self.model.flows {
            let Some(request) = requests.iter().find(|entry| flow.has_request(entry)) else {
                return Err(format!("no request entry of {flow:?}"));
            };
            let source = (request.new_from, request.new_to);
            if source != (flow.source, flow.target(self.path.family)) {
                return Err(format!("its request entry makes {source:?} of {flow:?}"));
            }
            let Some(reply) = entries.iter().find(|entry| is_reply_of(entry, request)) else {
                return Err(format!("no reply entry of {flow:?}"));
            };
            flow.compare(request, reply)?;
        }
        if requests.len() != self.model.flows.len() {
            return Err(format!("{} request entries of {} flows", requests.len(), self.model.flows.len()));
        }
        for entry in entries.iter().filter(|entry| !entry.is_request()) {
            let stale = |each: &Stale| {
                (each.protocol.number(), each.source, each.target) == (entry.protocol, entry.to, entry.from)
            };
            if !requests.iter().any(|request| is_reply_of(entry, request))
                && !self.model.stale.iter().any(stale)
            {
                return Err(format!("a reply entry of no flow: {entry:?}"));
            }
        }
        self.compare_queues(&requests)
    }

    /// Verifies that each unassured flow has a place in the queues, which holds its tuple. (Flows
    /// that were removed otherwise may keep their places until these are taken again.)
    fn compare_queues(&self, requests: &[&FlowEntry]) -> Result<(), String> {
        let queued = self.harness.queued(self.path.family);
        for request in requests.iter().filter(|entry| entry.state & ASSURED == 0) {
            let held = request.place.and_then(|place| queued.get(&place));
            if held != Some(&(request.from, request.to, request.protocol)) {
                return Err(format!("its place holds {held:?} instead of {request:?}"));
            }
        }
        Ok(())
    }
}
