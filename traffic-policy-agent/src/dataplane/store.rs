//! Reads the frontends and their endpoints from the maps, and writes what the plan says.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use anyhow::{Context, Result};
use aya::maps::{Array, HashMap, MapData, lpm_trie::Key};
use ipnet::IpNet;
use traffic_policy_ebpf::abi::{
    Address, Address4, EndpointKey, Frontend, FrontendKey, PROTOCOL_TCP, PROTOCOL_UDP, SLOT_LOCAL, Slot,
    SlotRoute, SourceRange,
};

use super::{
    plan::{FrontendId, Held, Op, Source},
    tables::{Family, FromWire, Tables, ToWire, number},
};
use crate::model::{Endpoint, Protocol};

/// What the maps hold now.
///
/// # Errors
/// A map that cannot be read.
pub fn read(tables: &Tables) -> Result<Held> {
    let mut held = Held::default();
    read_family(&tables.v4, false, &mut held).context("reading the IPv4 frontends failed")?;
    read_family(&tables.v6, true, &mut held).context("reading the IPv6 frontends failed")?;
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

    for entry in &family.frontends {
        let (key, frontend) = entry?;
        let protocol = protocol(key.protocol)?;
        let address = SocketAddr::new(key.address.to_ip(), u16::from_be(key.port));
        held.frontends.insert(FrontendId { address, protocol }, frontend);
        for range in [frontend.cluster, frontend.local] {
            if range.len == 0 || held.slots.contains_key(&(ipv6, range.base)) {
                continue;
            }
            let endpoints = (range.base..range.base + range.len)
                .map(|index| {
                    let slot = family.slots.get(&index, 0)?;
                    Ok(Endpoint {
                        address: SocketAddr::new(slot.address.to_ip(), u16::from_be(slot.port)),
                        local: slot.flags & SLOT_LOCAL != 0,
                    })
                })
                .collect::<Result<_>>()?;
            held.slots.insert((ipv6, range.base), endpoints);
        }
    }
    Ok(())
}

fn protocol(number: u16) -> Result<Protocol> {
    match u32::from(number) {
        PROTOCOL_TCP => Ok(Protocol::Tcp),
        PROTOCOL_UDP => Ok(Protocol::Udp),
        other => anyhow::bail!("a map names protocol {other}"),
    }
}

/// Endpoints whose flows an earlier agent was marking when it ended.
///
/// # Errors
/// The map cannot be read.
pub fn gone(tables: &Tables) -> Result<BTreeSet<(SocketAddr, Protocol)>> {
    let endpoint = |key: EndpointKey| {
        let address = if key.ipv6 == 0 { (key.address[0] as Address4).to_ip() } else { key.address.to_ip() };
        Ok((SocketAddr::new(address, u16::from_be(key.port)), protocol(key.protocol)?))
    };
    tables.gone.keys().map(|key| endpoint(key.context("reading the gone endpoints failed")?)).collect()
}

/// Carries out one step; returns the number of map elements written.
///
/// # Errors
/// The kernel refuses: the map is full.
pub fn write(tables: &mut Tables, op: &Op) -> Result<usize> {
    match op {
        Op::Slots { base, endpoints, .. } => {
            for (index, endpoint) in (*base..).zip(endpoints) {
                let flags = if endpoint.local { SLOT_LOCAL } else { 0 };
                let port = endpoint.address.port().to_be();
                match endpoint.address {
                    SocketAddr::V4(address) => {
                        let slot = Slot { address: address.ip().to_wire(), port, flags, zero: 0 };
                        put_slot(&mut tables.v4.slots, &mut tables.v4.slot_routes, index, slot)?;
                    }
                    SocketAddr::V6(address) => {
                        let slot = Slot { address: address.ip().to_wire(), port, flags, zero: 0 };
                        put_slot(&mut tables.v6.slots, &mut tables.v6.slot_routes, index, slot)?;
                    }
                }
            }
            Ok(endpoints.len())
        }
        Op::Put(id, frontend) => {
            match id.address {
                SocketAddr::V4(address) => {
                    put(&mut tables.v4.frontends, address.ip().to_wire(), *id, Some(*frontend))?;
                }
                SocketAddr::V6(address) => {
                    put(&mut tables.v6.frontends, address.ip().to_wire(), *id, Some(*frontend))?;
                }
            }
            Ok(1)
        }
        Op::Allow(source) => {
            let written = if source.ipv6 {
                tables.v6.sources.insert(&source_key(source), 1, 0)
            } else {
                tables.v4.sources.insert(&source_key(source), 1, 0)
            };
            written.with_context(|| {
                format!("writing source range {} failed (is the map full?)", source.range)
            })?;
            Ok(1)
        }
        Op::Forbid(source) => {
            let removed = if source.ipv6 {
                tables.v6.sources.remove(&source_key(source))
            } else {
                tables.v4.sources.remove(&source_key(source))
            };
            removed.with_context(|| format!("deleting source range {} failed", source.range))?;
            Ok(1)
        }
        Op::Delete(id) => {
            match id.address {
                SocketAddr::V4(address) => put(&mut tables.v4.frontends, address.ip().to_wire(), *id, None)?,
                SocketAddr::V6(address) => put(&mut tables.v6.frontends, address.ip().to_wire(), *id, None)?,
            }
            Ok(1)
        }
    }
}

/// Bits of a Service's index in a key of the sources.
const SERVICE_BITS: u32 = 32;

/// The key of a source range.
fn source_key<const W: usize>(source: &Source) -> Key<SourceRange<W>> {
    let mut octets = [0; 16];
    match source.range.network() {
        IpAddr::V4(address) => octets[..4].copy_from_slice(&address.octets()),
        IpAddr::V6(address) => octets = address.octets(),
    }
    let address = std::array::from_fn(|i| {
        u32::from_ne_bytes([octets[i * 4], octets[i * 4 + 1], octets[i * 4 + 2], octets[i * 4 + 3]])
    });
    let data = SourceRange { service: source.service, address };
    Key::new(SERVICE_BITS + u32::from(source.range.prefix_len()), data)
}

/// The reverse of [`source_key`].
fn source<const W: usize>(key: &Key<SourceRange<W>>, ipv6: bool) -> Result<Source> {
    let data = key.data();
    let mut octets = [0; 16];
    for (word, bytes) in data.address.iter().zip(octets.chunks_mut(4)) {
        bytes.copy_from_slice(&word.to_ne_bytes());
    }
    let [a, b, c, d, ..] = octets;
    let address = if ipv6 { IpAddr::from(octets) } else { IpAddr::from([a, b, c, d]) };
    let length = u8::try_from(key.prefix_len().saturating_sub(SERVICE_BITS))?;
    Ok(Source { ipv6, service: data.service, range: IpNet::new(address, length)? })
}

fn put_slot<A: Address>(
    slots: &mut Array<MapData, Slot<A>>,
    routes: &mut Array<MapData, SlotRoute<A>>,
    index: u32,
    slot: Slot<A>,
) -> Result<()> {
    // The route of the endpoint that had this slot before must not be taken for the new one's.
    routes.set(index, SlotRoute::default(), 0).context("clearing the route of a slot failed")?;
    slots.set(index, slot, 0).context("writing an endpoint failed")
}

fn put<A: Address>(
    frontends: &mut HashMap<MapData, FrontendKey<A>, Frontend>,
    address: A,
    id: FrontendId,
    frontend: Option<Frontend>,
) -> Result<()> {
    let key = FrontendKey {
        address,
        port: id.address.port().to_be(),
        protocol: number(id.protocol) as u16,
        zero: 0,
    };
    match frontend {
        Some(frontend) => frontends
            .insert(key, frontend, 0)
            .with_context(|| format!("writing frontend {} failed (is the map full?)", id.address)),
        None => frontends.remove(&key).with_context(|| format!("deleting frontend {} failed", id.address)),
    }
}
