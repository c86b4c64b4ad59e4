//! The fate of a packet that another node has forwarded directly to an endpoint of this one.

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
    /// The endpoint.
    pub destination: IpAddr,
    pub dispatch: Dispatch,
}

impl Explainer {
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
        let is_left_alone = verdict(judged.outcome) == Verdict::Unhandled;
        steps.push(if is_left_alone {
            format!(
                "not opened: {from} is no address in another node's Lease, or {to} is no endpoint of this node that packets are opened for{}",
                if outer.dispatch == Dispatch::Udp { ", or not one of this Service" } else { "" }
            )
        } else {
            format!("opened: {from} is in another node's Lease, and {to} is an endpoint of this node")
        });
        steps.extend(judged.steps.iter().filter_map(|step| describer.describe(step)));
        let is_delivered = judged.outcome as u32 == Outcome::Delivered as u32;
        let packet = frame::read(&judged.frame).filter(|_| is_delivered);
        let endpoint = packet.map(|packet| packet.destination);
        Ok(Answer {
            name: flow.name.clone(),
            verdict: verdict(judged.outcome),
            outcome: judged.outcome.name(),
            endpoint,
            candidates: endpoint.into_iter().collect(),
            masquerade: false,
            source: packet.map(|packet| packet.source),
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
