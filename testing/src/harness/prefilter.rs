//! Bits of the prefilter, as the agent sets them.

use std::net::IpAddr;

use traffic_policy_agent::dataplane::wide;
use traffic_policy_ebpf::abi::{
    Address4, Address6, Prefilter, PrefilterCidr, ServiceBits, WideAddress, frontend::NODE_ADDRESS,
    prefilter::node_bit,
};
use traffic_policy_ebpf::hash;

use super::flows::Wire;
use super::{Frontend, Harness, Setup, Spot};
use crate::lab::{Addresses, Family};

impl Harness {
    /// As if this address had the bit of one of the node's in the prefilter.
    pub fn share_bit_with_the_node(&mut self, address: IpAddr) {
        let filter = self.tables.prefilter.pointer();
        // SAFETY: the element is mapped as long as the tables live, and the array has a bit of each number of 16 bits.
        unsafe { set((&raw mut (*filter).node_addresses).cast(), node_bit(hashed(address))) };
    }
}

impl Harness {
    /// As if the agent did not know the node's primary addresses.
    pub fn forget_primary(&mut self) {
        let filter = self.tables.prefilter.pointer();
        // SAFETY: the element is mapped as long as the tables live.
        unsafe { (&raw mut (*filter).primary).write_volatile([WideAddress::UNSPECIFIED; 2]) };
    }

    /// As if no address had a bit of the node's in the prefilter.
    pub fn forget_node_bits(&mut self) {
        let filter = self.tables.prefilter.pointer();
        // SAFETY: as above; no program runs meanwhile.
        unsafe { (&raw mut (*filter).node_addresses).write_bytes(0, 1) };
    }
}

/// Makes the prefilter as `setup` says.
///
/// # Safety
/// `prefilter` is mapped, and no program runs meanwhile.
pub(super) unsafe fn fill(prefilter: *mut Prefilter, setup: &Setup) {
    // SAFETY: as the caller says; a port is the number of a bit.
    unsafe {
        prefilter.write_bytes(0, 1);
        (*prefilter).primary = Family::BOTH.map(|family| wide(Spot::Node.of(family)));
        setup.frontends.iter().for_each(|frontend| name(prefilter, frontend));
        for port in &setup.pool {
            set((&raw mut (*prefilter).pool).cast(), (*port).into());
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
        // SAFETY: arrays of the element, by whose lengths the bits are made.
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

/// # Safety
/// The array has such a bit.
unsafe fn set(array: *mut u64, bit: u32) {
    // SAFETY: as the caller says.
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
