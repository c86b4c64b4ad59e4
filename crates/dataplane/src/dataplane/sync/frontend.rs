//! The map values of one Service port and its frontends.

use std::time::Duration;

use traffic_policy_cluster::model::{
    self, Algorithm, Forwarding, FrontendKind, HeldPolicy, Policy, ServicePort, ServicePortKey,
};
use traffic_policy_ebpf::abi::{Frontend, NAME_LENGTH, ServiceInfo, frontend, frontend_kind, policy};

use crate::dataplane::maps::keys::number;

/// Returns the flags of a frontend, see [`frontend`].
pub fn flags(port: &ServicePort, kind: FrontendKind, node_address: bool, has_table: bool) -> u32 {
    let policy = port.policy_here(kind);
    let number = match kind {
        FrontendKind::ClusterIp => frontend_kind::CLUSTER_IP,
        FrontendKind::NodePort => frontend_kind::NODE_PORT,
        FrontendKind::LoadBalancer => frontend_kind::LOAD_BALANCER,
        FrontendKind::ExternalIp => frontend_kind::EXTERNAL_IP,
        FrontendKind::LoopbackNodePort => frontend_kind::LOOPBACK,
        FrontendKind::OpenedNodePort => frontend_kind::OPENED,
    };
    let mut flags = number << frontend::KIND_SHIFT;
    if policy == Policy::Local {
        flags |= frontend::LOCAL;
    }
    if port.has_endpoints {
        flags |= frontend::HAS_ENDPOINTS;
    }
    if has_table {
        flags |= frontend::MAGLEV;
    }
    if node_address {
        flags |= frontend::NODE_ADDRESS;
    }
    if port.forwarding.is_direct() {
        flags |= frontend::DIRECT;
    }
    if has_table && port.is_alike_everywhere(kind) {
        flags |= frontend::L2;
    }
    if port.forwarding == Forwarding::Tunnel {
        flags |= frontend::TUNNEL | frontend::OPENS_REPLIES;
    }
    if kind == FrontendKind::LoadBalancer && !port.source_ranges.is_empty() {
        flags |= frontend::SOURCE_RANGES;
    }
    flags
}

/// The inputs of draining in addition to the Service.
#[derive(Clone, Copy, Debug)]
pub struct Drain {
    /// The drain time of Services without an annotation of their own.
    pub default: Duration,
    /// The current time of CLOCK_MONOTONIC, in nanoseconds.
    pub now: u64,
}

/// Returns the time until which new flows are still forwarded from this node: see
/// [`model::drain_until`].
pub fn drain_until(
    port: &ServicePort,
    kind: FrontendKind,
    flags: u32,
    local: u32,
    held: Option<Frontend>,
    drain: Drain,
) -> u64 {
    let is_local = kind != FrontendKind::ClusterIp && flags & frontend::LOCAL != 0;
    let held = held
        .map(|held| HeldPolicy { local: held.flags & frontend::LOCAL != 0, drain_until: held.drain_until });
    model::drain_until(is_local, local as usize, held, port.drain.unwrap_or(drain.default), drain.now)
}

/// Returns the affinity timeout in seconds, 0 if there is none.
pub fn affinity(port: &ServicePort) -> u32 {
    port.affinity.map_or(0, |lasts| u32::try_from(lasts.as_secs()).unwrap_or(u32::MAX))
}

/// Returns the names and policies of a Service port, for human readers of the maps.
pub fn info(key: &ServicePortKey, port: &ServicePort) -> ServiceInfo {
    let name = |text: &str| {
        let mut bytes = [0; NAME_LENGTH];
        let length = text.len().min(NAME_LENGTH);
        bytes[..length].copy_from_slice(&text.as_bytes()[..length]);
        bytes
    };
    let mut policies = 0;
    if port.external_policy == Policy::Local {
        policies |= policy::EXTERNAL_LOCAL;
    }
    if port.internal_policy == Policy::Local {
        policies |= policy::INTERNAL_LOCAL;
    }
    if port.algorithm == Algorithm::Maglev {
        policies |= policy::MAGLEV;
    }
    ServiceInfo {
        namespace: name(&key.service.namespace),
        name: name(&key.service.name),
        port: name(&key.port),
        protocol: number(key.protocol) as u8,
        ipv6: u8::from(key.ipv6),
        policies,
        zero: 0,
    }
}
