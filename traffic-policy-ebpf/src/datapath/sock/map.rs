//! Keys of the socket maps, and the choice of the map that holds a socket.

use traffic_policy_ebpf::abi::{Address, PROTOCOL_UDP, Port, SocketKey, WideAddress};

use crate::datapath::{
    family::{Family, V4, V6},
    maps::{CONNECTED_UDP, SOCKETS, Table},
    sock::{addr::Named, lookup::Translation},
};

/// Returns the map that holds a socket.
#[inline(always)]
pub fn table_of(protocol: u32, connected: bool) -> Table {
    if protocol == PROTOCOL_UDP && connected {
        Table::of(&raw const CONNECTED_UDP)
    } else {
        Table::of(&raw const SOCKETS)
    }
}

/// Turns the key of the forward entry into that of the reverse entry.
#[inline(always)]
pub fn reverse<A: Address>(key: &mut SocketKey, translation: &Translation<A>) {
    key.address = translation.address.wide();
    key.port = translation.port;
    key.forward = 0;
}

/// Returns the key of the entry for a socket whose peer is an endpoint.
#[inline(always)]
pub fn peer_key<F: Family>(cookie: u64, protocol: u32, address: F::Address, port: Port) -> SocketKey {
    // Word by word: as a whole it would be copied once for each family.
    let [head, tail] = address.wide().wire();
    SocketKey {
        cookie,
        address: WideAddress::from_wire([head, tail]),
        port,
        protocol: protocol as u8,
        forward: 0,
        ipv6: F::V6 as u32,
    }
}

/// Returns the key as [`peer_key`] does.
#[inline(always)]
pub fn named_key(cookie: u64, protocol: u32, address: Named, port: Port) -> SocketKey {
    match address {
        Named::V4(address) => peer_key::<V4>(cookie, protocol, address, port),
        Named::V6(address) => peer_key::<V6>(cookie, protocol, address, port),
    }
}
