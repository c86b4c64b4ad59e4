//! Hypothetical changes of a cluster, applied to the objects of one Service.

mod pods;

use std::{collections::BTreeMap, str::FromStr, time::Duration};

use traffic_policy_cluster::model::{
    Algorithm, Forwarding, Policy, ServiceName,
    object::{EndpointSlice, Node, Readiness, Service, ServiceType, SliceEndpoint},
};

use super::cluster::Cluster;

/// A placeholder for the `healthCheckNodePort` that the API server would allocate.
pub const ALLOCATED: u16 = u16::MAX;

/// A change of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeChange {
    /// The node vanishes without notice, with its pods.
    Gone,
    /// The node is cordoned, and its pods move to others.
    Drained,
    /// The node is new, without pods.
    Added,
}

/// A change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    Policy(Policy),
    Node(String, NodeChange),
    PodDeleted(String),
    Scale(usize),
    /// The pods are spread as a spread constraint over nodes would place them.
    Spread,
    Drain(Duration),
    /// The annotation `traffic-policy.io/forwarding`.
    Forwarding(Forwarding),
    /// The annotation `traffic-policy.io/algorithm`.
    Algorithm(Algorithm),
}

/// A change that cannot be applied.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    #[error("there is no Node {0}")]
    NoNode(String),
    #[error("there is a Node {0} already")]
    NodeThere(String),
    #[error("no ready pod {pod} of {service}: it has {known}")]
    NoPod { pod: String, service: ServiceName, known: String },
    #[error("no node is left that a pod could be put on")]
    NoRoom,
    #[error("{0} has no EndpointSlice with an endpoint: where its pods listen is not known")]
    NoEndpoints(ServiceName),
    #[error(
        "{0} has topology hints that name other zones than the endpoints' own, as its annotation service.kubernetes.io/topology-mode gives by the \
         zones' CPUs: which a pod elsewhere would get cannot be predicted. Ask without the hints: delete them from a copy of the manifests"
    )]
    Hints(ServiceName),
}

/// Parses a value of `--node`: `NAME=gone|drained|added`.
impl FromStr for NodeChange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "gone" => Ok(Self::Gone),
            "drained" => Ok(Self::Drained),
            "added" => Ok(Self::Added),
            _ => Err(format!("`{text}` is not gone, drained or added")),
        }
    }
}

pub(super) use pods::PodState;

/// A Node that was removed, and its endpoints, each with the number of its slice.
#[derive(Clone, Debug)]
pub(super) struct RemovedNode {
    node: Node,
    endpoints: Vec<(usize, SliceEndpoint)>,
}

/// The objects of one Service, to which changes are applied.
#[derive(Clone, Debug)]
pub(super) struct Objects {
    nodes: BTreeMap<String, Node>,
    service: Service,
    slices: Vec<EndpointSlice>,
}

impl Objects {
    pub(super) fn of(cluster: &Cluster, name: &ServiceName) -> Option<Self> {
        let index = cluster.index();
        let mut service = index.services().find(|service| service.name == *name)?.clone();
        if index.is_health_port_refused(&service) {
            // The holder of the port is not among these objects.
            service.health_annotation = 0;
        }
        // What agents run with is not among these objects, either. Nodes are taken to open packets.
        let treatment = cluster.treatment(&service);
        if treatment.forwarding != Forwarding::default() {
            service.forwarding = Some(treatment.forwarding);
        }
        if treatment.algorithm != Algorithm::default() {
            service.algorithm = Some(treatment.algorithm);
        }
        Some(Self {
            nodes: index.nodes().map(|node| (node.name.clone(), node.clone())).collect(),
            service,
            slices: index.slices_of(name).cloned().collect(),
        })
    }

    pub(super) fn cluster(&self) -> Cluster {
        Cluster::of(self.nodes.values().cloned(), self.service.clone(), self.slices.iter().cloned())
    }

    pub(super) fn make(&mut self, change: &Change) -> Result<(), ChangeError> {
        match change {
            Change::Policy(policy) => {
                self.service.external_policy = *policy;
                let wants_port =
                    *policy == Policy::Local && self.service.service_type == ServiceType::LoadBalancer;
                if wants_port && self.service.health_check_node_port == 0 {
                    self.service.health_check_node_port = ALLOCATED;
                }
            }
            Change::Drain(drain) => self.service.drain = Some(*drain),
            Change::Forwarding(way) => self.service.forwarding = Some(*way),
            Change::Algorithm(algorithm) => self.service.algorithm = Some(*algorithm),
            Change::Node(name, NodeChange::Gone) => _ = self.remove_node(name)?,
            Change::Node(name, NodeChange::Drained) => {
                let node = self.nodes.get_mut(name).ok_or_else(|| ChangeError::NoNode(name.clone()))?;
                node.standing.unschedulable = true;
                for pod in self.pods().into_iter().filter(|(_, node)| node == name).map(|(pod, _)| pod) {
                    let to = self.emptiest()?;
                    self.move_pod(&pod, &to)?;
                }
            }
            Change::Node(name, NodeChange::Added) => {
                if self.nodes.contains_key(name) {
                    return Err(ChangeError::NodeThere(name.clone()));
                }
                self.nodes.insert(name.clone(), Node { name: name.clone(), ..Node::default() });
            }
            Change::PodDeleted(pod) => {
                let pods = self.pods();
                if !pods.contains_key(pod) {
                    let known: Vec<_> = pods.keys().take(5).map(String::as_str).collect();
                    return Err(ChangeError::NoPod {
                        pod: pod.clone(),
                        service: self.service.name.clone(),
                        known: if known.is_empty() { "none".to_owned() } else { known.join(", ") },
                    });
                }
                self.retain(|endpoint| label(endpoint) != *pod);
            }
            Change::Scale(wanted) => self.scale(*wanted)?,
            Change::Spread => self.spread()?,
        }
        Ok(())
    }

    /// Removes a Node and its endpoints.
    pub(super) fn remove_node(&mut self, name: &str) -> Result<RemovedNode, ChangeError> {
        let node = self.nodes.remove(name).ok_or_else(|| ChangeError::NoNode(name.to_owned()))?;
        let mut endpoints = Vec::new();
        for (slice, number) in self.slices.iter_mut().zip(0..) {
            let (own, rest): (Vec<_>, Vec<_>) =
                slice.endpoints.drain(..).partition(|endpoint| endpoint.node_name.as_deref() == Some(name));
            slice.endpoints = rest;
            endpoints.extend(own.into_iter().map(|endpoint| (number, endpoint)));
        }
        Ok(RemovedNode { node, endpoints })
    }

    /// Puts a Node and its endpoints back.
    pub(super) fn put_back(&mut self, RemovedNode { node, endpoints }: RemovedNode) {
        self.nodes.insert(node.name.clone(), node);
        for (number, endpoint) in endpoints {
            if let Some(slice) = self.slices.get_mut(number) {
                slice.endpoints.push(endpoint);
            }
        }
    }

    /// Removes what only this project's agents read of the Service.
    pub(super) fn forget_annotations(&mut self) {
        self.service.drain = Some(Duration::ZERO);
        (self.service.external_fallback, self.service.health_annotation) = (false, 0);
        (self.service.forwarding, self.service.algorithm) = (None, None);
    }

    /// Returns the ready pods, by name or address, and their nodes.
    pub(super) fn pods(&self) -> BTreeMap<String, String> {
        let endpoints = self.slices.iter().flat_map(|slice| &slice.endpoints);
        endpoints
            .filter(|endpoint| endpoint.ready)
            .filter_map(|endpoint| Some((label(endpoint), endpoint.node_name.as_deref()?.to_owned())))
            .collect()
    }

    fn retain(&mut self, keep: impl Fn(&SliceEndpoint) -> bool) {
        for slice in &mut self.slices {
            slice.endpoints.retain(&keep);
        }
    }

    fn move_pod(&mut self, pod: &str, to: &str) -> Result<(), ChangeError> {
        let hints = self.hints_on(to)?;
        for endpoint in self.slices.iter_mut().flat_map(|slice| &mut slice.endpoints) {
            if label(endpoint) == pod {
                endpoint.node_name = Some(to.into());
                hints.put(endpoint);
            }
        }
        Ok(())
    }

    /// Returns, for each node that the scheduler would use or that has ready pods, whether it is
    /// usable and the number of its ready pods.
    fn counts(&self) -> BTreeMap<String, (bool, usize)> {
        let is_usable = |node: &Node| {
            !node.standing.unschedulable && !node.leaving && node.standing.readiness == Readiness::Ready
        };
        let mut counts: BTreeMap<String, (bool, usize)> =
            self.nodes.values().map(|node| (node.name.clone(), (is_usable(node), 0))).collect();
        for node in self.pods().into_values() {
            counts.entry(node).or_insert((false, 0)).1 += 1;
        }
        counts
    }

    /// Returns the node where the scheduler would most likely place a pod: the one with the fewest
    /// ready pods.
    fn emptiest(&self) -> Result<String, ChangeError> {
        let counts = self.counts();
        let usable = counts.iter().filter(|(_, (usable, _))| *usable);
        let found = usable.min_by_key(|(_, (_, count))| *count).map(|(name, _)| name.clone());
        found.ok_or(ChangeError::NoRoom)
    }

    fn scale(&mut self, wanted: usize) -> Result<(), ChangeError> {
        loop {
            let pods = self.pods();
            match pods.len() {
                now if now == wanted => return Ok(()),
                now if now < wanted => self.add_pod(now + 1)?,
                _ => {
                    // A ReplicaSet deletes pods first from the node that has the most.
                    let counts = self.counts();
                    let most = pods.iter().max_by_key(|(_, node)| counts.get(*node).map_or(0, |(_, n)| *n));
                    let Some((pod, _)) = most else { return Ok(()) };
                    self.retain(|endpoint| label(endpoint) != *pod);
                }
            }
        }
    }

    fn add_pod(&mut self, number: usize) -> Result<(), ChangeError> {
        let node = self.emptiest()?;
        let mut pod = format!("new-{number}");
        while self.pods().contains_key(&pod) {
            pod.push('\'');
        }
        self.put_pod(&pod, &node, true)
    }

    fn spread(&mut self) -> Result<(), ChangeError> {
        loop {
            let counts = self.counts();
            let emptiest = self.emptiest()?;
            let fewest = counts.get(&emptiest).map_or(0, |(_, count)| *count);
            // This includes pods of nodes that the scheduler would not use now.
            let fullest = counts.iter().max_by_key(|(_, (usable, count))| (!usable && *count > 0, *count));
            let Some((fullest, (usable, most))) = fullest else { return Ok(()) };
            if *most == 0 || *usable && *most <= fewest + 1 {
                return Ok(());
            }
            let pods = self.pods();
            let Some((pod, _)) = pods.iter().find(|(_, node)| *node == fullest) else { return Ok(()) };
            self.move_pod(pod, &emptiest)?;
        }
    }
}

/// Returns the pod's name, or the address if the name is not known.
pub(super) fn label(endpoint: &SliceEndpoint) -> String {
    endpoint.pod.as_deref().map_or_else(|| endpoint.address.to_string(), str::to_owned)
}
