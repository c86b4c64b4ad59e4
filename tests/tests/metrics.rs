//! Scrapes of --metrics-address. The tests with an agent need root; without it each fails with an
//! explanation.

#![expect(clippy::unwrap_used, reason = "a test fails with the error as it is")]

use std::net::SocketAddr;
use std::time::{Duration, SystemTime};

use k8s_openapi::jiff::Timestamp;
use serde_json::json;
use traffic_policy_agent::health::ProxyHealth;
use traffic_policy_agent::metrics::{Metrics, NoLocal, Observed, PortCounts};
use traffic_policy_cluster::model::{self, ServiceName, ServicePortKey};
use traffic_policy_dataplane::inspect::ServiceCount;
use traffic_policy_dataplane::{Attached, DataplaneUsage, Found, MapUsage};
use traffic_policy_ebpf::outcome::Outcome;
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::exposition::{Exposition, Kind};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Policy, Service};
use traffic_policy_testing::pace::poll;

const PORT: u16 = 30080;
const SOON: Duration = Duration::from_secs(10);

const SYNCS: &str = "kubeproxy_sync_proxy_rules_duration_seconds_count";
const FULL: &str = "kubeproxy_sync_full_proxy_rules_duration_seconds_count";
const PARTIAL: &str = "kubeproxy_sync_partial_proxy_rules_duration_seconds_count";
const PROGRAMMED: &str = "kubeproxy_network_programming_duration_seconds_count";
const SYNCED_AT: &str = "kubeproxy_sync_proxy_rules_last_timestamp_seconds";
const QUEUED_AT: &str = "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds";
const NO_LOCAL: &str = "kubeproxy_sync_proxy_rules_no_local_endpoints_total";
const PACKETS: &str = "traffic_policy_packets_total";
const V4: [(&str, &str); 1] = [("ip_family", "IPv4")];
const V6: [(&str, &str); 1] = [("ip_family", "IPv6")];

fn count(scrape: &Exposition, name: &str, labels: &[(&str, &str)]) -> u64 {
    scrape.value(name, labels).unwrap() as u64
}

/// Scrapes until the condition holds.
fn wait_scrape(agent: &Agent, what: &str, wanted: impl Fn(&Exposition) -> bool) -> Exposition {
    let found = poll(SOON, || {
        let scrape = agent.scrape().unwrap();
        assert_eq!(scrape.complaints(), Vec::<String>::new());
        wanted(&scrape).then_some(scrape)
    });
    found.unwrap_or_else(|| panic!("{what}:\n{}", agent.ask_metrics("/metrics").unwrap().body))
}

/// Every possible family, with labels that need escapes.
#[test]
fn everything_at_once_is_in_good_style() {
    let key = |name: &str, ipv6| ServicePortKey {
        service: ServiceName { namespace: "a\\b".to_owned(), name: name.to_owned() },
        port: "say \"http\"\n".to_owned(),
        protocol: model::Protocol::Tcp,
        ipv6,
    };
    let metrics = Metrics::new("node \"one\"".to_owned(), ProxyHealth::new(true, true));
    metrics.queued();
    metrics.failed(Duration::from_secs(20), true);
    metrics.synced(Duration::from_millis(1), true);
    metrics.synced(Duration::from_millis(3), false);
    metrics.observed(Observed {
        attached: vec![("eth0".to_owned(), Attached::XdpDriver), ("vxlan.calico".to_owned(), Attached::Tc)],
        usage: DataplaneUsage {
            maps: [Some(false), Some(true), None]
                .map(|ipv6| MapUsage { map: "slots", ipv6, used: 1, size: 2 })
                .to_vec(),
            found: [Found { entries: 4, snat: 2, unassured: 1, deleted: 0 }; 2],
            full: [1, 0],
            snat_ports: 30_000,
            draining: vec![(key("web", false), SystemTime::now()), (key("web", true), SystemTime::now())],
        },
        ports: PortCounts { no_local: [NoLocal { internal: 1, external: 2 }; 2], ..PortCounts::default() },
        warnings: vec![(key("web", false).service, 1), (key("api", false).service, 2)],
        ..Observed::default()
    });
    metrics.count_packets(|| {
        let hooks = ["xdp", "tc-ingress", "tc-egress"];
        Ok(hooks
            .iter()
            .flat_map(|hook| Outcome::ALL.iter().map(move |outcome| (*hook, *outcome, 1)))
            .collect())
    });
    let counts =
        [(false, Outcome::Forwarded), (true, Outcome::Forwarded), (true, Outcome::DroppedNoSnatPort)];
    let counts =
        counts.map(|(ipv6, outcome)| ServiceCount { key: key("web", ipv6), outcome, packets: 3, bytes: 300 });
    metrics.count_services(move || Ok(counts.to_vec()));

    let text = metrics.render();
    let scrape = Exposition::parse(&text).unwrap();
    assert_eq!(scrape.complaints(), Vec::<String>::new());
    let labels = [("namespace", "a\\b"), ("service", "web"), ("port", "say \"http\"\n"), ("protocol", "TCP")];
    assert_eq!(scrape.samples("traffic_policy_service_packets_total", &labels).len(), 3);
    assert_eq!(scrape.samples("traffic_policy_service_bytes_total", &labels).len(), 3);
    let refused = [("outcome", "dropped-no-snat-port"), ("ip_family", "IPv6")];
    assert_eq!(count(&scrape, "traffic_policy_service_packets_total", &refused), 3);
    assert_eq!(count(&scrape, SYNCS, &V6), 3);
    let name = "kubeproxy_sync_proxy_rules_duration_seconds_bucket";
    for (bound, below) in [("0.001", 1), ("0.002", 1), ("0.004", 2), ("16.384", 2), ("+Inf", 3)] {
        assert_eq!(count(&scrape, name, &[("le", bound), V4[0]]), below, "{bound}");
    }
    assert_eq!(scrape.samples("kubeproxy_network_programming_duration_seconds_bucket", &V4).len(), 81);
    assert_eq!(
        scrape.kind(NO_LOCAL),
        Some(Kind::Untyped),
        "a gauge, which promtool would not have by this name"
    );
}

fn web(policy: Policy) -> Service {
    Cluster::node_port("web", policy, PORT)
}

/// Writes the slices of the endpoints as the EndpointSlice controller leaves them after a change at
/// this moment.
fn change_endpoints(cluster: &Cluster, service: &Service, pods: usize) {
    let mut slices = service.slices(&cluster.backends()[..pods]);
    for slice in &mut slices {
        let now = Timestamp::now().to_string();
        slice["metadata"]["annotations"] = json!({"endpoints.kubernetes.io/last-change-trigger-time": now});
    }
    cluster.manifests.write("endpoints-default-web", &slices).unwrap();
}

#[test]
fn a_scrape_follows_syncs_and_packets() {
    let cluster = Cluster::start(Lab::builder().pods(&[0, 2])).unwrap();
    cluster.manifests.apply(&web(Policy::Cluster), &cluster.backends()).unwrap();
    let start = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs_f64();
    let agent = Agent::builder(&cluster.lab, cluster.lab.node(1)).start().unwrap();
    agent.wait_ready(SOON).unwrap();

    // After the first sync, which compared all maps.
    let first = wait_scrape(&agent, "observed", |scrape| !scrape.samples(NO_LOCAL, &[]).is_empty());
    for family in [V4, V6] {
        assert_eq!(count(&first, FULL, &family), 1);
        assert_eq!(count(&first, SYNCS, &family), 1 + count(&first, PARTIAL, &family));
        assert_eq!(count(&first, PROGRAMMED, &family), 0, "no annotation");
        assert_eq!(count(&first, "kubeproxy_sync_proxy_rules_service_changes_total", &family), 1);
        assert_eq!(count(&first, "kubeproxy_sync_proxy_rules_endpoint_changes_total", &family), 1);
        assert_eq!(count(&first, "kubeproxy_sync_proxy_rules_service_changes_pending", &family), 0);
        assert_eq!(count(&first, "kubeproxy_sync_proxy_rules_endpoint_changes_pending", &family), 0);
        assert_eq!(count(&first, "traffic_policy_service_ports", &family), 2);
        let (queued, synced) =
            (first.value(QUEUED_AT, &family).unwrap(), first.value(SYNCED_AT, &family).unwrap());
        assert!(start <= queued && queued <= synced && synced < start + 60.0, "{start} {queued} {synced}");
        for policy in ["internal", "external"] {
            assert_eq!(count(&first, NO_LOCAL, &[family[0], ("traffic_policy", policy)]), 0);
        }
        // The node's primary address and the others of the family, with two protocols.
        assert!(count(&first, "traffic_policy_map_entries", &[family[0], ("map", "frontends")]) >= 2);
        assert_eq!(count(&first, "traffic_policy_map_entries", &[family[0], ("map", "slots")]), 4);
        assert_eq!(count(&first, "traffic_policy_map_max_entries", &[family[0], ("map", "slots")]), 262_144);
    }
    // The maps that docs/metrics.md lists.
    for map in [
        "flows",
        "unassured",
        "frontends",
        "slots",
        "source-ranges",
        "direct-nodes",
        "direct-macs",
        "services",
        "maglev",
        "hops",
        "devices",
        "removed-endpoints",
    ] {
        assert!(!first.samples("traffic_policy_map_max_entries", &[("map", map)]).is_empty(), "{map}");
    }
    assert_eq!(count(&first, "traffic_policy_attached_devices", &[("device", "eth0"), ("mode", "tc")]), 1);
    assert_eq!(count(&first, "traffic_policy_node_info", &[("node", "node-1")]), 1);
    assert_eq!(first.samples("traffic_policy_build_info", &[]).len(), 1);
    assert_eq!(count(&first, "traffic_policy_healthy", &[]), 1);
    assert_eq!(count(&first, "traffic_policy_node_eligible", &[]), 1);
    assert!(first.value("traffic_policy_out_of_sync_seconds", &[]).unwrap().abs() < f64::EPSILON);
    assert!(first.value("traffic_policy_source_age_seconds", &[]).unwrap() < 60.0);
    assert!(count(&first, "traffic_policy_snat_ports", &[]) >= 4096);
    assert_eq!(agent.ask_metrics("/proxyMode").unwrap().body, "ebpf");
    assert_eq!(agent.ask_metrics("/healthz").unwrap().status, 200);

    // Packet counters.
    let forwarded = [("hook", "tc-ingress"), ("outcome", "forwarded")];
    let replied = [("hook", "tc-ingress"), ("outcome", "replied")];
    assert_eq!((count(&first, PACKETS, &forwarded), count(&first, PACKETS, &replied)), (0, 0));
    for protocol in Protocol::BOTH {
        cluster.answer(protocol, cluster.at(1, Family::V4, PORT)).unwrap();
    }
    let second = agent.scrape().unwrap();
    // SYN, ACK and request of one, the datagram of the other; SYN-ACK and answers.
    assert!(count(&second, PACKETS, &forwarded) >= 4, "{:?}", second.samples(PACKETS, &forwarded));
    assert!(count(&second, PACKETS, &replied) >= 3);
    let flows = [V4[0], ("map", "flows")];
    let swept =
        wait_scrape(&agent, "flows", |scrape| count(scrape, "traffic_policy_map_entries", &flows) >= 4);
    assert!(count(&swept, "traffic_policy_snat_flows", &V4) >= 2);
    assert!(count(&swept, "traffic_policy_map_entries", &[("map", "hops")]) >= 1);

    // Endpoints that change now: the time until they are in the maps is measured.
    change_endpoints(&cluster, &web(Policy::Cluster), 1);
    let third = wait_scrape(&agent, "programmed", |scrape| count(scrape, PROGRAMMED, &V6) == 1);
    assert_eq!(count(&third, PROGRAMMED, &V4), 1);
    let name = "kubeproxy_network_programming_duration_seconds_sum";
    assert!((0.0..10.0).contains(&third.value(name, &V4).unwrap()));
    assert_eq!(count(&third, FULL, &V4), 1);
    assert!(count(&third, PARTIAL, &V4) > count(&first, PARTIAL, &V4));
    assert_eq!(count(&third, "kubeproxy_sync_proxy_rules_endpoint_changes_total", &V4), 2);
    assert_eq!(count(&third, "kubeproxy_sync_proxy_rules_service_changes_total", &V4), 1);
    assert!(third.value(SYNCED_AT, &V4).unwrap() > first.value(SYNCED_AT, &V4).unwrap());
    assert!(third.value(QUEUED_AT, &V4).unwrap() <= third.value(SYNCED_AT, &V4).unwrap());

    // Probe counters.
    let ok = [("code", "200")];
    let probes = |scrape: &Exposition| {
        ["healthz", "livez"].map(|probe| count(scrape, &format!("kubeproxy_proxy_{probe}_total"), &ok))
    };
    let before = probes(&agent.scrape().unwrap());
    agent.healthz().unwrap();
    agent.livez().unwrap();
    agent.livez().unwrap();
    assert_eq!(probes(&agent.scrape().unwrap()), [before[0] + 1, before[1] + 2]);
}

/// Both ports of the Service, in both families: the node has no endpoint, but another node has.
#[test]
fn local_policies_without_local_endpoints_are_counted() {
    let cluster = Cluster::start(Lab::builder().pods(&[0, 1])).unwrap();
    cluster.manifests.apply(&web(Policy::Cluster), &cluster.backends()).unwrap();
    let agents = Agent::start_all(&cluster.lab, |agent| agent.flags(&["--drain", "1h"])).unwrap();
    let no_local = |scrape: &Exposition| -> Vec<u64> {
        let both = [V4[0], V6[0]].map(|family| {
            ["internal", "external"]
                .map(|policy| count(scrape, NO_LOCAL, &[family, ("traffic_policy", policy)]))
        });
        both.concat()
    };
    let service = web(Policy::Local).cluster_ip("10.96.0.80".parse().unwrap()).internal_policy(Policy::Local);
    cluster.manifests.service(&service).unwrap();
    let scrape = wait_scrape(&agents[0], "Local", |scrape| no_local(scrape) == [2, 2, 0, 0]);
    // The policy changed to Local here and now, so load balancers get time to notice.
    assert_eq!(count(&scrape, "traffic_policy_service_ports_draining", &[]), 2);
    let until = "traffic_policy_drain_until_timestamp_seconds";
    let draining = [V4[0], ("namespace", "default"), ("service", "web"), ("protocol", "UDP")];
    let left = scrape.value(until, &draining).unwrap()
        - SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs_f64();
    assert!((3500.0..3601.0).contains(&left), "{left}");
    // The endpoint's own node lacks none.
    let there = wait_scrape(&agents[1], "the Service", |scrape| {
        count(scrape, "kubeproxy_sync_proxy_rules_service_changes_total", &V4) == 2
    });
    assert_eq!(no_local(&there), [0; 4]);
    assert_eq!(count(&there, "traffic_policy_service_ports_draining", &[]), 0);
    // Without any endpoint no traffic is lost for want of a local one.
    cluster.manifests.endpoints(&service, &[]).unwrap();
    wait_scrape(&agents[0], "no endpoints", |scrape| no_local(scrape) == [0; 4]);
}

#[test]
fn a_service_that_loses_its_node_port_is_named() {
    let cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
    cluster.manifests.apply(&web(Policy::Cluster), &cluster.backends()).unwrap();
    let late = Cluster::node_port("late", Policy::Cluster, PORT).families(&[Family::V4]);
    let agents = Agent::start_all(&cluster.lab, |agent| agent).unwrap();
    cluster.manifests.apply(&late, &cluster.backends()).unwrap();
    let warnings = "traffic_policy_service_warnings";
    let named = |scrape: &Exposition, service| scrape.samples(warnings, &[("service", service)]).len();
    // If two are equally old, the name decides.
    let scrape = wait_scrape(&agents[0], "a warning", |scrape| named(scrape, "web") == 1);
    assert_eq!(named(&scrape, "late"), 0);
    let reason = [("reason", "no-frontend")];
    assert_eq!(count(&scrape, "traffic_policy_service_ports_not_programmed", &reason), 2, "by TCP and UDP");
}

#[test]
fn none_and_taken_addresses() {
    let cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
    let builder = || Agent::builder(&cluster.lab, cluster.lab.node(1));
    for how in [
        builder().flags(&["--metrics-address", "none"]),
        builder().environment("TRAFFIC_POLICY_METRICS_ADDRESS", ""),
    ] {
        let mut agent = how.start().unwrap();
        agent.wait_ready(SOON).unwrap();
        let error = agent.ask_metrics("/metrics").unwrap_err();
        assert!(format!("{error:#}").contains("refused"), "{error:#}");
        agent.stop().unwrap();
    }
    let taken: SocketAddr = "127.0.0.1:10249".parse().unwrap();
    let _taken = cluster.lab.node(1).netns().run(|| std::net::TcpListener::bind(taken).unwrap());
    for (how, said) in [
        (builder(), "127.0.0.1:10249 cannot be listened on"),
        (builder().flags(&["--metrics-address", "10249"]), "`10249` is not an address"),
    ] {
        let mut agent = how.start().unwrap();
        assert_ne!(agent.wait_ended(SOON).unwrap(), Some(0));
        agent.wait_said(&[said, "--metrics-address"], SOON).unwrap();
    }
    let agent = builder().flags(&["--metrics-address", "127.0.0.1:10250"]).start().unwrap();
    agent.wait_ready(SOON).unwrap();
}
