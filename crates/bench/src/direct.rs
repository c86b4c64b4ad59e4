//! Direct forwarding: the bench's Service as a node in front has it, and as the endpoint's node has
//! it; packets within packets; and flows of which the node in front has the requests alone.

pub mod packets;

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result, bail, ensure};
use aya::{
    Pod,
    maps::{Array, HashMap, Map, MapData},
};
use traffic_policy_bench_ebpf::{FloorFlow, FloorFlow6, RING};
use traffic_policy_dataplane::{ToWire, node::pod_namespaces::by_address};
use traffic_policy_ebpf::{
    abi::{
        self, Address, Address4, Address6, DirectEndpoint, DirectEndpointKey, DirectNode, FlowKey, Frontend,
        FrontendKey, MAC_TAKES, NO_SERVICE, PROTOCOL_TCP, PROTOCOL_UDP, Port, SLOT_L2, SLOT_OPENS, SLOT_UDP,
        Slot, Tuple, frontend, mac_key, scope,
    },
    checksum,
};

use super::{
    fixture::{ROUTER_MAC, V4, V6},
    flows::{Flow, FromIp, ends, request_key},
    loaded::{Loaded, Method, NODE_PORT, TARGET_PORT},
    service,
};

/// The outer packets of requests, and whether replies travel in such packets, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Dispatch {
    Ip,
    Udp,
    /// Nothing: they go to the MAC address of the endpoint's node.
    ByMac,
    /// IP, and replies come back within it.
    Tunnel,
}

/// Flags of a frontend that are set by [`Dispatch`].
const FRONTEND: u32 = frontend::DIRECT | frontend::L2 | frontend::TUNNEL | frontend::OPENS_REPLIES;
/// Flags of a slot that are.
const SLOT: u16 = SLOT_OPENS | SLOT_UDP | SLOT_L2;

impl Dispatch {
    fn flags(self) -> (u32, u16) {
        let (frontend, slot) = match self {
            Self::Ip => (0, 0),
            Self::Udp => (0, SLOT_UDP),
            Self::ByMac => (frontend::L2, SLOT_L2),
            Self::Tunnel => (frontend::TUNNEL | frontend::OPENS_REPLIES, 0),
        };
        (frontend | frontend::DIRECT, slot | SLOT_OPENS)
    }
}

impl Loaded {
    /// Makes the Service one whose packets travel to its endpoints' nodes within outer packets, for
    /// the packet path and for the floors. The router is another node that takes part.
    pub fn forward_directly(&mut self) -> Result<()> {
        self.dispatch(Dispatch::Ip)?;
        let endpoints = self.setup.endpoints;
        let mut ring: Array<_, u32> = self.feeder.take("KATRAN_RING")?.try_into()?;
        for place in 0..RING {
            ring.set(place, place % endpoints, 0)?;
        }
        let mut backends: HashMap<_, u32, Slot<Address4>> =
            self.feeder.take("CILIUM_BACKENDS")?.try_into()?;
        for number in 0..endpoints {
            backends.insert(number, self.tables.v4.slots.get(&number, 0)?, 0)?;
        }
        let mut macs: HashMap<_, u64, u32> = self.take("tp_direct_macs")?.try_into()?;
        macs.insert(mac_key(ROUTER_MAC), MAC_TAKES, 0)?;
        self.admit(Address4::of(V4.router)?, "tp_direct_from4")?;
        self.admit(Address6::of(V6.router)?, "tp_direct_from6")?;
        self.floors6()
    }

    /// Sets what the packets of new flows travel in.
    pub fn dispatch(&mut self, dispatch: Dispatch) -> Result<()> {
        let (endpoints, flags) = (self.setup.endpoints, dispatch.flags());
        let (v4, v6) = (&mut self.tables.v4, &mut self.tables.v6);
        mark(&mut v4.frontends, &mut v4.slots, Address4::of(V4.node)?, endpoints, flags)?;
        mark(&mut v6.frontends, &mut v6.slots, Address6::of(V6.node)?, endpoints, flags)
    }

    /// Gives the floors of IPv6 the node and the Service.
    fn floors6(&mut self) -> Result<()> {
        let v6 = &self.tables.v6;
        let FloorFlow { macs, source_mac_tail, .. } = service::macs();
        let (source, destination) = (Address6::of(V6.node)?, Address6::of(V6.router)?);
        let ports = service::floor_ports();
        let own = FloorFlow6 { source, destination, ports, macs, source_mac_tail, ..Default::default() };
        let mut node: Array<_, FloorFlow6> = self.feeder.take("FLOOR_NODE6")?.try_into()?;
        node.set(0, own, 0)?;
        let mut slots: Array<_, Slot<Address6>> = self.feeder.take("FLOOR_SLOTS6")?.try_into()?;
        for i in 0..self.setup.endpoints {
            slots.set(i, v6.slots.get(&i, 0)?, 0)?;
        }
        let mut frontends: HashMap<_, FrontendKey<Address6>, Frontend> =
            self.feeder.take("FLOOR_FRONTENDS6")?.try_into()?;
        for protocol in PROTOCOLS {
            let key = key(source, protocol);
            frontends.insert(key, v6.frontends.get(&key, 0)?, 0)?;
        }
        Ok(())
    }

    /// Makes the first endpoint one of this node, for which packets of the router are opened.
    pub fn open_here(&mut self) -> Result<()> {
        self.floors6()?;
        self.open_of(Address4::of(V4.router)?, Address4::of(V4.endpoint)?, ["from4", "eps4", "node4"])?;
        self.open_of(Address6::of(V6.router)?, Address6::of(V6.endpoint)?, ["from6", "eps6", "node6"])
    }

    fn open_of<A: Address + Pod>(
        &mut self,
        from: A,
        address: A,
        [from_nodes, endpoints, nodes]: [&str; 3],
    ) -> Result<()> {
        self.admit(from, &format!("tp_direct_{from_nodes}"))?;
        let mut numbers: Array<_, DirectNode<A>> = self.take(&format!("tp_direct_{nodes}"))?.try_into()?;
        numbers.set(ROUTER, DirectNode { address: from, ..DirectNode::default() }, 0)?;
        let endpoints = self.take(&format!("tp_direct_{endpoints}"))?;
        let mut endpoints = HashMap::<_, DirectEndpointKey<A>, DirectEndpoint>::try_from(endpoints)?;
        for (service, port) in [(service::SERVICE, Port::from_host(TARGET_PORT)), (NO_SERVICE, Port::NONE)] {
            let key = DirectEndpointKey { address, service, zero: 0 };
            endpoints.insert(key, DirectEndpoint { port, netns: Self::wire_netns()? }, 0)?;
        }
        Ok(())
    }

    /// Returns the namespace at the other end of the uplink, in place of a pod's:
    /// [`DirectEndpoint::netns`]. Its stack is asked for connections that are not known.
    fn wire_netns() -> Result<u16> {
        let found = by_address()?.get(&V4.router).copied().context("the other end has no namespace")?;
        Ok(u16::try_from(found + 1)?)
    }

    /// Opens packets of another node, the router.
    fn admit<A: Address + Pod>(&mut self, from: A, map: &str) -> Result<()> {
        Ok(HashMap::<_, A, u32>::try_from(self.take(map)?)?.insert(from, ROUTER, 0)?)
    }

    fn take(&mut self, map: &str) -> Result<Map> {
        self.ours.take_map(map).with_context(|| format!("no map {map}"))
    }
}

/// The number of the router's address among those of other nodes.
const ROUTER: u32 = 1;

const PROTOCOLS: [u32; 2] = [PROTOCOL_TCP, PROTOCOL_UDP];

fn key<A>(address: A, protocol: u32) -> FrontendKey<A> {
    let port = Port::from_host(NODE_PORT);
    FrontendKey { address, port, protocol: protocol as u16, scope: scope::ADDRESS }
}

/// Gives the Service and its endpoints these flags of direct forwarding.
fn mark<A: Address>(
    frontends: &mut HashMap<MapData, FrontendKey<A>, Frontend>,
    slots: &mut Array<MapData, Slot<A>>,
    node: A,
    endpoints: u32,
    flags: (u32, u16),
) -> Result<()>
where
    FrontendKey<A>: Pod,
    Slot<A>: Pod,
{
    for protocol in PROTOCOLS {
        let key = key(node, protocol);
        let found = frontends.get(&key, 0)?;
        frontends.insert(key, Frontend { flags: found.flags & !FRONTEND | flags.0, ..found }, 0)?;
    }
    for i in 0..endpoints {
        let slot = slots.get(&i, 0)?;
        slots.set(i, Slot { flags: slot.flags & !SLOT | flags.1, ..slot }, 0)?;
    }
    Ok(())
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

/// Makes the method of another balancer forget these flows.
pub fn forget(loaded: &mut Loaded, method: Method, flows: &[Flow]) -> Result<()> {
    for flow in flows {
        let key = request_key(flow)?;
        match method {
            Method::Katran => loaded.feeder.katran.remove(&key),
            Method::Cilium => loaded.feeder.cilium.remove(&key),
        }
        .with_context(|| format!("{method:?}'s method lacks a flow"))?;
    }
    Ok(())
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
                let entry =
                    FloorFlow { source, destination, ports: service::floor_ports(), ..service::macs() };
                loaded.feeder.floor.insert(request_key(flow)?, entry, 0)?;
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                let (source, destination) = (source.to_wire(), destination.to_wire());
                let FloorFlow { macs, source_mac_tail, .. } = service::macs();
                let ports = service::floor_ports();
                let entry =
                    FloorFlow6 { source, destination, ports, macs, source_mac_tail, ..Default::default() };
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

/// Removes both entries that the floor at the endpoint's node has of these flows.
pub fn remove_floor_at_home(loaded: &mut Loaded, flows: &[Flow]) -> Result<()> {
    for flow in flows {
        if flow.client.is_ipv4() {
            let (from, to) = ways::<Address4>(flow)?;
            let table = &mut loaded.feeder.floor;
            table.remove(&from).and_then(|()| table.remove(&to.reversed()))
        } else {
            let (from, to) = ways::<Address6>(flow)?;
            let table = &mut loaded.feeder.floor6;
            table.remove(&FlowKey::of(&from)).and_then(|()| table.remove(&FlowKey::of(&to.reversed())))
        }
        .context("the floor lacks a flow")?;
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
