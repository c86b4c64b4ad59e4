//! Sentences that describe the steps of a traced packet.

use std::net::SocketAddr;

use traffic_policy_cluster::model::{Dispatch, FALLBACK_ANNOTATION, FrontendKind, ServicePortKey};
use traffic_policy_ebpf::{
    abi::{
        AffinityMatch, FilterMatch, ListKind, RangeMatch, RouteKind, TraceStep, WideAddress, frontend,
        frontend_kind as kind_number, step,
    },
    outcome::Outcome,
};

use super::{
    flow::{Flow, From},
    simulator::Candidate,
};
use crate::{
    dataplane::from_wide,
    inspect::{DeadNode, frontend_kind},
};

/// The facts that follow from the steps.
#[derive(Clone, Debug, Default)]
pub struct FlowFacts {
    pub service: Option<ServicePortKey>,
    pub index: Option<u32>,
    pub flags: u32,
    /// Whether the policy is Local, but the Service's annotation makes it forward as under Cluster.
    pub falls_back: bool,
    pub candidates: Vec<Candidate>,
    pub chosen: Option<Candidate>,
    /// The name of the node that the chosen endpoint is on, if it is known.
    pub node: Option<String>,
    /// Whether the packet is forwarded directly.
    pub direct: bool,
}

/// Returns the origin of a flow in words.
pub const fn origin(from: From) -> &'static str {
    match from {
        From::External => "a client outside this node",
        From::Pod => "a pod of this node",
        From::PodPacket => "a pod of this node whose sockets are not seen",
        From::Node => "a process of this node",
    }
}

/// Returns a sentence on a packet that begins no connection; `None` for one that does.
pub fn later(flow: &Flow) -> Option<String> {
    flow.later.then(|| {
        "segment: with ACK, of a connection that this node does not know, as one that another node in front has left"
            .to_owned()
    })
}

/// A description of the steps of one flow.
pub struct Describer<'a> {
    pub flow: &'a Flow,
    pub from: From,
    pub facts: &'a FlowFacts,
    /// Whether the simulation is offline, so that the next hop is not evaluated.
    pub offline: bool,
}

impl Describer<'_> {
    /// Returns a step as a sentence; `None` for steps that explain nothing.
    pub fn describe(&self, step: &TraceStep) -> Option<String> {
        let Flow { destination, transport, .. } = self.flow;
        Some(match step.kind {
            step::FILTER => match FilterMatch::numbered(step.value)? {
                FilterMatch::No => format!("filter: no Service is at {destination}, the packet goes no further"),
                FilterMatch::SnatPort => format!("filter: port {} may be one that replies come back to", destination.port()),
                FilterMatch::NodePort => format!("filter: a Service has port {}", destination.port()),
                FilterMatch::Service => format!("filter: {} may be an address of a Service", destination.ip()),
            },
            step::FRONTEND => {
                let service = self
                    .facts
                    .service
                    .as_ref()
                    .map_or("a Service".to_owned(), |key| format!("Service {key}"));
                format!("frontend: {destination}/{transport} is {} of {service}", kind(step.words[0] as u32))
            }
            step::NO_FRONTEND => match Outcome::numbered(step.value) {
                Some(Outcome::RejectedUnknownPort) => format!(
                    "frontend: {} is a ClusterIP, but its Service has no port {}/{transport}",
                    destination.ip(),
                    destination.port()
                ),
                Some(Outcome::DroppedUnallocatedClusterIp) => {
                    format!(
                        "frontend: {} is in the range of ClusterIPs, and no Service has it",
                        destination.ip()
                    )
                }
                _ => format!("frontend: {destination}/{transport} belongs to no Service on this node"),
            },
            step::SOURCE_RANGE => {
                let source = self.flow.source.ip();
                let assumed = if self.from.is_packet() {
                    ""
                } else {
                    "; a socket that is not bound to an address is judged by the node's primary address, in a pod by the range of pods"
                };
                let within = match RangeMatch::numbered(step.value)? {
                    RangeMatch::Within => "within",
                    RangeMatch::Outside => "in none of",
                };
                format!("source: {source} is {within} loadBalancerSourceRanges{assumed}")
            }
            step::LIST => self.list(ListKind::numbered(step.value)?),
            step::AFFINITY => match (AffinityMatch::numbered(step.value)?, self.from) {
                (AffinityMatch::Kept, _) => {
                    "affinity: the client has an endpoint already, and that still serves".to_owned()
                }
                (AffinityMatch::New, From::Pod) => {
                    "affinity: a pod that has an endpoint already keeps it; which pod asks is not known, so this one chooses anew".to_owned()
                }
                (AffinityMatch::New, From::External | From::PodPacket | From::Node) => {
                    "affinity: the client has no endpoint yet; it keeps the one it gets now".to_owned()
                }
            },
            step::SLOT => {
                let chosen = self.facts.chosen?;
                let place = if chosen.local { "on this node" } else { "not known to be on this node" };
                let many = self.facts.candidates.len();
                let how = match self.from {
                    From::External | From::PodPacket if step.words[0] != 0 => "by its Maglev table, as on every node",
                    From::External | From::PodPacket => "by a hash of the flow",
                    From::Pod | From::Node => "at random: a socket may get another one",
                };
                format!("endpoint: {}, {place}, one of {many}, chosen {how}", chosen.address)
            }
            step::ROUTE => {
                let source = from_wide(WideAddress::from_wire(step.words), destination.is_ipv6());
                match RouteKind::numbered(step.value)? {
                    RouteKind::NextHop | RouteKind::Unresolved if self.facts.direct => {
                        let node = self.facts.node.as_ref().map_or("another node".to_owned(), |node| format!("node {node}"));
                        let chosen = self.facts.chosen?;
                        let endpoint = chosen.address.ip();
                        let dispatch = chosen.opens.map_or(Dispatch::Ipip, Dispatch::within);
                        let form = form_of_direct(endpoint.is_ipv6(), dispatch);
                        let within = if dispatch == Dispatch::Udp { " --opened-within udp" } else { "" };
                        let answers = if self.facts.flags & frontend::TUNNEL == 0 {
                            "that node answers the client itself"
                        } else {
                            "that node's answer comes back within a packet, and goes on from here"
                        };
                        let by_mac = match chosen.opens {
                            Some(Dispatch::L2 { .. }) => "to its MAC address if it is the next hop itself and finds the endpoint by its own table, else ",
                            _ => "",
                        };
                        format!(
                            "route: to {node}, which opens it: unchanged, {by_mac}within a packet from {source} to {endpoint} ({form}); {answers} \
                             (its `explain --opened-from {source} --at {endpoint}{within}` tells how)"
                        )
                    }
                    RouteKind::Local if self.from == From::PodPacket => "route: the stack takes it to the endpoint, here or on another node, as a packet from the pod to the endpoint, past the same rules; the pod's address is kept".to_owned(),
                    RouteKind::NextHop | RouteKind::Unresolved if self.from == From::PodPacket => format!("route: back to the pod, which is its own endpoint and would not accept its own address: the source becomes {source}"),
                    RouteKind::Local => "route: this node's stack delivers it; the client's address is kept, for the reply passes this node anyway".to_owned(),
                    RouteKind::NextHop if self.offline => format!("route: to another node (the way there is not judged); the source becomes {source}, so that the reply comes back here"),
                    RouteKind::NextHop => format!("route: to another node by a known next hop; the source becomes {source}, so that the reply comes back here"),
                    RouteKind::Unresolved => format!("route: to another node, whose neighbour the kernel resolves; the source becomes {source}"),
                    RouteKind::None => "route: there is none that can be used".to_owned(),
                }
            }
            step::OWN_LOOPBACK => format!("loopback: {} leads to the pod itself", destination.ip()),
            step::PORT if !self.facts.direct => {
                format!("port: {} is free towards this endpoint and becomes the source port", step.value)
            }
            _ => return None,
        })
    }

    fn list(&self, kind: ListKind) -> String {
        let internal = frontend::kind(self.facts.flags) == kind_number::CLUSTER_IP;
        let policy = if internal { "internalTrafficPolicy" } else { "externalTrafficPolicy" };
        let count = self.facts.candidates.len();
        let endpoints = match count {
            0 => "no endpoint".to_owned(),
            1 => "1 endpoint".to_owned(),
            many => format!("{many} endpoints"),
        };
        match kind {
            ListKind::Cluster if self.facts.falls_back && self.from == From::External => format!(
                "policy: {policy} is Local and no endpoint is on this node, but the annotation {FALLBACK_ANNOTATION} lets it forward as under \
                 Cluster: {endpoints} to choose from"
            ),
            ListKind::Cluster if !self.facts.falls_back => {
                format!("policy: {policy} is Cluster, {endpoints} to choose from")
            }
            ListKind::Local => format!("policy: {policy} is Local, {endpoints} on this node"),
            ListKind::Draining => format!(
                "policy: {policy} turned Local a moment ago, and load balancers may not know yet: {endpoints} elsewhere"
            ),
            ListKind::Internal | ListKind::Cluster => format!(
                "policy: {policy} is Local, which is for clients outside this node; from inside {endpoints} to choose from"
            ),
            ListKind::NoneAnywhere => format!("policy: {policy} is Local, but there is no endpoint anywhere"),
            ListKind::NoneHere => {
                format!("policy: {policy} is Local, there are endpoints, and none of them is on this node")
            }
        }
    }

    /// Returns a sentence on the source address of a socket, as the endpoint sees it.
    pub fn source(&self, masquerade: bool) -> String {
        match (self.from, masquerade) {
            (From::Node, true) => {
                "source: the kernel picks the node's address on the way to the endpoint".to_owned()
            }
            (_, true) => "source: the pod reaches itself, and the connection stays within the pod".to_owned(),
            (_, false) => {
                "source: kept, for the address is translated at the socket and no reply has to come back to the Service's address".to_owned()
            }
        }
    }
}

/// The largest number of dead nodes with a sentence each; of further ones, only the number is
/// given.
const DESCRIBED: usize = 5;

/// Whether a step chooses a list that may have endpoints of other nodes.
pub fn is_of_other_nodes(step: &TraceStep) -> bool {
    step.kind == step::LIST
        && !matches!(ListKind::numbered(step.value), None | Some(ListKind::Local | ListKind::NoneHere))
}

/// Returns sentences on dead nodes, first on those of which the list still has an endpoint.
/// `endpoints`: those of this Service port that are left out, if the agent tells.
pub fn dead_nodes(
    dead: &[DeadNode],
    candidates: &[Candidate],
    endpoints: Option<&[(SocketAddr, Option<String>)]>,
) -> Vec<String> {
    let mut nodes: Vec<_> = dead.iter().collect();
    nodes.sort_by_key(|node| !candidates.iter().any(|candidate| candidate.node == node.number));
    let mut sentences: Vec<_> =
        nodes.iter().take(DESCRIBED).map(|node| left_out(node, candidates, endpoints)).collect();
    if let Some(more @ 1..) = nodes.len().checked_sub(DESCRIBED) {
        sentences.push(format!("silence: {more} more nodes are dead, which `status` names"));
    }
    sentences
}

/// Returns a sentence on a dead node and the list that endpoints are chosen from.
fn left_out(
    dead: &DeadNode,
    candidates: &[Candidate],
    endpoints: Option<&[(SocketAddr, Option<String>)]>,
) -> String {
    let since = match dead.silent {
        Some(silent) => {
            format!("for {} s it has answered neither connections to its endpoints", silent.as_secs())
        }
        None => "it has answered neither its peers".to_owned(),
    };
    let there = candidates.iter().filter(|candidate| candidate.node == dead.number);
    let there: Vec<_> = there.map(|candidate| candidate.address.to_string()).collect();
    // The agent does not tell which hop leads to an endpoint that names no node.
    let name = (!dead.is_hop()).then_some(dead.name.as_str());
    let out = endpoints.map(|all| all.iter().filter(|(_, node)| node.as_deref() == name));
    let out = out.map(|out| out.map(|(address, _)| address.to_string()).collect::<Vec<_>>());
    let list = if let Some(out) = out.filter(|_| there.is_empty()) {
        match out.as_slice() {
            [] => "it has no endpoint of this Service port".to_owned(),
            out => format!(
                "its {} left out of the list: {}",
                if out.len() == 1 { "endpoint is" } else { "endpoints are" },
                out.join(", ")
            ),
        }
    } else if there.is_empty() {
        "any endpoint that it has of this Service is left out of the list".to_owned()
    } else {
        format!(
            "the list still has {}, because no endpoint elsewhere can take new flows, or because the agent is just \
             removing it",
            there.join(", ")
        )
    };
    let node = if dead.is_hop() { "" } else { "node " };
    format!("silence: {node}{} is dead, {since} nor the agent's questions; {list}", dead.name)
}

/// The form of packets that name their endpoint, between nodes that forward directly.
pub(super) const fn form_of_direct(ipv6: bool, dispatch: Dispatch) -> &'static str {
    match (dispatch.within(), ipv6) {
        (Dispatch::Udp, _) => "UDP",
        (_, true) => "IPv6 in IPv6",
        (_, false) => "IPv4 in IPv4",
    }
}

/// Returns a sentence on the device of a pod whose packet is translated there. `itself`: whether
/// the pod is its own endpoint.
pub fn at_pods_device(device: &str, flow: &Flow, endpoint: SocketAddr, itself: bool) -> String {
    let destination = flow.destination;
    let back = if itself {
        "and is sent back by the device, as is its reply".to_owned()
    } else {
        format!(
            "and of the reply, which the stack takes to that device, the source {endpoint} becomes {destination} again there"
        )
    };
    format!("device: at {device}, the destination becomes {endpoint}, {back}")
}

/// Returns a sentence on a pod's device that matters if its sockets are not seen.
pub fn of_unseen_sockets(device: &str) -> String {
    format!(
        "device: if the pod's sockets are not seen (Kata, KubeVirt, gVisor, another cgroup), its packets are translated \
         at {device} instead: --from pod-packet tells how"
    )
}

/// Returns a sentence on packets of an established flow to a pod of this node. `device`: the one by
/// which they go straight into it.
pub fn once_established(device: Option<&str>) -> String {
    match device {
        Some(device) => format!(
            "established: once both sides have been seen, packets bypass the stack: straight into the pod by {device} \
             (delivered-direct), and its replies to the client (replied-direct)"
        ),
        None => "established: later packets take the stack, too (`status` says why)".to_owned(),
    }
}

fn kind(flags: u32) -> &'static str {
    match frontend_kind(flags) {
        Some(FrontendKind::ClusterIp) => "the ClusterIP",
        Some(FrontendKind::NodePort) => "the node port",
        Some(FrontendKind::LoadBalancer) => "a load balancer's address",
        Some(FrontendKind::ExternalIp) => "an external IP",
        Some(FrontendKind::LoopbackNodePort) => "the node port on loopback",
        Some(FrontendKind::OpenedNodePort) | None => "a frontend",
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_dead_node_and_its_endpoints() {
        let dead = |silent| DeadNode { number: 2, name: "far".to_owned(), silent };
        let candidate =
            |node| Candidate { address: "10.244.2.2:8080".parse().unwrap(), local: false, node, opens: None };
        let text = left_out(&dead(Some(Duration::from_millis(12_700))), &[candidate(1)], None);
        assert!(text.contains("node far is dead, for 12 s it has answered neither"), "{text}");
        assert!(text.ends_with("of this Service is left out of the list"), "{text}");
        let endpoint =
            |last: u8, node: &str| (SocketAddr::from(([10, 244, 2, last], 80)), Some(node.to_owned()));
        let endpoints = [endpoint(2, "far"), endpoint(3, "far"), endpoint(4, "near")];
        let text = left_out(&dead(None), &[candidate(1)], Some(&endpoints));
        assert!(text.ends_with("endpoints are left out of the list: 10.244.2.2:80, 10.244.2.3:80"), "{text}");
        let text = left_out(&dead(None), &[candidate(1)], Some(&endpoints[2..]));
        assert!(text.ends_with("no endpoint of this Service port"), "{text}");
        let text = left_out(&dead(None), &[candidate(2)], Some(&[]));
        assert!(text.contains("still has 10.244.2.2:8080,") && !text.contains(" s it"), "{text}");
    }

    #[test]
    fn many_dead_nodes_are_counted() {
        let dead = |number| DeadNode { number, name: format!("n{number}"), silent: None };
        let candidate =
            Candidate { address: "10.244.9.2:8080".parse().unwrap(), local: false, node: 9, opens: None };
        let of = |count: u16| dead_nodes(&(1..=count).map(dead).collect::<Vec<_>>(), &[candidate], None);
        assert_eq!((of(0).len(), of(5).len()), (0, 5));
        let sentences = of(9);
        assert!(sentences[0].contains("node n9 is dead"), "its endpoint may be chosen: {sentences:?}");
        assert!(sentences[5].contains("4 more nodes") && sentences.len() == 6, "{sentences:?}");
    }

    #[test]
    fn only_lists_with_other_nodes_tell_of_them() {
        let list =
            |kind: ListKind| TraceStep { kind: step::LIST, value: kind as u32, ..TraceStep::default() };
        for kind in [ListKind::Cluster, ListKind::Draining, ListKind::Internal, ListKind::NoneAnywhere] {
            assert!(is_of_other_nodes(&list(kind)), "{kind:?}");
        }
        for kind in [ListKind::Local, ListKind::NoneHere] {
            assert!(!is_of_other_nodes(&list(kind)), "{kind:?}");
        }
        assert!(!is_of_other_nodes(&TraceStep { kind: step::SLOT, ..list(ListKind::Cluster) }));
    }
}
