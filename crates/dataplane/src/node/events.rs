//! Events of rtnetlink: links, addresses, routes, neighbours.

use std::{io, net::IpAddr};

use futures::{StreamExt, channel::mpsc::UnboundedReceiver};
use netlink_packet_core::{NetlinkMessage, NetlinkPayload};
use netlink_packet_route::{
    RouteNetlinkMessage,
    neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState},
};
use netlink_sys::{AsyncSocket, Socket, SocketAddr};
use nix::sys::socket::{setsockopt, sockopt::RcvBufForce};
use rtnetlink::{Handle, MulticastGroup, new_connection, new_multicast_connection};

use super::{route_mtus, way::HopAddress};

/// A change of the network configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    Link,
    Address,
    Route,
    /// A route with an MTU.
    RouteMtu,
    Neighbour(Neighbour),
    /// A neighbour that the kernel has asked in vain: NUD_FAILED.
    NeighbourFailed(HopAddress),
    /// The removal of a neighbour's entry on this device.
    NeighbourGone(u32, IpAddr),
    /// A loss of events that were not read in time: anything may have changed.
    Lost,
}

/// A neighbour with a MAC address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Neighbour {
    pub link: u32,
    pub address: IpAddr,
    pub mac: [u8; 6],
    /// Whether the entry was written manually (an overlay's static neighbours): the kernel never
    /// probes it.
    pub fixed: bool,
}

/// The stream of changes.
#[derive(Debug)]
pub struct Events(UnboundedReceiver<(NetlinkMessage<RouteNetlinkMessage>, SocketAddr)>);

/// The size of the receive buffer in bytes, enough for a burst of changes such as the start of a
/// hundred pods.
const RECEIVE_BUFFER: usize = 4 << 20;

/// Opens one connection for requests, and another for changes: a burst of changes delays no reply,
/// and an unanswered request delays no change.
pub(super) fn connect() -> io::Result<(Handle, Events)> {
    let groups = [
        MulticastGroup::Link,
        MulticastGroup::Neigh,
        MulticastGroup::Ipv4Ifaddr,
        MulticastGroup::Ipv6Ifaddr,
        MulticastGroup::Ipv4Route,
        MulticastGroup::Ipv6Route,
        MulticastGroup::Ipv4Rule,
        MulticastGroup::Ipv6Rule,
    ];
    let (mut changes, _, messages) = new_multicast_connection(&groups)?;
    enlarge(changes.socket_mut().socket_mut());
    tokio::spawn(changes);
    let (requests, handle, _) = new_connection()?;
    tokio::spawn(requests);
    Ok((handle, Events(messages)))
}

/// Enlarges the receive buffer. Exceeding net.core.rmem_max (208 KiB by default) needs
/// CAP_NET_ADMIN. With a smaller buffer `Lost` merely occurs sooner.
fn enlarge(socket: &Socket) {
    if setsockopt(socket, RcvBufForce, &RECEIVE_BUFFER).is_err() {
        let _ = socket.set_rx_buf_sz(RECEIVE_BUFFER);
    }
}

impl Events {
    /// Waits for the next change; returns `None` if the socket is gone. It is cancel-safe.
    pub async fn next(&mut self) -> Option<Event> {
        loop {
            let (message, _) = self.0.next().await?;
            let event = match message.payload {
                NetlinkPayload::InnerMessage(message) => event(&message),
                NetlinkPayload::Overrun(_) => Some(Event::Lost),
                _ => None,
            };
            if event.is_some() {
                return event;
            }
        }
    }
}

fn event(message: &RouteNetlinkMessage) -> Option<Event> {
    match message {
        RouteNetlinkMessage::NewLink(_) | RouteNetlinkMessage::DelLink(_) => Some(Event::Link),
        RouteNetlinkMessage::NewAddress(_) | RouteNetlinkMessage::DelAddress(_) => Some(Event::Address),
        RouteNetlinkMessage::NewRoute(message) | RouteNetlinkMessage::DelRoute(message)
            if route_mtus::named(message).is_some() =>
        {
            Some(Event::RouteMtu)
        }
        RouteNetlinkMessage::NewRoute(_)
        | RouteNetlinkMessage::DelRoute(_)
        | RouteNetlinkMessage::NewRule(_)
        | RouteNetlinkMessage::DelRule(_) => Some(Event::Route),
        RouteNetlinkMessage::NewNeighbour(message) if message.header.state == NeighbourState::Failed => {
            let link = message.header.ifindex;
            address(message).map(|address| Event::NeighbourFailed(HopAddress { link, address }))
        }
        RouteNetlinkMessage::NewNeighbour(message) => neighbour(message).map(Event::Neighbour),
        RouteNetlinkMessage::DelNeighbour(message) => {
            address(message).map(|address| Event::NeighbourGone(message.header.ifindex, address))
        }
        _ => None,
    }
}

/// Returns the neighbour of a message, if its MAC address is known.
pub(super) fn neighbour(message: &NeighbourMessage) -> Option<Neighbour> {
    let mac = message.attributes.iter().find_map(|attribute| match attribute {
        NeighbourAttribute::LinkLayerAddress(mac) => <[u8; 6]>::try_from(mac.as_slice()).ok(),
        _ => None,
    });
    let fixed = matches!(message.header.state, NeighbourState::Permanent | NeighbourState::Noarp);
    Some(Neighbour { link: message.header.ifindex, address: address(message)?, mac: mac?, fixed })
}

pub(super) fn address(message: &NeighbourMessage) -> Option<IpAddr> {
    message.attributes.iter().find_map(|attribute| match attribute {
        NeighbourAttribute::Destination(NeighbourAddress::Inet(address)) => Some(IpAddr::V4(*address)),
        NeighbourAttribute::Destination(NeighbourAddress::Inet6(address)) => Some(IpAddr::V6(*address)),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use netlink_sys::protocols::NETLINK_ROUTE;
    use nix::sys::socket::{getsockopt, sockopt::RcvBuf};

    use super::*;

    #[test]
    fn the_buffer_for_changes_is_larger_than_what_anybody_may_have() {
        let socket = Socket::new(NETLINK_ROUTE).unwrap();
        let plain = getsockopt(&socket, RcvBuf).unwrap();
        enlarge(&socket);
        let got = getsockopt(&socket, RcvBuf).unwrap();
        assert!(got >= plain, "{got}");
        // An agent does not start without CAP_NET_ADMIN.
        if crate::dataplane::effective_capabilities().unwrap() >> 12 & 1 == 0 {
            // `println!` output is not shown for a test that succeeds.
            let test = "the_buffer_for_changes_is_larger_than_what_anybody_may_have";
            writeln!(io::stderr(), "SKIPPED {test}: no CAP_NET_ADMIN").unwrap();
            return;
        }
        assert!(got >= RECEIVE_BUFFER, "{got}");
    }
}
