//! Machines and the pods on them, as they are, whatever the objects say.

use std::collections::{BTreeSet, HashMap};

use crate::change::ChangeError;

/// A machine.
#[derive(Debug)]
pub(super) struct Machine {
    pub(super) name: String,
    pub(super) is_there: bool,
}

#[derive(Debug)]
pub(super) struct Pod {
    pub(super) name: String,
    /// The number of its machine.
    pub(super) node: Option<usize>,
    pub(super) serves: bool,
}

/// All machines and pods, each with a number that stays the same.
#[derive(Debug, Default)]
pub(super) struct Machines {
    nodes: Vec<Machine>,
    node_of: HashMap<String, usize>,
    pods: Vec<Pod>,
    pod_of: HashMap<String, usize>,
}

impl Machines {
    pub(super) fn nodes(&self) -> &[Machine] {
        &self.nodes
    }

    pub(super) fn pods(&self) -> &[Pod] {
        &self.pods
    }

    pub(super) fn node_named(&self, name: &str) -> Result<usize, ChangeError> {
        self.node_of.get(name).copied().ok_or_else(|| ChangeError::NoNode(name.to_owned()))
    }

    pub(super) fn pod_named(&self, name: &str) -> Option<usize> {
        self.pod_of.get(name).copied()
    }

    /// Adds a machine, unless it is known, and returns its number.
    pub(super) fn add_node(&mut self, name: &str) -> usize {
        if let Some(known) = self.node_of.get(name) {
            return *known;
        }
        self.nodes.push(Machine { name: name.to_owned(), is_there: true });
        self.node_of.insert(name.to_owned(), self.nodes.len() - 1);
        self.nodes.len() - 1
    }

    /// Adds a pod, and returns its number. A new pod serves if its endpoint is serving; a known pod
    /// keeps its own state.
    pub(super) fn add_pod(&mut self, name: &str, node: Option<&str>, serves: bool) -> usize {
        if let Some(known) = self.pod_of.get(name) {
            return *known;
        }
        let node = node.map(|node| self.add_node(node));
        self.pods.push(Pod { name: name.to_owned(), node, serves });
        self.pod_of.insert(name.to_owned(), self.pods.len() - 1);
        self.pods.len() - 1
    }

    /// Returns a name that no pod has.
    pub(super) fn new_pod_name(&self) -> String {
        let mut name = format!("new-{}", self.pods.len() + 1);
        while self.pod_of.contains_key(&name) {
            name.push('\'');
        }
        name
    }

    pub(super) fn is_there(&self, node: usize) -> bool {
        self.nodes[node].is_there
    }

    /// Whether a pod accepts connections.
    pub(super) fn is_reached(&self, pod: usize) -> bool {
        self.pods[pod].serves && self.has_machine(pod)
    }

    /// Whether the machine of a pod is there, as far as it is known.
    pub(super) fn has_machine(&self, pod: usize) -> bool {
        self.pods[pod].node.is_none_or(|node| self.is_there(node))
    }

    /// Returns the pods on a machine.
    pub(super) fn pods_on(&self, node: usize) -> BTreeSet<usize> {
        let pods = self.pods.iter().enumerate();
        pods.filter(|(_, pod)| pod.node == Some(node)).map(|(number, _)| number).collect()
    }

    /// Removes a machine. Returns whether it was there.
    pub(super) fn vanish(&mut self, node: usize) -> bool {
        std::mem::take(&mut self.nodes[node].is_there)
    }

    /// Lets a pod accept connections.
    pub(super) fn serve(&mut self, pod: usize) {
        self.pods[pod].serves = true;
    }

    /// Stops a pod. Returns whether it accepted connections.
    pub(super) fn stop(&mut self, pod: usize) -> bool {
        std::mem::take(&mut self.pods[pod].serves)
    }
}
