//! The network namespaces of this node's pods, by the addresses in them: the ids under which this
//! namespace knows those that have the other end of one of its devices. Pods without such a device
//! (macvlan, ipvlan, SR-IOV) cannot be found from here.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::IpAddr,
};

use netlink_sys::protocols::NETLINK_ROUTE;

use super::{
    netlink::{Connection, Message, attribute, find},
    veth::End,
};

// linux/rtnetlink.h, linux/if_addr.h
const RTM_NEWADDR: u16 = 20;
const RTM_GETADDR: u16 = 22;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const IFA_TARGET_NETNSID: u16 = 10;
/// `struct ifaddrmsg`.
const ADDRESS_HEADER: usize = 8;

/// Returns the addresses in the namespaces behind this one's devices, each with the id of its
/// namespace. Of namespaces with the same address, such as that of a loopback device, one is named.
///
/// # Errors
/// The kernel lists no devices. A namespace that is gone, or not accessible to this process, is
/// left out.
pub fn by_address() -> io::Result<BTreeMap<IpAddr, u32>> {
    let ids: BTreeSet<u32> = End::all()?.iter().filter_map(End::other_namespace).collect();
    let mut routes = Connection::open(NETLINK_ROUTE)?;
    routes.check_requests_strictly()?;
    let mut namespaces = BTreeMap::new();
    for id in ids {
        for family in [libc::AF_INET, libc::AF_INET6] {
            let mut request = vec![0; ADDRESS_HEADER];
            request[0] = family as u8;
            request.extend(attribute(IFA_TARGET_NETNSID, &id.to_ne_bytes()));
            let Ok(messages) = routes.dump(RTM_GETADDR, &request) else { continue };
            namespaces.extend(messages.iter().filter_map(address).map(|address| (address, id)));
        }
    }
    Ok(namespaces)
}

/// Returns the address that a message is about.
fn address(message: &Message) -> Option<IpAddr> {
    if message.kind != RTM_NEWADDR {
        return None;
    }
    let attributes = message.payload.get(ADDRESS_HEADER..)?;
    // With a peer, the other attribute has the peer's address.
    let bytes = find(attributes, IFA_LOCAL).or_else(|| find(attributes, IFA_ADDRESS))?;
    match bytes.len() {
        4 => Some(<[u8; 4]>::try_from(bytes).ok()?.into()),
        16 => Some(<[u8; 16]>::try_from(bytes).ok()?.into()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: u16, attributes: &[Vec<u8>]) -> Message {
        Message { kind, payload: [vec![0; ADDRESS_HEADER], attributes.concat()].concat() }
    }

    #[test]
    fn the_address_of_this_end_is_read() {
        let (own, peer) = ([10, 0, 0, 1], [10, 0, 0, 2]);
        let both = [attribute(IFA_ADDRESS, &peer), attribute(IFA_LOCAL, &own)];
        assert_eq!(address(&message(RTM_NEWADDR, &both)), Some(own.into()));
        let v6 = [0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
        assert_eq!(address(&message(RTM_NEWADDR, &[attribute(IFA_ADDRESS, &v6)])), Some(v6.into()));
        assert_eq!(address(&message(RTM_GETADDR, &both)), None);
        assert_eq!(address(&message(RTM_NEWADDR, &[attribute(IFA_LOCAL, &[1, 2])])), None);
    }
}
