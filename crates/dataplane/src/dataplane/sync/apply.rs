//! Application of writes to the maps, and the frontends and endpoints that the maps hold.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use anyhow::{Context, Result};
use aya::maps::{
    HashMap, MapData,
    lpm_trie::{Key, LpmTrie},
};
use ipnet::IpNet;
use traffic_policy_cluster::model::{Endpoint, Protocol};
use traffic_policy_ebpf::{
    abi::{
        Address, EndpointKey, Frontend, FrontendKey, IndexRange, Port, SLOT_LOCAL, SLOT_REMOTE, ServiceCidr,
        ServiceCountKey, ServiceInfo, Slot, SlotRoute, maglev, scope,
    },
    outcome::Outcome,
};

use super::op::{Held, Op};
use crate::dataplane::maps::{
    Family, Maps,
    keys::{
        self, FromWire, FrontendId, Removal, RemovedEndpoint, ToWire, from_wide, from_words, number, source,
        source_key, to_words,
    },
    prefilter::Needed,
};
use crate::dispatch;

/// Reads the current content of the maps.
pub fn read(maps: &Maps) -> Result<Held> {
    let mut held = Held::default();
    read_family(&maps.v4, false, &mut held).context("reading the IPv4 frontends failed")?;
    read_family(&maps.v6, true, &mut held).context("reading the IPv6 frontends failed")?;
    for entry in &maps.services {
        let (index, info) = entry.context("reading the names of Services failed")?;
        held.names.insert(index, info);
    }
    Ok(held)
}

fn read_family<A: Address + FromWire, const W: usize>(
    family: &Family<A, W>,
    ipv6: bool,
    held: &mut Held,
) -> Result<()> {
    for key in family.sources.keys() {
        let key = key?;
        held.sources.insert(source(&key, ipv6)?);
    }
    for key in family.service_cidrs.keys() {
        let key = key?;
        let address = from_words(&key.data().address, ipv6);
        held.service_cidrs.insert(IpNet::new(address, u8::try_from(key.prefix_len())?)?);
    }
    for entry in &family.frontends {
        let (key, frontend) = entry?;
        if key.scope == scope::CLUSTER_IP {
            held.cluster_ips.insert(key.address.to_ip());
            continue;
        }
        let protocol = protocol(key.protocol)?;
        let address = SocketAddr::new(key.address.to_ip(), key.port.to_host());
        held.frontends.insert(FrontendId { address, protocol }, frontend);
        for range in [frontend.cluster, frontend.local, frontend.former_list] {
            if range.len == 0 || held.slots.contains_key(&(ipv6, range.base)) {
                continue;
            }
            let endpoints = (range.base..range.base + range.len)
                .map(|index| Ok(keys::endpoint(&family.slots.get(&index, 0)?)))
                .collect::<Result<_>>()?;
            held.slots.insert((ipv6, range.base), endpoints);
        }
    }
    Ok(())
}

/// Reads a Maglev table: `range.base` is its first element, `range.len` the number of its slots.
pub fn table(maps: &Maps, range: IndexRange) -> Result<Vec<u16>> {
    let elements = maps.tables.read(range.base, maglev::elements(range.len));
    let elements = elements.context("reading a Maglev table failed")?;
    Ok(maglev::unpack(&elements, range.len).collect())
}

fn protocol(number: u16) -> Result<Protocol> {
    keys::protocol(number.into()).with_context(|| format!("a map names protocol {number}"))
}

/// Returns the endpoints whose flows an earlier agent was marking when it stopped.
pub fn removed(maps: &Maps) -> Result<BTreeMap<RemovedEndpoint, Removal>> {
    let endpoint = |(key, value): (EndpointKey, u32)| {
        let endpoint = SocketAddr::new(from_wide(key.address, key.ipv6 != 0), key.port.to_host());
        let protocol = protocol(key.protocol.into())?;
        Ok((RemovedEndpoint { service: key.service, endpoint, protocol }, Removal::of(value)))
    };
    maps.removed
        .iter()
        .map(|entry| endpoint(entry.context("reading the removed endpoints failed")?))
        .collect()
}

/// Returns the bits of the prefilter that these writes need.
pub fn needed(ops: &[Op], service_cidrs: &BTreeSet<IpNet>) -> Needed {
    let mut needed = Needed::default();
    if ops.iter().any(|op| matches!(op, Op::ServiceCidr(..))) {
        needed.service_cidrs = Some(service_cidrs.clone());
    }
    for op in ops {
        match op {
            Op::Slots { endpoints, .. } => endpoints.iter().for_each(|e| needed.endpoint(e.address)),
            Op::SetFrontend(id, frontend) => needed.frontend(id.address, frontend),
            Op::ClusterIp(address, true) => needed.address(*address),
            Op::Table { .. }
            | Op::DeleteFrontend(_)
            | Op::AddSourceRange(_)
            | Op::RemoveSourceRange(_)
            | Op::SetInfo(..)
            | Op::ClearInfo(_)
            | Op::ClusterIp(..)
            | Op::ServiceCidr(..) => {}
        }
    }
    needed
}

/// Executes one operation; returns the number of map elements written.
///
/// # Errors
/// The kernel refuses, for example because the map is full.
pub fn write(maps: &mut Maps, op: &Op) -> Result<usize> {
    match op {
        Op::Slots { ipv6, base, endpoints } => {
            let v4 = |ip| if let IpAddr::V4(ip) = ip { Some(ip.to_wire()) } else { None };
            let v6 = |ip| if let IpAddr::V6(ip) = ip { Some(ip.to_wire()) } else { None };
            if *ipv6 {
                put_slots(&mut maps.v6, *base, endpoints, v6)?;
            } else {
                put_slots(&mut maps.v4, *base, endpoints, v4)?;
            }
            Ok(endpoints.len())
        }
        Op::Table { base, elements } => {
            maps.tables.write(*base, elements).context("writing a Maglev table failed")?;
            Ok(elements.len())
        }
        Op::SetFrontend(id, frontend) => put_frontend(maps, *id, Some(*frontend)),
        Op::DeleteFrontend(id) => put_frontend(maps, *id, None),
        Op::ClusterIp(address, known) => {
            match address {
                IpAddr::V4(address) => know(&mut maps.v4.frontends, address.to_wire(), *known),
                IpAddr::V6(address) => know(&mut maps.v6.frontends, address.to_wire(), *known),
            }
            .with_context(|| format!("writing cluster IP {address} failed (is the map full?)"))?;
            Ok(1)
        }
        Op::ServiceCidr(range, known) => {
            match range {
                IpNet::V4(_) => put_range(&mut maps.v4.service_cidrs, *range, *known),
                IpNet::V6(_) => put_range(&mut maps.v6.service_cidrs, *range, *known),
            }
            .with_context(|| format!("writing the range {range} of cluster IPs failed"))?;
            Ok(1)
        }
        Op::SetInfo(index, info) => {
            let before = maps.services.get(index, 0).ok();
            if !before.is_some_and(|before| is_same(&before, info)) {
                forget_counts(maps, *index);
            }
            maps.services.insert(index, **info, 0).context("writing the name of a Service failed")?;
            Ok(1)
        }
        Op::ClearInfo(index) => {
            maps.services.remove(index).context("forgetting the name of a Service failed")?;
            forget_counts(maps, *index);
            Ok(1)
        }
        Op::AddSourceRange(source) => {
            let written = if source.ipv6 {
                maps.v6.sources.insert(&source_key(source), 1, 0)
            } else {
                maps.v4.sources.insert(&source_key(source), 1, 0)
            };
            written.with_context(|| {
                format!("writing source range {} failed (is the map full?)", source.range)
            })?;
            Ok(1)
        }
        Op::RemoveSourceRange(source) => {
            let removed = if source.ipv6 {
                maps.v6.sources.remove(&source_key(source))
            } else {
                maps.v4.sources.remove(&source_key(source))
            };
            removed.with_context(|| format!("deleting source range {} failed", source.range))?;
            Ok(1)
        }
    }
}

/// Returns a frontend as the maps hold it.
pub fn frontend(maps: &Maps, id: &FrontendId) -> Option<Frontend> {
    match id.address {
        SocketAddr::V4(address) => maps.v4.frontends.get(&key(address.ip().to_wire(), *id), 0).ok(),
        SocketAddr::V6(address) => maps.v6.frontends.get(&key(address.ip().to_wire(), *id), 0).ok(),
    }
}

fn key<A: Address>(address: A, id: FrontendId) -> FrontendKey<A> {
    FrontendKey {
        address,
        port: Port::from_host(id.address.port()),
        protocol: number(id.protocol) as u16,
        scope: if id.address.ip().is_unspecified() { scope::NODE_PORT } else { scope::ADDRESS },
    }
}

fn put_frontend(maps: &mut Maps, id: FrontendId, frontend: Option<Frontend>) -> Result<usize> {
    match id.address {
        SocketAddr::V4(address) => put(&mut maps.v4.frontends, address.ip().to_wire(), id, frontend)?,
        SocketAddr::V6(address) => put(&mut maps.v6.frontends, address.ip().to_wire(), id, frontend)?,
    }
    Ok(1)
}

/// Whether two names are those of the same Service port, whatever its policies.
fn is_same(one: &ServiceInfo, other: &ServiceInfo) -> bool {
    ServiceInfo { policies: 0, ..*one } == ServiceInfo { policies: 0, ..*other }
}

/// Resets the counts of an index, so that its next Service port starts from zero. It must be called
/// again at that time: flows that outlive a Service port are counted under its index when they end.
fn forget_counts(maps: &mut Maps, service: u32) {
    for outcome in Outcome::ALL {
        // Most outcomes were never counted.
        let _ = maps.service_counts.remove(&ServiceCountKey { service, outcome: *outcome as u32 });
    }
}

fn know<A: Address>(
    frontends: &mut HashMap<MapData, FrontendKey<A>, Frontend>,
    address: A,
    known: bool,
) -> Result<(), aya::maps::MapError> {
    let key = FrontendKey { address, port: Port::NONE, protocol: 0, scope: scope::CLUSTER_IP };
    if known { frontends.insert(key, Frontend::default(), 0) } else { frontends.remove(&key) }
}

fn put_range<const W: usize>(
    cidrs: &mut LpmTrie<MapData, ServiceCidr<W>, u32>,
    range: IpNet,
    known: bool,
) -> Result<(), aya::maps::MapError> {
    let key = Key::new(u32::from(range.prefix_len()), ServiceCidr { address: to_words(range.network()) });
    if known { cidrs.insert(&key, 1, 0) } else { cidrs.remove(&key) }
}

/// Writes a list of endpoints into a range that no program reads yet.
fn put_slots<A: Address, const W: usize>(
    family: &mut Family<A, W>,
    base: u32,
    endpoints: &[Endpoint],
    wire: impl Fn(IpAddr) -> Option<A>,
) -> Result<()> {
    let slots = endpoints.iter().map(|endpoint| Some(slot(wire(endpoint.address.ip())?, endpoint)));
    let slots: Vec<Slot<A>> =
        slots.collect::<Option<_>>().context("endpoints of another family in a list")?;
    let (rows, route_rows) = &family.slot_rows;
    // The route of the slot's previous endpoint must not be used for the new one.
    let none = vec![SlotRoute::default(); slots.len()];
    route_rows.write(&mut family.slot_routes, base, &none).context("clearing the routes of slots failed")?;
    rows.write(&mut family.slots, base, &slots).context("writing endpoints failed")
}

fn slot<A>(address: A, endpoint: &Endpoint) -> Slot<A> {
    let mut flags = match (endpoint.local, endpoint.remote) {
        (true, _) => SLOT_LOCAL,
        (false, true) => SLOT_REMOTE,
        (false, false) => 0,
    };
    flags |= dispatch::flags(endpoint.opens, endpoint.held);
    Slot { address, port: Port::from_host(endpoint.address.port()), flags, node: endpoint.node, zero: 0 }
}

fn put<A: Address>(
    frontends: &mut HashMap<MapData, FrontendKey<A>, Frontend>,
    address: A,
    id: FrontendId,
    frontend: Option<Frontend>,
) -> Result<()> {
    let key = key(address, id);
    match frontend {
        Some(frontend) => frontends
            .insert(key, frontend, 0)
            .with_context(|| format!("writing frontend {} failed (is the map full?)", id.address)),
        None => frontends.remove(&key).with_context(|| format!("deleting frontend {} failed", id.address)),
    }
}
