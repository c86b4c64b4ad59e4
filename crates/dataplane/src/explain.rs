//! The library behind `explain`: the fate of a packet and the reasons, determined by running the
//! programs on it.

mod describe;
mod flow;
mod frame;
mod opened;
mod pods;
mod scope;
pub mod simulator;

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

use anyhow::{Result, bail};
use serde::Serialize;
use traffic_policy_cluster::model::{FrontendKind, ServicePortKey};
use traffic_policy_ebpf::{
    abi::{IndexRange, Port, SocketQuestion, client, frontend, frontend_kind as kind_number, hook, step},
    outcome::{Outcome, Verdict as Kernel},
};

use self::{
    describe::FlowFacts,
    simulator::{Entrance, Judged, PacketHook},
};
pub use self::{
    flow::{Flow, From, SOURCE_PORT, Transport, read},
    frame::Seen,
    opened::Outer,
    pods::PodDevices,
    scope::NodeScope,
    simulator::Simulator,
};
use crate::{
    dataplane::wide,
    inspect::{Nodes, frontend_kind},
};

/// The result for the sender of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// The sender gets a connection to an endpoint.
    Endpoints,
    /// The sender gets an error at once.
    Reject,
    /// The sender gets no reply.
    Drop,
    /// The packet is left to the stack, as it would be without us.
    Unhandled,
    /// It is a reply, which goes on to the client.
    Reply,
}

/// The answer for one flow, serialized as `explain --flows` prints it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Answer {
    pub name: String,
    pub verdict: Verdict,
    /// The name of the outcome, as in `status` and metrics.
    pub outcome: &'static str,
    /// The endpoint that this very flow gets.
    pub endpoint: Option<SocketAddr>,
    /// All endpoints that a flow of this kind may get.
    pub candidates: Vec<SocketAddr>,
    /// Whether the endpoint sees an address of this node instead of the client's: kube-proxy's
    /// masquerade, except for cases that this project makes unnecessary.
    pub masquerade: bool,
    /// The source as the endpoint sees it; `None` without an endpoint.
    pub source: Option<SocketAddr>,
    /// The deciding hook: `xdp`, `tc` or `socket`.
    pub hook: &'static str,
    /// The origin of the flow: `external`, `pod` or `node`.
    pub from: &'static str,
    /// The Service port: namespace/name, followed by a colon and the port's name if it has one.
    pub service: Option<String>,
    /// One sentence for each step, in order.
    pub steps: Vec<String>,
    /// The packet as it leaves, if it is forwarded.
    #[serde(skip)]
    pub packet: Option<Seen>,
    #[serde(skip)]
    pub cause: Outcome,
    #[serde(skip)]
    pub key: Option<ServicePortKey>,
    /// The kind of the Service address that is the destination.
    #[serde(skip)]
    pub frontend: Option<FrontendKind>,
}

/// Answers questions about flows by running a [`Simulator`].
pub struct Explainer {
    simulator: Simulator,
    scope: NodeScope,
    /// The node's primary addresses, for connections of its own that specify no source.
    primary: Vec<IpAddr>,
    /// The lookup of the device on which packets from a source arrive.
    route_lookup: RouteLookup,
    /// The cookie of the node's network namespace, as affinity uses it.
    netns: u64,
    offline: bool,
    /// The nodes that endpoints are on, and which of them the agent has found dead; none offline.
    nodes: Nodes,
    /// Endpoints of dead nodes that are left out, as far as the agent tells.
    left_out: LeftOutEndpoints,
    pods: PodDevices,
}

/// Endpoints that are left out, by Service port, with the names of their nodes: none for one that
/// names no node. `None`: nobody tells.
pub type LeftOutEndpoints = Option<BTreeMap<ServicePortKey, Vec<(SocketAddr, Option<String>)>>>;

/// A function that finds the device on which packets from an address arrive; `None` if any device
/// will do.
pub type RouteLookup = Box<dyn FnMut(IpAddr) -> Option<u32>>;

impl Explainer {
    pub fn new(
        simulator: Simulator,
        scope: NodeScope,
        primary: Vec<IpAddr>,
        route_lookup: RouteLookup,
        netns: u64,
        offline: bool,
    ) -> Self {
        Self {
            simulator,
            scope,
            primary,
            route_lookup,
            netns,
            offline,
            nodes: Nodes::default(),
            left_out: None,
            pods: PodDevices::default(),
        }
    }

    /// Sets the devices of the node's pods.
    pub fn set_pods(&mut self, pods: PodDevices) {
        self.pods = pods;
    }

    /// Sets the nodes, and those endpoints of dead ones that are left out.
    pub fn set_nodes(&mut self, nodes: Nodes, left_out: LeftOutEndpoints) {
        self.nodes = nodes;
        self.left_out = left_out;
    }

    /// Runs the programs for a flow and describes the result.
    pub fn explain(&mut self, flow: &Flow) -> Result<Answer> {
        let mut steps = Vec::new();
        let from = match flow.from {
            Some(from) => {
                steps.push(format!("from {}, as the question says", describe::origin(from)));
                from
            }
            None => {
                let (from, why) = self.scope.guess(flow.source.ip());
                let by_device = from == From::Pod && !self.pods.sockets && self.pods.serves();
                let from = if by_device { From::PodPacket } else { from };
                steps.push(format!("from {}: {why}", describe::origin(from)));
                from
            }
        };
        steps.extend(describe::later(flow));
        let mut judged = self.judge(flow, from)?;
        let mut facts = self.facts(flow, &judged)?;
        if let Some(index) = facts.index.filter(|_| from != From::Pod && has_affinity(&judged)) {
            // The client may have an affinity to an endpoint already.
            if self.simulator.remember_client(self.client(flow, from), client_kind(from), index)? {
                judged = self.judge(flow, from)?;
                facts = self.facts(flow, &judged)?;
            }
        }
        let describer = describe::Describer { flow, from, facts: &facts, offline: self.offline };
        for step in &judged.steps {
            steps.extend(describer.describe(step));
            if describe::is_of_other_nodes(step) {
                let of_port = |all: &BTreeMap<_, Vec<_>>| {
                    facts.service.as_ref().and_then(|key| all.get(key)).cloned().unwrap_or_default()
                };
                let left_out = self.left_out.as_ref().map(of_port);
                steps.extend(describe::dead_nodes(self.nodes.dead(), &facts.candidates, left_out.as_deref()));
            }
        }
        self.tell_of_devices(flow, from, &facts, &judged, &mut steps);
        let verdict = verdict(judged.outcome);
        let has_endpoint = verdict == Verdict::Endpoints;
        let packet = if judged.frame.is_empty() { None } else { frame::read(&judged.frame) };
        let endpoint = facts.chosen.filter(|_| has_endpoint).map(|chosen| chosen.address);
        let (source, masquerade) = match (endpoint, packet) {
            (None, _) => (None, false),
            // What leaves is the outer packet.
            (Some(_), _) if facts.direct => (Some(flow.source), false),
            (Some(_), Some(packet)) => (Some(packet.source), packet.source != flow.source),
            (Some(endpoint), None) => {
                let masquerade = masquerades(&facts, from, flow, endpoint);
                steps.push(describer.source(masquerade));
                (Some(self.socket_source(flow)), masquerade)
            }
        };
        let place = judged.steps.iter().rev().find(|step| step.kind == step::OUTCOME);
        Ok(Answer {
            name: flow.name.clone(),
            verdict,
            outcome: judged.outcome.name(),
            endpoint,
            candidates: if has_endpoint {
                facts.candidates.iter().map(|candidate| candidate.address).collect()
            } else {
                Vec::new()
            },
            masquerade,
            source,
            hook: place.map_or("xdp", |step| hook_name(step.words[0] as u32)),
            from: from.name(),
            service: facts.service.as_ref().map(ToString::to_string),
            key: facts.service,
            steps,
            packet: packet.filter(|_| has_endpoint && !facts.direct),
            cause: judged.outcome,
            frontend: frontend_kind(facts.flags),
        })
    }

    fn judge(&mut self, flow: &Flow, from: From) -> Result<Judged> {
        if from == From::PodPacket {
            let Some(place) = self.place_of(flow.source.ip(), PodDevices::serving) else {
                bail!(
                    "{} is behind no device at which packets to Services are translated: `status` names them",
                    flow.source.ip()
                );
            };
            let Entrance { ifindex, mac, hook } = place.entrance;
            let frame = frame::build(flow, mac)?;
            return self.simulator.packet(hook, ifindex, &frame);
        }
        if flow.later && from != From::External {
            bail!(
                "from {} a socket is asked, which sends later segments by itself: name --from external or pod-packet",
                describe::origin(from)
            );
        }
        if from != From::External {
            return self.simulator.socket(SocketQuestion {
                destination: wide(flow.destination.ip()),
                source: wide(flow.source.ip()),
                // The cookie of a pod's namespace is not known; it differs from the node's, and is
                // never 0, which stands for packets from outside.
                netns: if from == From::Node { self.netns } else { !self.netns | 1 },
                hash: spread(flow),
                port: Port::from_host(flow.destination.port()),
                protocol: u16::from(flow.transport.0),
                node: u16::from(from == From::Node),
                ipv6: u16::from(flow.destination.is_ipv6()),
            });
        }
        let Entrance { ifindex, mac, hook } = self.entrance(flow.source.ip());
        let frame = frame::build(flow, mac)?;
        let judged = self.simulator.packet(hook, ifindex, &frame)?;
        if hook == PacketHook::Xdp && judged.outcome as u32 == Outcome::PassedToTc as u32 {
            let mut finished = self.simulator.packet(PacketHook::Tc, ifindex, &frame)?;
            finished.steps.splice(0..0, judged.steps);
            return Ok(finished);
        }
        Ok(judged)
    }

    /// Returns the place of a pod's address among the devices that `at` looks for.
    fn place_of(
        &mut self,
        pod: IpAddr,
        at: impl Fn(&PodDevices, u32) -> Option<pods::Place>,
    ) -> Option<pods::Place> {
        let towards = (self.route_lookup)(pod)?;
        at(&self.pods, towards)
    }

    /// Adds sentences on pods' devices: where the packet of a pod is translated, and how the reply
    /// returns; by which device packets bypass the stack, once the flow is established.
    fn tell_of_devices(
        &mut self,
        flow: &Flow,
        from: From,
        facts: &FlowFacts,
        judged: &Judged,
        steps: &mut Vec<String>,
    ) {
        let Some(endpoint) = facts.chosen.as_ref().map(|chosen| chosen.address) else { return };
        if verdict(judged.outcome) != Verdict::Endpoints {
            return;
        }
        match from {
            From::PodPacket => {
                if let Some(place) = self.place_of(flow.source.ip(), PodDevices::serving) {
                    let itself = endpoint.ip() == flow.source.ip();
                    steps.push(describe::at_pods_device(&place.name, flow, endpoint, itself));
                }
            }
            From::Pod => {
                if let Some(place) = self.place_of(flow.source.ip(), PodDevices::serving) {
                    steps.push(describe::of_unseen_sockets(&place.name));
                }
            }
            From::External if self.pods.direct && judged.outcome as u32 == Outcome::Delivered as u32 => {
                let place = self.place_of(endpoint.ip(), PodDevices::direct);
                steps.push(describe::once_established(place.as_ref().map(|place| place.name.as_str())));
            }
            From::External | From::Node => {}
        }
    }

    fn entrance(&mut self, source: IpAddr) -> Entrance {
        let device = (self.route_lookup)(source);
        let entrances = self.simulator.entrances();
        let named = entrances.iter().find(|entrance| Some(entrance.ifindex) == device);
        *named.unwrap_or(&entrances[0])
    }

    fn facts(&self, flow: &Flow, judged: &Judged) -> Result<FlowFacts> {
        let ipv6 = flow.destination.is_ipv6();
        let direct = matches!(judged.outcome, Outcome::ForwardedDirect | Outcome::ForwardedToOwner);
        let mut facts = FlowFacts { direct, ..FlowFacts::default() };
        for step in &judged.steps {
            match step.kind {
                step::FRONTEND => {
                    facts.service = self.simulator.service(step.value);
                    facts.index = Some(step.value);
                    facts.flags = step.words[0] as u32;
                    facts.falls_back = self.simulator.falls_back(step.value, facts.flags);
                }
                step::LIST => {
                    let range = IndexRange { base: step.words[0] as u32, len: step.words[1] as u32 };
                    facts.candidates = self.simulator.candidates(ipv6, range)?;
                }
                step::SLOT => {
                    let chosen = self.simulator.endpoint(ipv6, step.value)?;
                    facts.node = self.nodes.name(chosen.node).map(str::to_owned);
                    facts.chosen = Some(chosen);
                }
                _ => {}
            }
        }
        Ok(facts)
    }

    fn client(&self, flow: &Flow, from: From) -> [u64; 2] {
        if from.is_packet() { wide(flow.source.ip()).wire() } else { [self.netns, 0] }
    }

    /// Returns the source address of a socket, as an endpoint sees it: the address that it is bound
    /// to, or for a destination on loopback the address that the kernel picks for the route to the
    /// endpoint.
    fn socket_source(&self, flow: &Flow) -> SocketAddr {
        let own = self.primary.iter().find(|address| address.is_ipv6() == flow.source.is_ipv6());
        match own {
            Some(own) if flow.source.ip().is_loopback() => SocketAddr::new(*own, flow.source.port()),
            _ => flow.source,
        }
    }
}

fn has_affinity(judged: &Judged) -> bool {
    judged.steps.iter().any(|step| step.kind == step::AFFINITY)
}

fn client_kind(from: From) -> u16 {
    if from.is_packet() { client::ADDRESS } else { client::NETNS }
}

/// Returns a number that spreads flows: sockets have no port yet when they choose, so any number
/// does.
fn spread(flow: &Flow) -> u64 {
    let port = u64::from(flow.source.port());
    let [head, tail] = wide(flow.source.ip()).wire();
    (tail ^ head ^ port << 32 | port).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32
}

const fn hook_name(number: u32) -> &'static str {
    match number {
        hook::SOCKET => "socket",
        hook::XDP => "xdp",
        // `--output json` has promised this name; elsewhere it is `tc-ingress`.
        _ => "tc",
    }
}

/// Returns the verdict for the sender of a new flow.
pub fn verdict(outcome: Outcome) -> Verdict {
    match outcome {
        Outcome::Forwarded
        | Outcome::ForwardedDirect
        | Outcome::ForwardedToOwner
        | Outcome::Delivered
        | Outcome::DeliveredDirect
        | Outcome::Connected => Verdict::Endpoints,
        Outcome::RepliedOpened => Verdict::Reply,
        _ if outcome.verdict() == Kernel::Drop => Verdict::Drop,
        _ if outcome.verdict() == Kernel::Send => Verdict::Reject,
        _ => Verdict::Unhandled,
    }
}

/// Whether an endpoint sees this node instead of the client, for a connection whose address is
/// translated before there is a packet. The kernel picks the source after the translation: for a
/// process of the node it is an address of the node, which is what kube-proxy's masquerade shows
/// there. Pods keep their addresses; where kube-proxy would hide them for the policy Cluster this
/// is not needed, because the reply never passes the Service's address.
fn masquerades(facts: &FlowFacts, from: From, flow: &Flow, endpoint: SocketAddr) -> bool {
    let kind = frontend::kind(facts.flags);
    if kind == kind_number::LOOPBACK {
        return true;
    }
    let is_local = facts.flags & frontend::LOCAL != 0 || facts.falls_back;
    if kind != kind_number::CLUSTER_IP && !is_local {
        return false;
    }
    from == From::Node || flow.source.ip() == endpoint.ip()
}
