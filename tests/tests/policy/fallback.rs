//! `traffic-policy.io/external-fallback: cluster`: policy Local on nodes with endpoints, policy
//! Cluster on nodes without.

use std::net::SocketAddr;
use std::thread::sleep;
use std::time::Duration;

use serde_json::json;
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::capture::{Capture, Frame};
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::{Addresses, Family, Lab};
use traffic_policy_testing::object::{Backend, Policy, Service, lease, vip};
use traffic_policy_testing::pace::{look_until, until};
use traffic_policy_testing::traffic::{HeldConnections, Outcome, http};

use crate::direct::header;

const WEB: u16 = 30080;
const PLAIN: u16 = 30081;
const STICKY: u16 = 30082;
const RESTRICTED: u16 = 30083;
const HEALTH: u16 = 32080;
const ANNOTATION: &str = "traffic-policy.io/external-fallback";
const SOON: Duration = Duration::from_secs(10);

fn local(name: &str, port: u16) -> Service {
    Cluster::node_port(name, Policy::Local, port)
}

fn web() -> Service {
    let service = local("web", WEB).annotation(ANNOTATION, "cluster");
    service.announced().health_port(HEALTH)
}

/// The answer of a node's health check, as a load balancer sees it.
fn health(cluster: &Cluster, node: usize) -> Option<(u16, bool)> {
    let to = cluster.at(node, Family::V4, HEALTH);
    let response = http::get_from(cluster.lab.client().netns(), to, "/").ok()?;
    Some((response.status, response.body.contains("\"localEndpoints\": 0")))
}

fn wait_health(cluster: &Cluster, node: usize, wanted: u16) {
    let is_wanted = |said: &Option<_>| *said == Some((wanted, wanted == 503));
    look_until(&format!("node-{node}: {wanted}"), SOON, || health(cluster, node), is_wanted);
}

/// Checks that new connections and datagrams at this node are answered by a pod of the node, which
/// sees the client's address.
fn is_local(cluster: &Cluster, node: usize, port: u16, what: &str) {
    for family in Family::BOTH {
        for protocol in Protocol::BOTH {
            for _ in 0..4 {
                let answer = cluster.answer(protocol, cluster.at(node, family, port)).unwrap();
                assert_eq!(answer.node, cluster.lab.node(node).name, "{what} {family:?} {protocol:?}");
                let client = cluster.lab.client().address(family);
                assert_eq!(answer.client.ip(), client, "{what} {family:?} {protocol:?}");
            }
        }
    }
}

/// Checks that they are forwarded to any of the pods, which see the node's address.
fn is_forwarded(cluster: &Cluster, node: usize, port: u16, pods: &[&str], what: &str) {
    forwarded_as(cluster, node, port, pods, cluster.lab.node(node).addresses, what);
}

fn forwarded_as(cluster: &Cluster, node: usize, port: u16, pods: &[&str], seen: Addresses, what: &str) {
    for family in Family::BOTH {
        for protocol in Protocol::BOTH {
            for answer in cluster.ask_until_all(protocol, cluster.at(node, family, port), pods).unwrap() {
                assert_eq!(answer.client.ip(), seen.of(family), "{what} {family:?} {protocol:?}");
            }
        }
    }
}

fn what_people_are_told(cluster: &Cluster, agents: &[Agent]) {
    for (node, phase) in [(1, "active"), (3, "fallback")] {
        let ports = agents[node - 1].json(&["services", "default/web"]).unwrap();
        for port in ports.as_array().unwrap() {
            assert_eq!(port["external_policy"], "Local");
            for frontend in port["frontends"].as_array().unwrap() {
                if frontend["kind"] == "NodePort" || frontend["kind"] == "LoadBalancer" {
                    assert_eq!(frontend["phase"], phase, "{port}");
                    assert_eq!(frontend["policy"], "Local", "{port}");
                }
            }
        }
    }
    let explain = |more: &[&str]| {
        let from = cluster.lab.client().address(Family::V4).to_string();
        let to = cluster.at(3, Family::V4, WEB).to_string();
        let arguments: Vec<_> = ["explain", &from, &to].iter().chain(more).copied().collect();
        String::from_utf8_lossy(&agents[2].command(&arguments).unwrap().stdout).into_owned()
    };
    let reason = "externalTrafficPolicy is Local and no endpoint is on this node, but the annotation \
                  traffic-policy.io/external-fallback lets it forward as under Cluster: 2 endpoints to choose from";
    for more in [&[][..], &["--policy", "local"]] {
        let said = explain(more);
        assert!(said.contains(reason) && said.contains("forwarded"), "{more:?}\n{said}");
    }
    let said = explain(&["--policy", "cluster"]);
    assert!(said.contains("externalTrafficPolicy is Cluster, 2 endpoints"), "{said}");
    // The fallback never applies to clients inside the cluster.
    let said = explain(&["--from", "pod"]);
    assert!(
        said.contains("is Local, which is for clients outside this node; from inside 2 endpoints"),
        "{said}"
    );
}

fn follows_the_endpoints(attach: &str) {
    let cluster = Cluster::start(Lab::builder().pods(&[1, 1, 0])).unwrap();
    let all = cluster.backends();
    cluster.manifests.apply(&web(), &all).unwrap();
    cluster.manifests.apply(&local("plain", PLAIN), &all).unwrap();
    let agents = Agent::start_all(&cluster.lab, |agent| agent.attach(attach)).unwrap();
    for node in [1, 2] {
        is_local(&cluster, node, WEB, attach);
        wait_health(&cluster, node, 200);
    }
    // Node-3 has no pod. A load balancer is informed of it all the same.
    is_forwarded(&cluster, 3, WEB, &["pod-1-1", "pod-2-1"], attach);
    wait_health(&cluster, 3, 503);
    for family in Family::BOTH {
        cluster.lab.route_vip(vip(family), cluster.lab.node(3)).unwrap();
        cluster.answer(Protocol::Tcp, SocketAddr::new(vip(family), 80)).unwrap();
        // Without the annotation the packet is dropped.
        for protocol in Protocol::BOTH {
            let outcome = cluster.ask(protocol, cluster.at(3, family, PLAIN)).unwrap();
            assert_eq!(outcome, Outcome::Silent, "{attach} {family:?} {protocol:?}");
        }
    }

    what_people_are_told(&cluster, &agents);

    // The last pod of node-1 goes and comes back, while connections by both paths are held open.
    // Pods answer all the time.
    let ways: Vec<_> =
        [1, 3].iter().flat_map(|node| Family::BOTH.map(|family| cluster.at(*node, family, WEB))).collect();
    let held =
        HeldConnections::start(cluster.lab.client().netns(), &ways, 12, Duration::from_millis(100)).unwrap();
    let endpoints = |backends: &[Backend]| cluster.manifests.endpoints(&web(), backends).unwrap();
    endpoints(&[all[0].clone().terminating(), all[1].clone()]);
    wait_health(&cluster, 1, 503);
    is_local(&cluster, 1, WEB, "it terminates and serves");
    endpoints(&all[1..]);
    let by_other =
        |outcome: &Outcome| matches!(outcome, Outcome::Answered(answer) if answer.pod == "pod-2-1");
    cluster.wait_for(Protocol::Tcp, cluster.at(1, Family::V4, WEB), SOON, by_other).unwrap();
    is_forwarded(&cluster, 1, WEB, &["pod-2-1"], "the last pod left");
    let late = HeldConnections::start(
        cluster.lab.client().netns(),
        &[cluster.at(1, Family::V4, WEB), cluster.at(1, Family::V6, WEB)],
        4,
        Duration::from_millis(100),
    )
    .unwrap();
    endpoints(&all);
    wait_health(&cluster, 1, 200);
    is_local(&cluster, 1, WEB, "a pod is here again");
    // Each connection went on with its pod.
    for report in [held.finish(), late.finish()] {
        assert!(report.broken.is_empty() && report.requests > 0, "{attach}: {report}");
    }

    // There is no endpoint anywhere: refused at once, as under any policy.
    endpoints(&[]);
    let to = cluster.at(3, Family::V4, WEB);
    cluster.wait_for(Protocol::Tcp, to, SOON, Outcome::is_refused_at_once).unwrap();
    endpoints(&all);
    let answered = |outcome: &Outcome| matches!(outcome, Outcome::Answered(_));
    cluster.wait_for(Protocol::Tcp, to, SOON, answered).unwrap();
    // The removal of the annotation begins the drain of a change to Local: here the drain is off.
    let without = local("web", WEB).health_port(HEALTH).annotation("traffic-policy.io/drain", "0");
    cluster.manifests.service(&without).unwrap();
    cluster.wait_for(Protocol::Tcp, to, SOON, |outcome| *outcome == Outcome::Silent).unwrap();
    // Only one value of the annotation is valid.
    cluster.manifests.service(&without.annotation(ANNOTATION, "Cluster")).unwrap();
    agents[2].wait_said(&[ANNOTATION, "is not \"cluster\"", "default/web"], SOON).unwrap();
    assert_eq!(cluster.ask(Protocol::Tcp, to).unwrap(), Outcome::Silent);
}

#[test]
fn follows_the_endpoints_by_tc() {
    follows_the_endpoints("tc");
}

#[test]
fn follows_the_endpoints_by_xdp() {
    follows_the_endpoints("xdp");
}

/// Source ranges and session affinity apply as under policy Cluster.
#[test]
fn source_ranges_and_affinity_hold() {
    let cluster = Cluster::start(Lab::builder().pods(&[0, 2, 2])).unwrap();
    let sticky = local("sticky", STICKY)
        .annotation(ANNOTATION, "cluster")
        .spec("sessionAffinity", json!("ClientIP"))
        .spec("sessionAffinityConfig", json!({"clientIP": {"timeoutSeconds": 600}}));
    cluster.manifests.apply(&sticky, &cluster.backends()).unwrap();
    // The client is 192.0.2.10 in IPv4; no IPv6 range is given, so all IPv6 clients are admitted.
    let restricted = local("restricted", RESTRICTED)
        .annotation(ANNOTATION, "cluster")
        .announced()
        .spec("loadBalancerSourceRanges", json!(["198.51.100.0/24"]));
    cluster.manifests.apply(&restricted, &cluster.backends()).unwrap();
    let _agents = Agent::start_first(1, &cluster.lab, |agent| agent.attach("xdp")).unwrap();
    for family in Family::BOTH {
        cluster.lab.route_vip(vip(family), cluster.lab.node(1)).unwrap();
        for protocol in Protocol::BOTH {
            // By chance, 8 requests all get one of 4 endpoints once in 16,000 runs.
            let to = cluster.at(1, family, STICKY);
            let first = cluster.answer(protocol, to).unwrap().pod;
            for _ in 0..8 {
                assert_eq!(cluster.answer(protocol, to).unwrap().pod, first, "{family:?} {protocol:?}");
            }
        }
        let outcome = cluster.ask(Protocol::Tcp, SocketAddr::new(vip(family), 80)).unwrap();
        match family {
            Family::V4 => assert_eq!(outcome, Outcome::Silent),
            Family::V6 => assert!(matches!(outcome, Outcome::Answered(_)), "{outcome:?}"),
        }
    }
}

const FORWARDING: &str = "traffic-policy.io/forwarding";

/// Changes the annotation, and waits until node-3 forwards so.
fn forward_by(cluster: &Cluster, forwarding: &str) {
    cluster.manifests.service(&web().annotation(FORWARDING, forwarding)).unwrap();
    until(&format!("node-3 forwards by {forwarding}"), SOON, || {
        let ports = cluster.agents[2].json(&["services", "default/web"]).unwrap();
        ports.as_array().unwrap().iter().all(|port| port["forwarding"] == forwarding)
    });
}

/// Pods of other nodes see the client, too, and their nodes answer it: themselves, or through the
/// node without a pod.
#[test]
fn pods_of_other_nodes_see_the_client_with_direct_forwarding() {
    let mut cluster = Cluster::start(Lab::builder().pods(&[1, 1, 0])).unwrap();
    let lab = &cluster.lab;
    let all = cluster.backends();
    let leases: Vec<_> =
        lab.nodes().iter().map(|node| lease::tunnels(node, &Family::BOTH, "ipip,udp")).collect();
    cluster.manifests.write("leases", &leases).unwrap();
    cluster.manifests.apply(&web().annotation(FORWARDING, "direct"), &all).unwrap();
    cluster.manifests.apply(&local("plain", PLAIN).annotation(FORWARDING, "direct"), &all).unwrap();
    let agents = lab.nodes().iter().zip(["tc", "tc", "xdp"]);
    let agents: Vec<_> =
        agents.map(|(node, hook)| Agent::builder(lab, node).attach(hook).start().unwrap()).collect();
    for agent in &agents {
        agent.wait_ready(SOON).unwrap();
    }
    cluster.agents = agents;
    let (lab, agents) = (&cluster.lab, &cluster.agents);
    let (client, pods) = (lab.client().addresses, ["pod-1-1", "pod-2-1"]);
    for node in [1, 2] {
        is_local(&cluster, node, WEB, "direct");
    }
    forwarded_as(&cluster, 3, WEB, &pods, client, "direct");
    for family in Family::BOTH {
        lab.route_vip(vip(family), lab.node(3)).unwrap();
        for protocol in Protocol::BOTH {
            let to = SocketAddr::new(vip(family), 80);
            for answer in cluster.ask_until_all(protocol, to, &pods).unwrap() {
                assert_eq!(answer.client.ip(), client.of(family), "{to} {protocol:?}");
            }
            // Without the other annotation nothing is forwarded.
            let outcome = cluster.ask(protocol, cluster.at(3, family, PLAIN)).unwrap();
            assert_eq!(outcome, Outcome::Silent, "{family:?} {protocol:?}");
        }
    }
    assert_eq!(agents[2].packets("xdp", "forwarded").unwrap(), 0);
    assert!(agents[2].packets("xdp", "forwarded-direct").unwrap() > 0);
    let to = cluster.at(3, Family::V4, WEB).to_string();
    let explained = agents[2].command(&["explain", &client.v4.to_string(), &to]).unwrap();
    let explained = String::from_utf8_lossy(&explained.stdout).into_owned();
    assert!(explained.contains(ANNOTATION) && explained.contains("forwarded-direct"), "{explained}");

    // Connections stay where they are while the last pod of node-1 goes and comes back, and while
    // the way of new ones changes.
    let hold = |node: usize| {
        let to = Family::BOTH.map(|family| cluster.at(node, family, WEB));
        HeldConnections::start(lab.client().netns(), &to, 8, Duration::from_millis(100)).unwrap()
    };
    let mut held = vec![hold(1), hold(3)];
    cluster.manifests.endpoints(&web(), &all[1..]).unwrap();
    let by_other =
        |outcome: &Outcome| matches!(outcome, Outcome::Answered(answer) if answer.pod == "pod-2-1");
    cluster.wait_for(Protocol::Tcp, cluster.at(1, Family::V4, WEB), SOON, by_other).unwrap();
    forwarded_as(&cluster, 1, WEB, &["pod-2-1"], client, "the last pod left");
    held.push(hold(1));
    cluster.manifests.endpoints(&web(), &all).unwrap();
    wait_health(&cluster, 1, 200);
    is_local(&cluster, 1, WEB, "a pod is here again");

    let to_front = || {
        let homes = agents[..2].iter().map(|agent| agent.packets("tc-egress", "replied-to-front").unwrap());
        homes.collect::<Vec<_>>()
    };
    assert_eq!(to_front(), [0, 0]);
    forward_by(&cluster, "tunnel");
    forwarded_as(&cluster, 3, WEB, &pods, client, "tunnel");
    let after = to_front();
    assert!(after.iter().all(|packets| *packets > 0), "{after:?}");
    held.push(hold(3));
    forward_by(&cluster, "snat");
    is_forwarded(&cluster, 3, WEB, &pods, "snat");
    for report in held.into_iter().map(HeldConnections::finish) {
        assert!(report.broken.is_empty() && report.requests > 0, "{report}");
        assert_eq!(report.clients, Family::BOTH.map(|family| client.of(family)).into(), "{report}");
    }
}

/// A node that has a pod of the Service takes what comes to its MAC address by its own, local
/// policy.
#[test]
fn pods_of_other_nodes_see_the_client_by_mac_address() {
    let mut cluster = Cluster::start(Lab::builder().pods(&[2, 1, 0])).unwrap();
    let leases: Vec<_> = cluster.lab.nodes().iter().map(|node| lease::takes(node, None)).collect();
    cluster.manifests.write("leases", &leases).unwrap();
    cluster.manifests.apply(&web(), &cluster.backends()).unwrap();
    let flags =
        ["--forwarding", "direct", "--algorithm", "maglev", "--maglev-size", "251", "--dispatch", "l2"];
    cluster.launch(|agent| agent.flags(&flags)).unwrap();
    let (lab, pods) = (&cluster.lab, ["pod-1-1", "pod-1-2", "pod-2-1"]);
    for family in Family::BOTH {
        lab.route_vip(vip(family), lab.node(3)).unwrap();
        let (to, client) = (SocketAddr::new(vip(family), 80), lab.client().address(family));
        // The first packets to each node resolve its neighbour, and name their endpoint.
        cluster.ask_until_all(Protocol::Tcp, to, &pods).unwrap();
        let captures = [1, 2].map(|node| Capture::start(lab.node(node).netns(), "eth0").unwrap());
        for protocol in Protocol::BOTH {
            for answer in cluster.ask_until_all(protocol, to, &pods).unwrap() {
                assert_eq!(answer.client.ip(), client, "{to} {protocol:?}");
            }
        }
        let pause = Duration::from_millis(20);
        let held = HeldConnections::start(lab.client().netns(), &[to], 16, pause).unwrap();
        // Each connection has some twenty requests.
        sleep(Duration::from_millis(500));
        let report = held.finish();
        assert!(report.is_clean(), "{report}");
        for capture in captures {
            let frames = capture.finish_valid().unwrap();
            let from_front =
                |frame: &&Frame| !frame.outgoing && frame.bytes[6..12] == lab.node(3).addresses.mac();
            let headers = frames.iter().filter(from_front).filter_map(header);
            let reached: Vec<_> = headers.filter(|(_, from, _)| *from == client).collect();
            assert!(reached.len() > 20, "{to}: {reached:?}");
            let unchanged = reached.iter().filter(|(_, _, reached)| *reached == to.ip()).count();
            assert_eq!(unchanged, reached.len(), "{to}: {reached:?}");
        }
    }
}
