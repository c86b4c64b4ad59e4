//! Machines and the pods on them, as they are, whatever the objects say.

use std::{
    collections::{BTreeSet, HashMap},
    time::Duration,
};

use crate::change::ChangeError;

/// A machine.
#[derive(Debug)]
pub(super) struct Machine {
    pub(super) name: String,
    pub(super) is_there: bool,
    /// Whether it reaches no other machine, and no other reaches it; clients and the balancer do.
    pub(super) is_isolated: bool,
    /// Whether its agent has notice that it will go.
    pub(super) has_notice: bool,
    /// The time since which Kubernetes does not hear from it.
    pub(super) silent_since: Option<Duration>,
}

impl Machine {
    /// Whether it is there and reaches the other machines, and so the API.
    pub(super) const fn is_connected(&self) -> bool {
        self.is_there && !self.is_isolated
    }
}

#[derive(Debug)]
pub(super) struct Pod {
    pub(super) name: String,
    /// The number of its machine.
    pub(super) node: Option<usize>,
    pub(super) serves: bool,
}

/// The answer to a SYN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reached {
    Serves,
    /// An RST: nobody listens any more.
    Refuses,
    Silence,
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
        self.nodes.push(Machine {
            name: name.to_owned(),
            is_there: true,
            is_isolated: false,
            has_notice: false,
            silent_since: None,
        });
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

    /// Returns the answer of a pod to a SYN that a machine forwards, or delivers.
    pub(super) fn answer(&self, front: usize, pod: usize) -> Reached {
        let Pod { node, serves, .. } = self.pods[pod];
        match node {
            Some(node) if !self.are_joined(front, node) => Reached::Silence,
            _ if serves => Reached::Serves,
            _ => Reached::Refuses,
        }
    }

    /// Whether packets of a machine reach another one, or itself.
    pub(super) fn are_joined(&self, front: usize, node: usize) -> bool {
        match front == node {
            true => self.is_there(node),
            false => self.nodes[front].is_connected() && self.nodes[node].is_connected(),
        }
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

    /// Cuts a machine off from the others. Returns whether it was joined with them.
    pub(super) fn isolate(&mut self, node: usize) -> bool {
        !std::mem::replace(&mut self.nodes[node].is_isolated, true)
    }

    /// Returns a machine with its pods, as it was. Returns whether it was gone or isolated.
    pub(super) fn come_back(&mut self, node: usize) -> bool {
        let machine = &mut self.nodes[node];
        let was_away = !machine.is_connected();
        (machine.is_there, machine.is_isolated) = (true, false);
        (machine.has_notice, machine.silent_since) = (false, None);
        was_away
    }

    /// Notes that Kubernetes does not hear from a machine any more.
    pub(super) fn fall_silent(&mut self, node: usize, now: Duration) {
        self.nodes[node].silent_since = Some(now);
    }

    /// Gives a machine's agent notice that the machine will go.
    pub(super) fn give_notice(&mut self, node: usize) {
        self.nodes[node].has_notice = true;
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
