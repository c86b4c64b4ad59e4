//! The prefilter: bit arrays by which the packet path passes what is not a Service packet.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use ipnet::IpNet;
use traffic_policy_ebpf::{
    abi::{PORT_WORDS, Prefilter},
    hash,
};

use super::{keys::ToWire, mmap::Mapped};

/// One bit array.
#[derive(Clone, PartialEq, Eq)]
pub struct Bits(Box<[u64; PORT_WORDS]>);

impl Default for Bits {
    fn default() -> Self {
        Self(Box::new([0; PORT_WORDS]))
    }
}

impl Bits {
    pub fn set(&mut self, index: u16) {
        self.0[usize::from(index >> 6)] |= 1 << (index & 63);
    }
}

impl FromIterator<u16> for Bits {
    fn from_iter<I: IntoIterator<Item = u16>>(indices: I) -> Self {
        let mut bits = Self::default();
        for index in indices {
            bits.set(index);
        }
        bits
    }
}

/// The arrays in the kernel's hands, by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Array {
    Frontends,
    Pool,
    Endpoints,
    ClusterIps,
    ServiceCidrs,
}

fn word(filter: *mut Prefilter, array: Array, index: usize) -> *mut u64 {
    // SAFETY: fields of the mapped element; `index` is below PORT_WORDS in all callers.
    unsafe {
        let first = match array {
            Array::Frontends => (&raw mut (*filter).frontends).cast::<u64>(),
            Array::Pool => (&raw mut (*filter).pool).cast::<u64>(),
            Array::Endpoints => (&raw mut (*filter).endpoints).cast::<u64>(),
            Array::ClusterIps => (&raw mut (*filter).cluster_ips).cast::<u64>(),
            Array::ServiceCidrs => (&raw mut (*filter).service_cidrs).cast::<u64>(),
        };
        first.add(index)
    }
}

/// Sets bits; returns the number of words written. A bit is set before anything is written that needs it.
pub fn add(filter: &mut Mapped<Prefilter>, array: Array, bits: &Bits) -> usize {
    (0..PORT_WORDS)
        .filter(|index| {
            let held = filter.load(|f| word(f, array, *index));
            filter.store(|f| word(f, array, *index), held | bits.0[*index])
        })
        .count()
}

/// Makes an array equal to `bits`; returns the number of words written.
fn replace(filter: &mut Mapped<Prefilter>, array: Array, bits: &Bits) -> usize {
    (0..PORT_WORDS).filter(|index| filter.store(|f| word(f, array, *index), bits.0[*index])).count()
}

/// Bits that frontends and endpoints need.
#[derive(Default)]
pub struct Needed {
    pub frontends: Bits,
    pub endpoints: Bits,
    pub cluster_ips: Bits,
    pub service_cidrs: Bits,
}

impl Needed {
    /// Of a frontend. ClusterIPs go by their address: their ports (80, 443) are common.
    pub fn frontend(&mut self, address: SocketAddr, cluster_ips: &BTreeSet<IpAddr>) {
        if cluster_ips.contains(&address.ip()) {
            self.cluster_ip(address.ip());
        } else {
            self.frontends.set(address.port());
        }
    }

    pub fn cluster_ip(&mut self, address: IpAddr) {
        self.cluster_ips.set(match address {
            IpAddr::V4(address) => hash::address(address.to_wire()),
            IpAddr::V6(address) => hash::address(address.to_wire()),
        });
    }

    /// Of a range that ClusterIPs are taken from: [`hash::prefix`] of every address in it.
    pub fn service_cidr(&mut self, range: IpNet) {
        match range {
            IpNet::V4(range) => {
                let first = u32::from(range.network()) >> 16;
                let last = u32::from(range.broadcast()) >> 16;
                (first..=last).for_each(|bit| self.service_cidrs.set(bit as u16));
            }
            // Kubernetes takes ClusterIPs from ranges of /64 and longer; a shorter one has too many prefixes to name.
            IpNet::V6(range) if range.prefix_len() < 64 => {
                self.service_cidrs = Bits(Box::new([u64::MAX; PORT_WORDS]));
            }
            IpNet::V6(range) => self.service_cidrs.set(hash::prefix(range.network().to_wire())),
        }
    }

    pub fn endpoint(&mut self, address: SocketAddr) {
        self.endpoints.set(address.port());
    }

    /// Takes away every other bit but those of endpoints. Only while there are no flows: those of a deleted Service need its
    /// bits. Sockets, which need the endpoints' bits to show the application the address that it named, outlive all flows
    /// and are not counted.
    pub fn replace_all(&self, filter: &mut Mapped<Prefilter>) -> usize {
        replace(filter, Array::Frontends, &self.frontends)
            + replace(filter, Array::ClusterIps, &self.cluster_ips)
            + replace(filter, Array::ServiceCidrs, &self.service_cidrs)
    }

    /// Adds them; returns the number of words written.
    pub fn add_to(&self, filter: &mut Mapped<Prefilter>) -> usize {
        add(filter, Array::Frontends, &self.frontends)
            + add(filter, Array::Endpoints, &self.endpoints)
            + add(filter, Array::ClusterIps, &self.cluster_ips)
            + add(filter, Array::ServiceCidrs, &self.service_cidrs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Bits {
        fn contains(&self, index: u16) -> bool {
            self.0[usize::from(index >> 6)] >> (index & 63) & 1 == 1
        }
    }

    #[test]
    fn cluster_ips_go_by_address_others_by_port() {
        let mut needed = Needed::default();
        let service: BTreeSet<IpAddr> = ["10.96.0.1".parse().unwrap()].into();
        needed.frontend("10.96.0.1:443".parse().unwrap(), &service);
        assert!(!needed.frontends.contains(443));
        assert_eq!(needed.cluster_ips.0.iter().map(|w| w.count_ones()).sum::<u32>(), 1);
        needed.frontend("192.0.2.1:30080".parse().unwrap(), &service);
        assert!(needed.frontends.contains(30080));
        assert!(!needed.frontends.contains(30081));
    }
}
