//! Findings about port numbers with two claimants: node ports, ephemeral ports, SNAT ports, and
//! listening sockets.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    ops::RangeInclusive,
};

use anyhow::Result;
use traffic_policy_cluster::model::{
    HEALTH_PORT_ANNOTATION, HealthPortRules, Index, NodeInput, Protocol, ServiceName, health_port,
    object::{Service, ServiceType},
};
use traffic_policy_dataplane::{
    LEAST_SNAT_PORTS, SnatPortRange, ephemeral_ports, node::bound_ports, reserved_ports,
};

use super::{
    Finding, Settings,
    listeners::{self, Listener},
};

/// Facts about ports in use.
#[derive(Clone, Debug)]
pub(super) struct Facts {
    snat_ports: SnatPortRange,
    ephemeral: RangeInclusive<u16>,
    /// Ports of net.ipv4.ip_local_reserved_ports.
    reserved: Vec<RangeInclusive<u16>>,
    /// Local ports of all sockets.
    bound: BTreeSet<u16>,
    listeners: Vec<Listener>,
    /// Addresses that the agent will listen on, each with the flag that sets it.
    own: Vec<(SocketAddr, &'static str)>,
    services: Vec<Service>,
    /// Process id of an agent that is already running.
    agent: Option<u32>,
}

impl Facts {
    pub(super) fn look(settings: &Settings, services: Vec<Service>, agent: Option<u32>) -> Result<Self> {
        let metrics = settings.metrics.map(|address| (address, "--metrics-address"));
        Ok(Self {
            snat_ports: settings.snat_ports.clone(),
            ephemeral: ephemeral_ports()?,
            reserved: reserved_ports(),
            bound: bound_ports()?,
            listeners: listeners::read(),
            own: [(settings.healthz, "--healthz-address")].into_iter().chain(metrics).collect(),
            services,
            agent,
        })
    }
}

pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    let mut findings = vec![overlap(facts), snat_ports(facts)];
    let mut conflicts = own_ports(facts);
    conflicts.extend(shadowed(facts));
    conflicts.extend(annotated(facts));
    if conflicts.is_empty() {
        conflicts.push(Finding::ok("listener", "nothing listens on the agent's ports or on node ports"));
    }
    findings.extend(conflicts);
    findings
}

/// Reports ephemeral ports that are node ports: answers to a connection of this node from such a
/// port would be taken for requests to a Service.
fn overlap(facts: &Facts) -> Finding {
    const PROBE: &str = "local-port-range";
    let (first, last) = (facts.ephemeral.start(), facts.ephemeral.end());
    let both: Vec<u16> = facts
        .ephemeral
        .clone()
        .filter(|port| facts.snat_ports.node_ports.contains(*port))
        .filter(|port| !facts.reserved.iter().any(|range| range.contains(port)))
        .collect();
    let (Some(from), Some(to)) = (both.first(), both.last()) else {
        return Finding::ok(
            PROBE,
            format!("net.ipv4.ip_local_port_range ({first} to {last}) gives out no node port"),
        );
    };
    Finding::warning(
        PROBE,
        format!(
            "net.ipv4.ip_local_port_range ({first} to {last}) gives node ports ({from} to {to}) to connections of this node: answers to such a connection are taken for requests to the Service with that port"
        ),
        format!(
            "sysctl -w net.ipv4.ip_local_port_range=\"32768 60999\", or keep the node ports out of it: sysctl -w net.ipv4.ip_local_reserved_ports={from}-{to}"
        ),
    )
}

fn snat_ports(facts: &Facts) -> Finding {
    const PROBE: &str = "snat-ports";
    let left = facts.snat_ports.free(&facts.ephemeral, &facts.bound).len();
    let (first, last) = (facts.ephemeral.start(), facts.ephemeral.end());
    if left < LEAST_SNAT_PORTS {
        return Finding::error(
            PROBE,
            format!(
                "only {left} ports are left as sources towards endpoints of other nodes, {LEAST_SNAT_PORTS} are needed: net.ipv4.ip_local_port_range ({first} to {last}), node ports and this node's sockets take the others"
            ),
            "sysctl -w net.ipv4.ip_local_port_range=\"32768 60999\", or make --snat-ports larger",
        );
    }
    Finding::ok(PROBE, format!("{left} ports are left as sources towards endpoints of other nodes"))
}

/// Prefix of the names of this project's processes, as the kernel truncates them.
const OWN_NAME: &str = "traffic-policy-";

fn own_ports(facts: &Facts) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (address, flag) in &facts.own {
        let Some(taken) = facts.listeners.iter().find(|listener| listener.takes(*address)) else { continue };
        let by_agent = facts.agent.is_some()
            && taken.holder.as_ref().is_none_or(|holder| holder.name.starts_with(OWN_NAME));
        let found = format!("{address} ({flag}) is taken by {}", taken.held_by());
        findings.push(if by_agent {
            Finding::note("listener", found, "nothing: that is the agent which runs already")
        } else {
            Finding::error(
                "listener",
                found,
                format!("stop it (kube-proxy listens there, too), or choose another {flag}"),
            )
        });
    }
    findings
}

/// The Service that needs a port on this node.
struct Wanted<'a> {
    service: &'a ServiceName,
    /// The field or annotation that makes it a health-check port.
    health: Option<&'static str>,
}

/// Reports listeners on node ports: packets for them from outside go to the Service.
fn shadowed(facts: &Facts) -> Vec<Finding> {
    let mut wanted: BTreeMap<(Protocol, u16), Wanted<'_>> = BTreeMap::new();
    for service in &facts.services {
        let name = &service.name;
        for port in service.ports.iter().filter(|port| port.node_port != 0) {
            wanted.entry((port.protocol, port.node_port)).or_insert(Wanted { service: name, health: None });
        }
        if service.health_check_node_port != 0 {
            let key = (Protocol::Tcp, service.health_check_node_port);
            wanted.entry(key).or_insert(Wanted { service: name, health: Some("healthCheckNodePort") });
        }
        if let Some(port) = health_port(service).filter(|_| service.service_type == ServiceType::NodePort) {
            let health = Some(HEALTH_PORT_ANNOTATION);
            wanted.entry((Protocol::Tcp, port)).or_insert(Wanted { service: name, health });
        }
    }
    let mut findings = Vec::new();
    let mut told = BTreeSet::new();
    for listener in &facts.listeners {
        let (protocol, port) = (listener.protocol, listener.local.port());
        let ours = listener.holder.as_ref().is_some_and(|holder| Some(holder.process) == facts.agent);
        // A program usually listens on both families.
        if ours || !told.insert((protocol, port)) {
            continue;
        }
        let by = listener.held_by();
        match wanted.get(&(protocol, port)) {
            Some(Wanted { service, health: Some(health) }) => findings.push(Finding::error(
                "listener",
                format!("{protocol} port {port}, the {health} of Service {service}, is taken by {by}: load balancers ask there and would believe it"),
                "let that program listen elsewhere",
            )),
            Some(Wanted { service, health: None }) => findings.push(Finding::warning(
                "listener",
                format!("{by} listens on {protocol} port {port}, the node port of Service {service}: packets from outside go to the Service, never to it"),
                format!("let that program listen elsewhere, or give {service} another nodePort"),
            )),
            // The port was chosen by the kernel and is soon free again.
            None if protocol == Protocol::Udp && facts.ephemeral.contains(&port) => {}
            None if facts.snat_ports.node_ports.contains(port) && !listener.local.ip().is_loopback() => {
                findings.push(Finding::note(
                    "listener",
                    format!("{by} listens on {protocol} port {port}, in the range of node ports: a Service that gets it as node port takes its packets"),
                    "let that program listen outside of the range, or narrow --node-ports as the API server's --service-node-port-range",
                ));
            }
            None => {}
        }
    }
    findings
}

/// Reports health-check ports that annotations of Services give and that the agent would not use.
fn annotated(facts: &Facts) -> Vec<Finding> {
    let mut index = Index::default();
    for service in facts.services.iter().filter(|service| !service.foreign) {
        index.apply(service.clone());
    }
    let health_ports = HealthPortRules {
        node_ports: facts.snat_ports.node_ports.0.clone(),
        own: facts.own.iter().map(|(address, flag)| (address.port(), *flag)).collect(),
        ephemeral: Some(facts.ephemeral.clone()),
        reserved: facts.reserved.clone(),
    };
    index.update(&NodeInput { health_ports, ipv4: true, ipv6: true, ..NodeInput::default() });
    let warnings = facts.services.iter().flat_map(|service| index.warnings_of(&service.name));
    let findings = warnings.filter(|text| text.contains(HEALTH_PORT_ANNOTATION)).map(|text| {
        Finding::warning(
            "health-port",
            text.trim_end_matches('.'),
            "correct the annotation: a number within --node-ports that no Service has; until then that Service has no health port",
        )
    });
    findings.collect()
}

#[cfg(test)]
mod tests;
