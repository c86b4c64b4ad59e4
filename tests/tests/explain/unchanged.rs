//! `explain` changes nothing: all pinned maps are the same, byte by byte, before and after.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::thread::sleep;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use traffic_policy_ebpf::abi::OutcomeCounters;
use traffic_policy_ebpf::outcome::Outcome;
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{Cluster, Protocol, TARGET};
use traffic_policy_testing::explain::{self, Flow};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Backend, Policy, Port, Service, cluster_ip, vip};
use traffic_policy_testing::pinned::{self, Entries};

const CLUSTER: u16 = 30_080;
const LOCAL: u16 = 30_081;
const NOBODY: u16 = 30_082;
const THERE: u16 = 30_083;

fn cluster() -> Cluster {
    let cluster = Cluster::start(Lab::builder().pods(&[2, 1])).unwrap();
    let remote = Backend::of(cluster.lab.node(2).pod(1));
    let sticky = |service: Service| service.spec("sessionAffinity", json!("ClientIP"));
    let web = Cluster::node_port("web", Policy::Cluster, CLUSTER).cluster_ips(10).announced();
    let web = web.spec("loadBalancerSourceRanges", json!(["192.0.2.0/24", "2001:db8:c::/64"]));
    cluster.manifests.apply(&sticky(web), &cluster.backends()).unwrap();
    cluster.manifests.apply(&Cluster::node_port("far", Policy::Local, LOCAL), &[remote]).unwrap();
    let remote = Backend::of(cluster.lab.node(2).pod(1));
    cluster.manifests.apply(&Cluster::node_port("there", Policy::Cluster, THERE), &[remote]).unwrap();
    let nobody = Service::new("nobody").port(Port::tcp(80, TARGET).node_port(NOBODY));
    cluster.manifests.apply(&nobody, &[]).unwrap();
    cluster
}

/// Flows of every kind; each possible outcome of a new flow is among the answers.
fn flows(cluster: &Cluster) -> Vec<Flow> {
    let mut flows = Vec::new();
    for family in Family::BOTH {
        let lab = &cluster.lab;
        let node = lab.node(1).address(family);
        let places = [
            ("external", lab.client().address(family)),
            // This source is in none of the source ranges.
            ("external", lab.node(2).address(family)),
            ("pod", lab.node(1).pod(1).address(family)),
            ("node", node),
        ];
        for (from, source) in places {
            let addresses = [
                (node, CLUSTER),
                (node, LOCAL),
                (node, NOBODY),
                (node, THERE),
                (node, 30_099),
                (vip(family), 80),
                (cluster_ip(10, family), 80),
                (cluster_ip(10, family), 81),
                (cluster_ip(99, family), 80),
            ];
            for (number, (address, port)) in (0..).zip(addresses) {
                let source = SocketAddr::new(source, 41_000 + number);
                for protocol in ["TCP", "UDP"] {
                    flows.push(Flow::new(protocol, source, SocketAddr::new(address, port)).from(from));
                }
            }
        }
    }
    flows
}

fn ask_everything(cluster: &Cluster, agent: &Agent) {
    let flows = flows(cluster);
    let mut outcomes = BTreeSet::new();
    for options in [&[][..], &["--policy", "Local"], &["--policy", "Cluster"], &["--device", "eth0"]] {
        let answers = explain::live(agent, &flows, options).unwrap();
        outcomes.extend(answers.into_iter().map(|answer| answer.outcome));
    }
    let wanted = [
        "connected",
        "delivered",
        "dropped-no-local-endpoint",
        "dropped-source-range",
        "dropped-unallocated-cluster-ip",
        "forwarded",
        "passed",
        "rejected-no-endpoint",
        "rejected-unknown-port",
    ];
    let missing: Vec<_> = wanted.iter().filter(|name| !outcomes.contains(**name)).collect();
    assert!(missing.is_empty(), "no {missing:?} in {outcomes:?}");
    // One by one, as users run it; each call loads every program.
    for flow in flows.iter().step_by(37) {
        let destination = format!("{}/{}", flow.destination, flow.protocol);
        for output in ["table", "json"] {
            let source = flow.source.to_string();
            let asked = agent.command(&["explain", &source, &destination, "--output", output]).unwrap();
            assert!(asked.status.success(), "{}", String::from_utf8_lossy(&asked.stderr));
        }
    }
}

/// Zeroes the counters of packets to no Service, in the elements of all CPUs: they move, as the
/// lab's machines keep resolving each other's addresses.
fn quieten(counters: &mut [u8]) {
    let noise =
        [Outcome::Passed, Outcome::PassedNotIp, Outcome::PassedUnsupportedProtocol, Outcome::PassedOtherHost];
    for of_cpu in counters.chunks_mut(size_of::<OutcomeCounters>()) {
        for outcome in noise {
            of_cpu[outcome as usize * 8..][..8].fill(0);
        }
    }
}

fn dump(agent: &Agent) -> BTreeMap<String, Entries> {
    let mut maps = pinned::all(agent.pin_dir()).unwrap();
    maps.get_mut("tp_counters").unwrap().values_mut().for_each(|counters| quieten(counters));
    maps
}

/// Stops the agent during `work`, as it writes maps by itself, too (its orders to the sweep, the
/// ports that may be used towards endpoints).
fn while_stopped<T>(agent: &Agent, work: impl FnOnce() -> T) -> T {
    let pid = Pid::from_raw(agent.pid().unwrap().try_into().unwrap());
    kill(pid, Signal::SIGSTOP).unwrap();
    let done = work();
    kill(pid, Signal::SIGCONT).unwrap();
    done
}

/// The content of the maps once the last packets of all connections have arrived.
fn quiet(agent: &Agent) -> BTreeMap<String, Entries> {
    let mut before = dump(agent);
    for _ in 0..20 {
        sleep(Duration::from_secs(1));
        let now = dump(agent);
        if now == before {
            return now;
        }
        before = now;
    }
    panic!("the maps change all the time");
}

fn nothing_changes(attach: &str) {
    let cluster = cluster();
    let agent = Agent::builder(&cluster.lab, cluster.lab.node(1))
        .attach(attach)
        .flags(&["--service-cidr", "10.96.0.0/16,fd00:10:96::/112"])
        .start()
        .unwrap();
    agent.wait_ready(Duration::from_secs(20)).unwrap();
    // The maps contain flows, clients with affinity, refusals and learned neighbours that could be
    // changed.
    for family in Family::BOTH {
        for protocol in Protocol::BOTH {
            cluster.answer(protocol, cluster.at(1, family, CLUSTER)).unwrap();
            cluster.answer(protocol, cluster.at(1, family, THERE)).unwrap();
            cluster.ask(protocol, cluster.at(1, family, LOCAL)).unwrap();
        }
        cluster.ask(Protocol::Tcp, cluster.at(1, family, NOBODY)).unwrap();
    }
    let (before, after) = while_stopped(&agent, || {
        let before = quiet(&agent);
        ask_everything(&cluster, &agent);
        (before, dump(&agent))
    });
    for name in [
        "tp_flows4",
        "tp_flows6",
        "tp_affinity",
        "tp_src_ranges4",
        "tp_svc_cidrs6",
        "tp_ep_routes4",
        "tp_nexthops",
    ] {
        assert!(!before[name].is_empty(), "{attach}: nothing in {name}");
    }
    assert!(before.keys().eq(after.keys()));
    for (name, before) in &before {
        let after = &after[name];
        let changed: Vec<_> = before.keys().filter(|key| after.get(*key) != before.get(*key)).collect();
        let new: Vec<_> = after.keys().filter(|key| !before.contains_key(*key)).collect();
        assert!(
            changed.is_empty() && new.is_empty(),
            "{attach} {name}: changed {changed:02x?}, new {new:02x?}"
        );
    }
    // The control: a single packet changes the maps.
    cluster.answer(Protocol::Udp, cluster.at(1, Family::V4, CLUSTER)).unwrap();
    assert_ne!(dump(&agent), before, "{attach}: a dump does not show a new flow");
}

#[test]
fn by_tc() {
    nothing_changes("tc");
}

#[test]
fn by_xdp() {
    nothing_changes("xdp");
}
