//! Flows as their packets make them: opened by a client, answered by the endpoint that was chosen, confirmed.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::{Context, Result};
use traffic_policy_agent::dataplane::{FromWire, ToWire};
use traffic_policy_ebpf::{
    abi::{Address, PROTOCOL_TCP, PROTOCOL_UDP, Tuple, destination_port, ports, source_port},
    bench::FloorFlow,
    checksum,
    outcome::Outcome,
};

use super::{
    frame::{Content, Frame, frame},
    loaded::{Hook, Loaded, NODE_PORT},
    stand::{Addresses, V4, V6},
};

/// Flows of one batch: fewer than may be unconfirmed.
const BATCH: usize = 4_000;
/// Ports of one client.
const PORTS: u32 = 8_192;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Protocol {
    Tcp,
    Udp,
}

impl Protocol {
    fn number(self) -> u32 {
        match self {
            Self::Tcp => PROTOCOL_TCP,
            Self::Udp => PROTOCOL_UDP,
        }
    }
}

/// One flow: who asks, and, when it is open, who answers whom.
#[derive(Clone, Copy)]
pub(crate) struct Flow {
    pub(crate) client: SocketAddr,
    pub(crate) frontend: SocketAddr,
    protocol: Protocol,
    endpoint: SocketAddr,
    node: SocketAddr,
}

/// The address so many after this one.
pub(crate) fn later(address: IpAddr, number: u32) -> IpAddr {
    match address {
        IpAddr::V4(address) => Ipv4Addr::from(u32::from(address) + number).into(),
        IpAddr::V6(address) => Ipv6Addr::from(u128::from(address) + u128::from(number)).into(),
    }
}

/// Flows that do not exist yet.
pub(crate) fn flows(ipv6: bool, protocol: Protocol, number: u32) -> Vec<Flow> {
    let Addresses { node, client, .. } = if ipv6 { V6 } else { V4 };
    (0..number)
        .map(|i| Flow {
            client: SocketAddr::new(later(client, i / PORTS), 20_000 + (i % PORTS) as u16),
            frontend: SocketAddr::new(node, NODE_PORT),
            protocol,
            endpoint: SocketAddr::new(node, 0),
            node: SocketAddr::new(node, 0),
        })
        .collect()
}

/// Packets of a flow.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    /// The first.
    Opening,
    /// The endpoint's first.
    Answer,
    Request,
    Reply,
}

pub(crate) fn frames(flows: &[Flow], kind: Kind) -> Result<Vec<Frame>> {
    let one = |flow: &Flow| {
        let content = match (flow.protocol, kind) {
            (Protocol::Udp, _) => Content::Datagram,
            (Protocol::Tcp, Kind::Opening) => Content::Syn,
            (Protocol::Tcp, Kind::Answer) => Content::SynAck,
            (Protocol::Tcp, Kind::Request | Kind::Reply) => Content::Ack,
        };
        match kind {
            Kind::Opening | Kind::Request => frame(flow.client, flow.frontend, content),
            Kind::Answer | Kind::Reply => frame(flow.endpoint, flow.node, content),
        }
    };
    flows.iter().map(one).collect()
}

/// Opens flows by their packets.
pub(crate) fn open(loaded: &mut Loaded, hook: Hook, flows: &mut [Flow]) -> Result<()> {
    for batch in flows.chunks_mut(BATCH) {
        let number = batch.len() as u32;
        loaded.set_frames(&frames(batch, Kind::Opening)?)?;
        loaded.run_to(hook, number, Outcome::Forwarded).context("opening flows")?;
        learn(loaded, batch)?;
        loaded.set_frames(&frames(batch, Kind::Answer)?)?;
        loaded.run_to(hook, number, Outcome::Replied).context("answering")?;
        loaded.set_frames(&frames(batch, Kind::Request)?)?;
        loaded.run_to(hook, number, Outcome::Forwarded).context("confirming flows")?;
    }
    Ok(())
}

/// Reads from the tables who was chosen.
pub(crate) fn learn(loaded: &Loaded, flows: &mut [Flow]) -> Result<()> {
    for flow in flows {
        (flow.node, flow.endpoint) = match (flow.client.ip(), flow.frontend.ip()) {
            (IpAddr::V4(client), IpAddr::V4(frontend)) => {
                let key = request(flow, client.to_wire(), frontend.to_wire());
                ends(&loaded.tables.v4.flows.get(&key, 0).context("a flow is missing")?)
            }
            (IpAddr::V6(client), IpAddr::V6(frontend)) => {
                let key = request(flow, client.to_wire(), frontend.to_wire());
                ends(&loaded.tables.v6.flows.get(&key, 0).context("a flow is missing")?)
            }
            _ => anyhow::bail!("families mixed up"),
        };
    }
    Ok(())
}

/// Removes both halves of IPv4 flows.
pub(crate) fn remove(loaded: &mut Loaded, flows: &[Flow]) -> Result<()> {
    for flow in flows {
        for key in [request_key(flow)?, reply_key(flow)?] {
            loaded.tables.v4.flows.remove(&key).context("a flow is missing")?;
        }
    }
    Ok(())
}

/// Gives the floor the same IPv4 flows, in the same order.
pub(crate) fn mirror(loaded: &mut Loaded, flows: &[Flow]) -> Result<()> {
    for flow in flows {
        let (request, reply) = (request_key(flow)?, reply_key(flow)?);
        loaded.floor.insert(reply, floor(reply, request.reversed()), 0)?;
        loaded.floor.insert(request, floor(request, reply.reversed()), 0)?;
    }
    Ok(())
}

pub(crate) fn floor(from: Tuple<u32>, to: Tuple<u32>) -> FloorFlow {
    let addresses = |tuple: Tuple<u32>| tuple.source.sum() + tuple.destination.sum();
    FloorFlow {
        source: to.source,
        destination: to.destination,
        ports: to.ports,
        address_delta: checksum::delta(addresses(from), addresses(to)),
        port_delta: checksum::delta(checksum::port_sum(from.ports), checksum::port_sum(to.ports)),
        ..FloorFlow::default()
    }
}

fn request<A: Address>(flow: &Flow, client: A, frontend: A) -> Tuple<A> {
    Tuple {
        source: client,
        destination: frontend,
        ports: ports(flow.client.port().to_be(), flow.frontend.port().to_be()),
        protocol: flow.protocol.number(),
    }
}

fn request_key(flow: &Flow) -> Result<Tuple<u32>> {
    let (IpAddr::V4(client), IpAddr::V4(frontend)) = (flow.client.ip(), flow.frontend.ip()) else {
        anyhow::bail!("not IPv4")
    };
    Ok(request(flow, client.to_wire(), frontend.to_wire()))
}

fn reply_key(flow: &Flow) -> Result<Tuple<u32>> {
    let (IpAddr::V4(endpoint), IpAddr::V4(node)) = (flow.endpoint.ip(), flow.node.ip()) else {
        anyhow::bail!("not IPv4")
    };
    Ok(Tuple {
        source: endpoint.to_wire(),
        destination: node.to_wire(),
        ports: ports(flow.endpoint.port().to_be(), flow.node.port().to_be()),
        protocol: flow.protocol.number(),
    })
}

/// Source and destination that a request gets.
fn ends<A: FromWire>(half: &traffic_policy_ebpf::abi::Flow<A>) -> (SocketAddr, SocketAddr) {
    (
        SocketAddr::new(half.source.to_ip(), u16::from_be(source_port(half.ports))),
        SocketAddr::new(half.destination.to_ip(), u16::from_be(destination_port(half.ports))),
    )
}
