//! Map content as an agent writes it: a Service with a node port and endpoints on other nodes, for
//! both families and protocols, and the same for the floor.

use std::{net::IpAddr, ops};

use anyhow::{Result, bail};
use aya::maps::{Array, HashMap};
use traffic_policy_bench_ebpf::FloorFlow;
use traffic_policy_dataplane::{
    Maps, ToWire,
    maps::prefilter::{self, Needed},
    wide,
};
use traffic_policy_ebpf::abi::{
    Address4, DeviceInfo, Frontend, FrontendKey, GUE_PORT, HOP_XDP, IndexRange, LocalNode, PROTOCOL_TCP,
    PROTOCOL_UDP, Port, Ports, RouteConfig, Slot, frontend, scope, source_check,
};

use super::{
    feeder::Feeder,
    fixture::{Addresses, MAC, ROUTER_MAC, V4, V6, later},
};

pub(super) const NODE_PORT: u16 = 30_080;
/// Index of the Service with the node port.
pub(super) const SERVICE: u32 = 1;
/// Indexes of all Services.
pub(super) const ALL: ops::RangeInclusive<u32> = SERVICE..=4;
/// Node port of the Service without an endpoint; [`NO_LOCAL_PORT`] is that of the one with policy
/// Local and no endpoint here.
pub(super) const NO_ENDPOINT_PORT: u16 = 30_081;
pub(super) const NO_LOCAL_PORT: u16 = 30_082;
/// Offset of a load balancer's address of a Service from the node's.
pub(super) const VIP: u32 = 9;
pub(super) const TARGET_PORT: u16 = 8_080;
/// The source port of what the floor, and another node, send within UDP.
pub(super) const FLOOR_PORT: u16 = 600;
/// Number of the node that the endpoints are on.
const NODE: u16 = 1;
/// Source ports towards endpoints.
pub(super) const SNAT_PORTS: ops::Range<u16> = 32_768..65_535;

/// Writes what the agent writes once: epochs that hold, the SNAT ports, and the bits of frontends
/// and SNAT ports.
pub(super) fn set_config(tables: &mut Maps) {
    let (config, filter, ports) = (&mut tables.config, &mut tables.prefilter, &mut tables.snat_ports);
    // SAFETY: these are fields of mapped elements, and elements of their arrays.
    unsafe {
        let routes = RouteConfig { route: 1, hop_epoch: 1, hop_max_age: u32::MAX, route_mtus: 0 };
        filter.store(|f| &raw mut (*f).routes, routes);
        config.store(|c| &raw mut (*c).snat_port_count, u32::from(SNAT_PORTS.end - SNAT_PORTS.start));
        config.store(|c| &raw mut (*c).seed, 0x5eed_5eed_5eed_5eed);
        for (i, port) in SNAT_PORTS.enumerate() {
            ports.store(|p| p.cast::<u16>().add(i), port);
        }
    }
    prefilter::add(filter, prefilter::Array::SnatPorts, SNAT_PORTS.map(u32::from));
    prefilter::add(filter, prefilter::Array::Endpoints, [u32::from(TARGET_PORT)]);
    let mut needed = Needed::default();
    let of_node = Frontend { flags: frontend::NODE_ADDRESS, ..Frontend::default() };
    for (node, vip) in [V4.node, V6.node].map(|node| (node, later(node, VIP))) {
        for port in [NODE_PORT, NO_ENDPOINT_PORT, NO_LOCAL_PORT] {
            needed.frontend((node, port).into(), &of_node);
        }
        needed.address(vip);
    }
    needed.add_to(filter);
}

/// Describes the node as the agent does by default: packets from outside may not have its addresses
/// as their source.
pub(super) fn describe_node(tables: &mut Maps) -> Result<()> {
    let (IpAddr::V4(v4), IpAddr::V6(v6)) = (V4.node, V6.node) else { bail!("families mixed up") };
    let mut node = LocalNode { source_check: source_check::MARTIAN, ..LocalNode::default() };
    node.note_address(0, v4.to_wire());
    node.note_address(1, v6.to_wire());
    tables.v4.node_addresses.insert(v4.to_wire(), 1, 0)?;
    tables.v6.node_addresses.insert(v6.to_wire(), 1, 0)?;
    prefilter::set_primary(&mut tables.prefilter, &[V4.node, V6.node]);
    tables.local_node.set(0, node, 0)?;
    Ok(())
}

/// Writes the Services, and the device that packets arrive on.
pub(super) fn set_services(tables: &mut Maps, ifindex: u32, endpoints: u32) -> Result<()> {
    tables.devices.insert(ifindex, device(), 0)?;
    let services = [
        (NODE_PORT, service(endpoints)),
        (NO_ENDPOINT_PORT, Frontend { flags: frontend::NODE_ADDRESS, ..service(0) }),
        (NO_LOCAL_PORT, Frontend { flags: service(1).flags | frontend::LOCAL, ..service(1) }),
    ];
    let (IpAddr::V4(v4), IpAddr::V6(v6)) = (V4.node, V6.node) else { bail!("families mixed up") };
    for protocol in [PROTOCOL_TCP, PROTOCOL_UDP] {
        for (number, (port, service)) in (SERVICE..).zip(services) {
            let service = Frontend { service: number, ..service };
            tables.v4.frontends.insert(key(v4.to_wire(), port, protocol), service, 0)?;
            tables.v6.frontends.insert(key(v6.to_wire(), port, protocol), service, 0)?;
        }
    }
    let (IpAddr::V4(v4), IpAddr::V6(v6)) = (later(V4.node, VIP), later(V6.node, VIP)) else {
        bail!("families mixed up")
    };
    let vip = Frontend { flags: frontend::HAS_ENDPOINTS, service: *ALL.end(), ..service(endpoints) };
    tables.v4.frontends.insert(key(v4.to_wire(), NODE_PORT, PROTOCOL_TCP), vip, 0)?;
    tables.v6.frontends.insert(key(v6.to_wire(), NODE_PORT, PROTOCOL_TCP), vip, 0)?;
    for i in 0..endpoints {
        let (port, flags, node, zero) = (Port::from_host(TARGET_PORT), 0, NODE, 0);
        let (IpAddr::V4(v4), IpAddr::V6(v6)) = (endpoint(V4, i), endpoint(V6, i)) else {
            bail!("families mixed up")
        };
        tables.v4.slots.set(i, Slot { address: v4.to_wire(), port, flags, node, zero }, 0)?;
        tables.v6.slots.set(i, Slot { address: v6.to_wire(), port, flags, node, zero }, 0)?;
    }
    Ok(())
}

/// Writes the first of the Services for the floor.
pub(super) fn set_floor(feeder: &mut Feeder, tables: &Maps, endpoints: u32) -> Result<()> {
    let (IpAddr::V4(node), IpAddr::V4(router)) = (V4.node, V4.router) else { bail!("families mixed up") };
    let mut frontends: HashMap<_, FrontendKey<Address4>, Frontend> =
        feeder.take("FLOOR_FRONTENDS")?.try_into()?;
    for protocol in [PROTOCOL_TCP, PROTOCOL_UDP] {
        frontends.insert(key(node.to_wire(), NODE_PORT, protocol), service(endpoints), 0)?;
    }
    let mut slots: Array<_, Slot<Address4>> = feeder.take("FLOOR_SLOTS")?.try_into()?;
    for i in 0..endpoints {
        slots.set(i, tables.v4.slots.get(&i, 0)?, 0)?;
    }
    let mut own: Array<_, FloorFlow> = feeder.take("FLOOR_NODE")?.try_into()?;
    let (source, destination, ports) = (node.to_wire(), router.to_wire(), floor_ports());
    own.set(0, FloorFlow { source, destination, ports, ..macs() }, 0)?;
    Ok(())
}

/// Returns the MAC addresses of forwarded packets, as the floor's flows store them.
pub(super) fn macs() -> FloorFlow {
    let ([a, b, c, d, e, f], [g, h, rest @ ..]) = (ROUTER_MAC, MAC);
    FloorFlow {
        macs: u64::from_ne_bytes([a, b, c, d, e, f, g, h]),
        source_mac_tail: u32::from_ne_bytes(rest),
        ..FloorFlow::default()
    }
}

/// Returns the ports of what the floor sends within UDP.
pub(super) fn floor_ports() -> Ports {
    Ports::from_host(FLOOR_PORT, GUE_PORT.to_host())
}

fn key<A>(address: A, port: u16, protocol: u32) -> FrontendKey<A> {
    FrontendKey { address, port: Port::from_host(port), protocol: protocol as u16, scope: scope::ADDRESS }
}

fn service(endpoints: u32) -> Frontend {
    Frontend {
        service: SERVICE,
        flags: frontend::HAS_ENDPOINTS | frontend::NODE_ADDRESS,
        cluster: IndexRange { base: 0, len: endpoints },
        local: IndexRange { base: 0, len: 0 },
        ..Frontend::default()
    }
}

fn device() -> DeviceInfo {
    let [a, b] = wide(V6.node).wire();
    DeviceInfo { mac: MAC, zero: 0, flags: HOP_XDP, mtu: 1500, addresses: [wide(V4.node).wire()[0], a, b] }
}

/// Returns the address of an endpoint.
pub(super) fn endpoint(addresses: Addresses, number: u32) -> IpAddr {
    later(addresses.endpoint, number)
}
