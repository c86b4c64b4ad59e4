//! The way of this node's own packets to an address, as the kernel's routes have it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use super::netlink::{Connection, Message, attribute, find, protocols};

// linux/rtnetlink.h
const RTM_GETROUTE: u16 = 26;
const RTN_UNICAST: u8 = 1;
const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;
const RTA_VIA: u16 = 18;
/// `struct rtmsg`.
const HEADER: usize = 12;

/// A next hop: a gateway, or the destination itself where it is on-link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HopAddress {
    /// The index of the device.
    pub link: u32,
    pub address: IpAddr,
}

impl HopAddress {
    fn is_link_local(&self) -> bool {
        match self.address {
            IpAddr::V4(address) => address.is_link_local(),
            IpAddr::V6(address) => address.is_unicast_link_local(),
        }
    }

    /// Returns the address if it means the same without the device.
    #[must_use]
    pub fn global(&self) -> Option<IpAddr> {
        (!self.is_link_local()).then_some(self.address)
    }
}

/// The form for readers is none that the name of a Node can have, which may be an address.
impl fmt::Display for HopAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "next hop {}", self.address)?;
        if self.is_link_local() { write!(f, "%{}", self.link) } else { Ok(()) }
    }
}

/// Returns the next hop towards each of these addresses; addresses that are not routed are left
/// out. It blocks for some microseconds for each.
pub fn ways(addresses: &BTreeSet<IpAddr>) -> io::Result<BTreeMap<IpAddr, HopAddress>> {
    let mut kernel = Connection::open(protocols::NETLINK_ROUTE)?;
    let mut ways = BTreeMap::new();
    for &address in addresses {
        match way(&mut kernel, address) {
            Ok(Some(hop)) => drop(ways.insert(address, hop)),
            Ok(None) => {}
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                return Err(error);
            }
            // No route leads there.
            Err(_) => {}
        }
    }
    Ok(ways)
}

/// Returns the next hop towards an address; `None` if its route is none of unicast.
pub(super) fn way(kernel: &mut Connection, address: IpAddr) -> io::Result<Option<HopAddress>> {
    Ok(ask(kernel, address)?.iter().find_map(|route| hop(route, address)))
}

/// Returns the kernel's answer to the question for the route to an address.
///
/// # Errors
/// The kernel's error: often that no route leads there.
pub(super) fn ask(kernel: &mut Connection, address: IpAddr) -> io::Result<Vec<Message>> {
    let (family, bits, bytes) = parts(address);
    let mut request = vec![0; HEADER];
    (request[0], request[1]) = (family, bits);
    request.extend(attribute(RTA_DST, &bytes));
    kernel.request(RTM_GETROUTE, 0, &request)
}

/// Returns the next hop of such an answer; `None` if the route is none of unicast.
pub(super) fn hop(route: &Message, destination: IpAddr) -> Option<HopAddress> {
    let attributes = route.payload.get(HEADER..)?;
    let unicast = route.payload.get(7) == Some(&RTN_UNICAST);
    let link = find(attributes, RTA_OIF).filter(|_| unicast)?;
    let link = u32::from_ne_bytes(*link.first_chunk()?);
    let address = match (find(attributes, RTA_GATEWAY), find(attributes, RTA_VIA)) {
        (Some(gateway), _) => parse(gateway)?,
        // The family comes first: `struct rtvia`.
        (None, Some(via)) => parse(via.get(2..)?)?,
        (None, None) => destination,
    };
    Some(HopAddress { link, address })
}

fn parse(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.len() {
        4 => Some(IpAddr::from(Ipv4Addr::from(*bytes.first_chunk()?))),
        16 => Some(IpAddr::from(Ipv6Addr::from(*bytes.first_chunk()?))),
        _ => None,
    }
}

/// Returns family, length in bits and bytes of an address.
pub(super) fn parts(address: IpAddr) -> (u8, u8, Vec<u8>) {
    match address {
        IpAddr::V4(address) => (libc::AF_INET as u8, 32, address.octets().to_vec()),
        IpAddr::V6(address) => (libc::AF_INET6 as u8, 128, address.octets().to_vec()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const THERE: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 1, 2, 3));

    #[test]
    fn a_gateway_of_either_family_or_the_destination_itself() {
        let route = |kind: u8, attributes: &[&[u8]]| {
            let mut payload = vec![0; HEADER];
            payload[7] = kind;
            payload.extend(attributes.concat());
            hop(&Message { kind: 24, payload }, THERE)
        };
        let by = |address: IpAddr| Some(HopAddress { link: 7, address });
        let out = attribute(RTA_OIF, &7u32.to_ne_bytes());
        let gateway = attribute(RTA_GATEWAY, &[192, 0, 2, 1]);
        let six = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);
        let via = attribute(RTA_VIA, &[&[10, 0][..], &six.octets()].concat());
        assert_eq!(route(RTN_UNICAST, &[&out]), by(THERE));
        assert_eq!(route(RTN_UNICAST, &[&out, &gateway]), by([192, 0, 2, 1].into()));
        assert_eq!(route(RTN_UNICAST, &[&out, &via]), by(six.into()));
        assert_eq!(route(RTN_UNICAST, &[&gateway]), None);
        // RTN_LOCAL, RTN_BLACKHOLE
        assert_eq!(route(2, &[&out]), None);
        assert_eq!(route(6, &[&out]), None);
    }

    /// A link-local address alone names no neighbour.
    #[test]
    fn a_link_local_hop_is_named_with_its_device() {
        let near = HopAddress { link: 3, address: "fe80::1".parse().unwrap() };
        assert_eq!((near.to_string().as_str(), near.global()), ("next hop fe80::1%3", None));
        let far = HopAddress { link: 3, address: THERE };
        assert_eq!((far.to_string().as_str(), far.global()), ("next hop 10.1.2.3", Some(THERE)));
    }

    #[test]
    fn the_kernel_routes_nothing_of_its_own_elsewhere() {
        let loopback = BTreeSet::from([IpAddr::from(Ipv4Addr::LOCALHOST)]);
        assert!(ways(&loopback).unwrap().is_empty(), "a local route has no next hop");
    }
}
