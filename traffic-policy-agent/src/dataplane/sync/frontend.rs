//! Map values of one Service port and its frontends.

use std::time::Duration;

use traffic_policy_ebpf::abi::{Frontend, NAME_LENGTH, ServiceInfo, frontend, frontend_kind, policy};

use crate::{
    dataplane::maps::keys::number,
    model::{FrontendKind, Policy, ServicePort, ServicePortKey},
};

/// See [`frontend`].
pub fn flags(port: &ServicePort, kind: FrontendKind, node_address: bool) -> u32 {
    let policy =
        if kind == FrontendKind::ClusterIp { port.internal_policy } else { port.external_policy_here() };
    let number = match kind {
        FrontendKind::ClusterIp => frontend_kind::CLUSTER_IP,
        FrontendKind::NodePort => frontend_kind::NODE_PORT,
        FrontendKind::LoadBalancer => frontend_kind::LOAD_BALANCER,
        FrontendKind::ExternalIp => frontend_kind::EXTERNAL_IP,
        FrontendKind::LoopbackNodePort => frontend_kind::LOOPBACK,
    };
    let mut flags = number << frontend::KIND_SHIFT;
    if policy == Policy::Local {
        flags |= frontend::LOCAL;
    }
    if port.has_endpoints {
        flags |= frontend::HAS_ENDPOINTS;
    }
    if node_address {
        flags |= frontend::NODE_ADDRESS;
    }
    if kind == FrontendKind::LoadBalancer && !port.source_ranges.is_empty() {
        flags |= frontend::SOURCE_RANGES;
    }
    flags
}

/// What draining depends on besides the Service.
#[derive(Clone, Copy, Debug)]
pub struct Drain {
    /// Of Services without an annotation of their own.
    pub default: Duration,
    /// CLOCK_MONOTONIC, nanoseconds.
    pub now: u64,
}

/// Until when new flows are still forwarded from this node: set when the policy turns from Cluster to Local on a node
/// without an endpoint, also when the annotation that let it forward goes, kept while it stays so, and never set because the last local endpoint left (Local must not show
/// a node's address).
pub fn drain_until(
    port: &ServicePort,
    kind: FrontendKind,
    flags: u32,
    local: u32,
    held: Option<Frontend>,
    drain: Drain,
) -> u64 {
    if kind == FrontendKind::ClusterIp || flags & frontend::LOCAL == 0 || local > 0 {
        return 0;
    }
    let Some(held) = held else { return 0 };
    if held.flags & frontend::LOCAL != 0 {
        return held.drain_until;
    }
    let time = port.drain.unwrap_or(drain.default);
    if time.is_zero() {
        return 0;
    }
    drain.now.saturating_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}

/// Seconds, 0 for none.
pub fn affinity(port: &ServicePort) -> u32 {
    port.affinity.map_or(0, |lasts| u32::try_from(lasts.as_secs()).unwrap_or(u32::MAX))
}

/// The names and policies of a Service port, for people who read the maps.
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
