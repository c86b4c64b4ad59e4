//! The prefilter: bit arrays that separate packets of Services from all others, before any look-up.

use super::{Address, RouteConfig, WideAddress};

/// The words of one bit array over all ports, or over 16 bits of a hash.
pub const PORT_WORDS: usize = 1024;
/// The words of the bit array over [`ServiceBits`]: 64 KiB. With 10,000 ClusterIPs, one in 700 of
/// all other addresses has both bits set.
pub const SERVICE_WORDS: usize = 8192;
/// The ranges of ClusterIPs of one family that are compared. Kubernetes has one, and a second while
/// it is changed.
pub const CIDRS: usize = 8;

/// The bit arrays and ranges of the prefilter. Ports are in host order.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Prefilter {
    /// The node's primary address, IPv4 and IPv6, the destination of most requests to node ports
    /// and of most replies: comparing it is cheaper than a hash. [`WideAddress::UNSPECIFIED`]: not
    /// known. Its bit in [`Self::node_addresses`] may be missing.
    pub primary: [WideAddress; 2],
    /// The epochs of routes, which lie in the cache line of `primary`.
    pub routes: RouteConfig,
    /// The destination ports of frontends on addresses of this node.
    pub node_ports: [u64; PORT_WORDS],
    /// The ports used as source towards endpoints.
    pub snat_ports: [u64; PORT_WORDS],
    /// The ports of endpoints, on any node.
    pub endpoints: [u64; PORT_WORDS],
    /// Hashes of this node's addresses: the agent sets those of frontends, the packet path those
    /// that have been the source towards an endpoint. See [`node_bit`].
    pub node_addresses: [u64; PORT_WORDS],
    /// Hashes of addresses and ports of endpoints on this node that have had a flow, set by the
    /// packet path: [`endpoint_bit`].
    pub local_endpoints: [u64; PORT_WORDS],
    /// Hashes of all other frontends' addresses, and of ClusterIPs, two bits each: [`ServiceBits`].
    pub services: [u64; SERVICE_WORDS],
    /// The ranges that ClusterIPs are allocated from: IPv4, IPv6.
    pub cidrs: [[PrefilterCidr; CIDRS]; 2],
    /// The number of ranges of each family.
    pub cidr_count: [u32; 2],
}

/// A range of addresses, both in network byte order; IPv4 in the form of [`WideAddress`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct PrefilterCidr {
    pub network: WideAddress,
    pub mask: WideAddress,
}

/// The bit of an address with this [hash][crate::hash::address] in [`Prefilter::node_addresses`].
#[inline(always)]
pub const fn node_bit(hash: u64) -> u32 {
    (hash >> 48) as u32
}

/// The bit of an address and port in [`Prefilter::local_endpoints`].
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
        // Neighbouring addresses differ in few bits of a product: another multiplication spreads
        // the second bits.
        let again = (hash ^ (hash >> 32)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        Self { first: (hash >> SHIFT) as u32, second: (again >> SHIFT) as u32 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::Address4;

    /// 10,000 consecutive ClusterIPs, as an allocator gives them, and 100,000 pods of another
    /// range.
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
