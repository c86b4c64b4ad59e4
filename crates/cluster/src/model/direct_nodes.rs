//! The nodes that take part in direct forwarding.

use std::{collections::BTreeSet, net::IpAddr};

/// The other nodes that open packets which are forwarded to them directly, and the addresses from
/// which any other node may send some.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct DirectNodes {
    /// By the families in which they do: IPv4, IPv6.
    pub(super) names: [BTreeSet<String>; 2],
    pub(super) addresses: BTreeSet<IpAddr>,
}

impl DirectNodes {
    /// Whether packets to an endpoint of another node are opened there. A node's own address is
    /// none that they can be sent to: network plugins send packets of their own to it.
    pub(super) fn open(&self, address: IpAddr, node: Option<&str>) -> bool {
        node.is_some_and(|node| self.names[usize::from(address.is_ipv6())].contains(node))
            && !self.addresses.contains(&address)
    }
}
