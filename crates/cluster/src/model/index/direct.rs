//! Nodes of an [`Index`] whose agents open packets that are forwarded to them directly.

use std::{net::IpAddr, sync::Arc};

use super::{Changes, Index, Indexed};
use crate::model::{ServiceName, direct_nodes::DirectNodes, object::DirectNode};

impl Index {
    /// Takes over the nodes that open packets, without this one.
    pub(super) fn note_direct_nodes(&mut self, own: &str, changes: &mut Changes) {
        let others = || self.direct.values().filter(|other| other.node != own);
        let names = [IpAddr::is_ipv4, IpAddr::is_ipv6].map(|of_family| {
            let opening = others().filter(|other| other.addresses.iter().any(of_family));
            opening.map(|other| other.node.clone()).collect()
        });
        let direct = DirectNodes {
            names,
            addresses: others().flat_map(|other| other.addresses.iter().copied()).collect(),
        };
        if *self.context.direct == direct {
            return;
        }
        let former = std::mem::replace(&mut self.context.direct, Arc::new(direct.clone()));
        if former.addresses != direct.addresses {
            self.desired.direct_nodes.clone_from(&direct.addresses);
            changes.direct_nodes = true;
        }
        for (former, names) in former.names.iter().zip(&direct.names) {
            if former.is_empty() || names.is_empty() {
                // Endpoints on this node are opened for from now on, or no longer.
                self.dirty.extend(self.services.keys().cloned());
            } else {
                self.concern(former, names);
            }
        }
    }
}

impl Indexed for DirectNode {
    fn apply(self, index: &mut Index) -> bool {
        if self.is_held(index) {
            return false;
        }
        index.direct.insert(self.name.clone(), self);
        true
    }

    fn delete(name: &ServiceName, index: &mut Index) -> bool {
        index.direct.remove(name).is_some()
    }

    fn name(&self) -> ServiceName {
        self.name.clone()
    }

    fn names(index: &Index) -> Vec<ServiceName> {
        index.direct.keys().cloned().collect()
    }

    fn is_held(&self, index: &Index) -> bool {
        index.direct.get(&self.name) == Some(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::NodeInput;

    fn node(node: &str, address: &str) -> DirectNode {
        let name = ServiceName { namespace: "n".to_owned(), name: format!("direct-{node}") };
        DirectNode { name, node: node.to_owned(), addresses: vec![address.parse().unwrap()] }
    }

    #[test]
    fn others_may_send_and_this_node_is_no_other() {
        let mut index = Index::default();
        let input = NodeInput { node_name: "here".to_owned(), ..NodeInput::default() };
        assert!(index.apply(node("here", "192.0.2.1")) && index.apply(node("there", "192.0.2.2")));
        assert!(index.update(&input).direct_nodes);
        let addresses =
            |index: &Index| index.desired().direct_nodes.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(addresses(&index), ["192.0.2.2"]);
        assert!(!index.apply(node("there", "192.0.2.2")));
        assert!(!index.update(&input).direct_nodes);
        assert!(index.delete::<DirectNode>(&node("there", "192.0.2.2").name));
        assert!(index.update(&input).direct_nodes);
        assert!(addresses(&index).is_empty());
    }

    #[test]
    fn a_node_opens_packets_of_the_families_of_its_addresses() {
        let mut index = Index::default();
        let input = NodeInput { node_name: "here".to_owned(), ..NodeInput::default() };
        assert!(index.apply(node("v4", "192.0.2.1")) && index.apply(node("v6", "2001:db8::1")));
        assert!(index.update(&input).direct_nodes);
        for (node, address, opens) in [
            ("v4", "198.51.100.1", true),
            ("v4", "2001:db8:1::1", false),
            ("v6", "198.51.100.1", false),
            ("v6", "2001:db8:1::1", true),
        ] {
            let address: IpAddr = address.parse().unwrap();
            assert_eq!(index.context.direct.open(address, Some(node)), opens, "{node} {address}");
        }
    }
}
