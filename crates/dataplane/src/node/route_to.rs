//! The route to one address: its MTU, its next hop, and the neighbour there.

use std::{io, net::IpAddr};

use super::{
    netlink::{Connection, Message, attribute, find, protocols},
    way::{self, HopAddress},
};

// linux/rtnetlink.h, linux/neighbour.h
const RTM_GETNEIGH: u16 = 30;
const RTA_METRICS: u16 = 8;
const RTAX_MTU: u16 = 2;
const NDA_DST: u16 = 1;
const NDA_LLADDR: u16 = 2;
const NUD_INCOMPLETE: u16 = 1;
const NUD_FAILED: u16 = 32;
/// `struct rtmsg`, `struct ndmsg`.
const HEADER: usize = 12;

/// A route of unicast, as it is for one destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteTo {
    pub hop: HopAddress,
    /// The MTU in bytes that the route itself names, or that the kernel has learned of an ICMP
    /// error; `None`: that of the device counts.
    pub mtu: Option<u32>,
}

impl RouteTo {
    /// Returns the route of this node's own packets to an address; `None` if it is none of unicast.
    ///
    /// # Errors
    /// The kernel's error: often that no route leads there.
    pub fn of(address: IpAddr) -> io::Result<Option<Self>> {
        let mut kernel = Connection::open(protocols::NETLINK_ROUTE)?;
        let routes = way::ask(&mut kernel, address)?;
        Ok(routes.iter().find_map(|route| Self::parse(route, address)))
    }

    fn parse(route: &Message, destination: IpAddr) -> Option<Self> {
        let hop = way::hop(route, destination)?;
        let metrics = find(route.payload.get(HEADER..)?, RTA_METRICS);
        let mtu = metrics.and_then(|metrics| find(metrics, RTAX_MTU));
        let mtu = mtu.and_then(|mtu| Some(u32::from_ne_bytes(*mtu.first_chunk()?)));
        Some(Self { hop, mtu })
    }
}

impl HopAddress {
    /// Returns the MAC address of this neighbour; `None` if it is not resolved.
    ///
    /// # Errors
    /// The kernel refuses the question.
    pub fn mac(&self) -> io::Result<Option<[u8; 6]>> {
        let (family, _, address) = way::parts(self.address);
        let mut request = vec![0; HEADER];
        request[0] = family;
        request[4..8].copy_from_slice(&self.link.to_ne_bytes());
        request.extend(attribute(NDA_DST, &address));
        let mut kernel = Connection::open(protocols::NETLINK_ROUTE)?;
        match kernel.request(RTM_GETNEIGH, 0, &request) {
            Ok(neighbours) => Ok(neighbours.iter().find_map(mac)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}

fn mac(neighbour: &Message) -> Option<[u8; 6]> {
    let state = u16::from_ne_bytes(*neighbour.payload.get(8..)?.first_chunk()?);
    let resolved = state != 0 && state & (NUD_INCOMPLETE | NUD_FAILED) == 0;
    let address = find(neighbour.payload.get(HEADER..)?, NDA_LLADDR).filter(|_| resolved)?;
    address.try_into().ok()
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn the_mtu_of_a_route_and_of_none() {
        let destination = IpAddr::from(Ipv4Addr::new(10, 1, 2, 3));
        let route = |attributes: &[&[u8]]| {
            // RTN_UNICAST, RTA_OIF
            let payload = [&[0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0][..], &attributes.concat()].concat();
            RouteTo::parse(&Message { kind: 24, payload }, destination).map(|route| route.mtu)
        };
        let out = attribute(4, &7u32.to_ne_bytes());
        assert_eq!(route(&[&out]), Some(None));
        let advmss = attribute(8, &1340u32.to_ne_bytes());
        let metrics =
            attribute(RTA_METRICS, &[&advmss[..], &attribute(RTAX_MTU, &1400u32.to_ne_bytes())].concat());
        assert_eq!(route(&[&out, &metrics]), Some(Some(1400)));
        assert_eq!(route(&[&metrics]), None, "it leads nowhere");
    }

    #[test]
    fn a_neighbour_that_does_not_answer_has_no_address() {
        let neighbour = |state: u16| {
            let mut payload = vec![0; HEADER];
            payload[8..10].copy_from_slice(&state.to_ne_bytes());
            payload.extend(attribute(NDA_LLADDR, &[2, 0, 0, 0, 0, 1]));
            mac(&Message { kind: 28, payload })
        };
        // NUD_REACHABLE, NUD_STALE, NUD_PERMANENT
        for state in [2, 4, 128] {
            assert_eq!(neighbour(state), Some([2, 0, 0, 0, 0, 1]));
        }
        assert_eq!([NUD_INCOMPLETE, NUD_FAILED, 0].map(neighbour), [None; 3]);
    }
}
