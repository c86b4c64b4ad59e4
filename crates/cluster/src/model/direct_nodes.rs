//! The nodes that take part in direct forwarding.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use super::Dispatch;

/// The other nodes that open packets which are forwarded to them directly, and the addresses from
/// which any other node may send some.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct DirectNodes {
    /// By the families in which they do: IPv4, IPv6; and what this node uses towards each.
    pub(super) names: [BTreeMap<String, Dispatch>; 2],
    pub(super) addresses: BTreeSet<IpAddr>,
}

impl DirectNodes {
    /// The outer packet towards an endpoint of another node, if packets are opened there. A node's
    /// own address is none that they can be sent to: network plugins send packets of their own to
    /// it.
    pub(super) fn open(&self, address: IpAddr, node: Option<&str>) -> Option<Dispatch> {
        let dispatch = self.names[usize::from(address.is_ipv6())].get(node?).copied()?;
        (!self.addresses.contains(&address)).then_some(dispatch)
    }
}
