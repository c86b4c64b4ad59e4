//! Direct forwarding: the bench's Service as a node in front has it, and as the endpoint's node has
//! it; packets within packets; and flows of which the node in front has the requests alone.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result, bail, ensure};
use aya::{
    Pod,
    maps::{Array, HashMap, MapData},
};
use etherparse::{IpNumber, PacketBuilder};
use traffic_policy_bench_ebpf::{FloorFlow, FloorFlow6, RING};
use traffic_policy_dataplane::ToWire;
use traffic_policy_ebpf::{
    abi::{
        self, Address, Address4, Address6, DirectEndpoint, DirectEndpointKey, FlowKey, Frontend, FrontendKey,
        NO_SERVICE, PROTOCOL_TCP, PROTOCOL_UDP, Port, SLOT_OPENS, Slot, Tuple, frontend, scope,
    },
    checksum,
};
use traffic_policy_testing::netlink::Mac;

use super::{
    fixture::{MAC, ROUTER_MAC, V4, V6},
    flows::{Flow, FromIp, ends, request_key},
    loaded::{Loaded, NODE_PORT, TARGET_PORT},
    service,
};

/// TTL or hop limit of an outer packet.
const TTL: u8 = 64;

impl Loaded {
    /// Makes the Service one whose packets travel to its endpoints' nodes within outer packets, for
    /// the packet path and for the floors.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn forward_directly(&mut self) -> Result<()> {
        let endpoints = self.setup.endpoints;
        let (v4, v6) = (&mut self.tables.v4, &mut self.tables.v6);
        mark(&mut v4.frontends, &mut v4.slots, Address4::of(V4.node)?, endpoints)?;
        mark(&mut v6.frontends, &mut v6.slots, Address6::of(V6.node)?, endpoints)?;
        let FloorFlow { macs, source_mac_tail, .. } = service::macs();
        let own = FloorFlow6 { source: Address6::of(V6.node)?, macs, source_mac_tail, ..Default::default() };
        let mut node: Array<_, FloorFlow6> = self.feeder.take("FLOOR_NODE6")?.try_into()?;
        node.set(0, own, 0)?;
        let mut slots: Array<_, Slot<Address6>> = self.feeder.take("FLOOR_SLOTS6")?.try_into()?;
        let mut ring: Array<_, u32> = self.feeder.take("KATRAN_RING")?.try_into()?;
        for i in 0..endpoints {
            slots.set(i, v6.slots.get(&i, 0)?, 0)?;
        }
        for place in 0..RING {
            ring.set(place, place % endpoints, 0)?;
        }
        let mut frontends: HashMap<_, FrontendKey<Address6>, Frontend> =
            self.feeder.take("FLOOR_FRONTENDS6")?.try_into()?;
        for protocol in PROTOCOLS {
            let key = key(Address6::of(V6.node)?, protocol);
            frontends.insert(key, v6.frontends.get(&key, 0)?, 0)?;
        }
        Ok(())
    }

    /// Makes the first endpoint one of this node, for which packets of the router are opened.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn open_here(&mut self) -> Result<()> {
        self.open_of(Address4::of(V4.router)?, Address4::of(V4.endpoint)?, ["from4", "eps4"])?;
        self.open_of(Address6::of(V6.router)?, Address6::of(V6.endpoint)?, ["from6", "eps6"])
    }

    fn open_of<A: Address + Pod>(
        &mut self,
        from: A,
        address: A,
        [nodes, endpoints]: [&str; 2],
    ) -> Result<()> {
        let mut map = |name: &str| -> Result<_> {
            self.ours.take_map(&format!("tp_direct_{name}")).with_context(|| format!("no map {name}"))
        };
        let (nodes, endpoints) = (map(nodes)?, map(endpoints)?);
        HashMap::<_, A, u32>::try_from(nodes)?.insert(from, 1, 0)?;
        let mut endpoints = HashMap::<_, DirectEndpointKey<A>, DirectEndpoint>::try_from(endpoints)?;
        for (service, port) in [(service::SERVICE, Port::from_host(TARGET_PORT)), (NO_SERVICE, Port::NONE)] {
            let key = DirectEndpointKey { address, service, zero: 0 };
            endpoints.insert(key, DirectEndpoint { port, zero: 0 }, 0)?;
        }
        Ok(())
    }
}

const PROTOCOLS: [u32; 2] = [PROTOCOL_TCP, PROTOCOL_UDP];

fn key<A>(address: A, protocol: u32) -> FrontendKey<A> {
    let port = Port::from_host(NODE_PORT);
    FrontendKey { address, port, protocol: protocol as u16, scope: scope::ADDRESS }
}

/// Marks the Service as one that is forwarded directly, and its endpoints as ones whose nodes open
/// packets.
fn mark<A: Address>(
    frontends: &mut HashMap<MapData, FrontendKey<A>, Frontend>,
    slots: &mut Array<MapData, Slot<A>>,
    node: A,
    endpoints: u32,
) -> Result<()>
where
    FrontendKey<A>: Pod,
    Slot<A>: Pod,
{
    for protocol in PROTOCOLS {
        let key = key(node, protocol);
        let found = frontends.get(&key, 0)?;
        frontends.insert(key, Frontend { flags: found.flags | frontend::DIRECT, ..found }, 0)?;
    }
    for i in 0..endpoints {
        let slot = slots.get(&i, 0)?;
        slots.set(i, Slot { flags: slot.flags | SLOT_OPENS, ..slot }, 0)?;
    }
    Ok(())
}

/// Returns a frame within an outer packet, as the node sends it.
///
/// # Errors
/// The addresses are of different families.
pub fn sent_within(inner: &[u8], flow: &Flow) -> Result<Vec<u8>> {
    within(inner, [MAC, ROUTER_MAC], flow.node.ip(), flow.endpoint.ip())
}

/// Returns a frame within an outer packet, as another node, the router, sends it to the first
/// endpoint.
///
/// # Errors
/// The addresses are of different families.
pub fn arriving_within(inner: &[u8], flow: &Flow) -> Result<Vec<u8>> {
    let other = if flow.client.is_ipv4() { V4.router } else { V6.router };
    within(inner, [ROUTER_MAC, MAC], other, flow.endpoint.ip())
}

fn within(inner: &[u8], [from, to]: [Mac; 2], source: IpAddr, destination: IpAddr) -> Result<Vec<u8>> {
    let ethernet = PacketBuilder::ethernet2(from, to);
    let (step, protocol) = match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            (ethernet.ipv4(source.octets(), destination.octets(), TTL), IpNumber::IPV4)
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            (ethernet.ipv6(source.octets(), destination.octets(), TTL), IpNumber::IPV6)
        }
        _ => bail!("{source} and {destination} are of two families"),
    };
    let inner = &inner[14..];
    let mut bytes = Vec::with_capacity(step.size(inner.len()));
    step.write(&mut bytes, protocol, inner)?;
    Ok(bytes)
}

/// Reads the outer addresses of direct flows from the tables, and verifies that they are the node's
/// and an endpoint's.
///
/// # Errors
/// A flow is missing, or leads elsewhere.
pub fn learn(loaded: &Loaded, flows: &mut [Flow]) -> Result<()> {
    let endpoints = loaded.setup.endpoints;
    for flow in flows {
        let own = if flow.client.is_ipv4() { V4 } else { V6 };
        (flow.node, flow.endpoint) = if flow.client.is_ipv4() {
            ends(&loaded.tables.v4.flows, flow)?
        } else {
            ends(&loaded.tables.v6.flows, flow)?
        };
        let served = (0..endpoints).any(|i| service::endpoint(own, i) == flow.endpoint.ip());
        ensure!(served && flow.node.ip() == own.node, "a flow leads from {} to {}", flow.node, flow.endpoint);
    }
    Ok(())
}

/// Returns flows as they are at the first endpoint's node: it answers the client itself.
#[must_use]
pub fn at_home(flows: &[Flow]) -> Vec<Flow> {
    let home = |flow: &Flow| {
        let first = if flow.client.is_ipv4() { V4.endpoint } else { V6.endpoint };
        Flow { endpoint: SocketAddr::new(first, TARGET_PORT), node: flow.client, ..*flow }
    };
    flows.iter().map(home).collect()
}

/// Removes the entries of direct flows, and returns their places.
///
/// # Errors
/// An entry is missing.
pub fn remove(loaded: &mut Loaded, flows: &[Flow]) -> Result<()> {
    for flow in flows {
        if flow.client.is_ipv4() {
            let key = FlowKey::of(&request_key::<Address4>(flow)?);
            let entry: abi::Flow<Address4> =
                loaded.tables.v4.flows.get(&key, 0).context("a flow is missing")?;
            loaded.places4.take_back(&entry)?;
            loaded.tables.v4.flows.remove(&key)?;
        } else {
            let key = FlowKey::of(&request_key::<Address6>(flow)?);
            let entry: abi::Flow<Address6> =
                loaded.tables.v6.flows.get(&key, 0).context("a flow is missing")?;
            loaded.places6.take_back(&entry)?;
            loaded.tables.v6.flows.remove(&key)?;
        }
    }
    Ok(())
}

/// Removes the entries that the floor in front made for these flows.
///
/// # Errors
/// An entry is missing.
pub fn remove_floor(loaded: &mut Loaded, flows: &[Flow]) -> Result<()> {
    for flow in flows {
        if flow.client.is_ipv4() {
            loaded.feeder.floor.remove(&request_key(flow)?)
        } else {
            loaded.feeder.floor6.remove(&FlowKey::of(&request_key(flow)?))
        }
        .context("the floor lacks a flow")?;
    }
    Ok(())
}

/// Makes Katran's method forget these flows.
///
/// # Errors
/// It does not know one of them.
pub fn forget_katrans(loaded: &mut Loaded, flows: &[Flow]) -> Result<()> {
    for flow in flows {
        loaded.feeder.katran.remove(&request_key(flow)?).context("Katran's method lacks a flow")?;
    }
    Ok(())
}

/// Returns the endpoint in whose outer packet a frame is.
///
/// # Errors
/// It is in none of the endpoints'.
pub fn endpoint_of(loaded: &Loaded, frame: &[u8], packet: &[u8], flow: &Flow) -> Result<IpAddr> {
    let own = if flow.client.is_ipv4() { V4 } else { V6 };
    for ip in (0..loaded.setup.endpoints).map(|i| service::endpoint(own, i)) {
        let flow = Flow { node: SocketAddr::new(own.node, 0), endpoint: SocketAddr::new(ip, 0), ..*flow };
        if sent_within(frame, &flow)? == packet {
            return Ok(ip);
        }
    }
    bail!("the packet is in no endpoint's outer packet: {packet:02x?}")
}

/// Gives the floor in front the same flows, in the same order.
///
/// # Errors
/// The floor's table is full.
pub fn mirror(loaded: &mut Loaded, flows: &[Flow]) -> Result<()> {
    for flow in flows {
        match (flow.node.ip(), flow.endpoint.ip()) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let (source, destination) = (source.to_wire(), destination.to_wire());
                let entry = FloorFlow { source, destination, ..service::macs() };
                loaded.feeder.floor.insert(request_key(flow)?, entry, 0)?;
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                let (source, destination) = (source.to_wire(), destination.to_wire());
                let FloorFlow { macs, source_mac_tail, .. } = service::macs();
                let entry = FloorFlow6 { source, destination, macs, source_mac_tail, ..Default::default() };
                loaded.feeder.floor6.insert(FlowKey::of(&request_key(flow)?), entry, 0)?;
            }
            _ => bail!("a flow of two families"),
        }
    }
    Ok(())
}

/// Gives the floor at the endpoint's node both directions of these flows.
///
/// # Errors
/// The floor's table is full.
pub fn mirror_at_home(loaded: &mut Loaded, flows: &[Flow]) -> Result<()> {
    for flow in flows {
        if flow.client.is_ipv4() {
            let (from, to) = ways::<Address4>(flow)?;
            let table = &mut loaded.feeder.floor;
            table.insert(from, super::flows::floor(from, to), 0)?;
            table.insert(to.reversed(), super::flows::floor(to.reversed(), from.reversed()), 0)?;
        } else {
            let (from, to) = ways::<Address6>(flow)?;
            let table = &mut loaded.feeder.floor6;
            table.insert(FlowKey::of(&from), floor6(from, to), 0)?;
            table.insert(FlowKey::of(&to.reversed()), floor6(to.reversed(), from.reversed()), 0)?;
        }
    }
    Ok(())
}

/// Returns a request as the client sends it, and as the endpoint gets it.
fn ways<A: FromIp>(flow: &Flow) -> Result<(Tuple<A>, Tuple<A>)> {
    let from: Tuple<A> = request_key(flow)?;
    Ok((from, request_key(&Flow { frontend: flow.endpoint, ..*flow })?))
}

fn floor6(from: Tuple<Address6>, to: Tuple<Address6>) -> FloorFlow6 {
    let addresses = |tuple: Tuple<Address6>| tuple.source.sum() + tuple.destination.sum();
    FloorFlow6 {
        source: to.source,
        destination: to.destination,
        ports: to.ports,
        address_delta: checksum::delta(addresses(from), addresses(to)),
        port_delta: checksum::delta(checksum::port_sum(from.ports), checksum::port_sum(to.ports)),
        ..FloorFlow6::default()
    }
}
