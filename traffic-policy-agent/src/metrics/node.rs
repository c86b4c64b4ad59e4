//! Metrics of the node's state as the run loop knows it, of the source, and of health.

use std::time::SystemTime;

use traffic_policy_cluster::{
    model::{Desired, Dispatch, FrontendKind, Policy, ServiceName},
    source::Status,
};
use traffic_policy_dataplane::{Attached, DataplaneUsage};

use super::{
    exposition::Family,
    labels::{ip_family, port_labels, unix},
};
use crate::health::ProxyHealth;

/// State of the run loop at one moment.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    /// Attached devices by name.
    pub attached: Vec<(String, Attached)>,
    pub usage: DataplaneUsage,
    pub ports: PortCounts,
    pub node_eligible: bool,
    /// Number of warnings of each Service.
    pub warnings: Vec<(ServiceName, usize)>,
    /// Number of Service ports for which the maps have no room or whose write failed.
    pub no_room: usize,
    pub failed: usize,
}

/// Numbers of Service ports in the desired state; pairs are IPv4, IPv6.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PortCounts {
    pub all: [usize; 2],
    pub no_local: [NoLocal; 2],
    /// All of whose addresses belong to other Services.
    pub no_frontend: usize,
}

/// Service ports of one family with policy Local and without an endpoint here, although there is
/// one elsewhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NoLocal {
    pub internal: usize,
    pub external: usize,
}

impl PortCounts {
    /// Counts all Service ports, in one pass: changes wait for it.
    #[must_use]
    pub fn of(desired: &Desired) -> Self {
        let mut counts = Self::default();
        for (key, port) in &desired.ports {
            counts.all[usize::from(key.ipv6)] += 1;
            counts.no_frontend += usize::from(port.frontends.is_empty());
            if !port.local.is_empty() || !port.has_endpoints {
                continue;
            }
            let count = &mut counts.no_local[usize::from(key.ipv6)];
            let reached = |internal: bool| {
                port.frontends.iter().any(|frontend| (frontend.kind == FrontendKind::ClusterIp) == internal)
            };
            count.internal += usize::from(port.internal_policy == Policy::Local && reached(true));
            count.external += usize::from(port.external_policy == Policy::Local && reached(false));
        }
        counts
    }
}

impl Observed {
    pub fn families(&self) -> Vec<Family> {
        let mut families =
            vec![self.no_local(), self.attached(), self.service_ports(), self.not_programmed()];
        families.extend([self.warnings(), self.eligible()]);
        families.extend(self.flows());
        families.extend(self.maps());
        families.extend(self.draining());
        families
    }

    fn no_local(&self) -> Family {
        // This is a gauge, but by its name it ought to be a counter, which promtool refuses. No
        // type at all is accepted, and means the same to a query.
        let mut family = Family::untyped(
            "kubeproxy_sync_proxy_rules_no_local_endpoints_total",
            "Service ports with policy Local, no endpoint on this node, but one elsewhere (a gauge).",
        );
        for (ipv6, count) in [false, true].into_iter().zip(self.ports.no_local) {
            for (policy, count) in [("internal", count.internal), ("external", count.external)] {
                family.add(&[("ip_family", ip_family(ipv6)), ("traffic_policy", policy)], count as f64);
            }
        }
        family
    }

    fn attached(&self) -> Family {
        let mut family = Family::gauge(
            "traffic_policy_attached_devices",
            "Devices whose packets are taken, by the way they are: xdp, xdp-generic or tc.",
        );
        for (device, mode) in &self.attached {
            family.add(&[("device", device), ("mode", &mode.to_string())], 1.0);
        }
        family
    }

    fn service_ports(&self) -> Family {
        let mut family =
            Family::gauge("traffic_policy_service_ports", "Service ports that should be in the maps.");
        for (ipv6, count) in [false, true].into_iter().zip(self.ports.all) {
            family.add(&[("ip_family", ip_family(ipv6))], count as f64);
        }
        family
    }

    fn not_programmed(&self) -> Family {
        let mut family = Family::gauge(
            "traffic_policy_service_ports_not_programmed",
            "Service ports that are not in the maps as they should be: no room, a failed write, or all their addresses are other Services'.",
        );
        let reasons = [
            ("no-room", self.no_room),
            ("write-failed", self.failed),
            ("no-frontend", self.ports.no_frontend),
        ];
        for (reason, count) in reasons {
            family.add(&[("reason", reason)], count as f64);
        }
        family
    }

    fn warnings(&self) -> Family {
        let mut family = Family::gauge(
            "traffic_policy_service_warnings",
            "What the log warns of in a Service or its EndpointSlices: something of it was left out.",
        );
        for (service, count) in &self.warnings {
            family.add(&[("namespace", &service.namespace), ("service", &service.name)], *count as f64);
        }
        family
    }

    fn eligible(&self) -> Family {
        Family::gauge(
            "traffic_policy_node_eligible",
            "1: the Node object lets load balancers send to this node.",
        )
        .with(&[], f64::from(u8::from(self.node_eligible)))
    }

    fn flows(&self) -> Vec<Family> {
        let mut unassured = Family::gauge(
            "traffic_policy_flows_unassured",
            "Flows that the last sweep found and that are not assured: TCP that no client has confirmed, UDP that is no stream.",
        );
        let mut snat = Family::gauge(
            "traffic_policy_snat_flows",
            "Flows with a port of the SNAT port range that the last sweep found.",
        );
        let mut full = Family::counter(
            "traffic_policy_flow_table_full_total",
            "Episodes in which the flow table had no room for a new flow; one ends when all have found room for a minute.",
        );
        for (ipv6, episodes) in [false, true].into_iter().zip(self.usage.full) {
            full.add(&[("ip_family", ip_family(ipv6))], episodes as f64);
        }
        for (ipv6, found) in [false, true].into_iter().zip(self.usage.found) {
            let labels = [("ip_family", ip_family(ipv6))];
            unassured.add(&labels, f64::from(found.unassured));
            snat.add(&labels, f64::from(found.snat));
        }
        let ports = Family::gauge(
            "traffic_policy_snat_ports",
            "Source ports towards endpoints of other nodes; each endpoint can have as many flows.",
        );
        vec![unassured, full, snat, ports.with(&[], f64::from(self.usage.snat_ports))]
    }

    fn maps(&self) -> Vec<Family> {
        let mut used = Family::gauge(
            "traffic_policy_map_entries",
            "Entries of each map; flows, two a flow, and unassured, one a flow, as the last sweep found.",
        );
        let mut size = Family::gauge("traffic_policy_map_max_entries", "Entries that fit into each map.");
        for map in &self.usage.maps {
            let mut labels = vec![("map", map.map)];
            labels.extend(map.ipv6.map(|ipv6| ("ip_family", ip_family(ipv6))));
            used.add(&labels, map.used as f64);
            size.add(&labels, f64::from(map.size));
        }
        vec![used, size]
    }

    fn draining(&self) -> Vec<Family> {
        let mut until = Family::gauge(
            "traffic_policy_drain_until_timestamp_seconds",
            "Service ports without an endpoint here that still forward new connections after a change to policy Local: until when, in seconds since 1970.",
        );
        for (key, end) in &self.usage.draining {
            until.add(&port_labels(key), unix(*end));
        }
        let count = Family::gauge("traffic_policy_service_ports_draining", "Service ports in that phase.");
        vec![until, count.with(&[], self.usage.draining.len() as f64)]
    }
}

/// Returns metrics of the answers of `/healthz` and `/livez`, and of how far behind the maps are.
pub fn health(health: &ProxyHealth) -> Vec<Family> {
    let answered = health.answered();
    let family = |name, help, answers: [(u16, u64); 2]| {
        let mut family = Family::counter(name, help);
        for (code, count) in answers {
            family.add(&[("code", &code.to_string())], count as f64);
        }
        family
    };
    vec![
        family("kubeproxy_proxy_healthz_total", "Answers of /healthz by HTTP status.", answered.healthz),
        family("kubeproxy_proxy_livez_total", "Answers of /livez by HTTP status.", answered.livez),
        Family::gauge(
            "traffic_policy_out_of_sync_seconds",
            "Since when the maps have not been in sync with what the source says; 0: they are.",
        )
        .with(&[], health.behind().as_secs_f64()),
    ]
}

/// Returns metrics about the agent itself.
pub fn about(node_name: &str, health: &ProxyHealth) -> Vec<Family> {
    let direct = health.direct().unwrap_or_default();
    vec![
        Dispatch::ALL.into_iter().fold(
            Family::gauge(
                "traffic_policy_direct_nodes",
                "Other nodes that open packets which this one forwards directly, by what these travel in.",
            ),
            |family, dispatch| {
                let used = direct.dispatch.values().filter(|used| *used == dispatch.name()).count();
                family.with(&[("dispatch", dispatch.name())], used as f64)
            },
        ),
        Family::gauge(
            "traffic_policy_direct_snat_nodes",
            "Other nodes with a Lease that open no packets of this one: it uses SNAT towards them.",
        )
        .with(&[], direct.by_snat.len() as f64),
        Family::gauge(
            "traffic_policy_direct_opens",
            "1: this node opens packets that others forward directly, and they have been told so.",
        )
        .with(&[], f64::from(u8::from(direct.opens))),
        Family::gauge("traffic_policy_build_info", "The agent's version; always 1.")
            .with(&[("version", env!("CARGO_PKG_VERSION"))], 1.0),
        Family::gauge("traffic_policy_node_info", "The name of the Node object; always 1.")
            .with(&[("node", node_name)], 1.0),
        Family::gauge(
            "traffic_policy_leaving",
            "1: there is news that the node is about to go, and load balancers are told not to send here.",
        )
        .with(&[], f64::from(u8::from(health.leaving().is_some()))),
        Family::gauge("traffic_policy_healthy", "1: the maps were written once, and no change is late.")
            .with(&[], f64::from(u8::from(health.is_healthy()))),
    ]
}

/// Returns metrics of the source: the Kubernetes API or the folder of manifests.
pub fn source(status: &Status) -> Vec<Family> {
    let mut age = Family::gauge(
        "traffic_policy_source_age_seconds",
        "Since the last word of the source: an answer of the API, a good look at the folder.",
    );
    if let Some(contact) = status.last_contact {
        let now = SystemTime::now();
        age.add(&[], now.duration_since(contact).unwrap_or_default().as_secs_f64());
    }
    let stale = status.stale.values().map(|stale| stale.since.elapsed()).max().unwrap_or_default();
    vec![
        age,
        Family::gauge(
            "traffic_policy_source_stale_seconds",
            "At least so old is what is known of a kind of objects that waits to be listed anew; 0: all are followed.",
        )
        .with(&[], stale.as_secs_f64()),
        Family::gauge("traffic_policy_source_synced", "1: the source has given all objects once.")
            .with(&[], f64::from(u8::from(status.synced))),
        Family::gauge("traffic_policy_source_errors", "What is wrong with the source now, as the log says.")
            .with(&[], status.errors.len() as f64),
    ]
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, time::Duration};

    use traffic_policy_cluster::model::{Endpoint, Frontend, Protocol, ServicePort, ServicePortKey};
    use traffic_policy_dataplane::MapUsage;

    use super::*;

    fn key(name: &str, ipv6: bool) -> ServicePortKey {
        let service = ServiceName { namespace: "ns".to_owned(), name: name.to_owned() };
        ServicePortKey { service, port: String::new(), protocol: Protocol::Udp, ipv6 }
    }

    fn port(internal: Policy, external: Policy, local: usize, has_endpoints: bool) -> ServicePort {
        let frontend = |address: &str, kind| Frontend { address: address.parse().unwrap(), kind };
        let endpoint = Endpoint::new("10.1.0.1:80".parse().unwrap(), true);
        ServicePort {
            frontends: BTreeSet::from([
                frontend("10.96.0.1:80", FrontendKind::ClusterIp),
                frontend("192.0.2.1:30080", FrontendKind::NodePort),
            ]),
            external_policy: external,
            external_fallback: false,
            forwarding: traffic_policy_cluster::model::Forwarding::Snat,
            here: BTreeSet::new(),
            internal_policy: internal,
            cluster: Vec::new(),
            local: vec![endpoint; local],
            has_endpoints,
            serving: BTreeSet::new(),
            drain: None,
            source_ranges: Vec::new(),
            affinity: None,
            algorithm: traffic_policy_cluster::model::Algorithm::default(),
        }
    }

    #[test]
    fn no_local_endpoints() {
        use Policy::{Cluster, Local};
        let mut desired = Desired::default();
        let mut only_cluster_ip = port(Cluster, Local, 0, true);
        only_cluster_ip.frontends.retain(|frontend| frontend.kind == FrontendKind::ClusterIp);
        for (name, ipv6, port) in [
            ("both", false, port(Local, Local, 0, true)),
            ("here", false, port(Local, Local, 1, true)),
            ("nowhere", false, port(Local, Local, 0, false)),
            ("cluster", false, port(Cluster, Cluster, 0, true)),
            ("outside", true, port(Cluster, Local, 0, true)),
            ("inside", false, port(Local, Cluster, 0, true)),
            ("unreached", false, only_cluster_ip),
        ] {
            desired.ports.insert(key(name, ipv6), port.into());
        }
        let [v4, v6] = PortCounts::of(&desired).no_local;
        assert_eq!((v4.internal, v4.external), (2, 1));
        assert_eq!((v6.internal, v6.external), (0, 1));
    }

    #[test]
    fn what_the_run_loop_knows() {
        let end = SystemTime::UNIX_EPOCH + Duration::from_millis(1_500);
        let observed = Observed {
            attached: vec![("eth0".to_owned(), Attached::XdpGeneric)],
            usage: DataplaneUsage {
                maps: vec![
                    MapUsage { map: "slots", ipv6: Some(true), used: 3, size: 10 },
                    MapUsage { map: "hops", ipv6: None, used: 1, size: 4 },
                ],
                snat_ports: 28_000,
                full: [0, 2],
                draining: vec![(key("web", true), end)],
                ..DataplaneUsage::default()
            },
            warnings: vec![(key("web", true).service, 2)],
            no_room: 1,
            ..Observed::default()
        };
        let text: String = observed.families().iter().map(ToString::to_string).collect();
        for line in [
            "traffic_policy_attached_devices{device=\"eth0\",mode=\"xdp-generic\"} 1",
            "traffic_policy_map_entries{map=\"slots\",ip_family=\"IPv6\"} 3",
            "traffic_policy_map_max_entries{map=\"hops\"} 4",
            "traffic_policy_snat_ports 28000",
            "traffic_policy_flow_table_full_total{ip_family=\"IPv4\"} 0",
            "traffic_policy_flow_table_full_total{ip_family=\"IPv6\"} 2",
            "traffic_policy_drain_until_timestamp_seconds{namespace=\"ns\",service=\"web\",port=\"\",protocol=\"UDP\",ip_family=\"IPv6\"} 1.5",
            "traffic_policy_service_ports_draining 1",
            "traffic_policy_service_warnings{namespace=\"ns\",service=\"web\"} 2",
            "traffic_policy_service_ports_not_programmed{reason=\"no-room\"} 1",
            "kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family=\"IPv4\",traffic_policy=\"internal\"} 0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
    }
}
