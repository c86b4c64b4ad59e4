//! Ranges of cluster IPs in which an address without a Service counts as unallocated: without the
//! addresses of Services that another proxy serves, and empty while the set of Services is not
//! known.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use ipnet::IpNet;

use super::ServiceName;

/// The largest number of ranges per family that the packet path takes.
const MOST: usize = 1024;

/// Cluster IPs of Services that another proxy serves, each with its Services.
#[derive(Clone, Debug, Default)]
pub(super) struct ForeignIps(BTreeMap<IpAddr, BTreeSet<ServiceName>>);

impl ForeignIps {
    pub(super) fn add(&mut self, name: &ServiceName, addresses: &[IpAddr]) {
        for address in addresses {
            self.0.entry(*address).or_default().insert(name.clone());
        }
    }

    pub(super) fn remove(&mut self, name: &ServiceName, addresses: &[IpAddr]) {
        for address in addresses {
            if let Some(services) = self.0.get_mut(address) {
                services.remove(name);
                if services.is_empty() {
                    self.0.remove(address);
                }
            }
        }
    }

    /// Returns the Service of another proxy that has an address.
    pub(super) fn owner(&self, address: IpAddr) -> Option<&ServiceName> {
        self.0.get(&address)?.first()
    }

    /// Returns `ranges` without these addresses. A family whose ranges become too many gets none:
    /// packets to its unallocated addresses then pass.
    pub(super) fn taken_from(&self, ranges: &BTreeSet<IpNet>) -> BTreeSet<IpNet> {
        let mut left = ranges.clone();
        for ipv6 in [false, true] {
            for address in self.0.keys().filter(|address| address.is_ipv6() == ipv6) {
                let around: Vec<_> = left.iter().filter(|range| range.contains(address)).copied().collect();
                for range in around {
                    left.remove(&range);
                    left.extend(without(range, *address));
                }
                if left.iter().filter(|range| range.addr().is_ipv6() == ipv6).count() > MOST {
                    left.retain(|range| range.addr().is_ipv6() != ipv6);
                    break;
                }
            }
        }
        left
    }
}

/// Splits a range at an address: returns the halves that do not contain it, down to the address
/// itself.
fn without(range: IpNet, address: IpAddr) -> Vec<IpNet> {
    let mut left = Vec::new();
    let mut around = range.trunc();
    while let Ok(halves) = around.subnets(around.prefix_len() + 1) {
        let Some(inner) = halves.into_iter().fold(None, |inner, half| {
            if half.contains(&address) {
                return Some(half);
            }
            left.push(half);
            inner
        }) else {
            break;
        };
        around = inner;
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_many_leave_no_range_of_their_family() {
        let ranges: BTreeSet<IpNet> =
            ["10.96.0.0/12", "fd00:10:96::/112"].iter().map(|range| range.parse().unwrap()).collect();
        let name = ServiceName { namespace: "ns".to_owned(), name: "mesh".to_owned() };
        let mut foreign = ForeignIps::default();
        assert_eq!(foreign.taken_from(&ranges), ranges);
        let some: Vec<_> = (0..40).map(|number| IpAddr::from([10, 96, number, 1])).collect();
        foreign.add(&name, &some);
        let left = foreign.taken_from(&ranges);
        assert!(some.iter().all(|address| !left.iter().any(|range| range.contains(address))), "{left:?}");
        assert!(left.iter().any(|range| range.contains(&IpAddr::from([10, 96, 0, 2]))), "{left:?}");
        foreign.add(&name, &(0..200).map(|number| IpAddr::from([10, 97, number, 1])).collect::<Vec<_>>());
        assert_eq!(foreign.taken_from(&ranges), ["fd00:10:96::/112".parse().unwrap()].into());
    }
}
