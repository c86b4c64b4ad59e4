//! The prefilter: what tells packets of Services from all others, before any lookup.

use super::{Address, WideAddress};

/// Words of one bit array over all ports, or over 16 bits of a hash.
pub const PORT_WORDS: usize = 1024;
/// Words of the bit array over [`ServiceBits`]: 64 KiB. Of the addresses that are none of 10,000
/// ClusterIPs one in 700 has both bits.
pub const SERVICE_WORDS: usize = 8192;
/// Ranges of ClusterIPs of a family that are compared. Kubernetes has one, and one more while it is
/// changed.
pub const CIDRS: usize = 8;

/// Bit arrays and ranges of the prefilter. Ports in host order.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Prefilter {
    /// The node's primary address, IPv4 and IPv6, which most requests to node ports and most
    /// replies are for: comparing it is cheaper than a hash. [`WideAddress::UNSPECIFIED`]: not
    /// known. Its bit in [`Self::node_addresses`] may be missing.
    pub primary: [WideAddress; 2],
    /// Destination ports of frontends on addresses of this node.
    pub node_ports: [u64; PORT_WORDS],
    /// Ports used as source towards endpoints.
    pub pool: [u64; PORT_WORDS],
    /// Ports of endpoints, wherever they are.
    pub endpoints: [u64; PORT_WORDS],
    /// Hashes of this node's addresses: those of frontends, by the agent, and those that have been
    /// the source towards an endpoint, by the packet path. See [`node_bit`].
    pub node_addresses: [u64; PORT_WORDS],
    /// Hashes of addresses and ports of endpoints on this node that have had a flow, by the packet
    /// path: [`endpoint_bit`].
    pub local_endpoints: [u64; PORT_WORDS],
    /// Hashes of all other frontends' addresses, and of ClusterIPs, two bits each: [`ServiceBits`].
    pub services: [u64; SERVICE_WORDS],
    /// Ranges that ClusterIPs are taken from: IPv4, IPv6.
    pub cidrs: [[PrefilterCidr; CIDRS]; 2],
    /// The number of each.
    pub cidr_count: [u32; 2],
}

/// A range of addresses, both in network byte order; of IPv4 as [`WideAddress`] has it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct PrefilterCidr {
    pub network: WideAddress,
    pub mask: WideAddress,
}

/// Bit of an address with this [hash][crate::hash::address] in [`Prefilter::node_addresses`].
#[inline(always)]
pub const fn node_bit(hash: u64) -> u32 {
    (hash >> 48) as u32
}

/// Bit of an address and port in [`Prefilter::local_endpoints`].
#[inline(always)]
pub fn endpoint_bit<A: Address>(address: A, port: u16) -> u32 {
    (crate::hash::endpoint(address, port as u32) >> 48) as u32
}

/// Both bits of an address with a [hash][crate::hash::address] in [`Prefilter::services`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceBits {
    pub first: u32,
    pub second: u32,
}

impl ServiceBits {
    #[inline(always)]
    pub const fn of(hash: u64) -> Self {
        const SHIFT: u32 = u64::BITS - (SERVICE_WORDS as u64 * 64).ilog2();
        // Neighbours differ in few bits of a product: those of the second one are spread by
        // another.
        let again = (hash ^ (hash >> 32)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        Self { first: (hash >> SHIFT) as u32, second: (again >> SHIFT) as u32 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::Address4;

    /// 10,000 ClusterIPs in a row, as an allocator gives them, and as many pods of a range of their
    /// own.
    #[test]
    fn few_pods_share_both_bits_with_a_cluster_ip() {
        let mut bits = vec![false; SERVICE_WORDS * 64];
        let bits_of = |first: u32, number: u32| {
            ServiceBits::of(crate::hash::address(Address4::from_octets((first + number).to_be_bytes())))
        };
        for number in 0..10_000 {
            let ServiceBits { first, second } = bits_of(0x0a60_0001, number);
            (bits[first as usize], bits[second as usize]) = (true, true);
        }
        let collides = |number: &u32| {
            let ServiceBits { first, second } = bits_of(0x0af4_0000, *number);
            bits[first as usize] && bits[second as usize]
        };
        let collisions = (0..100_000).filter(collides).count();
        assert!(collisions < 250, "{collisions} of 100,000 pods");
    }
}
