//! Comparison of the flow table with the model, and the invariants of every table.

use std::collections::HashSet;

use traffic_policy_ebpf::tcp::{ANSWERED, ASSURED, FIN, RST};
use traffic_policy_testing::harness::FlowEntry;

use super::{
    compared::Compared,
    entries::{self, is_reply_of},
};
use crate::{
    model::{Association, Count, Ended, Flow, From, Stale},
    segment::Protocol,
};

/// Verifies the rules of every table, independent of the model: request entries have their reply
/// entries, and no two flows share a port towards one endpoint.
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

/// Compares the counts and states of a flow's entries.
fn compare_flow(flow: &Flow, request: &FlowEntry, reply: &FlowEntry) -> Result<(), String> {
    for (entry, from) in [(request, From::Client), (reply, From::Endpoint)] {
        let (counted, count) = (Count { packets: entry.packets, bytes: entry.bytes }, flow.counted(from));
        if counted != count {
            return Err(format!("{from:?}: counted {counted:?} instead of {count:?} of {flow:?}"));
        }
    }
    if flow.loose {
        return Ok(());
    }
    let assured = request.state & ASSURED != 0;
    if assured != flow.assured {
        return Err(format!("assured: {assured}, but {flow:?}"));
    }
    if flow.protocol == Protocol::Sctp {
        return compare_association(flow, request, reply);
    }
    if flow.protocol == Protocol::Udp || !assured || flow.ended == Ended::Unspecified {
        return Ok(());
    }
    for (entry, host) in [request, reply].into_iter().zip(&flow.hosts) {
        if flow.ended == Ended::No && (entry.state & RST != 0 || (entry.state & FIN != 0) != host.fin) {
            return Err(format!("state {:#x}, but {flow:?}", entry.state));
        }
    }
    Ok(())
}

/// Compares the tags and the states of an association.
fn compare_association(flow: &Flow, request: &FlowEntry, reply: &FlowEntry) -> Result<(), String> {
    let Association { client, endpoint, restart, answered, assured, shut, over, .. } = flow.association;
    let endpoint = endpoint.unwrap_or(0);
    let tags = (request.tags, reply.tags);
    if tags != ((client, endpoint), (endpoint, client)) {
        return Err(format!("tags {tags:x?}, but {flow:x?}"));
    }
    let tag = u32::from_be(request.syn);
    if assured && tag != restart.unwrap_or(0) {
        return Err(format!("a restart with the tag {tag:#x}, but {flow:x?}"));
    }
    let bits = |from: From| {
        let of = |is: bool, bit| if is { bit } else { 0 };
        of(assured, ASSURED) | of(shut[from as usize], FIN) | of(over[from as usize], RST)
    };
    let wanted = (bits(From::Client), bits(From::Endpoint) | if answered { ANSWERED } else { 0 });
    let states = (request.state & STATES, reply.state & STATES);
    if states != wanted {
        return Err(format!("states {states:x?} instead of {wanted:x?} of {flow:x?}"));
    }
    Ok(())
}

/// The bits of a state that packets set.
const STATES: u8 = ASSURED | ANSWERED | FIN | RST;

/// Verifies that the flow table holds the model's flows, each with both entries, and no others.
pub fn compare(compared: &Compared<'_>) -> Result<(), String> {
    let entries = compared.harness.flows(compared.path.family);
    sound(&entries)?;
    let requests: Vec<_> = entries.iter().filter(|entry| entry.is_request()).collect();
    for flow in &compared.model.flows {
        let Some(request) = requests.iter().find(|entry| entries::is_request_of(entry, flow)) else {
            return Err(format!("no request entry of {flow:?}"));
        };
        let source = (request.new_from, request.new_to);
        if source != (flow.source, flow.target(compared.path.family)) {
            return Err(format!("its request entry makes {source:?} of {flow:?}"));
        }
        let Some(reply) = entries.iter().find(|entry| is_reply_of(entry, request)) else {
            return Err(format!("no reply entry of {flow:?}"));
        };
        compare_flow(flow, request, reply)?;
    }
    if requests.len() != compared.model.flows.len() {
        return Err(format!("{} request entries of {} flows", requests.len(), compared.model.flows.len()));
    }
    for entry in entries.iter().filter(|entry| !entry.is_request()) {
        let stale = |each: &Stale| {
            (each.protocol.number(), each.source, each.target) == (entry.protocol, entry.to, entry.from)
        };
        if !requests.iter().any(|request| is_reply_of(entry, request))
            && !compared.model.stale.iter().any(stale)
        {
            return Err(format!("a reply entry of no flow: {entry:?}"));
        }
    }
    compare_queues(compared, &requests)
}

/// Verifies that each unassured flow has a place in the queues, which holds its tuple. (Flows
/// that were removed otherwise may keep their places until these are taken again.)
fn compare_queues(compared: &Compared<'_>, requests: &[&FlowEntry]) -> Result<(), String> {
    let queued = compared.harness.queued(compared.path.family);
    for request in requests.iter().filter(|entry| entry.state & ASSURED == 0) {
        let held = request.place.and_then(|place| queued.get(&place));
        if held != Some(&(request.from, request.to, request.protocol)) {
            return Err(format!("its place holds {held:?} instead of {request:?}"));
        }
    }
    Ok(())
}
