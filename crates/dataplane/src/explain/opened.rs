//! The fate of a packet that another node has sent within another one: a request that it has
//! forwarded directly to an endpoint of this node, or a reply that goes back through this node.

use std::net::IpAddr;

use anyhow::Result;
use traffic_policy_cluster::model::Dispatch;
use traffic_policy_ebpf::outcome::Outcome;

use super::{
    Answer, Explainer, describe,
    flow::{Flow, From},
    frame,
    simulator::PacketHook,
    verdict,
};
use crate::explain::{Entrance, Verdict};

/// The outer packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outer {
    /// The node that sends it.
    pub source: IpAddr,
    /// The endpoint; of a reply, an address of this node.
    pub destination: IpAddr,
    pub dispatch: Dispatch,
}

impl Explainer {
    /// Returns a sentence on the outer packet: whether it is opened, and why.
    fn opening(&self, flow: &Flow, outer: Outer, outcome: Outcome) -> String {
        let Outer { source: from, destination: to, dispatch } = outer;
        let is_reply = self.scope.node.contains(&to);
        let is_left_alone = verdict(outcome) == Verdict::Unhandled;
        let frontend = flow.source;
        match (is_left_alone, is_reply) {
            (false, true) => format!(
                "opened: {from} is in another node's Lease, {to} is this node's, and replies from {frontend} come back through here"
            ),
            (false, false) => {
                format!("opened: {from} is in another node's Lease, and {to} is an endpoint of this node")
            }
            (true, true) => format!(
                "not opened: {from} is no address in another node's Lease, or {frontend} is no frontend whose replies come back through here"
            ),
            (true, false) => format!(
                "not opened: {from} is no address in another node's Lease, or {to} is no endpoint of this node that packets are opened for{}",
                if dispatch == Dispatch::Udp { ", or not one of this Service" } else { "" }
            ),
        }
    }

    /// Runs the programs for the packet of a flow within an outer one, which TC opens.
    ///
    /// # Errors
    /// Flow and outer packet are of different families, or the kernel refuses to run the programs.
    pub fn explain_opened(&mut self, flow: &Flow, outer: Outer) -> Result<Answer> {
        let Entrance { ifindex, mac, .. } = self.entrance(outer.source);
        let packet = frame::build(flow, mac)?;
        let packet = frame::within(&packet, outer.source, outer.destination, outer.dispatch)?;
        let judged = self.simulator.packet(PacketHook::Tc, ifindex, &packet)?;
        let facts = self.facts(flow, &judged)?;
        let describer =
            describe::Describer { flow, from: From::External, facts: &facts, offline: self.offline };
        let (from, to) = (outer.source, outer.destination);
        let form = describe::form_of_direct(to.is_ipv6(), outer.dispatch);
        let mut steps = vec![format!("from node {from}, within a packet to {to} ({form})")];
        steps.push(self.opening(flow, outer, judged.outcome));
        steps.extend(describe::later(flow));
        steps.extend(judged.steps.iter().filter_map(|step| describer.describe(step)));
        if let Outcome::ForwardedToOwner = judged.outcome
            && let Some(owner) = frame::destination(&judged.frame)
        {
            steps.push(format!(
                "owner: neither this node nor the pod's stack knows the connection, so it is sent on, within a packet \
                 to {owner}, an endpoint that the Maglev table names, or named before"
            ));
        }
        let is_delivered = judged.outcome as u32 == Outcome::Delivered as u32;
        let is_reply = verdict(judged.outcome) == Verdict::Reply;
        let packet = frame::read(&judged.frame).filter(|_| is_delivered || is_reply);
        let endpoint = packet.map(|packet| packet.destination).filter(|_| is_delivered);
        Ok(Answer {
            name: flow.name.clone(),
            verdict: verdict(judged.outcome),
            outcome: judged.outcome.name(),
            endpoint,
            candidates: endpoint.into_iter().collect(),
            masquerade: false,
            source: packet.map(|packet| packet.source).filter(|_| is_delivered),
            hook: "tc",
            from: From::External.name(),
            service: facts.service.as_ref().map(ToString::to_string),
            steps,
            packet,
            cause: judged.outcome,
            key: facts.service,
            frontend: None,
        })
    }
}
