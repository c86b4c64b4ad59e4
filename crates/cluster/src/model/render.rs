//! The desired state as text: stable, one fact per line, for people and for tests to compare.

use std::fmt::Display;

use super::{Algorithm, Desired, Endpoint, FrontendKind, Policy, ServicePort, ServicePortKey};

/// Renders the whole state, in order of names.
#[must_use]
pub fn render(desired: &Desired) -> String {
    let mut lines = Vec::new();
    for (key, port) in &desired.ports {
        render_port(key, port, &mut lines);
    }
    for (name, health) in &desired.health {
        lines.push(format!("health {name} on {}: {} local", health.port, health.local_endpoints));
    }
    lines.push(format!("node {}", if desired.node_eligible { "eligible" } else { "not eligible" }));
    lines.extend(desired.service_cidrs.iter().map(|cidr| format!("service CIDR {cidr}")));
    lines.extend(desired.warnings.iter().map(|warning| format!("warning: {warning}")));
    lines.push(String::new());
    lines.join("\n")
}

fn render_port(key: &ServicePortKey, port: &ServicePort, lines: &mut Vec<String>) {
    let name = if key.port.is_empty() { "-" } else { &key.port };
    let family = if key.ipv6 { "IPv6" } else { "IPv4" };
    lines.push(format!("port {} {name} {} {family}", key.service, key.protocol));
    for frontend in &port.frontends {
        let kind = match frontend.kind {
            FrontendKind::ClusterIp => "ClusterIP",
            FrontendKind::NodePort => "NodePort",
            FrontendKind::LoadBalancer => "LoadBalancer",
            FrontendKind::ExternalIp => "ExternalIP",
            FrontendKind::LoopbackNodePort => "LoopbackNodePort",
            FrontendKind::OpenedNodePort => "OpenedNodePort",
        };
        lines.push(format!("  {kind} {}", frontend.address));
    }
    lines.push(format!(
        "  policy external={} internal={}",
        policy(port.external_policy),
        policy(port.internal_policy)
    ));
    if port.external_fallback {
        lines.push("  external fallback cluster".to_owned());
    }
    lines.push(format!("  cluster {}", list(port.cluster.iter().map(endpoint))));
    lines.push(format!("  local {}", list(port.local.iter().map(endpoint))));
    // Printed only where the lists do not show it.
    if port.has_endpoints && port.cluster.is_empty() && port.local.is_empty() {
        lines.push("  has endpoints elsewhere".to_owned());
    }
    lines.push(format!("  serving {}", list(port.serving.iter())));
    if let Some(drain) = port.drain {
        lines.push(format!("  drain {}s", drain.as_secs_f64()));
    }
    if !port.source_ranges.is_empty() {
        lines.push(format!("  source ranges {}", list(port.source_ranges.iter())));
    }
    if port.algorithm != Algorithm::default() {
        lines.push(format!("  algorithm {}", port.algorithm));
    }
    if let Some(affinity) = port.affinity {
        lines.push(format!("  affinity {}s", affinity.as_secs()));
    }
}

fn policy(policy: Policy) -> &'static str {
    match policy {
        Policy::Cluster => "Cluster",
        Policy::Local => "Local",
    }
}

fn endpoint(endpoint: &Endpoint) -> String {
    let weight = if endpoint.weight == 1 { String::new() } else { format!("*{}", endpoint.weight) };
    format!("{}{weight}{}", endpoint.address, if endpoint.local { "(here)" } else { "" })
}

fn list(items: impl Iterator<Item = impl Display>) -> String {
    let items: Vec<_> = items.map(|item| item.to_string()).collect();
    if items.is_empty() { "-".to_owned() } else { items.join(" ") }
}
