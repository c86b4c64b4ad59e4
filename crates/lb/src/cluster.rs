//! The objects of a cluster at one moment.

use std::{
    collections::BTreeSet,
    net::{Ipv4Addr, Ipv6Addr},
};

use traffic_policy_cluster::model::{
    Algorithm, Forwarding, FrontendKind, Index, NodeInput, ServiceName,
    object::{DirectNode, EndpointSlice, Node, Service},
};

use super::nodes::Nodes;

/// The settings of agents that Services without annotations follow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Agents {
    pub forwarding: Forwarding,
    pub algorithm: Algorithm,
}

/// A cluster whose Services can be judged.
#[derive(Debug)]
pub struct Cluster {
    index: Index,
    agents: Agents,
    /// The settings that agents run with, as far as the user has said it.
    told: (Option<Forwarding>, Option<Algorithm>),
    /// Whether all Leases of direct forwarding have been listed.
    leases_are_listed: bool,
    /// Whether no Node objects were given, so that the nodes are those that endpoints name.
    pub nodes_are_guessed: bool,
}

impl Cluster {
    #[must_use]
    pub fn new(index: Index) -> Self {
        let mut cluster = Self {
            index,
            agents: Agents::default(),
            told: (None, None),
            leases_are_listed: false,
            nodes_are_guessed: false,
        };
        cluster.prepare();
        cluster
    }

    /// Sets what agents run with. `None`: as the Leases of all nodes say that have one, else the
    /// agent's default.
    pub fn set_agents(&mut self, forwarding: Option<Forwarding>, algorithm: Option<Algorithm>) {
        self.told = (forwarding, algorithm);
        self.ask_leases();
    }

    /// Takes what agents run with from the Leases, as far as the user has not said it.
    fn ask_leases(&mut self) {
        let told = || self.index.direct_leases().filter_map(DirectNode::settings);
        let agreed = told().next().filter(|first| told().all(|settings| settings == *first));
        let ((forwarding, algorithm), agreed) = (self.told, agreed.unwrap_or_default());
        self.agents =
            Agents { forwarding: forwarding.unwrap_or(agreed.0), algorithm: algorithm.unwrap_or(agreed.1) };
    }

    /// Notes that all Leases have been listed: nodes without one open nothing. Otherwise that is
    /// known while there is one.
    pub fn leases_are_listed(&mut self) {
        self.leases_are_listed = true;
    }

    /// Returns how agents treat a Service: by its annotations, else by their own settings.
    #[must_use]
    pub fn treatment(&self, service: &Service) -> Agents {
        Agents {
            forwarding: service.forwarding.unwrap_or(self.agents.forwarding),
            algorithm: service.algorithm.unwrap_or(self.agents.algorithm),
        }
    }

    /// Returns the nodes that open packets; `None`: all are taken to.
    pub(super) fn opening(&self) -> Option<BTreeSet<&str>> {
        let mut leases = self.index.direct_leases().peekable();
        let are_known = self.leases_are_listed || leases.peek().is_some();
        are_known.then(|| leases.filter(|lease| lease.opens).map(|lease| lease.node.as_str()).collect())
    }

    /// Applies a change to the objects.
    pub fn change(&mut self, change: impl FnOnce(&mut Index)) {
        if std::mem::take(&mut self.nodes_are_guessed) {
            self.index.reset::<Node>(Vec::new(), &[]);
        }
        change(&mut self.index);
        self.prepare();
    }

    fn prepare(&mut self) {
        self.ask_leases();
        let index = &mut self.index;
        self.nodes_are_guessed = index.nodes().next().is_none();
        if self.nodes_are_guessed {
            let services: Vec<_> = index.services().map(|service| service.name.clone()).collect();
            let slices = services.iter().flat_map(|service| index.slices_of(service));
            let names: BTreeSet<String> = slices
                .flat_map(|slice| slice.endpoints.iter().filter_map(|endpoint| endpoint.node_name.as_deref()))
                .map(str::to_owned)
                .collect();
            for name in names {
                index.apply(Node { name, ..Node::default() });
            }
        }
        // The input for everything that does not depend on the node: which Service holds which
        // frontend, and what is left out of objects. Node ports are bound to the unspecified
        // addresses, which stand for those of every node.
        let input = NodeInput {
            node_port_addresses: vec![Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()],
            ipv4: true,
            ipv6: true,
            ..NodeInput::default()
        };
        let _ = index.update(&input);
    }

    #[must_use]
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// Returns the names of Services that clients outside the cluster reach.
    pub fn exposed(&self) -> impl Iterator<Item = &ServiceName> {
        self.index.services().map(|service| &service.name).filter(|name| self.is_exposed(name))
    }

    fn is_exposed(&self, name: &ServiceName) -> bool {
        let mut own = self.index.desired().ports_of(name);
        own.any(|(_, port)| port.frontends.iter().any(|frontend| is_external(frontend.kind)))
    }

    /// Returns the Services of this name, in the given namespace or in any, whether exposed or not.
    #[must_use]
    pub fn named(&self, name: &str) -> Vec<&Service> {
        let is_meant = |service: &&Service| match name.split_once('/') {
            Some((namespace, name)) => service.name.namespace == namespace && service.name.name == name,
            None => service.name.name == name,
        };
        self.index.services().filter(is_meant).collect()
    }

    pub(super) fn nodes(&self) -> Nodes<'_> {
        Nodes::new(self.index.nodes())
    }

    /// Returns a cluster of one Service.
    pub(super) fn of(
        nodes: impl IntoIterator<Item = Node>,
        service: Service,
        slices: impl IntoIterator<Item = EndpointSlice>,
    ) -> Self {
        let mut index = Index::default();
        for node in nodes {
            index.apply(node);
        }
        index.apply(service);
        for slice in slices {
            index.apply(slice);
        }
        Self::new(index)
    }
}

/// Whether clients outside the cluster use this kind of frontend.
pub(super) const fn is_external(kind: FrontendKind) -> bool {
    matches!(kind, FrontendKind::LoadBalancer | FrontendKind::ExternalIp | FrontendKind::NodePort)
}
