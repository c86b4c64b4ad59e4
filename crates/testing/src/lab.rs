//! A cluster's network as code: nodes with pods behind them, a router that is also their switch,
//! and a client.
//!
//! ```text
//!   client ── router ──┬── node-1 ── cni0 ──┬── pod-1-1
//!                      │                    └── pod-1-2
//!                      ├── node-2 ── cni0 ───── …
//!                      └── node-3 ── cni0 ───── …
//! ```
//!
//! Nodes reach each other's pods through the owning node (plain routes, or a VXLAN overlay). The
//! client and the router know the nodes' network only, so a pod is reached from outside through a
//! node or not at all. The set-up of a network plugin, which replaces `cni0` and these routes, is
//! one of the layouts of [`Cni`].

pub mod addressing;
mod build;
mod change;
mod cni;
mod drawing;
mod folder;
mod overlay;
pub mod persistent;
pub mod plan;

use std::net::IpAddr;
use std::path::PathBuf;

pub use self::build::LabBuilder;
pub use self::cni::Cni;
pub use self::folder::{Folder, remove_leftovers};
pub use self::plan::Addresses;
use anyhow::Result;

pub use crate::family::Family;
use crate::netlink::{self, Netlink};
use crate::netns::{Namespace, Owned};

/// A running lab. Dropping it removes everything that it made.
#[derive(Debug)]
pub struct Lab {
    id: String,
    nodes: Vec<Node>,
    router: Owned,
    /// The second router to the client, for nodes with two uplinks.
    second_router: Option<Owned>,
    client: Client,
    plan: LabBuilder,
    folder: Folder,
}

/// The client, which uses the cluster from outside; its device is `eth0`.
#[derive(Debug)]
pub struct Client {
    pub addresses: Addresses,
    netns: Owned,
}

/// A Kubernetes node: `eth0` leads to the switch, `cni0` to its pods.
#[derive(Debug)]
pub struct Node {
    /// The name of the Kubernetes Node object.
    pub name: String,
    /// The InternalIPs of the Node object.
    pub addresses: Addresses,
    /// The addresses of `eth1`, if the node has a second uplink.
    pub second_uplink: Option<Addresses>,
    /// The network of the node's pods, an IPv4 /24 and an IPv6 /64.
    pub pod_network: Addresses,
    pub pods: Vec<Pod>,
    number: u8,
    netns: Owned,
}

/// A pod; its device is `eth0`, and the host's end of the veth is `veth<index>` on the node's
/// `cni0`, unless the lab has the layout of a network plugin.
#[derive(Debug)]
pub struct Pod {
    pub name: String,
    /// The name of its node.
    pub node: String,
    pub addresses: Addresses,
    netns: Owned,
}

impl Lab {
    pub fn builder() -> LabBuilder {
        LabBuilder::default()
    }

    /// The common prefix of the names of all its namespaces.
    pub fn id(&self) -> &str {
        &self.id
    }

    pub fn client(&self) -> &Client {
        &self.client
    }

    pub fn router(&self) -> &Namespace {
        &self.router
    }

    pub fn second_router(&self) -> Option<&Namespace> {
        self.second_router.as_deref()
    }

    /// Returns a node; nodes count from 1, as in their names.
    pub fn node(&self, number: usize) -> &Node {
        &self.nodes[number - 1]
    }

    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    pub fn pods(&self) -> impl Iterator<Item = &Pod> {
        self.nodes.iter().flat_map(|node| &node.pods)
    }

    /// Every namespace with its role: `client`, `router`, `node-1`, `pod-1-1` …
    pub fn namespaces(&self) -> Vec<(&str, &Namespace)> {
        let mut all: Vec<(&str, &Namespace)> = vec![("client", &self.client.netns), ("router", &self.router)];
        all.extend(self.second_router().map(|router| ("router-2", router)));
        for node in &self.nodes {
            all.push((&node.name, &node.netns));
            all.extend(node.pods.iter().map(|pod| (pod.name.as_str(), pod.netns())));
        }
        all
    }

    /// Applies a change to each device for whose namespace and name `wanted` returns true, except
    /// `lo`.
    pub fn each_device(
        &self,
        wanted: impl Fn(&str, &str) -> bool + Sync,
        change: impl AsyncFn(&Netlink, &str) -> Result<()> + Sync,
    ) -> Result<()> {
        self.namespaces().into_iter().try_for_each(|(name, namespace)| {
            namespace.netlink(async |net| {
                for device in
                    netlink::devices()?.iter().filter(|device| *device != "lo" && wanted(name, device))
                {
                    change(&net, device).await?;
                }
                Ok(())
            })
        })
    }

    /// The source address with which a node reaches pods of other nodes.
    pub fn source_towards_pods(&self, node: &Node, family: Family) -> IpAddr {
        let addresses = match self.plan.layout() {
            Some(cni) => cni.source_towards_pods(node),
            None if self.is_overlay() => node.pod_network,
            None => node.addresses,
        };
        addresses.of(family)
    }

    pub(crate) fn folder(&self) -> &Folder {
        &self.folder
    }

    /// A bpffs of this lab alone; give each agent a folder in it as `--pin-dir`.
    pub fn bpffs(&self) -> PathBuf {
        self.folder.bpffs()
    }

    /// The folder of manifests.
    pub fn manifests(&self) -> PathBuf {
        self.folder.manifests()
    }

    /// The folder of logs.
    pub fn logs(&self) -> PathBuf {
        self.folder.logs()
    }
}

impl Client {
    pub fn netns(&self) -> &Namespace {
        &self.netns
    }

    pub fn address(&self, family: Family) -> IpAddr {
        self.addresses.of(family)
    }
}

impl Node {
    pub fn netns(&self) -> &Namespace {
        &self.netns
    }

    pub fn address(&self, family: Family) -> IpAddr {
        self.addresses.of(family)
    }

    /// Returns a pod; pods count from 1, as in their names.
    pub fn pod(&self, number: usize) -> &Pod {
        &self.pods[number - 1]
    }
}

impl Pod {
    pub fn netns(&self) -> &Namespace {
        &self.netns
    }

    pub fn address(&self, family: Family) -> IpAddr {
        self.addresses.of(family)
    }
}
