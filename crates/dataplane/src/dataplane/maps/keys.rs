//! Keys of the maps as the agent represents them, and conversions between addresses and their forms
//! in the maps.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::Result;
use aya::maps::lpm_trie::Key;
use ipnet::IpNet;
use traffic_policy_cluster::model::{Endpoint, Protocol};
use traffic_policy_ebpf::abi::{
    Address, Address4, Address6, DeviceInfo, EndpointKey, PROTOCOL_SCTP, PROTOCOL_TCP, PROTOCOL_UDP, Port,
    REMOVED_FROM_OPENING, REMOVED_FROM_SERVICE, SLOT_LOCAL, SLOT_REMOTE, Slot, SourceRange, WideAddress,
};

use super::reader::Reader;
use crate::dispatch;

/// A frontend as a key of its map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FrontendId {
    pub address: SocketAddr,
    pub protocol: Protocol,
}

/// A source range of the Service port with this index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Source {
    pub ipv6: bool,
    pub service: u32,
    pub range: IpNet,
}

/// The reason for which flows to an endpoint are to choose anew. What has left its Service has left
/// it for all flows: the first of two reasons counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Removal {
    /// It serves its Service port no longer.
    Service,
    /// Its node opens no packets any more: flows of UDP that are forwarded directly choose anew.
    /// Their client may send for ever, while a connection of TCP ends.
    Opening,
}

impl Removal {
    /// The value in `tp_removed_eps`.
    pub const fn value(self) -> u32 {
        match self {
            Self::Service => REMOVED_FROM_SERVICE,
            Self::Opening => REMOVED_FROM_OPENING,
        }
    }

    /// Reads a value of `tp_removed_eps`.
    pub const fn of(value: u32) -> Self {
        if value == REMOVED_FROM_OPENING { Self::Opening } else { Self::Service }
    }
}

/// An endpoint whose flows of a Service port are to choose anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RemovedEndpoint {
    /// The index of the Service port.
    pub service: u32,
    pub endpoint: SocketAddr,
    pub protocol: Protocol,
}

/// The conversion of an address of one family to the form of the maps.
pub trait ToWire<A> {
    fn to_wire(self) -> A;
}

impl ToWire<Address4> for Ipv4Addr {
    fn to_wire(self) -> Address4 {
        Address4::from_octets(self.octets())
    }
}

impl ToWire<Address6> for Ipv6Addr {
    fn to_wire(self) -> Address6 {
        Address6::from_octets(self.octets())
    }
}

/// The reverse of [`ToWire`].
pub trait FromWire: Address {
    fn to_ip(self) -> IpAddr;
}

impl FromWire for Address4 {
    fn to_ip(self) -> IpAddr {
        IpAddr::V4(Ipv4Addr::from(self.octets()))
    }
}

impl FromWire for Address6 {
    fn to_ip(self) -> IpAddr {
        IpAddr::V6(Ipv6Addr::from(self.octets()))
    }
}

/// Returns the IP protocol number.
pub fn number(protocol: Protocol) -> u32 {
    match protocol {
        Protocol::Tcp => PROTOCOL_TCP,
        Protocol::Udp => PROTOCOL_UDP,
        Protocol::Sctp => PROTOCOL_SCTP,
    }
}

/// Returns the protocol of a number; `None` if Services do not support it.
pub fn protocol(number: u32) -> Option<Protocol> {
    [Protocol::Tcp, Protocol::Udp, Protocol::Sctp]
        .into_iter()
        .find(|protocol| self::number(*protocol) == number)
}

/// Returns the wide form of an address: [`Address::wide`].
pub fn wide(address: IpAddr) -> WideAddress {
    match address {
        IpAddr::V4(address) => address.to_wire().wide(),
        IpAddr::V6(address) => address.to_wire().wide(),
    }
}

/// Returns the first address of each family, IPv4 and IPv6; unspecified if there is none.
pub fn first(addresses: &[IpAddr]) -> [WideAddress; 2] {
    [IpAddr::is_ipv4, IpAddr::is_ipv6]
        .map(|of_family| addresses.iter().copied().find(of_family).map_or(WideAddress::UNSPECIFIED, wide))
}

/// Converts an address from the wide form.
pub fn from_wide(wide: WideAddress, ipv6: bool) -> IpAddr {
    if ipv6 { wide.ipv6().to_ip() } else { wide.ipv4().to_ip() }
}

/// The addresses of a device, in the form that the packet path needs.
pub trait SetAddresses {
    /// Stores the first address of each family.
    fn set_addresses(&mut self, addresses: impl DoubleEndedIterator<Item = IpAddr>);
}

impl SetAddresses for DeviceInfo {
    fn set_addresses(&mut self, addresses: impl DoubleEndedIterator<Item = IpAddr>) {
        for address in addresses.rev() {
            match address {
                IpAddr::V4(_) => self.addresses[0] = wide(address).wire()[0],
                IpAddr::V6(_) => [self.addresses[1], self.addresses[2]] = wide(address).wire(),
            }
        }
    }
}

/// Returns the key of `tp_removed_eps`.
pub fn endpoint_key(removed: &RemovedEndpoint) -> EndpointKey {
    EndpointKey {
        address: wide(removed.endpoint.ip()),
        port: Port::from_host(removed.endpoint.port()),
        protocol: number(removed.protocol) as u8,
        ipv6: u8::from(removed.endpoint.is_ipv6()),
        service: removed.service,
    }
}

/// Returns the words of an address; an IPv4 address has one.
pub fn to_words<const W: usize>(address: IpAddr) -> [u32; W] {
    let mut octets = [0; 16];
    match address {
        IpAddr::V4(address) => octets[..4].copy_from_slice(&address.octets()),
        IpAddr::V6(address) => octets = address.octets(),
    }
    std::array::from_fn(|i| {
        u32::from_ne_bytes([octets[i * 4], octets[i * 4 + 1], octets[i * 4 + 2], octets[i * 4 + 3]])
    })
}

/// The reverse of [`to_words`].
pub fn from_words(words: &[u32], ipv6: bool) -> IpAddr {
    let mut octets = [0; 16];
    for (word, bytes) in words.iter().zip(octets.chunks_mut(4)) {
        bytes.copy_from_slice(&word.to_ne_bytes());
    }
    let [a, b, c, d, ..] = octets;
    if ipv6 { IpAddr::from(octets) } else { IpAddr::from([a, b, c, d]) }
}

/// The number of bits of a Service's index in a key of the sources.
const SERVICE_BITS: u32 = 32;

/// Returns the key of a source range.
pub fn source_key<const W: usize>(source: &Source) -> Key<SourceRange<W>> {
    let data = SourceRange { service: source.service, address: to_words(source.range.network()) };
    Key::new(SERVICE_BITS + u32::from(source.range.prefix_len()), data)
}

/// The reverse of [`source_key`].
pub fn source<const W: usize>(key: &Key<SourceRange<W>>, ipv6: bool) -> Result<Source> {
    let data = key.data();
    let address = from_words(&{ data.address }, ipv6);
    let length = u8::try_from(key.prefix_len().saturating_sub(SERVICE_BITS))?;
    Ok(Source { ipv6, service: data.service, range: IpNet::new(address, length)? })
}

/// Returns all source ranges of one family, from the pinned map.
pub fn read_sources<const W: usize>(map: &Reader, ipv6: bool) -> Result<Vec<Source>> {
    map.entries::<Key<SourceRange<W>>, u32>()?.iter().map(|(key, _)| source(key, ipv6)).collect()
}

/// Returns the endpoint that a slot holds.
pub fn endpoint<A: FromWire>(slot: &Slot<A>) -> Endpoint {
    Endpoint {
        address: SocketAddr::new(slot.address.to_ip(), slot.port.to_host()),
        local: slot.flags & SLOT_LOCAL != 0,
        remote: slot.flags & SLOT_REMOTE != 0,
        opens: dispatch::of(slot.flags),
        held: dispatch::held(slot.flags),
        node: slot.node,
        // Maps hold the shares that follow from it.
        weight: 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_there_and_back() {
        let v4: Ipv4Addr = "192.0.2.1".parse().unwrap();
        assert_eq!(v4.to_wire().to_ip(), IpAddr::V4(v4));
        assert_eq!(v4.to_wire().octets(), [192, 0, 2, 1]);
        let v6: Ipv6Addr = "2001:db8::1:2".parse().unwrap();
        assert_eq!(v6.to_wire().to_ip(), IpAddr::V6(v6));
        for address in [IpAddr::V4(v4), IpAddr::V6(v6)] {
            assert_eq!(from_wide(wide(address), address.is_ipv6()), address);
        }
    }
}
