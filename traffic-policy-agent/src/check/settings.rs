//! The settings of `run` that `check` judges.

use std::{net::SocketAddr, path::PathBuf};

use traffic_policy_cluster::source::{Access, Manifests};
use traffic_policy_dataplane::{Cgroup, LocalDelivery, Mode, PodServices, SnatPortRange};

/// The settings of `--direct`.
#[derive(Clone, Debug, Default)]
pub struct DirectSettings {
    /// Another node; `None`: no packet is sent.
    pub peer: Option<Peer>,
    /// The namespace of the Leases, and the way to the API server.
    pub announce: Option<(String, Access)>,
}

/// Another node that is asked.
#[derive(Clone, Debug)]
pub struct Peer {
    /// The name or address that was given.
    pub given: String,
    /// The node's name, or why no node of such an address is known.
    pub node: Result<String, String>,
}

/// Settings that `run` will receive.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Value of `--device`; if empty, devices are found by routes and addresses.
    pub devices: Vec<String>,
    pub attach: Mode,
    pub local_delivery: LocalDelivery,
    pub pod_services: PodServices,
    /// Whether direct forwarding is looked at.
    pub direct: Option<DirectSettings>,
    pub pins: PathBuf,
    pub cgroup: Cgroup,
    pub snat_ports: SnatPortRange,
    pub healthz: SocketAddr,
    pub metrics: Option<SocketAddr>,
    /// Manifests with the Services whose ports are compared with this node's listeners.
    pub manifests: Option<Manifests>,
}
