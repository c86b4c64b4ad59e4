//! Health ports of Services: the port that this node serves for each, and the holder where several
//! want the same.

use std::{
    collections::{BTreeSet, HashMap},
    ops::RangeInclusive,
};

use super::{
    Policy, Protocol, ServiceName,
    conflicts::NAMED,
    object::{Service, ServiceType},
};

/// The annotation that gives a health port to a Service of type NodePort, to which Kubernetes gives
/// none.
pub const HEALTH_PORT_ANNOTATION: &str = "traffic-policy.io/health-check-node-port";

/// Returns the port on which a node reports whether it has endpoints of a Service:
/// `healthCheckNodePort` for type LoadBalancer, the annotation's for type NodePort, and for both
/// only under policy Local.
#[must_use]
pub fn health_port(service: &Service) -> Option<u16> {
    let port = match service.service_type {
        ServiceType::LoadBalancer => service.health_check_node_port,
        ServiceType::NodePort => service.health_annotation,
        ServiceType::ClusterIp => 0,
    };
    Some(port).filter(|port| *port != 0 && service.external_policy == Policy::Local)
}

/// Returns the health port of a Service if the annotation gives it.
pub(super) fn annotated(service: &Service) -> Option<u16> {
    health_port(service).filter(|_| service.service_type == ServiceType::NodePort)
}

/// Returns a sentence about an annotation that does not apply to this Service.
pub(super) fn misplaced(service: &Service) -> Option<String> {
    let why = match (service.service_type, service.external_policy) {
        _ if service.health_annotation == 0 => return None,
        (ServiceType::NodePort, Policy::Local) => return None,
        (ServiceType::NodePort, Policy::Cluster) => {
            "counts under externalTrafficPolicy: Local only: under policy Cluster every node serves, and /healthz on port 10256 tells \
             of each"
        }
        (ServiceType::LoadBalancer, _) => {
            "is for type NodePort: one of type LoadBalancer has spec.healthCheckNodePort under policy Local"
        }
        (ServiceType::ClusterIp, _) => "is for type NodePort",
    };
    Some(sentence(&service.name, service.health_annotation, why))
}

pub(super) fn sentence(service: &ServiceName, port: u16, why: &str) -> String {
    format!(
        "Service {service}: metadata.annotations[{HEALTH_PORT_ANNOTATION}] \"{port}\" {why}; it is ignored."
    )
}

/// Rules for the ports that an annotation may give on this node. By default any port is allowed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HealthPortRules {
    /// `--node-ports`, the range from which the API server also allocates `healthCheckNodePort`;
    /// empty: any port.
    pub node_ports: Vec<RangeInclusive<u16>>,
    /// Ports of the agent itself, each with the flag that sets it.
    pub own: Vec<(u16, &'static str)>,
    /// The range of the sysctl `net.ipv4.ip_local_port_range`.
    pub ephemeral: Option<RangeInclusive<u16>>,
    /// The ports of the sysctl `net.ipv4.ip_local_reserved_ports`.
    pub reserved: Vec<RangeInclusive<u16>>,
}

impl HealthPortRules {
    /// Returns the reason why a port cannot be given; `None` if it can.
    pub(super) fn refusal(&self, port: u16) -> Option<String> {
        let within = |ranges: &[RangeInclusive<u16>]| ranges.iter().any(|range| range.contains(&port));
        if let Some((_, flag)) = self.own.iter().find(|(own, _)| *own == port) {
            return Some(format!("is a port of this agent itself ({flag})"));
        }
        if !self.node_ports.is_empty() && !within(&self.node_ports) {
            let ranges: Vec<_> =
                self.node_ports.iter().map(|range| format!("{}-{}", range.start(), range.end())).collect();
            return Some(format!(
                "is not within --node-ports ({}): other ports are those of programs, of this node's own connections, and \
                 of --snat-ports",
                ranges.join(",")
            ));
        }
        let ephemeral = self.ephemeral.as_ref().filter(|range| range.contains(&port))?;
        (!within(&self.reserved)).then(|| {
            format!(
                "is within net.ipv4.ip_local_port_range ({} to {}), from which this node's own connections take ports",
                ephemeral.start(),
                ephemeral.end()
            )
        })
    }
}

/// The use of a port by a Service, in order of precedence: the API server allocates ports, while
/// any user may write an annotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Use {
    NodePort,
    HealthCheckNodePort,
    Annotation,
}

/// Returns the TCP ports that a Service wants on each node.
pub(super) fn uses(service: &Service) -> Vec<(u16, Use)> {
    let tcp = service.ports.iter().filter(|port| port.node_port != 0 && port.protocol == Protocol::Tcp);
    let health = match annotated(service) {
        Some(port) => Some((port, Use::Annotation)),
        None => health_port(service).map(|port| (port, Use::HealthCheckNodePort)),
    };
    tcp.map(|port| (port.node_port, Use::NodePort)).chain(health).collect()
}

/// A claim to a port, ordered by precedence: the use, then the older Service, then the name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Claim {
    what: Use,
    created: i64,
    service: ServiceName,
}

/// All TCP ports that Services want on nodes, each with its claimants.
#[derive(Clone, Debug, Default)]
pub(super) struct Claims(HashMap<u16, BTreeSet<Claim>>);

impl Claims {
    /// Adds the claims of a Service created at `created` (seconds since 1970; `i64::MAX`: not
    /// known). Adds other Services that this affects to `touched`.
    pub(super) fn add(
        &mut self,
        created: i64,
        service: &ServiceName,
        uses: &[(u16, Use)],
        touched: &mut BTreeSet<ServiceName>,
    ) {
        for (port, what) in uses {
            let claims = self.0.entry(*port).or_default();
            let claim = Claim { what: *what, created, service: service.clone() };
            change(claims, service, touched, |claims| claims.insert(claim));
        }
    }

    /// Removes claims, given as they were added. Adds other Services that this affects to
    /// `touched`.
    pub(super) fn remove(
        &mut self,
        created: i64,
        service: &ServiceName,
        uses: &[(u16, Use)],
        touched: &mut BTreeSet<ServiceName>,
    ) {
        for (port, what) in uses {
            let Some(claims) = self.0.get_mut(port) else { continue };
            let claim = Claim { what: *what, created, service: service.clone() };
            change(claims, service, touched, |claims| claims.remove(&claim));
            if claims.is_empty() {
                self.0.remove(port);
            }
        }
    }

    /// Returns the holder of a port that takes precedence over a Service that wants it by
    /// annotation.
    pub(super) fn lost_to(&self, service: &ServiceName, created: Option<i64>, port: u16) -> Option<String> {
        let claims = self.0.get(&port)?;
        let holder = claims.first()?;
        let created = created.unwrap_or(i64::MAX);
        let what = match holder.what {
            Use::NodePort => "is a node port",
            Use::HealthCheckNodePort => "is the healthCheckNodePort",
            Use::Annotation if (holder.created, &holder.service) >= (created, service) => return None,
            Use::Annotation => "is, by the same annotation, the health port",
        };
        if !named(claims).any(|claim| claim.service == *service) {
            return Some("is wanted by the same annotation of many Services that come before it".to_owned());
        }
        Some(format!("{what} of Service {}", holder.service))
    }

    /// Whether any Service wants this port, for any use.
    pub(super) fn has(&self, port: u16) -> bool {
        self.0.contains_key(&port)
    }
}

/// The first [`NAMED`] claims by annotation: the warnings of these name the holder of the port.
fn named(claims: &BTreeSet<Claim>) -> impl Iterator<Item = &Claim> {
    let service = ServiceName { namespace: String::new(), name: String::new() };
    let first = Claim { what: Use::Annotation, created: i64::MIN, service };
    claims.range(first..).take(NAMED)
}

/// Changes the claim of one Service, and notes the other Services that this concerns: those that
/// enter or leave the first [`NAMED`]; all of these if the first claim changes.
fn change(
    claims: &mut BTreeSet<Claim>,
    service: &ServiceName,
    touched: &mut BTreeSet<ServiceName>,
    change: impl FnOnce(&mut BTreeSet<Claim>) -> bool,
) {
    let names = |claims: &BTreeSet<Claim>| -> BTreeSet<ServiceName> {
        named(claims).map(|claim| claim.service.clone()).filter(|name| name != service).collect()
    };
    let (holder, before) = (claims.first().cloned(), names(claims));
    change(claims);
    let after = names(claims);
    if holder.as_ref() == claims.first() {
        touched.extend(before.symmetric_difference(&after).cloned());
    } else {
        touched.extend(before.union(&after).cloned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules() -> HealthPortRules {
        HealthPortRules {
            node_ports: vec![30_000..=32_767],
            own: vec![(30_256, "--healthz-address")],
            ephemeral: Some(32_000..=60_999),
            reserved: vec![32_100..=32_200],
        }
    }

    #[test]
    fn ports_that_are_refused() {
        for (port, expected) in [
            (31_999, None),
            (32_150, None),
            (30_256, Some("--healthz-address")),
            (22, Some("--node-ports (30000-32767)")),
            (40_000, Some("--snat-ports")),
            (32_000, Some("ip_local_port_range (32000 to 60999)")),
        ] {
            let said = rules().refusal(port);
            match expected {
                None => assert_eq!(said, None, "{port}"),
                Some(text) => assert!(said.as_ref().unwrap().contains(text), "{port}: {said:?}"),
            }
        }
        assert_eq!(HealthPortRules::default().refusal(22), None);
    }

    #[test]
    fn a_change_concerns_few_of_many_that_want_a_port() {
        let name = |i: i64| ServiceName { namespace: "ns".to_owned(), name: format!("s{i:03}") };
        let wanted = [(31_999, Use::Annotation)];
        let mut claims = Claims::default();
        let heard = |claims: &Claims| -> Vec<_> {
            (0..60).map(|i| claims.lost_to(&name(i), Some(i), 31_999)).collect()
        };
        for i in (0..60).map(|i| i * 23 % 60) {
            claims.add(i, &name(i), &wanted, &mut BTreeSet::new());
        }
        for i in [0, 5, 30, 59, 1] {
            for step in [false, true] {
                let (before, mut touched) = (heard(&claims), BTreeSet::new());
                if step {
                    claims.add(i, &name(i), &wanted, &mut touched);
                } else {
                    claims.remove(i, &name(i), &wanted, &mut touched);
                }
                assert!(touched.len() <= NAMED + 1, "{touched:?}");
                for (other, (before, after)) in (0..).zip(before.iter().zip(heard(&claims))) {
                    let concerned = other == i || touched.contains(&name(other));
                    assert!(concerned || *before == after, "{i} {step} {other}: {before:?} {after:?}");
                }
            }
        }
    }

    #[test]
    fn who_has_a_port() {
        let name = |name: &str| ServiceName { namespace: "ns".to_owned(), name: name.to_owned() };
        let mut claims = Claims::default();
        let mut touched = BTreeSet::new();
        let [young, old, given] = ["young", "old", "given"].map(name);
        let annotated = [(31_999, Use::Annotation)];
        claims.add(2, &young, &annotated, &mut touched);
        assert_eq!((claims.lost_to(&young, Some(2), 31_999), touched.len()), (None, 0));
        claims.add(1, &old, &annotated, &mut touched);
        assert_eq!(touched, [young.clone()].into(), "it loses what it had");
        assert!(claims.lost_to(&young, Some(2), 31_999).unwrap().ends_with("of Service ns/old"));
        // A port from the API server takes precedence, whatever the age.
        let given_uses = [(31_999, Use::HealthCheckNodePort), (30_080, Use::NodePort)];
        claims.add(i64::MAX, &given, &given_uses, &mut touched);
        assert!(
            claims
                .lost_to(&old, Some(1), 31_999)
                .unwrap()
                .contains("healthCheckNodePort of Service ns/given")
        );
        touched.clear();
        claims.remove(i64::MAX, &given, &given_uses, &mut touched);
        assert_eq!(touched, [young.clone(), old.clone()].into(), "they may have it now");
        assert_eq!(claims.lost_to(&old, Some(1), 31_999), None);
        assert!(!claims.has(30_080) && claims.has(31_999));
        // A Service's own node port takes precedence, too.
        claims.add(1, &old, &[(31_999, Use::NodePort)], &mut touched);
        assert!(claims.lost_to(&old, Some(1), 31_999).unwrap().contains("a node port of Service ns/old"));
    }
}
