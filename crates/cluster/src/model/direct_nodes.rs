//! The nodes that take part in direct forwarding.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use super::{Dispatch, Forwarding};

/// The other nodes that open packets which are forwarded to them directly, and the addresses from
/// which any other node may send some.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct DirectNodes {
    /// By the families in which they do: IPv4, IPv6; and how this node sends to each.
    pub(super) names: [BTreeMap<String, Way>; 2],
    pub(super) addresses: BTreeSet<IpAddr>,
}

/// The way to another node that opens packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Way {
    pub(super) dispatch: Dispatch,
    /// Whether replies come back through this node if it asks for that.
    pub(super) tunnels: bool,
}

impl DirectNodes {
    /// The outer packet towards an endpoint of another node, if packets that this node forwards in
    /// this way are opened there, and answered. A node's
    /// own address is none that they can be sent to: network plugins send packets of their own to
    /// it.
    pub(super) fn open(
        &self,
        address: IpAddr,
        node: Option<&str>,
        forwarding: Forwarding,
    ) -> Option<Dispatch> {
        let way = self.names[usize::from(address.is_ipv6())].get(node?).copied()?;
        let answers = forwarding != Forwarding::Tunnel || way.tunnels;
        (answers && !self.addresses.contains(&address)).then_some(way.dispatch)
    }
}
