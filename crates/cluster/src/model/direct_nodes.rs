//! The nodes that take part in direct forwarding.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use super::{Dispatch, Forwarding, Protocol};

/// The destination of a packet by which another node can be asked what gets there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectTarget {
    /// The address of an endpoint of that node.
    pub endpoint: IpAddr,
    /// A TCP frontend of a Service that has the endpoint, on an address that is not this node's.
    pub frontend: SocketAddr,
    /// Such a frontend, of any Service with an endpoint there, whose packets need not name the
    /// endpoint: the node finds it by its own table.
    pub by_table: Option<SocketAddr>,
}

/// The nodes that can be asked, and by which packet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DirectTargets {
    /// The packets by node, and whether they are of IPv6.
    pub of: BTreeMap<(String, bool), DirectTarget>,
    /// Whether any packets of each family may be forwarded directly, to nodes that can be asked or
    /// not.
    pub is_used: [bool; 2],
}

/// The way of packets to a node that opens them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Opener {
    /// The outer packet, or the MAC address alone; `None`: `snat`.
    pub(super) direct: Option<Dispatch>,
    /// The same for packets whose replies are to come back through this node.
    pub(super) tunnel: Option<Dispatch>,
    /// Whether it opens those of SCTP, too.
    pub(super) sctp: bool,
    /// Whether replies of SCTP can come back through this node.
    pub(super) tunnels_sctp: bool,
    /// Whether these are the ways of connections that go on alone, because the node may not know
    /// this one yet, it is not known what gets there, or the node asks for no new flows.
    pub(super) held: bool,
}

/// The way of packets to an endpoint of another node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Opens {
    /// That of all.
    pub(super) all: Option<Dispatch>,
    /// That of connections that go on, where others have none.
    pub(super) held: Option<Dispatch>,
}

impl Opens {
    /// Returns the same with the outer packets that name the endpoint.
    pub(super) fn within(self) -> Self {
        Self { all: self.all.map(Dispatch::within), held: self.held.map(Dispatch::within) }
    }
}

/// The other nodes that open packets which are forwarded to them directly, and the addresses from
/// which any other node may send some.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct DirectNodes {
    /// The names of the former by the family in which they do (IPv4, IPv6), and the way that this
    /// node uses towards each.
    pub(super) names: [BTreeMap<String, Opener>; 2],
    pub(super) addresses: BTreeSet<IpAddr>,
    /// The MAC addresses of such nodes, and whether each takes packets that are sent to it as they
    /// are.
    pub(super) macs: BTreeMap<[u8; 6], bool>,
    /// The names of those for whose addresses the maps have no room: nothing else here is theirs.
    pub(super) without_room: BTreeSet<String>,
}

impl DirectNodes {
    /// The way of packets to an endpoint of another node, if those of this protocol are opened
    /// there, and answered as this node forwards them. A node's own address is none that they can
    /// be sent to: network plugins send packets of their own to it.
    pub(super) fn open(
        &self,
        address: IpAddr,
        node: Option<&str>,
        (forwarding, protocol): (Forwarding, Protocol),
    ) -> Opens {
        let of_family = &self.names[usize::from(address.is_ipv6())];
        let Some(opener) = node.and_then(|node| of_family.get(node)) else { return Opens::default() };
        let is_sctp = protocol == Protocol::Sctp;
        let dispatch = match forwarding {
            Forwarding::Tunnel => opener.tunnel.filter(|_| opener.tunnels_sctp || !is_sctp),
            _ => opener.direct,
        };
        let dispatch = dispatch.filter(|_| (opener.sctp || !is_sctp) && !self.addresses.contains(&address));
        if opener.held {
            // The other node may not know this one's MAC address, or no longer have the same table.
            return Opens { all: None, held: dispatch.map(Dispatch::within) };
        }
        Opens { all: dispatch, held: None }
    }
}
