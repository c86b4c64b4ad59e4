//! The inputs of the controller, as `run` makes them from its flags.

use std::{collections::BTreeSet, net::SocketAddr};

use ipnet::IpNet;
use traffic_policy_cluster::{
    model::{Algorithm, DispatchChoice, Forwarding},
    source::{Kubernetes, Manifests, Opening},
};
use traffic_policy_dataplane::{Config, node::socket_ender::SocketEnder};

use super::NodePortAddresses;
use crate::{
    in_effect::InEffect,
    notice::{self, Board},
};

/// Source of objects.
#[derive(Clone, Debug)]
pub enum Origin {
    Manifests(Manifests),
    Kubernetes(Kubernetes),
}

/// Settings for silent nodes.
#[derive(Clone, Copy, Debug)]
pub struct Silence {
    /// Unanswered connections after which a node is suspected; 0: no node ever is.
    pub suspect_syns: u32,
    /// The most nodes that are left out, in percent of those with endpoints.
    pub max_left_out: u8,
}

/// All inputs of `run`.
#[derive(Clone, Debug)]
pub struct Settings {
    pub node_name: String,
    /// Value of `--device`; if empty, devices are found by routes and addresses.
    pub devices: Vec<String>,
    pub origin: Origin,
    pub node_port_addresses: NodePortAddresses,
    /// Ranges of cluster IPs in addition to those of ServiceCIDR objects.
    pub service_cidrs: BTreeSet<IpNet>,
    /// The way of packets to endpoints of other nodes, where a Service has no annotation.
    pub forwarding: Forwarding,
    /// The outer packet of what is forwarded directly.
    pub dispatch: DispatchChoice,
    /// The settings that decide which endpoint is chosen: see `NodeInput::choice`.
    pub choice: String,
    /// The Leases of direct forwarding; `None`: this node writes none.
    pub opening: Option<Opening>,
    /// The algorithm of Services whose annotation names none.
    pub algorithm: Algorithm,
    pub healthz: SocketAddr,
    /// Listening address of metrics; `None`: no metrics.
    pub metrics: Option<SocketAddr>,
    /// All settings as they were given, for `/configz`.
    pub in_effect: InEffect,
    /// Whether `--adopt` is given.
    pub adopt: bool,
    /// The ender of UDP sockets; `None`: no UDP socket is ended.
    pub socket_ender: Option<SocketEnder>,
    pub silence: Silence,
    /// Sources of news that this node is about to go, and the board on which they write.
    pub notices: Vec<notice::Source>,
    pub board: Board,
    pub dataplane: Config,
}
