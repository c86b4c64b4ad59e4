//! Bits of the prefilter, set as the agent sets them.

use std::net::IpAddr;

use traffic_policy_dataplane::wide;
use traffic_policy_ebpf::abi::{
    Address4, Address6, Prefilter, PrefilterCidr, RouteConfig, ServiceBits, WideAddress,
    frontend::NODE_ADDRESS, prefilter::node_bit,
};
use traffic_policy_ebpf::hash;

use super::flows::Wire;
use super::{Frontend, Harness, Setup, Spot};
use crate::lab::{Addresses, Family};

impl Harness {
    /// Sets the bit of this address, as if it collided with one of the node's addresses.
    pub fn share_bit_with_the_node(&mut self, address: IpAddr) {
        let filter = self.tables.prefilter.pointer();
        // SAFETY: the element is mapped as long as the tables live, and the array has a bit for
        // each number of 16 bits.
        unsafe { set((&raw mut (*filter).node_addresses).cast(), node_bit(hashed(address))) };
    }
}

impl Harness {
    /// Clears the node's primary addresses, as if the agent did not know them.
    pub fn forget_primary(&mut self) {
        let filter = self.tables.prefilter.pointer();
        // SAFETY: the element is mapped as long as the tables live.
        unsafe { (&raw mut (*filter).primary).write_volatile([WideAddress::UNSPECIFIED; 2]) };
    }

    /// Clears the bits of all of the node's addresses.
    pub fn forget_node_bits(&mut self) {
        let filter = self.tables.prefilter.pointer();
        // SAFETY: the element is mapped as long as the tables live; no program runs meanwhile.
        unsafe { (&raw mut (*filter).node_addresses).write_bytes(0, 1) };
    }
}

/// Fills the prefilter as `setup` demands.
///
/// # Safety
/// `prefilter` is mapped, and no program runs meanwhile.
pub(super) unsafe fn fill(prefilter: *mut Prefilter, setup: &Setup) {
    // SAFETY: the caller guarantees it; a port is the number of a bit.
    unsafe {
        prefilter.write_bytes(0, 1);
        (*prefilter).routes = RouteConfig {
            route: 1,
            hop_epoch: 1,
            hop_max_age: setup.hop_max_age,
            route_mtus: if setup.route_mtus.is_empty() { 0 } else { 3 },
        };
        (*prefilter).primary = Family::BOTH.map(|family| wide(Spot::Node.of(family)));
        setup.frontends.iter().for_each(|frontend| name(prefilter, frontend));
        for port in &setup.snat_ports {
            set((&raw mut (*prefilter).snat_ports).cast(), (*port).into());
        }
        for (index, spot) in setup.service_cidrs.iter().enumerate() {
            let Addresses { v4, v6 } = spot.addresses().network();
            let masks = [
                IpAddr::from([255, 255, 255, 0]),
                IpAddr::from([0xffff, 0xffff, 0xffff, 0xffff, 0, 0, 0, 0]),
            ];
            for (family, network) in [IpAddr::from(v4), IpAddr::from(v6)].into_iter().enumerate() {
                (*prefilter).cidrs[family][index] =
                    PrefilterCidr { network: wide(network), mask: wide(masks[family]) };
                (*prefilter).cidr_count[family] = index as u32 + 1;
            }
        }
    }
}

/// Sets the bits that a frontend and its endpoints need.
///
/// # Safety
/// `prefilter` is mapped.
pub(super) unsafe fn name(prefilter: *mut Prefilter, frontend: &Frontend) {
    for address in Family::BOTH.map(|family| frontend.address.of(family)) {
        let hash = hashed(address);
        // SAFETY: the arrays belong to the element, and the bits are computed from their lengths.
        unsafe {
            if frontend.flags & NODE_ADDRESS != 0 {
                set((&raw mut (*prefilter).node_ports).cast(), frontend.port.into());
                set((&raw mut (*prefilter).node_addresses).cast(), node_bit(hash));
            } else {
                let ServiceBits { first, second } = ServiceBits::of(hash);
                set((&raw mut (*prefilter).services).cast(), first);
                set((&raw mut (*prefilter).services).cast(), second);
            }
            for (_, port) in frontend.cluster.iter().chain(&frontend.local) {
                set((&raw mut (*prefilter).endpoints).cast(), (*port).into());
            }
        }
    }
}

/// Sets one bit.
///
/// # Safety
/// The array has such a bit.
unsafe fn set(array: *mut u64, bit: u32) {
    // SAFETY: the caller guarantees that the array has the bit.
    unsafe {
        let word = array.add(bit as usize >> 6);
        word.write_volatile(word.read_volatile() | 1 << (bit & 63));
    }
}

/// The hash of an address in the prefilter.
fn hashed(address: IpAddr) -> u64 {
    match address {
        IpAddr::V4(_) => hash::address::<Address4>(Wire::from_ip(address)),
        IpAddr::V6(_) => hash::address::<Address6>(Wire::from_ip(address)),
    }
}
