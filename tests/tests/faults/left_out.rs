//! A Service that does not fit into the maps is left out, by name and alone: other Services, and
//! the node, are as healthy as before.

use std::collections::BTreeSet;
use std::fs;
use std::net::{IpAddr, Ipv4Addr};
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::json;
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{Cluster, Protocol, TARGET};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Policy, Port, Service, lease};
use traffic_policy_testing::pace::{scaled, until};
use traffic_policy_testing::traffic::http::{self, Response};

const SOON: Duration = Duration::from_secs(20);
/// The smallest sizes that the flags allow.
const TINY: [&str; 4] = ["--frontend-entries", "64", "--source-range-entries", "64"];
const HEALTH: u16 = 32000;

/// Services of a greedy tenant: one needs more frontends than the map holds; the other needs, for
/// its two ports together, more source ranges than a Service may have.
fn greedy() -> [Service; 2] {
    let balanced = |name: &str, number: u16| {
        let vip = format!("203.0.113.{number}").parse().unwrap();
        Cluster::node_port(name, Policy::Local, 30100 + number).vip(vip).health_port(HEALTH + number)
    };
    let mut addresses = balanced("addresses", 1).port(Port::tcp(81, TARGET));
    for number in 0..70 {
        addresses = addresses.external_ip(IpAddr::V4(Ipv4Addr::new(198, 51, 100, number)));
    }
    let ranges: Vec<_> = (0..30).map(|number| format!("100.64.{number}.0/24")).collect();
    [addresses, balanced("ranges", 2).spec("loadBalancerSourceRanges", json!(ranges))]
}

fn health(cluster: &Cluster, number: u16) -> Option<Response> {
    let to = cluster.at(1, Family::V4, HEALTH + number);
    http::get_from(cluster.lab.client().netns(), to, "/").ok()
}

fn left_out(attach: &str) {
    let cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
    let backends = cluster.backends();
    for service in &greedy() {
        cluster.manifests.apply(service, &backends).unwrap();
    }
    let other = |port: u16| {
        Cluster::node_port(&format!("other-{port}"), Policy::Local, port).health_port(port + 1000)
    };
    cluster.manifests.apply(&other(30080), &backends).unwrap();
    let agents = Agent::start_all(&cluster.lab, |agent| agent.attach(attach).flags(&TINY)).unwrap();
    let agent = &agents[0];

    // A Service of another tenant, and one that is added later.
    cluster.manifests.apply(&other(30081), &backends).unwrap();
    for family in Family::BOTH {
        for port in [30080, 30081] {
            let answered =
                |outcome: &_| matches!(outcome, traffic_policy_testing::traffic::Outcome::Answered(_));
            cluster.wait_for(Protocol::Tcp, cluster.at(1, family, port), SOON, answered).unwrap();
        }
    }
    for service in ["default/addresses", "default/ranges"] {
        agent.wait_said(&["no room", service], SOON).unwrap();
    }
    // The health ports of Services outside of the maps answer 503; the other Service has its
    // endpoint.
    for (number, status) in [(1, 503), (2, 503)] {
        let response = health(&cluster, number).unwrap();
        assert_eq!(response.status, status, "{number}: {}", response.body);
        assert!(response.head.contains("X-Load-Balancing-Endpoint-Weight: 0"), "{}", response.head);
    }
    let to = cluster.at(1, Family::V4, 31080);
    assert_eq!(http::get_from(cluster.lab.client().netns(), to, "/").unwrap().status, 200);

    // The state remains while the write is retried twice, every 5 s, and is logged once.
    let start = Instant::now();
    while start.elapsed() < scaled(Duration::from_secs(12)) {
        assert_eq!((agent.healthz().unwrap().status, agent.livez().unwrap().status), (200, 200));
        // Often enough to catch each of the retries.
        sleep(Duration::from_millis(500));
    }
    let log = agent.log();
    for service in ["default/addresses", "default/ranges"] {
        let said = log.lines().filter(|line| line.contains("no room") && line.contains(service)).count();
        assert_eq!(said, 1, "{service}\n{log}");
    }
    let report = &agent.json(&["status"]).unwrap()["agent"]["report"];
    assert_eq!(report["in_sync"], json!(false), "{report}");
    let left_out = report["left_out"].to_string();
    for text in [
        "default/addresses (all of it)",
        "--frontend-entries",
        "default/ranges:udp-80",
        "--source-range-entries",
    ] {
        assert!(left_out.contains(text), "{text}: {left_out}");
    }
    assert!(!left_out.contains("other"), "{left_out}");

    // With fewer ports it fits.
    cluster.manifests.delete(&greedy()[1]).unwrap();
    let modest = Cluster::node_port("addresses", Policy::Local, 30101).health_port(HEALTH + 1);
    cluster.manifests.apply(&modest, &backends).unwrap();
    until("200", SOON, || health(&cluster, 1).is_some_and(|response| response.status == 200));
    cluster.answer(Protocol::Tcp, cluster.at(1, Family::V4, 30101)).unwrap();
    let report = &agent.json(&["status"]).unwrap()["agent"]["report"];
    assert_eq!((&report["in_sync"], &report["left_out"]), (&json!(true), &json!([])), "{report}");
}

#[test]
fn a_service_that_does_not_fit_tc() {
    left_out("tc");
}

#[test]
fn a_service_that_does_not_fit_xdp() {
    left_out("xdp");
}

/// Limits the descriptors of an agent to those that are open and a few more. Those that are open
/// for a moment, as by a sweep, do not count.
fn limit_descriptors(agent: &Agent, more: usize) {
    let pid = agent.pid().unwrap();
    let open = || -> BTreeSet<usize> {
        sleep(Duration::from_millis(20));
        let entries = fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
        entries.map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap()).collect()
    };
    let open = (0..10).map(|_| open()).min_by_key(BTreeSet::len).unwrap();
    let limit = (0..).find(|limit| limit - open.range(..limit).count() == more).unwrap();
    let limits = [format!("--pid={pid}"), format!("--nofile={limit}:")];
    assert!(Command::new("prlimit").args(limits).status().unwrap().success());
}

/// Two parts of the packet path are loaded once the cluster has something for them.
#[test]
fn packets_of_other_nodes_and_sctp_whose_programs_are_not_loaded() {
    let cluster = Cluster::start(Lab::builder().pods(&[1, 1])).unwrap();
    cluster.manifests.apply(&web(30_080), &cluster.backends()).unwrap();
    let agent = Agent::builder(&cluster.lab, cluster.lab.node(1)).attach("xdp").start().unwrap();
    agent.wait_ready(SOON).unwrap();
    packets_of_other_nodes_whose_programs_are_not_loaded(&cluster, &agent);
    sctp_whose_programs_are_not_loaded(&cluster, &agent);
}

fn web(port: u16) -> Service {
    Cluster::node_port(&format!("web-{port}"), Policy::Local, port)
}

/// SCTP's programs are loaded, cannot be put in place for want of descriptors, and give theirs
/// back. It is the only part that is not served: not the node, and not TCP.
fn sctp_whose_programs_are_not_loaded(cluster: &Cluster, agent: &Agent) {
    let backends = cluster.backends();
    // As many as there are programs: each takes another one while it is put in place.
    limit_descriptors(agent, 7);
    let sctp = Service::new("sctp").port(Port::sctp(80, TARGET).node_port(30_081));
    cluster.manifests.apply(&sctp, &backends).unwrap();
    agent.wait_said(&["SCTP is not served", "cannot be put in place"], SOON).unwrap();
    agent.wait_said(&["no programs", "default/sctp"], SOON).unwrap();
    cluster.manifests.apply(&web(30_083), &backends).unwrap();
    let answered = |outcome: &_| matches!(outcome, traffic_policy_testing::traffic::Outcome::Answered(_));
    for port in [30_080, 30_083] {
        cluster.wait_for(Protocol::Tcp, cluster.at(1, Family::V4, port), SOON, answered).unwrap();
    }
    let ready = agent.readyz().unwrap();
    assert!(ready.status == 503 && ready.body.contains("SCTP is not served"), "{}", ready.body);
    assert_eq!((agent.healthz().unwrap().status, agent.livez().unwrap().status), (200, 200));
    let report = &agent.json(&["status"]).unwrap()["agent"]["report"];
    let left_out = report["left_out"].to_string();
    assert!(left_out.contains("default/sctp") && !left_out.contains("web"), "{left_out}");
    assert_eq!(report["in_sync"], json!(false), "{report}");

    limit_descriptors(agent, 500);
    agent.wait_said(&["SCTP is served"], Duration::from_secs(60)).unwrap();
    until("ready", SOON, || agent.readyz().is_ok_and(|ready| ready.status == 200));
    let report = &agent.json(&["status"]).unwrap()["agent"]["report"];
    assert_eq!((&report["in_sync"], &report["left_out"]), (&json!(true), &json!([])), "{report}");
}

/// The kernel does not load the programs that open packets. Only those are not served.
fn packets_of_other_nodes_whose_programs_are_not_loaded(cluster: &Cluster, agent: &Agent) {
    let backends = cluster.backends();
    // One less than there are programs.
    limit_descriptors(agent, 5);
    cluster.manifests.write("lease", &[lease::opens(cluster.lab.node(2), &Family::BOTH)]).unwrap();
    agent.wait_said(&["packets of other nodes are not opened", "does not load the program"], SOON).unwrap();
    cluster.manifests.apply(&web(30_082), &backends).unwrap();
    let answered = |outcome: &_| matches!(outcome, traffic_policy_testing::traffic::Outcome::Answered(_));
    for port in [30_080, 30_082] {
        cluster.wait_for(Protocol::Tcp, cluster.at(1, Family::V4, port), SOON, answered).unwrap();
    }
    assert_eq!((agent.healthz().unwrap().status, agent.readyz().unwrap().status), (200, 200));
    limit_descriptors(agent, 500);
    // Without a change of the cluster.
    agent.wait_said(&["INFO", "packets of other nodes are opened"], Duration::from_secs(60)).unwrap();
}
