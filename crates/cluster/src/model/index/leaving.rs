//! Nodes of an [`Index`] that are about to go: the others, as they have announced it, and this one,
//! as its Node object tells.

use std::collections::{BTreeMap, BTreeSet};

use super::{Index, Indexed};
use crate::model::{ServiceName, object::LeavingNode};

/// The announcements of all nodes.
#[derive(Clone, Debug, Default)]
pub(super) struct Announced {
    /// Each announcement, by the name of its Lease.
    all: BTreeMap<ServiceName, LeavingNode>,
    /// The name of this node, whose own announcement is for the others.
    own: String,
    /// The names of the nodes, except this one's.
    others: BTreeSet<String>,
}

impl Announced {
    /// Leaves the announcement of this node out from now on.
    pub(super) fn leave_out(&mut self, own: &str) {
        if self.own != own {
            own.clone_into(&mut self.own);
            self.renew();
        }
    }

    fn renew(&mut self) {
        let others = self.all.values().map(|leaving| &leaving.node).filter(|node| **node != self.own);
        self.others = others.cloned().collect();
    }
}

impl Index {
    /// The other nodes that have announced that they are about to go. They still run: their flows
    /// stay, and only new ones avoid them while there are other endpoints.
    #[must_use]
    pub fn leaving_nodes(&self) -> &BTreeSet<String> {
        &self.leaving.others
    }

    /// The reason why a node is about to go, as far as its own Node object tells.
    #[must_use]
    pub fn leaving_by_node(&self, node_name: &str) -> Option<&'static str> {
        match self.nodes.get(node_name) {
            Some(node) => node.leaving.then_some(
                "its Node object is being deleted, or has the taint ToBeDeletedByClusterAutoscaler",
            ),
            // A Node that never was is a mistake in a name, not a farewell.
            None => self.deleted_nodes.contains_key(node_name).then_some("its Node object was deleted"),
        }
    }
}

impl Indexed for LeavingNode {
    fn apply(self, index: &mut Index) -> bool {
        if self.is_held(index) {
            return false;
        }
        index.leaving.all.insert(self.name.clone(), self);
        index.leaving.renew();
        index.avoid_leaving();
        true
    }

    fn delete(name: &ServiceName, index: &mut Index) -> bool {
        let found = index.leaving.all.remove(name).is_some();
        index.leaving.renew();
        index.avoid_leaving();
        found
    }

    fn name(&self) -> ServiceName {
        self.name.clone()
    }

    fn names(index: &Index) -> Vec<ServiceName> {
        index.leaving.all.keys().cloned().collect()
    }

    fn is_held(&self, index: &Index) -> bool {
        index.leaving.all.get(&self.name) == Some(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{NodeInput, object::Node};

    fn announcement(node: &str) -> LeavingNode {
        let name = ServiceName { namespace: "n".to_owned(), name: format!("lease-of-{node}") };
        LeavingNode { name, node: node.to_owned() }
    }

    fn leaving(index: &Index) -> Vec<&str> {
        index.leaving_nodes().iter().map(String::as_str).collect()
    }

    #[test]
    fn others_that_leave_and_come_back() {
        let mut index = Index::default();
        assert!(index.apply(announcement("here")) && index.apply(announcement("a")));
        index.update(&NodeInput { node_name: "here".to_owned(), ..NodeInput::default() });
        assert_eq!(leaving(&index), ["a"], "not this node itself");
        assert!(index.apply(announcement("b")), "the set is known before the next update");
        assert!(!index.apply(announcement("b")), "renewed");
        assert_eq!(leaving(&index), ["a", "b"]);
        assert!(index.reset(vec![announcement("b"), announcement("here")], &[]), "a came back");
        assert_eq!(leaving(&index), ["b"]);
        assert!(index.delete::<LeavingNode>(&announcement("b").name));
        assert!(!index.delete::<LeavingNode>(&announcement("b").name));
        assert!(index.leaving_nodes().is_empty());
    }

    #[test]
    fn only_a_node_that_was_there_leaves() {
        let mut index = Index::default();
        let named = |leaving| Node { name: "here".to_owned(), leaving, ..Node::default() };
        assert_eq!(index.leaving_by_node("here"), None, "a wrong --node-name is no farewell");
        index.apply(named(false));
        assert_eq!(index.leaving_by_node("here"), None);
        index.apply(named(true));
        assert!(index.leaving_by_node("here").unwrap().contains("taint"));
        index.delete::<Node>(&ServiceName { namespace: String::new(), name: "here".to_owned() });
        index.update(&NodeInput { node_name: "here".to_owned(), ..NodeInput::default() });
        assert!(index.leaving_by_node("here").unwrap().contains("deleted"));
    }
}
