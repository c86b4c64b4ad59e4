//! Answers to the probes of load balancers: the health-check node port, /healthz and /livez.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::thread::sleep;
use std::time::{Duration, Instant};

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Backend, Policy, Service};
use traffic_policy_testing::pace::{look_until, scaled, until};
use traffic_policy_testing::traffic::http::{self, Response};

const PORT: u16 = 30080;
const HEALTH: u16 = 32000;
const SOON: Duration = Duration::from_secs(10);

fn web() -> Service {
    Cluster::node_port("web", Policy::Local, PORT).vip("203.0.113.1".parse().unwrap()).health_port(HEALTH)
}

/// The answer of the health check at a node's address, as a load balancer sees it.
fn health(cluster: &Cluster, number: usize) -> Option<Response> {
    http::get_from(cluster.lab.client().netns(), cluster.at(number, Family::V4, HEALTH), "/healthz").ok()
}

fn wait_health(cluster: &Cluster, number: usize, wanted: Option<u16>) -> Option<Response> {
    wait_status(&format!("node-{number}"), || health(cluster, number), wanted)
}

fn wait_status(what: &str, ask: impl FnMut() -> Option<Response>, wanted: Option<u16>) -> Option<Response> {
    let status = |response: &Option<Response>| response.as_ref().map(|response| response.status);
    look_until(&format!("{what}: {wanted:?}"), SOON, ask, |response| status(response) == wanted)
}

fn weight(response: &Response) -> &str {
    let line = response.head.lines().find_map(|line| line.strip_prefix("X-Load-Balancing-Endpoint-Weight: "));
    line.unwrap_or_else(|| panic!("no weight: {}", response.head))
}

#[test]
fn tells_where_ready_endpoints_are() {
    let cluster = Cluster::start(Lab::builder().pods(&[2, 1, 0])).unwrap();
    let backends = cluster.backends();
    cluster.manifests.apply(&web(), &backends).unwrap();
    let _agents = Agent::start_all(&cluster.lab, |agent| agent.attach("xdp")).unwrap();
    for (number, status, count) in [(1, 200, "2"), (2, 200, "1"), (3, 503, "0")] {
        let response = wait_health(&cluster, number, Some(status)).unwrap();
        assert_eq!(weight(&response), count, "node-{number}");
        for header in ["Content-Type: application/json", "X-Content-Type-Options: nosniff"] {
            assert!(response.head.contains(header), "{}", response.head);
        }
        let body = format!(
            "{{\n\t\"service\": {{\n\t\t\"namespace\": \"default\",\n\t\t\"name\": \"web\"\n\t}},\n\
             \t\"localEndpoints\": {count},\n\t\"serviceProxyHealthy\": true\n}}"
        );
        assert_eq!(response.body, body, "node-{number}");
        // IPv6 gives the same answer.
        let to = cluster.at(number, Family::V6, HEALTH);
        let v6 = http::get_from(cluster.lab.client().netns(), to, "/any/path").unwrap();
        assert_eq!((v6.status, v6.body), (status, body));
    }

    // On node-1 only terminating endpoints remain: the load balancer leaves while traffic is still
    // forwarded to them.
    let leaving: Vec<_> = backends[..2].iter().map(|backend| backend.clone().terminating()).collect();
    let backends: Vec<_> = leaving.into_iter().chain(backends[2..].iter().cloned()).collect();
    cluster.manifests.endpoints(&web(), &backends).unwrap();
    assert_eq!(weight(&wait_health(&cluster, 1, Some(503)).unwrap()), "0");
    for _ in 0..5 {
        let answer = cluster.answer(Protocol::Tcp, cluster.at(1, Family::V4, PORT)).unwrap();
        assert_eq!(answer.node, "node-1");
    }
    assert_eq!(weight(&wait_health(&cluster, 2, Some(200)).unwrap()), "1");

    // The port is closed with the Service, and with the policy.
    cluster.manifests.service(&Cluster::node_port("web", Policy::Cluster, PORT)).unwrap();
    wait_health(&cluster, 1, None);
    cluster.manifests.service(&web()).unwrap();
    wait_health(&cluster, 2, Some(200));
    cluster.manifests.delete(&web()).unwrap();
    wait_health(&cluster, 2, None);
}

/// A balancer that forwards packets unchanged probes at its own address with the node's MAC. A
/// local route makes that address local to the node: no device has it.
#[test]
fn a_probe_of_the_load_balancers_address_is_answered() {
    let cluster = Cluster::start(Lab::builder().pods(&[1, 0])).unwrap();
    let vips: [IpAddr; 2] = ["203.0.113.1".parse().unwrap(), "2001:db8:f::1".parse().unwrap()];
    let elsewhere: IpAddr = "203.0.113.2".parse().unwrap();
    let service = web().vip(vips[1]);
    cluster.manifests.apply(&service, &cluster.backends()).unwrap();
    let agents = Agent::start_all(&cluster.lab, |agent| agent.attach("xdp")).unwrap();
    let client = cluster.lab.client().netns();
    let status = |address, port| {
        http::get_from(client, SocketAddr::new(address, port), "/healthz").ok().map(|answer| answer.status)
    };
    for (number, wanted) in [(1, 200), (2, 503)] {
        let node = cluster.lab.node(number);
        wait_health(&cluster, number, Some(wanted));
        for vip in vips.into_iter().chain([elsewhere]) {
            cluster.lab.route_vip(vip, node).unwrap();
            node.netns().netlink(async |net| net.local(vip, "eth0").await).unwrap();
        }
        for vip in vips {
            assert_eq!(status(vip, HEALTH), Some(wanted), "{} at {vip}", node.name);
            // Under policy Cluster the same balancers probe the proxy.
            assert_eq!(status(vip, 10256), Some(200), "{} at {vip}", node.name);
        }
        assert_eq!(status(elsewhere, HEALTH), None, "not an address of this Service");
    }
    // The port is closed with the address.
    cluster.manifests.service(&web()).unwrap();
    until("the end of the listener on the former address", SOON, || status(vips[1], HEALTH).is_none());
    assert_eq!(status(vips[0], HEALTH), Some(503));
    assert!(agents.iter().all(|agent| !agent.log().contains("failed to start healthcheck")));
}

/// A Service of type NodePort has a health port by annotation only. Its answers are those of a
/// healthCheckNodePort.
#[test]
fn a_node_port_service_has_one_by_annotation() {
    const ANNOTATED: u16 = 31999;
    const ANNOTATION: &str = "traffic-policy.io/health-check-node-port";
    let cluster = Cluster::start(Lab::builder().pods(&[1, 0])).unwrap();
    let backends = cluster.backends();
    let plain = |policy| Cluster::node_port("web", policy, PORT).annotation("traffic-policy.io/drain", "1h");
    let annotated = plain(Policy::Local).annotation(ANNOTATION, "31999");
    let ask = |number: usize, family| {
        http::get_from(cluster.lab.client().netns(), cluster.at(number, family, ANNOTATED), "/healthz").ok()
    };
    let wait = |number: usize, family, wanted: Option<u16>| {
        wait_status(&format!("node-{number}"), || ask(number, family), wanted)
    };
    let is_of = |name: &str| ask(1, Family::V4).is_some_and(|response| response.body.contains(name));
    cluster.manifests.apply(&plain(Policy::Cluster), &backends).unwrap();
    let agents = Agent::start_all(&cluster.lab, |agent| agent.attach("xdp")).unwrap();
    for family in Family::BOTH {
        cluster.answer(Protocol::Tcp, cluster.at(2, family, PORT)).unwrap();
    }
    // The answer is 503 during the drain, while new connections are still forwarded.
    cluster.manifests.service(&annotated).unwrap();
    for family in Family::BOTH {
        for (number, status, count) in [(1, 200, "1"), (2, 503, "0")] {
            let response = wait(number, family, Some(status)).unwrap();
            assert_eq!(weight(&response), count, "node-{number}");
            assert!(response.head.contains("Content-Type: application/json"), "{}", response.head);
            let body = format!(
                "{{\n\t\"service\": {{\n\t\t\"namespace\": \"default\",\n\t\t\"name\": \"web\"\n\t}},\n\
                 \t\"localEndpoints\": {count},\n\t\"serviceProxyHealthy\": true\n}}"
            );
            assert_eq!(response.body, body, "node-{number}");
        }
        let answer = cluster.answer(Protocol::Tcp, cluster.at(2, family, PORT)).unwrap();
        assert_eq!(answer.node, "node-1", "it drains");
    }
    // Only a terminating endpoint remains: the answer is 503, and the endpoint still serves.
    let leaving: Vec<_> = backends.iter().map(|backend| backend.clone().terminating()).collect();
    cluster.manifests.endpoints(&annotated, &leaving).unwrap();
    assert_eq!(weight(&wait(1, Family::V4, Some(503)).unwrap()), "0");
    cluster.answer(Protocol::Tcp, cluster.at(1, Family::V4, PORT)).unwrap();
    cluster.manifests.endpoints(&annotated, &backends).unwrap();
    wait(1, Family::V4, Some(200));

    // A port that the API server allocated to another Service takes precedence, and the conflict is
    // reported by name.
    let other = Cluster::node_port("other", Policy::Local, PORT + 1).health_port(ANNOTATED);
    cluster.manifests.apply(&other, &backends).unwrap();
    let said = [ANNOTATION, "Service default/web", "is the healthCheckNodePort of Service default/other"];
    agents[0].wait_said(&said, SOON).unwrap();
    until("the port to be handed over", SOON, || is_of("\"other\""));
    cluster.manifests.delete(&other).unwrap();
    until("the port to come back", SOON, || is_of("\"web\""));
    // Ports that no annotation may give: outside of the range of node ports.
    cluster.manifests.service(&plain(Policy::Local).annotation(ANNOTATION, "22000")).unwrap();
    agents[0].wait_said(&[ANNOTATION, "\"22000\" is not within --node-ports"], SOON).unwrap();
    wait(1, Family::V4, None);
    cluster.manifests.service(&annotated).unwrap();
    wait(1, Family::V4, Some(200));
    cluster.manifests.service(&plain(Policy::Local)).unwrap();
    wait(1, Family::V4, None);
}

/// Probed all the time, no health port answers 200 before a connection would be answered.
#[test]
fn never_says_200_before_the_maps_are_written() {
    let cluster = Cluster::start(Lab::builder().pods(&[1, 1])).unwrap();
    cluster.manifests.apply(&web(), &cluster.backends()).unwrap();
    cluster.manifests.write_text("broken", "kind: [").unwrap();
    let agent = Agent::builder(&cluster.lab, cluster.lab.node(1)).attach("xdp").start().unwrap();
    agent.wait_said(&["broken.yaml", "nothing is written"], SOON).unwrap();
    // The agent lives, and waits: restarting it would not help.
    for _ in 0..5 {
        let (healthz, livez) = (agent.healthz().unwrap(), agent.livez().unwrap());
        assert_eq!((healthz.status, livez.status), (503, 200), "{} {}", healthz.body, livez.body);
        assert!(healthz.body.contains("\"healthy\":false"), "{}", healthz.body);
        assert!(health(&cluster, 1).is_none());
        sleep(Duration::from_millis(100));
    }

    let local = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), HEALTH);
    let to = cluster.at(1, Family::V4, PORT);
    fs::remove_file(cluster.manifests.folder().join("broken.yaml")).unwrap();
    let start = Instant::now();
    loop {
        let said =
            http::get_from(cluster.lab.node(1).netns(), local, "/").ok().map(|response| response.status);
        let healthz = agent.healthz().unwrap().status;
        if said == Some(200) || healthz == 200 {
            // No retry: the health port promised an answer.
            cluster.answer(Protocol::Tcp, to).unwrap();
        }
        if said == Some(200) && healthz == 200 {
            break;
        }
        assert!(start.elapsed() < scaled(SOON), "{said:?} {healthz}");
    }
}

#[test]
fn healthz_hears_of_the_node() {
    let cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
    cluster.manifests.apply(&web(), &[Backend::of(cluster.lab.node(1).pod(1))]).unwrap();
    let agent = Agent::start_all(&cluster.lab, |agent| agent).unwrap().remove(0);
    let nodes = fs::read_to_string(cluster.manifests.folder().join("nodes.yaml")).unwrap();
    let taint = "spec:\n  taints:\n  - key: ToBeDeletedByClusterAutoscaler\n    effect: NoSchedule\n";
    cluster.manifests.write_text("nodes", &nodes.replace("spec:\n", taint)).unwrap();
    until("the taint to be noticed", SOON, || agent.healthz().unwrap().status != 200);
    let healthz = agent.healthz().unwrap();
    assert_eq!(healthz.status, 503);
    assert!(healthz.body.contains("\"nodeEligible\":false,\"healthy\":true"), "{}", healthz.body);
    // The node still works: restarting the agent would not help, and its endpoints are ready.
    assert_eq!(agent.livez().unwrap().status, 200);
    assert_eq!(health(&cluster, 1).unwrap().status, 200);
    cluster.answer(Protocol::Tcp, cluster.at(1, Family::V4, PORT)).unwrap();
    cluster.manifests.write_text("nodes", &nodes).unwrap();
    agent.wait_ready(SOON).unwrap();
}
