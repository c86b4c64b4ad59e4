//! Flows opened by their packets: a client's request, the answer of the chosen endpoint, and an
//! assured state.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result, bail};
use aya::{
    Pod,
    maps::{HashMap, MapData},
};
use traffic_policy_bench_ebpf::FloorFlow;
use traffic_policy_dataplane::{FromWire, ToWire};
use traffic_policy_ebpf::{
    abi::{self, Address, Address4, Address6, FlowKey, PROTOCOL_TCP, PROTOCOL_UDP, Ports, Tuple},
    checksum,
    outcome::Outcome,
};

use super::{
    feeder::{Feeder, Hook},
    fixture::{Addresses, V4, V6, later},
    frame::{Content, Frame, forwarded, frame},
    loaded::{Loaded, NODE_PORT, TARGET_PORT},
    places::Places,
    service,
};

/// Number of flows of one batch: fewer than may be unassured.
const BATCH: usize = 4_000;
/// Number of ports of one client.
const PORTS: u32 = 8_192;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Protocol {
    Tcp,
    Udp,
}

impl Protocol {
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
        }
    }

    fn number(self) -> u32 {
        match self {
            Self::Tcp => PROTOCOL_TCP,
            Self::Udp => PROTOCOL_UDP,
        }
    }
}

/// One flow: its client, and, when it is open, the endpoint and the address that the endpoint
/// answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    pub client: SocketAddr,
    pub frontend: SocketAddr,
    pub protocol: Protocol,
    pub endpoint: SocketAddr,
    pub node: SocketAddr,
}

/// Returns flows that do not exist yet.
pub fn flows(ipv6: bool, protocol: Protocol, number: u32) -> Vec<Flow> {
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

/// Does the same as [`flows`], with a client of its own for each flow.
pub fn flows_of_many(ipv6: bool, protocol: Protocol, number: u32) -> Vec<Flow> {
    let first = if ipv6 { V6.client } else { V4.client };
    let clients = (0..number).map(|i| SocketAddr::new(later(first, i), 20_000));
    flows(ipv6, protocol, number)
        .into_iter()
        .zip(clients)
        .map(|(flow, client)| Flow { client, ..flow })
        .collect()
}

/// Returns IPv4 TCP flows as they might have been opened, for the floor only.
pub fn supposed(number: u32, endpoints: u32) -> Vec<Flow> {
    let mut supposed = flows(false, Protocol::Tcp, number);
    for (i, flow) in (0..).zip(&mut supposed) {
        flow.endpoint = SocketAddr::new(service::endpoint(V4, i % endpoints), TARGET_PORT);
        flow.node.set_port(service::SNAT_PORTS.start + (i / endpoints) as u16);
    }
    supposed
}

/// Packets of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// The first packet.
    Opening,
    /// The endpoint's first packet.
    Answer,
    Request,
    Reply,
}

impl Kind {
    fn content(self, protocol: Protocol) -> Content {
        match (protocol, self) {
            (Protocol::Udp, _) => Content::Datagram,
            (Protocol::Tcp, Self::Opening) => Content::Syn,
            (Protocol::Tcp, Self::Answer) => Content::SynAck,
            (Protocol::Tcp, Self::Request) => Content::Ack,
            (Protocol::Tcp, Self::Reply) => Content::ReplyAck,
        }
    }

    /// Returns the name of the direction.
    pub fn direction(self) -> &'static str {
        match self {
            Self::Opening | Self::Request => "request",
            Self::Answer | Self::Reply => "reply",
        }
    }

    /// Returns the expected outcome of such packets.
    pub fn outcome(self) -> Outcome {
        match self {
            Self::Opening | Self::Request => Outcome::Forwarded,
            Self::Answer | Self::Reply => Outcome::Replied,
        }
    }
}

/// Returns a packet of each flow, as it arrives at the node.
pub fn frames(flows: &[Flow], kind: Kind) -> Result<Vec<Frame>> {
    let one = |flow: &Flow| {
        let content = kind.content(flow.protocol);
        match kind {
            Kind::Opening | Kind::Request => frame(flow.client, flow.frontend, content),
            Kind::Answer | Kind::Reply => frame(flow.endpoint, flow.node, content),
        }
    };
    flows.iter().map(one).collect()
}

/// Returns the expected frame of a packet of an open flow.
pub fn expected(flow: &Flow, kind: Kind) -> Result<Vec<u8>> {
    let content = kind.content(flow.protocol);
    match kind {
        Kind::Opening | Kind::Request => forwarded(flow.node, flow.endpoint, content),
        Kind::Answer | Kind::Reply => forwarded(flow.frontend, flow.client, content),
    }
}

/// Returns the same flows as [`flows`], opened by their packets in XDP.
pub fn open(loaded: &mut Loaded, ipv6: bool, protocol: Protocol, number: u32) -> Result<Vec<Flow>> {
    let mut flows = flows(ipv6, protocol, number);
    for batch in flows.chunks_mut(BATCH) {
        send(loaded, batch, Kind::Opening).context("opening flows")?;
        learn(loaded, batch)?;
        send(loaded, batch, Kind::Answer).context("answering")?;
        send(loaded, batch, Kind::Request).context("confirming flows")?;
    }
    loaded.feeder.clear();
    Ok(flows)
}

fn send(loaded: &mut Loaded, flows: &[Flow], kind: Kind) -> Result<()> {
    loaded.feeder.clear();
    let window = loaded.feeder.place(&frames(flows, kind)?)?;
    loaded.run_to(Hook::Xdp, window, window.len, kind.outcome()).map(drop)
}

/// Reads the chosen endpoints from the tables, and verifies that they belong to the Service.
pub fn learn(loaded: &Loaded, flows: &mut [Flow]) -> Result<()> {
    for flow in flows {
        (flow.node, flow.endpoint) = if flow.client.is_ipv4() {
            ends(&loaded.tables.v4.flows, flow)?
        } else {
            ends(&loaded.tables.v6.flows, flow)?
        };
        check(flow, loaded.setup.endpoints)?;
    }
    Ok(())
}

/// Verifies that the ends of a flow are an endpoint and a source port of the node.
fn check(flow: &Flow, endpoints: u32) -> Result<()> {
    let own = if flow.client.is_ipv4() { V4 } else { V6 };
    let served = (0..endpoints).any(|i| service::endpoint(own, i) == flow.endpoint.ip());
    let from_snat_port = flow.node.ip() == own.node && service::SNAT_PORTS.contains(&flow.node.port());
    if !served || flow.endpoint.port() != TARGET_PORT || !from_snat_port {
        bail!("a flow leads from {} to {}", flow.node, flow.endpoint);
    }
    Ok(())
}

/// Removes both entries of flows, and returns their places in the directory and among the unassured
/// flows, as garbage collection does: in a directory full of removed flows, a new flow would search
/// for a place in vain, and in a queue full of them it would look up each of them.
pub fn remove(loaded: &mut Loaded, flows: &[Flow]) -> Result<()> {
    for flow in flows {
        if flow.client.is_ipv4() {
            remove_from::<Address4>(&mut loaded.tables.v4.flows, &mut loaded.places4, flow)?;
        } else {
            remove_from::<Address6>(&mut loaded.tables.v6.flows, &mut loaded.places6, flow)?;
        }
    }
    Ok(())
}

/// A table of flows.
pub type Table<A> = HashMap<MapData, FlowKey<A>, abi::Flow<A>>;

fn remove_from<A: FromIp>(table: &mut Table<A>, places: &mut Places<A>, flow: &Flow) -> Result<()>
where
    Tuple<A>: Pod,
    abi::Flow<A>: Pod,
{
    let request = table.get(&FlowKey::of(&request_key::<A>(flow)?), 0).context("a flow is missing")?;
    places.take_back(&request)?;
    for key in [request_key::<A>(flow)?, reply_key::<A>(flow)?] {
        table.remove(&FlowKey::of(&key)).context("a flow is missing")?;
    }
    Ok(())
}

/// Removes both entries of flows that the floor made.
pub fn remove_floor(loaded: &mut Loaded, flows: &[Flow]) -> Result<()> {
    let table = &mut loaded.feeder.floor;
    for flow in flows {
        let key = request_key(flow)?;
        let FloorFlow { source, destination, ports, .. } =
            table.get(&key, 0).context("a flow of the floor is missing")?;
        let sent = Tuple { source, destination, ports, protocol: key.protocol };
        for key in [key, sent.reversed()] {
            table.remove(&key).context("a flow of the floor is missing")?;
        }
    }
    Ok(())
}

/// Gives the floor the same IPv4 flows, in the same order.
pub fn mirror(feeder: &mut Feeder, flows: &[Flow]) -> Result<()> {
    for flow in flows {
        let (request, reply) = (request_key(flow)?, reply_key(flow)?);
        feeder.floor.insert(reply, floor(reply, request.reversed()), 0)?;
        feeder.floor.insert(request, floor(request, reply.reversed()), 0)?;
    }
    Ok(())
}

/// Returns one half of a flow in the floor's form.
pub fn floor(from: Tuple<Address4>, to: Tuple<Address4>) -> FloorFlow {
    let addresses = |tuple: Tuple<Address4>| tuple.source.sum() + tuple.destination.sum();
    FloorFlow {
        source: to.source,
        destination: to.destination,
        ports: to.ports,
        address_delta: checksum::delta(addresses(from), addresses(to)),
        port_delta: checksum::delta(checksum::port_sum(from.ports), checksum::port_sum(to.ports)),
        ..service::macs()
    }
}

/// An address of a map that can be made from an address of its family.
pub trait FromIp: Address + FromWire {
    /// Converts an address.
    fn of(address: IpAddr) -> Result<Self>;
}

impl FromIp for Address4 {
    fn of(address: IpAddr) -> Result<Self> {
        match address {
            IpAddr::V4(address) => Ok(address.to_wire()),
            IpAddr::V6(address) => bail!("{address} is not IPv4"),
        }
    }
}

impl FromIp for Address6 {
    fn of(address: IpAddr) -> Result<Self> {
        match address {
            IpAddr::V4(address) => bail!("{address} is not IPv6"),
            IpAddr::V6(address) => Ok(address.to_wire()),
        }
    }
}

pub(super) fn request_key<A: FromIp>(flow: &Flow) -> Result<Tuple<A>> {
    key(flow.client, flow.frontend, flow.protocol)
}

fn reply_key<A: FromIp>(flow: &Flow) -> Result<Tuple<A>> {
    key(flow.endpoint, flow.node, flow.protocol)
}

fn key<A: FromIp>(source: SocketAddr, destination: SocketAddr, protocol: Protocol) -> Result<Tuple<A>> {
    Ok(Tuple {
        source: A::of(source.ip())?,
        destination: A::of(destination.ip())?,
        ports: Ports::from_host(source.port(), destination.port()),
        protocol: protocol.number(),
    })
}

/// Returns the source and destination that a request of this flow gets, from a table of flows.
pub fn ends<A: FromIp>(table: &Table<A>, flow: &Flow) -> Result<(SocketAddr, SocketAddr)>
where
    Tuple<A>: Pod,
    abi::Flow<A>: Pod,
{
    let entry = table.get(&FlowKey::of(&request_key::<A>(flow)?), 0).context("a flow is missing")?;
    Ok((
        SocketAddr::new(entry.source.to_ip(), entry.ports.source().to_host()),
        SocketAddr::new(entry.destination.to_ip(), entry.ports.destination().to_host()),
    ))
}

/// Verifies that a frame is the first packet of this new flow as it must be forwarded, whatever its
/// destination was.
pub fn check_new(flow: &Flow, frame: &[u8], endpoints: u32) -> Result<()> {
    let (ip, l4) = if flow.client.is_ipv4() { (26, 34) } else { (22, 54) };
    let width = (l4 - ip) / 2;
    let word = |at: usize| frame.get(at..at + 2).map(|bytes| u16::from_be_bytes([bytes[0], bytes[1]]));
    let address = |at: usize| -> Option<IpAddr> {
        let bytes = frame.get(at..at + width)?;
        match <[u8; 4]>::try_from(bytes) {
            Ok(bytes) => Some(IpAddr::from(bytes)),
            Err(_) => <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from),
        }
    };
    let end = |address: Option<IpAddr>, port: Option<u16>| {
        address.zip(port).map(SocketAddr::from).context("a frame that is too short")
    };
    let sent = Flow {
        node: end(address(ip), word(l4))?,
        endpoint: end(address(ip + width), word(l4 + 2))?,
        ..*flow
    };
    check(&sent, endpoints)?;
    if let Some(difference) =
        traffic_policy_testing::packet::difference(&expected(&sent, Kind::Opening)?, frame)
    {
        bail!("a new flow's first packet is wrong:\n{difference}");
    }
    Ok(())
}
