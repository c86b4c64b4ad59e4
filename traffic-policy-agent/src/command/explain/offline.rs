//! `explain` without a node: the packet path is filled from manifests, or from the objects of the
//! Kubernetes API, from the point of view of one node.

use std::{collections::BTreeSet, net::IpAddr, path::PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use ipnet::IpNet;
use traffic_policy_cluster::{
    command::{api::ApiArguments, listing},
    model::{
        Algorithm, DispatchChoice, Forwarding, Index, NodeInput, Policy, ServicePortKey, maglev::TableSize,
    },
    source::{Manifests, WholeCluster},
};
use traffic_policy_dataplane::explain::{Explainer, NodeScope, simulator::Simulator};

use crate::{
    command::{
        endpoint_choice::{self, forwarding, of_endpoints},
        run::service_cidr,
        view,
    },
    controller::NodePortAddresses,
};

/// A node that is not there.
#[derive(Debug, Args)]
#[command(next_help_heading = "Without a node")]
pub(super) struct OfflineArguments {
    /// A folder of ordinary Kubernetes YAML (Service, EndpointSlice, Node, ServiceCIDR, Lease).
    #[arg(
        long,
        env = "TRAFFIC_POLICY_EXPLAIN_MANIFESTS",
        value_name = "DIR",
        requires = "node_name",
        conflicts_with_all = ["device", "cluster"]
    )]
    pub(super) manifests: Option<PathBuf>,
    /// The objects that the Kubernetes API has now, reached by the flags below.
    #[arg(
        long = "api",
        env = "TRAFFIC_POLICY_EXPLAIN_API",
        requires = "node_name",
        conflicts_with = "device"
    )]
    pub(super) cluster: bool,
    /// Point of view: the name of a Node object, and the nodeName of its endpoints.
    #[arg(long, env = "TRAFFIC_POLICY_NODE_NAME", value_name = "N")]
    node_name: Option<String>,
    /// An address of the node; may be repeated. Those of its Node object count in any case.
    #[arg(
        long = "local-address",
        env = "TRAFFIC_POLICY_LOCAL_ADDRESS",
        value_name = "IP",
        value_delimiter = ','
    )]
    local_addresses: Vec<IpAddr>,
    /// Same as in `run`.
    #[arg(
        long,
        env = "TRAFFIC_POLICY_NODE_PORT_ADDRESSES",
        default_value = "primary",
        value_name = "CIDR,…|primary|all|localhost"
    )]
    node_port_addresses: NodePortAddresses,
    /// Same as in `run`.
    #[arg(long = "service-cidr", env = "TRAFFIC_POLICY_SERVICE_CIDR", value_name = "C,…", value_delimiter = ',',
        value_parser = service_cidr)]
    service_cidrs: Vec<IpNet>,
    /// Same as in `run`.
    #[arg(long, env = "TRAFFIC_POLICY_ALGORITHM", default_value_t, value_name = "random|maglev")]
    algorithm: Algorithm,
    /// Same as in `run`.
    #[arg(long, env = "TRAFFIC_POLICY_MAGLEV_SIZE", default_value_t, value_name = "N")]
    maglev_size: TableSize,
    /// Same as in `run`. With --api, a node without a Lease of its own uses `snat`.
    #[arg(long, env = "TRAFFIC_POLICY_FORWARDING", default_value = "snat", value_name = "snat|direct|tunnel",
        value_parser = forwarding)]
    forwarding: Forwarding,
    /// Same as in `run`. What gets to other nodes is not asked: with `auto`, their Leases decide.
    #[arg(long, env = "TRAFFIC_POLICY_DISPATCH", default_value = "auto", value_name = "auto|ipip|udp|l2",
        value_parser = endpoint_choice::dispatch)]
    dispatch: DispatchChoice,
    /// The namespace of the Leases by which nodes say that they open packets, as in `run`. Default:
    /// those of all namespaces count. With --manifests the Leases are files.
    #[arg(long, env = "TRAFFIC_POLICY_ANNOUNCE_OPENING", value_name = "NAMESPACE",
        value_parser = clap::builder::NonEmptyStringValueParser::new())]
    announce_opening: Option<String>,
    #[command(flatten)]
    api: ApiArguments,
}

/// The reason for which nothing is forwarded directly although a Service wants it.
pub(super) struct BySnat {
    pub(super) ports: BTreeSet<ServicePortKey>,
    pub(super) why: String,
}

impl OfflineArguments {
    pub(super) fn explainer(self, policy: Option<Policy>) -> Result<(Explainer, Option<BySnat>)> {
        let Some(node_name) = self.node_name else {
            return Err(view::usage("name the node whose point of view is taken: --node-name").into());
        };
        let WholeCluster { mut batch, no_leases } = match self.manifests {
            Some(folder) => {
                let manifests = Manifests { folder, node_name: node_name.clone() };
                let batch = manifests.read().context("the manifests are not understood")?;
                WholeCluster { batch, no_leases: None }
            }
            None => listing::cluster(&self.api.access(), self.announce_opening.as_deref())?,
        };
        if let Some(policy) = policy {
            batch.set_external_policy(policy);
        }
        let mut index = Index::default();
        batch.apply(&mut index);
        if self.cluster && !index.nodes().any(|node| node.name == node_name) {
            bail!("the cluster has no Node {node_name}: see `kubectl get nodes`");
        }
        let mut addresses: BTreeSet<IpAddr> = self.local_addresses.iter().copied().collect();
        addresses.extend(index.all_node_addresses(&node_name));
        // `run` resolves them in the same manner: only the Node object shows which are primary.
        let mut primary = index.node_addresses(&node_name).to_vec();
        let node_port_addresses = self.node_port_addresses.among(addresses.iter().copied(), &primary);
        let here = addresses.iter().copied();
        if let Some(concern) = self.node_port_addresses.concern(&node_name, here, &primary) {
            tracing::warn!("{concern}");
        }
        for family in [false, true] {
            if !primary.iter().any(|address| address.is_ipv6() == family) {
                primary.extend(self.local_addresses.iter().find(|address| address.is_ipv6() == family));
            }
        }
        let why_snat = match no_leases {
            Some(why) => Some(format!(
                "for the Leases of direct forwarding may not be listed (list on leases.coordination.k8s.io is needed): {why}"
            )),
            None if self.cluster => lacks_lease(&index, &node_name),
            None => None,
        };
        let input = NodeInput {
            node_name: node_name.clone(),
            algorithm: self.algorithm,
            forwarding: self.forwarding,
            dispatch: self.dispatch,
            choice: of_endpoints(self.forwarding, self.algorithm, self.maglev_size),
            hold_direct: why_snat.is_some(),
            node_port_addresses,
            loopback_ipv4: self.node_port_addresses.loopback(false),
            loopback_ipv6: self.node_port_addresses.loopback(true),
            service_cidrs: self.service_cidrs.into_iter().collect(),
            ipv4: true,
            ipv6: true,
            ..NodeInput::default()
        };
        index.update(&input);
        for warning in &index.desired().warnings {
            tracing::warn!("{warning}");
        }
        let desired = index.desired();
        let simulator = Simulator::offline(desired, &addresses, &primary, self.maglev_size)?;
        let scope = NodeScope { node: addresses, pods: index.pod_cidrs(&node_name).to_vec() };
        let explainer = Explainer::new(simulator, scope, primary, Box::new(|_| None), 1, true);
        let wanting = desired.ports.iter().filter(|(_, port)| port.forwarding.is_direct());
        let ports = wanting.map(|(key, _)| key.clone()).collect();
        Ok((explainer, why_snat.map(|why| BySnat { ports, why })))
    }
}

/// Returns why a node takes no part in direct forwarding, by the API: its agent would have a Lease.
/// Leases of several namespaces are a warning, for agents heed those of one.
fn lacks_lease(index: &Index, node_name: &str) -> Option<String> {
    let namespaces: BTreeSet<_> = index.direct_leases().map(|lease| &lease.name.namespace).collect();
    if namespaces.len() > 1 {
        let namespaces: Vec<_> = namespaces.into_iter().map(String::as_str).collect();
        tracing::warn!(
            "Leases of direct forwarding are in the namespaces {}, and all count: name that of the agents by --announce-opening",
            namespaces.join(", ")
        );
    }
    let has_one = index.direct_leases().any(|lease| lease.node == node_name);
    (!has_one)
        .then(|| format!("for {node_name} has no Lease by which its agent takes part (--announce-opening)"))
}
