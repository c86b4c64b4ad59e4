//! The prefilter: bit arrays with which the packet path passes packets that are not for a Service.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use ipnet::IpNet;
use traffic_policy_ebpf::{
    abi::{
        CIDRS, Frontend, PORT_WORDS, Prefilter, PrefilterCidr, SERVICE_WORDS, ServiceBits, frontend,
        prefilter::node_bit,
    },
    hash,
};

use super::{
    keys::{ToWire, first, wide},
    mmap::Mapped,
};

/// The bit arrays of the prefilter that the agent writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Array {
    NodePorts,
    SnatPorts,
    Endpoints,
    NodeAddresses,
    Services,
}

fn word(filter: *mut Prefilter, array: Array, index: usize) -> *mut u64 {
    // SAFETY: these are fields of the mapped element; `index` is below the length of the array in
    // all callers.
    unsafe {
        let first = match array {
            Array::NodePorts => (&raw mut (*filter).node_ports).cast::<u64>(),
            Array::SnatPorts => (&raw mut (*filter).snat_ports).cast::<u64>(),
            Array::Endpoints => (&raw mut (*filter).endpoints).cast::<u64>(),
            Array::NodeAddresses => (&raw mut (*filter).node_addresses).cast::<u64>(),
            Array::Services => (&raw mut (*filter).services).cast::<u64>(),
        };
        first.add(index)
    }
}

/// Writes the node's primary address of each family, the first one in `primary`.
pub fn set_primary(filter: &mut Mapped<Prefilter>, primary: &[IpAddr]) {
    // SAFETY: this is a field of the mapped element.
    filter.store(|f| unsafe { &raw mut (*f).primary }, first(primary));
}

/// Sets bits; returns the number of words written. A bit is set before any entry is written that
/// needs it. The packet path sets bits of some of these arrays at the same time.
pub fn add(filter: &mut Mapped<Prefilter>, array: Array, bits: impl IntoIterator<Item = u32>) -> usize {
    let set = |bit: &u32| filter.set_bits(|f| word(f, array, *bit as usize >> 6), 1 << (bit & 63));
    bits.into_iter().filter(set).count()
}

/// Makes an array of `words` words equal to `bits`; returns the number of words written.
fn replace(filter: &mut Mapped<Prefilter>, array: Array, words: usize, bits: &BTreeSet<u32>) -> usize {
    let mut wanted = vec![0_u64; words];
    for bit in bits {
        wanted[*bit as usize >> 6] |= 1 << (bit & 63);
    }
    let store = |(index, wanted): &(usize, u64)| filter.store(|f| word(f, array, *index), *wanted);
    wanted.into_iter().enumerate().filter(store).count()
}

/// Writes the ranges that ClusterIPs are allocated from; returns the number of words written. If
/// there are more than fit, every address is considered part of one: the packet path then looks
/// more closely.
fn set_cidrs(filter: &mut Mapped<Prefilter>, ranges: &BTreeSet<IpNet>) -> usize {
    let mut written = 0;
    for ipv6 in [false, true] {
        let of_family: Vec<_> = ranges.iter().filter(|range| range.addr().is_ipv6() == ipv6).collect();
        let cidrs: Vec<_> = if of_family.len() > CIDRS {
            vec![PrefilterCidr::default()]
        } else {
            of_family.into_iter().map(cidr).collect()
        };
        for (index, cidr) in cidrs.iter().enumerate() {
            // SAFETY: this is a field of the mapped element; there are no more than CIDRS.
            let place = |f: *mut Prefilter| unsafe { &raw mut (*f).cidrs[usize::from(ipv6)][index] };
            written += usize::from(filter.store(place, *cidr));
        }
        // SAFETY: this is a field of the mapped element.
        let count = |f: *mut Prefilter| unsafe { &raw mut (*f).cidr_count[usize::from(ipv6)] };
        written += usize::from(filter.store(count, cidrs.len() as u32));
    }
    written
}

fn cidr(range: &IpNet) -> PrefilterCidr {
    PrefilterCidr { network: wide(range.network()), mask: wide(range.netmask()) }
}

/// The bits that frontends and endpoints need.
#[derive(Default)]
pub struct Needed {
    node_ports: BTreeSet<u32>,
    node_addresses: BTreeSet<u32>,
    endpoints: BTreeSet<u32>,
    services: BTreeSet<u32>,
    /// The ranges that ClusterIPs are allocated from; `None` if they are unchanged.
    pub service_cidrs: Option<BTreeSet<IpNet>>,
}

fn hashed(address: IpAddr) -> u64 {
    match address {
        IpAddr::V4(address) => hash::address(address.to_wire()),
        IpAddr::V6(address) => hash::address(address.to_wire()),
    }
}

impl Needed {
    /// Adds the bits of a frontend. A frontend on an address of the node is also matched by its
    /// port, because these addresses have much other traffic.
    pub fn frontend(&mut self, address: SocketAddr, frontend: &Frontend) {
        let loopback = address.ip().is_unspecified() || address.ip().is_loopback();
        if loopback || frontend.flags & frontend::NODE_ADDRESS != 0 {
            self.node_ports.insert(address.port().into());
            self.node_addresses.insert(node_bit(hashed(address.ip())));
        } else {
            self.address(address.ip());
        }
    }

    /// Adds the bits of an address, any port of which may belong to a Service.
    pub fn address(&mut self, address: IpAddr) {
        let ServiceBits { first, second } = ServiceBits::of(hashed(address));
        self.services.extend([first, second]);
    }

    pub fn endpoint(&mut self, address: SocketAddr) {
        self.endpoints.insert(address.port().into());
    }

    /// Removes the bits of frontends and ClusterIPs that no longer exist. It must only be called
    /// while there are no flows: those of a deleted Service need its bits. Sockets need the
    /// endpoints' bits to show the application the address that it used; they outlive all flows and
    /// are not counted, so bits that the packet path sets stay.
    pub fn replace_all(&self, filter: &mut Mapped<Prefilter>) -> usize {
        replace(filter, Array::NodePorts, PORT_WORDS, &self.node_ports)
            + replace(filter, Array::Services, SERVICE_WORDS, &self.services)
            + self.service_cidrs.as_ref().map_or(0, |ranges| set_cidrs(filter, ranges))
    }

    /// Adds the bits to the prefilter; returns the number of words written.
    pub fn add_to(&self, filter: &mut Mapped<Prefilter>) -> usize {
        add(filter, Array::NodePorts, self.node_ports.iter().copied())
            + add(filter, Array::NodeAddresses, self.node_addresses.iter().copied())
            + add(filter, Array::Endpoints, self.endpoints.iter().copied())
            + add(filter, Array::Services, self.services.iter().copied())
            + self.service_cidrs.as_ref().map_or(0, |ranges| set_cidrs(filter, ranges))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nodes_addresses_go_by_port_others_by_address() {
        let mut needed = Needed::default();
        let of_node = Frontend { flags: frontend::NODE_ADDRESS, ..Frontend::default() };
        needed.frontend("10.96.0.1:443".parse().unwrap(), &Frontend::default());
        assert_eq!(
            (needed.node_ports.len(), needed.services.len()),
            (0, 2),
            "a web server here has port 443, too"
        );
        needed.frontend("192.0.2.1:30080".parse().unwrap(), &of_node);
        needed.frontend("0.0.0.0:30081".parse().unwrap(), &Frontend::default());
        assert_eq!(needed.node_ports, [30080, 30081].into());
        assert_eq!(needed.services.len(), 2);
    }

    #[test]
    fn a_range_is_compared_in_network_byte_order() {
        let range = cidr(&"10.233.0.0/18".parse().unwrap());
        let inside = |address: [u8; 4]| {
            let [head, _] = wide(address.into()).wire();
            head & range.mask.wire()[0] == range.network.wire()[0]
        };
        assert!(
            inside([10, 233, 63, 255]) && !inside([10, 233, 64, 1]),
            "kubespray's pods begin at 10.233.64.0"
        );
    }
}
