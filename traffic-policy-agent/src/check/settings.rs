//! The settings of `run` that `check` judges.

use std::{net::SocketAddr, path::PathBuf};

use traffic_policy_cluster::source::Manifests;
use traffic_policy_dataplane::{Cgroup, LocalDelivery, Mode, PodServices, SnatPortRange};

/// Settings that `run` will receive.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Value of `--device`; if empty, devices are found by routes and addresses.
    pub devices: Vec<String>,
    pub attach: Mode,
    pub local_delivery: LocalDelivery,
    pub pod_services: PodServices,
    pub pins: PathBuf,
    pub cgroup: Cgroup,
    pub snat_ports: SnatPortRange,
    pub healthz: SocketAddr,
    pub metrics: Option<SocketAddr>,
    /// Manifests with the Services whose ports are compared with this node's listeners.
    pub manifests: Option<Manifests>,
}
