//! The MTUs of routes (`ip route … mtu N`). The kernel applies them when it forwards; its FIB
//! lookup for programs does not.

use std::collections::{BTreeMap, btree_map::Entry};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use netlink_packet_route::{
    AddressFamily,
    route::{RouteAddress, RouteAttribute, RouteFlags, RouteMessage, RouteMetric},
};

/// RT_TABLE_MAIN of linux/rtnetlink.h.
const MAIN: u32 = 254;
/// IPV6_MIN_MTU: the kernel accepts no smaller value.
const LEAST_IPV6: u32 = 1280;

/// The MTU of each prefix in bytes, or 0 for a prefix without one inside a prefix with one. The
/// longest prefix of an address applies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RouteMtus(pub BTreeMap<IpNet, u32>);

impl RouteMtus {
    /// Returns the MTUs of the main table's routes; for each prefix, that of the route that the
    /// kernel prefers.
    pub(super) fn of(routes: &[RouteMessage]) -> Self {
        let mut best: BTreeMap<IpNet, (u32, u32)> = BTreeMap::new();
        for (prefix, priority, mtu) in routes.iter().filter_map(read) {
            match best.entry(prefix) {
                Entry::Vacant(free) => drop(free.insert((priority, mtu))),
                Entry::Occupied(mut held) => {
                    let (known, least) = *held.get();
                    if priority < known {
                        held.insert((priority, mtu));
                    } else if priority == known {
                        // Several nexthops of IPv6 are separate routes.
                        let mtu = if least == 0 || mtu == 0 { least.max(mtu) } else { least.min(mtu) };
                        held.insert((priority, mtu));
                    }
                }
            }
        }
        // In this order a prefix comes before those within it.
        let mut around: Vec<(IpNet, u32)> = Vec::new();
        let mut differing = BTreeMap::new();
        for (prefix, (_, mtu)) in best {
            while around.last().is_some_and(|(outer, _)| !outer.contains(&prefix)) {
                around.pop();
            }
            if around.last().map_or(0, |(_, mtu)| *mtu) != mtu {
                differing.insert(prefix, mtu);
                around.push((prefix, mtu));
            }
        }
        Self(differing)
    }

    /// Returns as many MTUs as there is room for, IPv4 and IPv6, and the number that are left out.
    /// Prefixes without an MTU are left out first, because a smaller MTU than fits costs less than
    /// a larger one.
    pub fn fitting(&self, room: [u32; 2]) -> (Self, usize) {
        let mut kept: Vec<(IpNet, u32)> = Vec::new();
        for (ipv6, room) in [false, true].into_iter().zip(room) {
            let of_family = self.0.iter().filter(|(prefix, _)| prefix.addr().is_ipv6() == ipv6);
            let mut of_family: Vec<_> = of_family.map(|(prefix, mtu)| (*prefix, *mtu)).collect();
            of_family.sort_by_key(|(prefix, mtu)| (*mtu == 0, prefix.prefix_len()));
            kept.extend(of_family.into_iter().take(room as usize));
        }
        let left_out = self.0.len() - kept.len();
        (Self(kept.into_iter().collect()), left_out)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Returns the MTU of a route, in bytes, if it has one.
pub(super) fn named(message: &RouteMessage) -> Option<u32> {
    message.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Metrics(metrics) => metrics.iter().find_map(|metric| match metric {
            RouteMetric::Mtu(mtu) => Some(*mtu),
            _ => None,
        }),
        _ => None,
    })
}

/// Returns prefix, priority and MTU (0 for none) of a route that packets without a type of service
/// may take.
fn read(message: &RouteMessage) -> Option<(IpNet, u32, u32)> {
    let (mut table, mut priority, mut address) = (u32::from(message.header.table), 0, None);
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Table(number) => table = *number,
            RouteAttribute::Priority(number) => priority = *number,
            RouteAttribute::Destination(destination) => address = Some(destination),
            _ => {}
        }
    }
    let header = &message.header;
    let from_anywhere = header.source_prefix_length == 0;
    if table != MAIN || header.tos != 0 || !from_anywhere || header.flags.contains(RouteFlags::Dead) {
        return None;
    }
    let length = header.destination_prefix_length;
    let prefix = match (header.address_family, address) {
        (AddressFamily::Inet, None) if length == 0 => Ipv4Net::default().into(),
        (AddressFamily::Inet6, None) if length == 0 => Ipv6Net::default().into(),
        (_, Some(RouteAddress::Inet(address))) => Ipv4Net::new(*address, length).ok()?.trunc().into(),
        (_, Some(RouteAddress::Inet6(address))) => Ipv6Net::new(*address, length).ok()?.trunc().into(),
        _ => return None,
    };
    let mtu = match named(message).unwrap_or(0) {
        0 => 0,
        mtu if matches!(prefix, IpNet::V6(_)) => mtu.max(LEAST_IPV6),
        mtu => mtu,
    };
    // No packet is longer.
    Some((prefix, priority, if mtu >= 0xffff { 0 } else { mtu }))
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use netlink_packet_route::route::{RouteHeader, RouteType};

    use super::*;

    struct Row(&'static str, u8, u32, Option<u32>);

    fn message(Row(prefix, table, priority, mtu): &Row) -> RouteMessage {
        let prefix: IpNet = prefix.parse().unwrap();
        let mut message = RouteMessage::default();
        let (family, address) = match prefix.addr() {
            IpAddr::V4(address) => (AddressFamily::Inet, RouteAddress::Inet(address)),
            IpAddr::V6(address) => (AddressFamily::Inet6, RouteAddress::Inet6(address)),
        };
        message.header = RouteHeader {
            address_family: family,
            destination_prefix_length: prefix.prefix_len(),
            table: *table,
            kind: RouteType::Unicast,
            ..RouteHeader::default()
        };
        if prefix.prefix_len() > 0 {
            message.attributes.push(RouteAttribute::Destination(address));
        }
        message.attributes.push(RouteAttribute::Priority(*priority));
        let metrics = mtu.map(|mtu| RouteAttribute::Metrics(vec![RouteMetric::Mtu(mtu)]));
        message.attributes.extend(metrics);
        message
    }

    fn mtus(rows: &[Row]) -> Vec<(String, u32)> {
        let messages: Vec<_> = rows.iter().map(message).collect();
        RouteMtus::of(&messages).0.iter().map(|(prefix, mtu)| (prefix.to_string(), *mtu)).collect()
    }

    fn wanted(list: &[(&str, u32)]) -> Vec<(String, u32)> {
        list.iter().map(|(prefix, mtu)| ((*prefix).to_owned(), *mtu)).collect()
    }

    #[test]
    fn each_address_has_the_mtu_of_the_route_that_the_kernel_takes() {
        let rows = [
            Row("0.0.0.0/0", 254, 0, None),
            Row("10.0.0.0/8", 254, 0, Some(1400)),
            // One prefix has the MTU of the prefix around it, another has none inside a prefix with
            // one.
            Row("10.1.0.0/16", 254, 0, Some(1400)),
            Row("10.2.0.0/16", 254, 0, None),
            Row("10.2.3.0/24", 254, 0, Some(1300)),
            Row("10.3.0.0/16", 100, 0, Some(1200)),
            // The smaller metric is preferred.
            Row("192.0.2.0/24", 254, 200, Some(1200)),
            Row("192.0.2.0/24", 254, 100, Some(1350)),
            Row("198.51.100.0/24", 254, 0, Some(65_535)),
            Row("::/0", 254, 1024, Some(1300)),
            Row("2001:db8::/32", 254, 1024, Some(1000)),
            Row("2001:db8:1::/48", 254, 1024, None),
        ];
        let found = wanted(&[
            ("10.0.0.0/8", 1400),
            ("10.2.0.0/16", 0),
            ("10.2.3.0/24", 1300),
            ("192.0.2.0/24", 1350),
            ("::/0", 1300),
            ("2001:db8::/32", 1280),
            ("2001:db8:1::/48", 0),
        ]);
        assert_eq!(mtus(&rows), found);
        assert_eq!(mtus(&rows[..1]), []);
    }

    #[test]
    fn of_several_ways_the_narrowest_counts() {
        for order in [[1300, 1400], [1400, 1300]] {
            let [first, second] = order.map(|mtu| Row("2001:db8::/32", 254, 1024, Some(mtu)));
            assert_eq!(mtus(&[first, second]), wanted(&[("2001:db8::/32", 1300)]));
        }
    }

    #[test]
    fn what_names_no_mtu_is_left_out_first() {
        let rows = [
            Row("10.0.0.0/8", 254, 0, Some(1400)),
            Row("10.2.0.0/16", 254, 0, None),
            Row("10.2.3.0/24", 254, 0, Some(1300)),
        ];
        let messages: Vec<_> = rows.iter().map(message).collect();
        let (fitting, left_out) = RouteMtus::of(&messages).fitting([2, 2]);
        assert_eq!((fitting.0.into_values().collect::<Vec<_>>(), left_out), (vec![1400, 1300], 1));
    }
}
