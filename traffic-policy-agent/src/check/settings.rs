//! The settings of `run` that `check` judges.

use std::{net::SocketAddr, path::PathBuf};

use traffic_policy_cluster::source::Manifests;
use traffic_policy_dataplane::{Cgroup, Mode, Pool};

/// Settings that `run` will be given.
#[derive(Clone, Debug)]
pub struct Settings {
    /// `--device`; empty: found by routes and addresses.
    pub devices: Vec<String>,
    pub attach: Mode,
    pub pins: PathBuf,
    pub cgroup: Cgroup,
    pub pool: Pool,
    pub healthz: SocketAddr,
    pub metrics: Option<SocketAddr>,
    /// Services whose ports are compared with what listens here.
    pub manifests: Option<Manifests>,
}
