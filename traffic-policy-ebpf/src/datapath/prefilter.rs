//! The prefilter, which tells, before any lookup, whether a packet or a call may concern a Service.
//! Most packets of a node do not: they belong to its pods, often on ports that Services use, too
//! (80, 443). So it checks addresses.

/// The result of the prefilter for a packet.
pub use traffic_policy_ebpf::abi::FilterMatch as Match;
use traffic_policy_ebpf::{
    abi::{
        Address, CIDRS, Port, Prefilter, ServiceBits, Tuple,
        prefilter::{endpoint_bit, node_bit},
    },
    hash,
};

use crate::datapath::{barrier::fetch_or, family::Family, maps::PREFILTER, trace, value::load};

/// Whether a packet may concern a Service.
#[inline(always)]
pub fn may_concern<F: Family>(tuple: &Tuple<F::Address>) -> bool {
    PREFILTER.get_ptr(0).is_some_and(|filter| !matches!(classify::<F>(filter, tuple), Match::No))
}

/// Classifies a packet by its tuple. `filter`: the map's element.
#[inline(always)]
pub fn classify<F: Family>(filter: *const Prefilter, tuple: &Tuple<F::Address>) -> Match {
    // Requests to node ports and replies come first, and need no hash.
    let hash = || hash::address(tuple.destination);
    if is_primary::<F>(filter, tuple.destination)
        || bit(place!(const filter.node_addresses).cast(), node_bit(hash()))
    {
        let port = tuple.ports.destination().to_host() as u32;
        if bit(place!(const filter.node_ports).cast(), port) {
            return Match::NodePort;
        }
        if bit(place!(const filter.snat_ports).cast(), port) {
            return Match::SnatPort;
        }
    }
    if is_service::<F>(filter, tuple.destination, hash()) { Match::Service } else { Match::No }
}

/// Whether an address is the node's primary address.
#[inline(always)]
fn is_primary<F: Family>(filter: *const Prefilter, address: F::Address) -> bool {
    let ([head, tail], [primary, primary_tail]) =
        (address.wide().wire(), get!(filter.primary[F::INDEX]).wire());
    head == primary && (!F::V6 || tail == primary_tail)
}

/// Whether an address may belong to a frontend that is not on this node's addresses, or to a range
/// of ClusterIPs.
#[inline(always)]
fn is_service<F: Family>(filter: *const Prefilter, address: F::Address, hash: u64) -> bool {
    let bits = ServiceBits::of(hash);
    let array = place!(const filter.services).cast();
    bit(array, bits.first) && bit(array, bits.second) || is_in_cidr::<F>(filter, address)
}

/// Whether an address lies in a range that ClusterIPs are allocated from.
#[inline(always)]
fn is_in_cidr<F: Family>(filter: *const Prefilter, address: F::Address) -> bool {
    let count = get!(filter.cidr_count[F::INDEX]) as usize;
    let [head, tail] = address.wide().wire();
    let mut index = 0;
    while index < CIDRS {
        if index >= count {
            return false;
        }
        let ([network, network_tail], [mask, mask_tail]) = (
            get!(filter.cidrs[F::INDEX][index].network).wire(),
            get!(filter.cidrs[F::INDEX][index].mask).wire(),
        );
        if head & mask == network && (!F::V6 || tail & mask_tail == network_tail) {
            return true;
        }
        index += 1;
    }
    false
}

/// Whether a destination may be a Service: the whole cost of other calls. Node ports are matched by
/// their port alone, because calls reach them on loopback addresses, too.
#[inline(always)]
pub fn may_be_service<F: Family>(destination: F::Address, port: Port) -> bool {
    let Some(filter) = PREFILTER.get_ptr(0) else { return false };
    bit(place!(const filter.node_ports).cast(), port.to_host() as u32)
        || is_service::<F>(filter, destination, hash::address(destination))
}

/// Whether new flows may have had this port as source towards endpoints.
#[inline(always)]
pub fn is_snat_port(port: Port) -> bool {
    let Some(filter) = PREFILTER.get_ptr(0) else { return false };
    bit(place!(const filter.snat_ports).cast(), port.to_host() as u32)
}

/// Whether an endpoint, on any node, has this port.
#[inline(always)]
pub fn is_endpoint(port: Port) -> bool {
    let Some(filter) = PREFILTER.get_ptr(0) else { return false };
    bit(place!(const filter.endpoints).cast(), port.to_host() as u32)
}

/// Whether an endpoint on this node that has this address and port may have had a flow.
#[inline(always)]
pub fn is_local_endpoint<F: Family>(address: F::Address, port: Port) -> bool {
    let Some(filter) = PREFILTER.get_ptr(0) else { return false };
    bit(place!(const filter.local_endpoints).cast(), endpoint_bit(address, port.to_host()))
}

/// Notes that an endpoint on this node is about to have a flow: its replies have to be examined.
#[inline(always)]
pub fn note_local_endpoint<F: Family>(address: F::Address, port: Port) {
    let Some(filter) = PREFILTER.get_ptr_mut(0) else { return };
    set_bit(place!(mut filter.local_endpoints).cast(), endpoint_bit(address, port.to_host()));
}

/// Notes that an address of this node is about to be the source towards an endpoint: replies will
/// arrive there.
#[inline(always)]
pub fn note_source<F: Family>(address: F::Address) {
    let Some(filter) = PREFILTER.get_ptr_mut(0) else { return };
    set_bit(place!(mut filter.node_addresses).cast(), node_bit(hash::address(address)));
}

/// Returns a bit of an array whose length the caller knows.
#[inline(always)]
fn bit(array: *const u64, index: u32) -> bool {
    load(array.wrapping_add((index >> 6) as usize)) >> (index & 63) & 1 != 0
}

/// Sets a bit, concurrently with other CPUs and the agent. A traced copy, which shares the array
/// with the running programs, changes nothing.
#[inline(always)]
fn set_bit(array: *mut u64, index: u32) {
    if !trace::is_on() && !bit(array, index) {
        fetch_or(array.wrapping_add((index >> 6) as usize), 1 << (index & 63));
    }
}
