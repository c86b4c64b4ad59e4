//! The maps by name and type, and conversions between addresses and map keys.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::fd::{AsFd as _, OwnedFd},
    sync::Arc,
};

use anyhow::{Context, Result};
use aya::{
    Ebpf,
    maps::{Array, HashMap, Map, MapData, PerCpuArray, ProgramArray, lpm_trie::LpmTrie},
};
use traffic_policy_ebpf::abi::{
    Address, Address4, Address6, Agent, Cidr, Counters, Device, EndpointKey, Filter, Flow, FlowKey, Frontend,
    FrontendKey, Hop, HopKey, Node, PROTOCOL_TCP, PROTOCOL_UDP, ServiceCount, ServiceCountKey, ServiceInfo,
    Slot, SlotRoute, Socket, SocketKey, SourceRange, State, Sweep, Usage,
};

use super::{plan::GoneEndpoint, words::Words};
use crate::model::Protocol;

/// The tables of one IP family.
pub struct Family<A: Address, const W: usize> {
    pub flows: HashMap<MapData, FlowKey<A>, Flow<A>>,
    pub frontends: HashMap<MapData, FrontendKey<A>, Frontend>,
    pub sources: LpmTrie<MapData, SourceRange<W>, u32>,
    pub service_cidrs: LpmTrie<MapData, Cidr<W>, u32>,
    pub slots: Array<MapData, Slot<A>>,
    pub slot_routes: Array<MapData, SlotRoute<A>>,
    /// Halves that fit into `flows`.
    pub size: u32,
}

/// All maps that the agent reads or writes.
pub struct Tables {
    pub v4: Family<Address4, 1>,
    pub v6: Family<Address6, 4>,
    pub services: HashMap<MapData, u32, ServiceInfo>,
    pub service_counts: HashMap<MapData, ServiceCountKey, ServiceCount>,
    pub sockets: HashMap<MapData, SocketKey, Socket>,
    pub node: Array<MapData, Node>,
    pub hops: Array<MapData, Hop>,
    pub hop_index: HashMap<MapData, HopKey, u32>,
    pub devices: HashMap<MapData, u32, Device>,
    pub gone: HashMap<MapData, EndpointKey, u32>,
    pub sweep: Array<MapData, Sweep>,
    pub swept: Swept,
    /// Shared with those who read them whenever they like.
    pub counters: Arc<PerCpuArray<MapData, Counters>>,
    pub xdp_jumps: ProgramArray<MapData>,
    pub tc_jumps: ProgramArray<MapData>,
    pub agent: Words<Agent>,
    pub state: Words<State>,
    pub usage: Words<Usage>,
    pub filter: Words<Filter>,
    pub pool: Words<[u16; 65_536]>,
    pub room: Room,
}

/// What a sweep walks over, by file descriptors; pairs are IPv4, IPv6.
#[derive(Debug)]
pub struct Swept {
    pub flows: [OwnedFd; 2],
    pub pending: [OwnedFd; 2],
    /// Of both families.
    pub sockets: OwnedFd,
}

impl Swept {
    fn of(object: &Ebpf) -> Result<Self> {
        let fd = |name: &str| -> Result<OwnedFd> {
            let Some(Map::HashMap(data) | Map::LruHashMap(data)) = object.map(name) else {
                anyhow::bail!("the packet path has no hash {name}")
            };
            // A copy of the descriptor: asking for one by the map's number takes CAP_SYS_ADMIN.
            data.fd().as_fd().try_clone_to_owned().context("no descriptor is free")
        };
        Ok(Self {
            flows: [fd("FLOWS4")?, fd("FLOWS6")?],
            pending: [fd("PENDING4")?, fd("PENDING6")?],
            sockets: fd("SOCKETS")?,
        })
    }
}

/// How many entries fit; pairs are IPv4, IPv6.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    pub pending: [u32; 2],
    pub frontends: [u32; 2],
    pub slots: [u32; 2],
    pub source_ranges: [u32; 2],
    pub devices: u32,
    pub gone: u32,
}

impl Room {
    fn of(object: &Ebpf) -> Result<Self> {
        let both = |name: &str| -> Result<[u32; 2]> {
            Ok([size(object, &format!("{name}4"))?, size(object, &format!("{name}6"))?])
        };
        Ok(Self {
            pending: both("PENDING")?,
            frontends: both("FRONTENDS")?,
            slots: both("SLOTS")?,
            source_ranges: both("SOURCES")?,
            devices: size(object, "DEVICES")?,
            gone: size(object, "GONE")?,
        })
    }
}

fn take(object: &mut Ebpf, name: &str) -> Result<Map> {
    object.take_map(name).with_context(|| format!("the packet path has no map {name}"))
}

fn size(object: &Ebpf, name: &str) -> Result<u32> {
    let Some(Map::HashMap(data) | Map::LruHashMap(data) | Map::LpmTrie(data) | Map::Array(data)) =
        object.map(name)
    else {
        anyhow::bail!("the packet path has no hash, trie or array {name}")
    };
    Ok(data.info().with_context(|| format!("the size of {name} cannot be read"))?.max_entries())
}

macro_rules! typed {
    ($object:expr, $name:expr) => {
        take($object, $name)?.try_into().with_context(|| format!("map {} has another type", $name))?
    };
}

impl Tables {
    /// Takes the maps out of a loaded object.
    ///
    /// # Errors
    /// A map that is missing or of another type: a build that does not fit together.
    pub fn take(object: &mut Ebpf) -> Result<Self> {
        let sizes = [size(object, "FLOWS4")?, size(object, "FLOWS6")?];
        let room = Room::of(object)?;
        let swept = Swept::of(object)?;
        Ok(Self {
            v4: Family {
                flows: typed!(object, "FLOWS4"),
                frontends: typed!(object, "FRONTENDS4"),
                sources: typed!(object, "SOURCES4"),
                service_cidrs: typed!(object, "SERVICE_CIDRS4"),
                slots: typed!(object, "SLOTS4"),
                slot_routes: typed!(object, "SLOT_ROUTES4"),
                size: sizes[0],
            },
            v6: Family {
                flows: typed!(object, "FLOWS6"),
                frontends: typed!(object, "FRONTENDS6"),
                sources: typed!(object, "SOURCES6"),
                service_cidrs: typed!(object, "SERVICE_CIDRS6"),
                slots: typed!(object, "SLOTS6"),
                slot_routes: typed!(object, "SLOT_ROUTES6"),
                size: sizes[1],
            },
            services: typed!(object, "SERVICES"),
            service_counts: typed!(object, "SERVICE_COUNTS"),
            sockets: typed!(object, "SOCKETS"),
            node: typed!(object, "NODE"),
            hops: typed!(object, "HOPS"),
            hop_index: typed!(object, "HOP_INDEX"),
            devices: typed!(object, "DEVICES"),
            gone: typed!(object, "GONE"),
            sweep: typed!(object, "SWEEP"),
            swept,
            counters: Arc::new(typed!(object, "COUNTERS")),
            xdp_jumps: typed!(object, "XDP_JUMPS"),
            tc_jumps: typed!(object, "TC_JUMPS"),
            agent: Words::new(take(object, "AGENT")?)?,
            state: Words::new(take(object, "STATE")?)?,
            usage: Words::new(take(object, "USAGE")?)?,
            filter: Words::new(take(object, "FILTER")?)?,
            pool: Words::new(take(object, "POOL")?)?,
            room,
        })
    }
}

/// An address of one family in the form of the maps.
pub trait ToWire<A> {
    fn to_wire(self) -> A;
}

impl ToWire<Address4> for Ipv4Addr {
    fn to_wire(self) -> Address4 {
        u32::from_ne_bytes(self.octets())
    }
}

impl ToWire<Address6> for Ipv6Addr {
    fn to_wire(self) -> Address6 {
        let octets = self.octets();
        let half = |at: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&octets[at..at + 8]);
            u64::from_ne_bytes(bytes)
        };
        [half(0), half(8)]
    }
}

/// The reverse of [`ToWire`].
pub trait FromWire: Address {
    fn to_ip(self) -> IpAddr;
}

impl FromWire for Address4 {
    fn to_ip(self) -> IpAddr {
        IpAddr::V4(Ipv4Addr::from(self.to_ne_bytes()))
    }
}

impl FromWire for Address6 {
    fn to_ip(self) -> IpAddr {
        let mut octets = [0; 16];
        octets[..8].copy_from_slice(&self[0].to_ne_bytes());
        octets[8..].copy_from_slice(&self[1].to_ne_bytes());
        IpAddr::V6(Ipv6Addr::from(octets))
    }
}

/// IP protocol number.
pub fn number(protocol: Protocol) -> u32 {
    match protocol {
        Protocol::Tcp => PROTOCOL_TCP,
        Protocol::Udp => PROTOCOL_UDP,
    }
}

/// The wide form of an address: [`Address::wide`].
pub fn wide(address: IpAddr) -> [u64; 2] {
    match address {
        IpAddr::V4(address) => address.to_wire().wide(),
        IpAddr::V6(address) => address.to_wire().wide(),
    }
}

/// An address of the wide form.
pub fn from_wide(wide: [u64; 2], ipv6: bool) -> IpAddr {
    if ipv6 { Address6::to_ip(wide) } else { Address4::to_ip(wide[0] as u32) }
}

/// Addresses of a device, as the packet path wants them.
pub trait SetAddresses {
    /// Takes the first address of each family.
    fn set_addresses(&mut self, addresses: impl DoubleEndedIterator<Item = IpAddr>);
}

impl SetAddresses for Device {
    fn set_addresses(&mut self, addresses: impl DoubleEndedIterator<Item = IpAddr>) {
        for address in addresses.rev() {
            match address {
                IpAddr::V4(_) => self.addresses[0] = wide(address)[0],
                IpAddr::V6(_) => [self.addresses[1], self.addresses[2]] = wide(address),
            }
        }
    }
}

/// Key of `GONE`.
pub fn endpoint_key(gone: &GoneEndpoint) -> EndpointKey {
    EndpointKey {
        address: wide(gone.endpoint.ip()),
        port: gone.endpoint.port().to_be(),
        protocol: number(gone.protocol) as u8,
        ipv6: u8::from(gone.endpoint.is_ipv6()),
        service: gone.service,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_there_and_back() {
        let v4: Ipv4Addr = "192.0.2.1".parse().unwrap();
        assert_eq!(v4.to_wire().to_ip(), IpAddr::V4(v4));
        assert_eq!(v4.to_wire().to_ne_bytes(), [192, 0, 2, 1]);
        let v6: Ipv6Addr = "2001:db8::1:2".parse().unwrap();
        assert_eq!(v6.to_wire().to_ip(), IpAddr::V6(v6));
        for address in [IpAddr::V4(v4), IpAddr::V6(v6)] {
            assert_eq!(from_wide(wide(address), address.is_ipv6()), address);
        }
    }
}
