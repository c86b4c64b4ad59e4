//! Entries of the flow table, and the flows of the model that they belong to.

use traffic_policy_testing::{harness::FlowEntry, lab::Family};

use crate::model::Flow;

/// Whether an entry is the reply entry of a request entry.
pub fn is_reply_of(reply: &FlowEntry, request: &FlowEntry) -> bool {
    !reply.is_request()
        && reply.protocol == request.protocol
        && (reply.from, reply.to) == (request.new_to, request.new_from)
        && (reply.new_from, reply.new_to) == (request.to, request.from)
}

/// Whether an entry is the request entry of a flow.
pub fn is_request_of(entry: &FlowEntry, flow: &Flow) -> bool {
    entry.is_request()
        && entry.protocol == flow.protocol.number()
        && entry.from == flow.client
        && entry.to == flow.frontend
}

/// Whether an entry leads replies of a flow's endpoint back to its client.
pub fn leads_back(entry: &FlowEntry, flow: &Flow, family: Family) -> bool {
    !entry.is_request()
        && entry.protocol == flow.protocol.number()
        && (entry.from, entry.to) == (flow.target(family), flow.source)
}
