//! Ports of this node that annotations of Services may not use as health-check ports.

use std::net::SocketAddr;

use traffic_policy_cluster::model::HealthPortRules;
use traffic_policy_dataplane::{PortRanges, ephemeral_ports, reserved_ports};

use super::Settings;

/// Rules for health-check ports: fixed at start, except for sysctls, which are read each time.
#[derive(Debug)]
pub(super) struct HealthPorts {
    node_ports: PortRanges,
    own: Vec<(u16, &'static str)>,
}

impl HealthPorts {
    pub(super) fn of(settings: &Settings) -> Self {
        let own = own(settings.healthz, settings.metrics);
        Self { node_ports: settings.dataplane.snat_ports.node_ports.clone(), own }
    }

    pub(super) fn look(&self) -> HealthPortRules {
        HealthPortRules {
            node_ports: self.node_ports.0.clone(),
            own: self.own.clone(),
            ephemeral: ephemeral_ports().ok(),
            reserved: reserved_ports(),
        }
    }
}

fn own(healthz: SocketAddr, metrics: Option<SocketAddr>) -> Vec<(u16, &'static str)> {
    let metrics = metrics.map(|address| (address.port(), "--metrics-address"));
    [(healthz.port(), "--healthz-address")].into_iter().chain(metrics).collect()
}
