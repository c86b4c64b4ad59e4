//! The nodes that take part in direct forwarding.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use super::{Dispatch, Forwarding, Protocol};

/// The way of packets to a node that opens them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Opener {
    /// The outer packet, or the MAC address alone.
    pub(super) dispatch: Dispatch,
    /// Whether it opens those of SCTP, too.
    pub(super) sctp: bool,
    /// Whether replies come back through this node if it asks for that.
    pub(super) tunnels: bool,
}

/// The other nodes that open packets which are forwarded to them directly, and the addresses from
/// which any other node may send some.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct DirectNodes {
    /// By the families in which they do: IPv4, IPv6; and what this node uses towards each.
    pub(super) names: [BTreeMap<String, Opener>; 2],
    pub(super) addresses: BTreeSet<IpAddr>,
    /// Their MAC addresses, and whether each takes packets that are sent to it as they are.
    pub(super) macs: BTreeMap<[u8; 6], bool>,
}

impl DirectNodes {
    /// The way of packets to an endpoint of another node, if those of this protocol are opened
    /// there, and answered as this node forwards them: replies of SCTP never come back through it.
    /// A node's own address is none that they can be sent to: network plugins send packets of their
    /// own to it.
    pub(super) fn open(
        &self,
        address: IpAddr,
        node: Option<&str>,
        (forwarding, protocol): (Forwarding, Protocol),
    ) -> Option<Dispatch> {
        let opener = self.names[usize::from(address.is_ipv6())].get(node?)?;
        let is_sctp = protocol == Protocol::Sctp;
        let answers = forwarding != Forwarding::Tunnel || opener.tunnels && !is_sctp;
        let opens = opener.sctp || !is_sctp;
        (opens && answers && !self.addresses.contains(&address)).then_some(opener.dispatch)
    }
}
