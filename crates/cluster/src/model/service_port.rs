//! The Service ports of one Service and its slices, as if there were no other Service.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
};

use super::{
    Excess, FALLBACK_ANNOTATION, Frontend, FrontendKind, HealthCheck, Policy, ServiceName, ServicePort,
    ServicePortKey,
    capacity::{Demand, Kind},
    context::Context,
    health_ports::{self, health_port},
    limits::{Chosen, demand},
    object::{EndpointSlice, Port, Service, ServiceType},
    slice_ports::SlicePorts,
    source_ranges::source_ranges,
    topology::{Candidates, NodeTopology},
};

/// The desired state of one Service. Another Service may also claim its frontends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) ports: Vec<(Arc<ServicePortKey>, Arc<ServicePort>)>,
    /// The creation time of the Service, in seconds since 1970; `i64::MAX`: not known.
    pub(super) created: i64,
    /// The map entries that `ports` need.
    pub(super) demand: Demand,
    /// The reason why there are no ports.
    pub(super) refused: Option<Excess>,
    pub(super) health: Option<HealthCheck>,
    /// The port of `health`, if the annotation gives it.
    pub(super) annotated: Option<u16>,
    /// The TCP ports that the Service wants on each node.
    pub(super) uses: Vec<(u16, health_ports::Use)>,
    /// The Service's cluster IPs, if another proxy serves it.
    pub(super) foreign_ips: Vec<IpAddr>,
    /// The Service's cluster IPs, whether or not any of its ports can be served.
    pub(super) cluster_ips: Vec<IpAddr>,
    pub(super) warnings: BTreeSet<String>,
}

pub(super) fn wanted(service: &Service, slices: &[&EndpointSlice], context: &Context) -> Wanted {
    let mut wanted = Wanted { created: service.created.unwrap_or(i64::MAX), ..Wanted::default() };
    if service.foreign {
        wanted.foreign_ips.clone_from(&service.cluster_ips);
        return wanted;
    }
    wanted.warnings.extend(service.problems.iter().cloned());
    wanted.warnings.extend(slices.iter().flat_map(|slice| slice.problems.iter().cloned()));

    wanted.warnings.extend(health_ports::misplaced(service));
    if service.external_fallback && external_policy(service) == Policy::Cluster {
        wanted.warnings.insert(format!(
            "Service {}: metadata.annotations[{FALLBACK_ANNOTATION}] counts under externalTrafficPolicy: Local only; it is ignored.",
            service.name
        ));
    }
    wanted.annotated = health_ports::annotated(service);
    wanted.uses = health_ports::uses(service);
    wanted.health = health_port(service).map(|port| HealthCheck { port, ..HealthCheck::default() });
    let cluster_ips = service.cluster_ips.iter().filter(|ip| context.serves(service, ip.is_ipv6()));
    wanted.cluster_ips.extend(cluster_ips);

    let slices = SlicePorts::new(slices);
    match demand(service, &slices, context) {
        Ok(demand) => wanted.demand = demand,
        Err(excess) => {
            wanted.refuse(&service.name, excess);
            return wanted;
        }
    }
    let mut local_endpoints = 0;
    for ipv6 in context.families(service) {
        let mut ready_here = BTreeSet::new();
        let mut chosen = Chosen::default();
        let limits = &context.input.limits;
        for port in &service.ports {
            let mut candidates = candidates(port, ipv6, &slices, context.topology());
            let mut served = service_port(service, port, ipv6, &candidates, context);
            // Endpoints that are left out keep their room: they may return at any time.
            chosen += &served;
            // Ports beyond the limit are counted for the message, and not kept.
            if chosen.excess(limits).is_some() {
                continue;
            }
            if candidates.leave_out(&context.silent, &context.leaving) {
                served = service_port(service, port, ipv6, &candidates, context);
            }
            ready_here.extend(candidates.ready_local().map(|address| address.ip()));
            let key = ServicePortKey {
                service: service.name.clone(),
                port: port.name.clone(),
                protocol: port.protocol,
                ipv6,
            };
            wanted.ports.push((Arc::new(key), Arc::new(served)));
        }
        if let Some((kind, numbers)) = chosen.excess(limits) {
            let excess = Excess::alone(context.served_ports(service), numbers, kind, ipv6);
            wanted.demand = Demand::default();
            wanted.refuse(&service.name, excess);
            return wanted;
        }
        wanted.demand.set(Kind::Endpoints, ipv6, chosen.cost());
        // A dual-stack pod is one endpoint with two addresses, so families are not added up.
        local_endpoints = local_endpoints.max(ready_here.len());
    }
    if let Some(health) = &mut wanted.health {
        health.local_endpoints = local_endpoints;
        // The load balancer IPs of a refused Service have no listener, because there may be any
        // number of them.
        health.load_balancer_ips = service.load_balancer_ips.iter().copied().collect();
    }
    wanted
}

impl Wanted {
    /// Returns the same desired state without its ports.
    pub(super) fn without_ports(&self) -> Self {
        Self {
            ports: Vec::new(),
            created: self.created,
            demand: self.demand,
            refused: self.refused.clone(),
            health: self.health.clone(),
            annotated: self.annotated,
            uses: self.uses.clone(),
            foreign_ips: self.foreign_ips.clone(),
            cluster_ips: self.cluster_ips.clone(),
            warnings: self.warnings.clone(),
        }
    }

    /// Removes all ports and the count of the health port, and adds a warning with the reason.
    pub(super) fn refuse(&mut self, service: &ServiceName, excess: Excess) {
        self.ports = Vec::new();
        if let Some(health) = &mut self.health {
            *health = HealthCheck { port: health.port, ..HealthCheck::default() };
        }
        self.warnings.insert(excess.sentence(service));
        self.refused = Some(excess);
    }
}

fn candidates<'a>(
    port: &Port,
    ipv6: bool,
    slices: &SlicePorts<'a>,
    topology: NodeTopology<'_>,
) -> Candidates<'a> {
    let mut candidates = Candidates::default();
    for (address, endpoint) in slices.endpoints(port, ipv6) {
        candidates.add(address, endpoint, topology);
    }
    candidates
}

/// Returns the external policy. A ClusterIP Service is reached from outside by its external IPs
/// only.
fn external_policy(service: &Service) -> Policy {
    let counts = service.service_type != ServiceType::ClusterIp || !service.external_ips.is_empty();
    if counts { service.external_policy } else { Policy::Cluster }
}

fn service_port(
    service: &Service,
    port: &Port,
    ipv6: bool,
    candidates: &Candidates<'_>,
    context: &Context,
) -> ServicePort {
    let frontends = frontends(service, port, ipv6, context);
    let externally_reached =
        port.node_port != 0 || frontends.iter().any(|frontend| frontend.kind != FrontendKind::ClusterIp);
    let external_policy = external_policy(service);
    let forwarding = service.forwarding.unwrap_or(context.input.forwarding);

    let cluster_used = service.internal_policy == Policy::Cluster || externally_reached;
    let local_used =
        service.internal_policy == Policy::Local || (external_policy == Policy::Local && externally_reached);
    ServicePort {
        external_policy,
        external_fallback: external_policy == Policy::Local && service.external_fallback,
        internal_policy: service.internal_policy,
        cluster: if cluster_used {
            let (numbers, direct, way) = (&context.numbers, &context.direct, (forwarding, port.protocol));
            candidates.cluster(context.topology(), numbers, direct, way, &service.weights)
        } else {
            Vec::new()
        },
        local: if local_used { candidates.local() } else { Vec::new() },
        has_endpoints: candidates.any_usable(),
        serving: candidates.serving(port.protocol),
        drain: service.drain,
        source_ranges: source_ranges(service, ipv6, context),
        affinity: service.affinity,
        forwarding,
        here: if context.direct.addresses.is_empty() { BTreeSet::new() } else { candidates.here() },
        algorithm: service.algorithm.unwrap_or(context.input.algorithm),
        frontends,
    }
}

/// Returns one frontend for each address. If an address occurs twice, the kind that restricts more
/// is kept, so that naming a load balancer's address as an external IP too does not open it to
/// every source.
fn frontends(service: &Service, port: &Port, ipv6: bool, context: &Context) -> BTreeSet<Frontend> {
    let input = &context.input;
    let any: IpAddr = if ipv6 { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() };
    let (node_ports, any) = match port.node_port {
        0 => (&[][..], None),
        _ => (&input.node_port_addresses[..], context.any_node_port(ipv6).map(|kind| (kind, any))),
    };
    let mut seen = BTreeSet::new();
    let mut frontends = BTreeSet::new();
    for (kind, addresses, number) in [
        (FrontendKind::LoadBalancer, service.load_balancer_ips.as_slice(), port.port),
        (FrontendKind::ClusterIp, &service.cluster_ips, port.port),
        (FrontendKind::ExternalIp, &service.external_ips, port.port),
        (FrontendKind::NodePort, node_ports, port.node_port),
    ] {
        for ip in addresses.iter().filter(|ip| ip.is_ipv6() == ipv6) {
            let address = SocketAddr::new(*ip, number);
            if seen.insert(address) {
                frontends.insert(Frontend { address, kind });
            }
        }
    }
    frontends.extend(any.map(|(kind, ip)| Frontend { address: SocketAddr::new(ip, port.node_port), kind }));
    frontends
}
