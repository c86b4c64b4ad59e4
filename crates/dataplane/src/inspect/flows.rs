//! The flow table: the request and the reply entry of each flow, combined.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use anyhow::Result;
use traffic_policy_cluster::model::{Dispatch, Protocol};
use traffic_policy_ebpf::{
    abi::{
        self, Address, Address4, Address6, BY_MAC, FlowKey, HopKey, Multipliers, Port, REPLY_THROUGH_FRONT,
        RuntimeConfig, TO_OWNER, Tuple, kind,
    },
    tcp::{ANSWERED, ASSURED, FIN, REMOVED, RST, TUNNELLED},
};

use super::{
    heartbeat::{Clock, Heartbeat},
    pinned::Pinned,
};
use crate::dataplane::maps::keys::{self, FromWire, from_wide};

/// A flow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flow {
    /// The index of the Service port.
    pub service: u32,
    pub protocol: Protocol,
    pub client: SocketAddr,
    /// The destination of the client's packets: the frontend.
    pub frontend: SocketAddr,
    pub endpoint: SocketAddr,
    /// The source that the endpoint sees.
    pub source: SocketAddr,
    pub kind: FlowKind,
    pub state: FlowState,
    /// Whether the endpoint was removed and accepts no new connections: a new one with the same
    /// ports chooses again.
    pub removed: bool,
    /// The time since the last packet of either direction.
    pub idle: Duration,
    pub request: Traffic,
    /// The traffic of replies; `None` if the reply entry is gone.
    pub reply: Option<Traffic>,
    /// The next hop towards the endpoint: device number and gateway; `None` if delivered here, or
    /// not resolved.
    pub hop: Option<(u32, IpAddr)>,
    /// The number of the endpoint's node in [`Nodes`][super::Nodes], or the place of its next hop;
    /// 0 if neither is known, or it is on this node.
    pub node: u16,
    /// Dispatch of a direct flow: the form of its packets to the other node. `None` for others.
    pub dispatch: Option<Dispatch>,
    /// Whether this is a direct flow whose node in front is another one, which did not know the
    /// connection: its packets are sent on to an owner.
    pub to_owner: bool,
    /// Whether the endpoint is here, and its replies go back through the node in front.
    pub tunnelled: bool,
}

/// The location of the endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlowKind {
    /// The endpoint is on another node.
    Forwarded,
    /// The endpoint is on another node, which answers the client itself.
    Direct,
    /// The endpoint is on another node, which answers the client through this one.
    Tunnel,
    /// The endpoint is on this node.
    Delivered,
    /// The endpoint is wherever conntrack translates to: the flow began under kube-proxy.
    Conntrack,
}

/// The traffic of one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Traffic {
    pub packets: u64,
    pub bytes: u64,
}

/// The state of a flow, as its packets have shown it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum FlowState {
    /// The client has sent a packet; there is no reply yet.
    New,
    /// The endpoint has replied; the client has not confirmed its source address yet.
    Answered,
    Assured,
    /// One side has sent FIN.
    Closing,
    /// Both sides have sent FIN.
    Finished,
    Reset,
}

impl FlowState {
    /// Returns the state for those of both entries: see [`traffic_policy_ebpf::tcp`].
    fn of(request: u8, reply: u8) -> Self {
        if (request | reply) & RST != 0 {
            Self::Reset
        } else if request & reply & FIN != 0 {
            Self::Finished
        } else if (request | reply) & FIN != 0 {
            Self::Closing
        } else if request & ASSURED != 0 {
            Self::Assured
        } else if reply & ANSWERED != 0 {
            Self::Answered
        } else {
            Self::New
        }
    }

    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::New => "new",
            Self::Answered => "answered",
            Self::Assured => "assured",
            Self::Closing => "closing",
            Self::Finished => "finished",
            Self::Reset => "reset",
        }
    }
}

impl Flow {
    /// Calls `visit` with each flow.
    pub fn each(pinned: &Pinned, mut visit: impl FnMut(Self)) -> Result<()> {
        let hops = hops(pinned)?;
        let clock = Heartbeat::read(pinned)?.clock()?;
        family::<Address4>(pinned, "tp_flows4", &hops, &clock, &mut visit)?;
        family::<Address6>(pinned, "tp_flows6", &hops, &clock, &mut visit)
    }
}

fn family<A: Address + FromWire + Eq + std::hash::Hash>(
    pinned: &Pinned,
    map: &str,
    hops: &HashMap<u32, HopKey>,
    clock: &Clock,
    visit: &mut impl FnMut(Flow),
) -> Result<()> {
    let by = Multipliers::of(pinned.element::<RuntimeConfig>("tp_config")?.seed);
    let (mut requests, mut replies) = (Vec::new(), HashMap::new());
    pinned.map(map)?.each(|key: FlowKey<A>, entry: abi::Flow<A>| match entry.kind {
        kind::FORWARD | kind::DELIVER | kind::LEFT | kind::DIRECT => {
            requests.push((key.unfolded(&entry, by), entry));
        }
        kind::REPLY | kind::REPLY_LOCAL | kind::LEFT_REPLY => {
            replies.insert(key.unfolded(&entry, by), entry);
        }
        // The entry is being written at this moment.
        _ => {}
    })?;
    for (tuple, request) in requests {
        let has_reply = request.kind != kind::DIRECT;
        let reply = replies.get(&request.translated(tuple.protocol).reversed()).filter(|_| has_reply);
        // The entry is of a kind that this version does not know.
        let Some(mut flow) = join(&tuple, &request, reply, clock) else { continue };
        if matches!(request.kind, kind::FORWARD | kind::DIRECT) {
            flow.hop = hops.get(&request.hop.into()).map(|hop| (hop.ifindex, gateway(hop)));
        }
        visit(flow);
    }
    Ok(())
}

/// Returns the keys of the next hops in use, by their index.
fn hops(pinned: &Pinned) -> Result<HashMap<u32, HopKey>> {
    let entries = pinned.map("tp_nexthop_ids")?.entries::<HopKey, u32>()?;
    Ok(entries.into_iter().map(|(key, index)| (index, key)).collect())
}

const AF_INET: u8 = 2;

fn gateway(hop: &HopKey) -> IpAddr {
    from_wide(hop.gateway, hop.family != AF_INET)
}

fn join<A: Address + FromWire>(
    tuple: &Tuple<A>,
    request: &abi::Flow<A>,
    reply: Option<&abi::Flow<A>>,
    clock: &Clock,
) -> Option<Flow> {
    let address = |address: A, port: Port| SocketAddr::new(address.to_ip(), port.to_host());
    let traffic = |entry: &abi::Flow<A>| {
        let (packets, bytes) = entry.traffic();
        Traffic { packets, bytes }
    };
    let idle = clock.idle(request.last);
    Some(Flow {
        service: request.service,
        protocol: keys::protocol(tuple.protocol)?,
        client: address(tuple.source, tuple.ports.source()),
        frontend: address(tuple.destination, tuple.ports.destination()),
        endpoint: address(request.destination, request.ports.destination()),
        source: if request.kind == kind::DIRECT {
            address(tuple.source, tuple.ports.source())
        } else {
            address(request.source, request.ports.source())
        },
        kind: match request.kind {
            kind::DELIVER => FlowKind::Delivered,
            kind::LEFT => FlowKind::Conntrack,
            kind::DIRECT if u32::from(request.address_delta) & REPLY_THROUGH_FRONT != 0 => FlowKind::Tunnel,
            kind::DIRECT => FlowKind::Direct,
            _ => FlowKind::Forwarded,
        },
        state: FlowState::of(request.state, reply.map_or(0, |reply| reply.state)),
        removed: request.state & REMOVED != 0,
        idle: reply.map_or(idle, |reply| idle.min(clock.idle(reply.last))),
        request: traffic(request),
        reply: reply.map(traffic),
        hop: None,
        // In its place is the way back of replies.
        node: if request.kind == kind::DELIVER { 0 } else { request.head.node() },
        dispatch: (request.kind == kind::DIRECT).then(|| dispatch(request.port_delta)),
        to_owner: request.kind == kind::DIRECT && request.address_delta & TO_OWNER != 0,
        tunnelled: request.kind == kind::DELIVER && request.state & TUNNELLED != 0,
    })
}

/// Returns what the packets of a direct flow travel in, by its source port within UDP, 0 within IP,
/// beside the bit [`BY_MAC`].
const fn dispatch(port_delta: u16) -> Dispatch {
    match (port_delta & BY_MAC != 0, port_delta & !BY_MAC != 0) {
        (true, else_udp) => Dispatch::L2 { else_udp },
        (false, true) => Dispatch::Udp,
        (false, false) => Dispatch::Ipip,
    }
}

#[cfg(test)]
mod tests {
    use traffic_policy_ebpf::abi::Ports;

    use super::*;
    use crate::dataplane::maps::keys::ToWire;

    #[test]
    fn states() {
        for (request, reply, state) in [
            (0, 0, FlowState::New),
            (0, ANSWERED, FlowState::Answered),
            (ASSURED, ASSURED | ANSWERED, FlowState::Assured),
            (ASSURED | FIN, ASSURED | ANSWERED, FlowState::Closing),
            (ASSURED, ASSURED | ANSWERED | FIN, FlowState::Closing),
            (ASSURED | FIN, ASSURED | ANSWERED | FIN, FlowState::Finished),
            (ASSURED | FIN, ASSURED | ANSWERED | RST, FlowState::Reset),
            (RST, 0, FlowState::Reset),
        ] {
            assert_eq!(FlowState::of(request, reply), state, "{request:#b} {reply:#b}");
        }
    }

    #[test]
    fn direct_flows_say_what_their_packets_travel_in() {
        let clock = Clock { jiffies: 1000, hz: 100 };
        let port = 600_u16.to_be();
        for (kind, state, deltas, dispatch, to_owner, tunnelled) in [
            (kind::DIRECT, 0, (0, 0), Some(Dispatch::Ipip), false, false),
            (kind::DIRECT, 0, (TO_OWNER, port), Some(Dispatch::Udp), true, false),
            (kind::DIRECT, 0, (0, BY_MAC), Some(Dispatch::L2 { else_udp: false }), false, false),
            (kind::DIRECT, 0, (0, BY_MAC | port), Some(Dispatch::L2 { else_udp: true }), false, false),
            (kind::DELIVER, TUNNELLED, (TO_OWNER, port), None, false, true),
            (kind::DELIVER, 0, (0, 0), None, false, false),
            (kind::FORWARD, 0, (TO_OWNER, port), None, false, false),
        ] {
            let (address_delta, port_delta) = deltas;
            let entry =
                abi::Flow::<Address4> { kind, state, address_delta, port_delta, ..abi::Flow::default() };
            let tuple = Tuple { protocol: 6, ..Tuple::default() };
            let flow = join(&tuple, &entry, None, &clock).unwrap();
            assert_eq!((flow.dispatch, flow.to_owner, flow.tunnelled), (dispatch, to_owner, tunnelled));
        }
    }

    #[test]
    fn both_halves_make_one_flow() {
        let ip = |octets: [u8; 4]| std::net::Ipv4Addr::from(octets).to_wire();
        let (client, node, pod) = (ip([192, 0, 2, 10]), ip([172, 18, 0, 11]), ip([10, 244, 2, 2]));
        let tuple =
            Tuple { source: client, destination: node, ports: Ports::from_host(40000, 30080), protocol: 6 };
        let request = abi::Flow {
            source: node,
            destination: pod,
            ports: Ports::from_host(5555, 8080),
            kind: kind::FORWARD,
            state: ASSURED | REMOVED,
            last: 900,
            packets: abi::Packets::of(3),
            bytes: 180,
            service: 7,
            head: abi::Head::of_node(5),
            ..abi::Flow::default()
        };
        let reply = abi::Flow {
            last: 950,
            packets: abi::Packets::of(2),
            bytes: 120,
            state: ASSURED | ANSWERED,
            ..request
        };
        let clock = Clock { jiffies: 1_000, hz: 250 };
        let flow = join(&tuple, &request, Some(&reply), &clock).unwrap();
        assert_eq!(flow.client.to_string(), "192.0.2.10:40000");
        assert_eq!(flow.frontend.to_string(), "172.18.0.11:30080");
        assert_eq!(flow.source.to_string(), "172.18.0.11:5555");
        assert_eq!(flow.endpoint.to_string(), "10.244.2.2:8080");
        assert_eq!((flow.state, flow.removed, flow.service), (FlowState::Assured, true, 7));
        assert_eq!(flow.node, 5);
        assert_eq!(flow.idle, Duration::from_millis(200), "the later packet counts");
        assert_eq!(flow.reply, Some(Traffic { packets: 2, bytes: 120 }));
        let alone = join(&tuple, &request, None, &clock).unwrap();
        assert_eq!((alone.idle, alone.reply), (Duration::from_millis(400), None));
        assert_eq!(join(&Tuple { protocol: 33, ..tuple }, &request, None, &clock), None, "unknown");
    }
}
