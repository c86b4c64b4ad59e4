//! The agent's writes: none if nothing changed, and only those of one Service if only that Service
//! changed.

use std::collections::BTreeMap;
use std::thread::sleep;
use std::time::Duration;

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::lab::Family;
use traffic_policy_testing::object::{Backend, Policy, Port, Service};
use traffic_policy_testing::pace::until;
use traffic_policy_testing::pinned::{self, Entries};
use traffic_policy_testing::traffic::Probe;

use crate::cluster::{self, NODE_PORT, PATIENCE, POD_PORT, web};
use crate::quiet;
use traffic_policy_testing::cluster::Cluster;

/// The maps that the packet path writes for every flow, the orders to the sweep, and the agent's
/// records of its own life.
const NOT_OF_THE_CLUSTER: [&str; 5] =
    ["tp_flows4", "tp_flows6", "tp_table_usage", "tp_gc_pass", "tp_heartbeat"];

/// A cluster with one agent and many Services of various policies.
fn cluster(attach: &str, services: u16) -> Cluster {
    let mut cluster = cluster::without_agents(&[2, 1], attach);
    let backends = cluster.backends();
    cluster.manifests.apply(&web(), &backends).unwrap();
    for number in 0..services {
        cluster.manifests.apply(&other(number), &backends[..1 + usize::from(number % 3)]).unwrap();
    }
    cluster.launch(|agent| agent.attach(attach)).unwrap();
    cluster
}

fn other(number: u16) -> Service {
    let policy = if number.is_multiple_of(2) { Policy::Cluster } else { Policy::Local };
    let port = Port::tcp(80, POD_PORT).node_port(31_000 + number);
    Service::new(&format!("other-{number}")).policy(policy).port(port)
}

/// The content of the maps, by name.
type Content = BTreeMap<String, Entries>;

fn content(agent: &Agent) -> Content {
    let mut maps = pinned::maps(agent.pin_dir()).unwrap();
    for name in NOT_OF_THE_CLUSTER {
        assert!(maps.remove(name).is_some(), "no map {name}");
    }
    for name in [
        "tp_frontends4",
        "tp_frontends6",
        "tp_endpoints4",
        "tp_prefilter",
        "tp_snat_ports",
        "tp_config",
        "tp_devices",
    ] {
        assert!(maps.get(name).is_some_and(|entries| !entries.is_empty()), "nothing in {name}");
    }
    // The port of --metrics-address, on which an agent listens only later.
    let (own, other) = (10_249_u16.to_ne_bytes(), 10_250_u16.to_ne_bytes());
    let is_source =
        |port| maps["tp_snat_ports"].values().any(|ports| ports.chunks(2).any(|held| held == port));
    assert!(is_source(other) && !is_source(own), "its own port is a source port");
    maps
}

/// The number of writes of each step in the log so far, including the first step of each start.
fn writes(agent: &Agent) -> Vec<usize> {
    let log = agent.log();
    let numbers = log.lines().filter_map(|line| line.split_once("writes=")).map(|(_, number)| number);
    numbers.map(|number| number.trim().parse().unwrap()).collect()
}

/// Waits for one more step than `before`, and checks that no other follows.
fn next_write(agent: &Agent, before: usize) -> usize {
    until("a step to be written", PATIENCE, || writes(agent).len() > before);
    // No more steps may follow: many times the 50 ms for which the agent collects changes.
    sleep(Duration::from_millis(700));
    let all = writes(agent);
    assert_eq!(all.len(), before + 1, "one change was written in several steps: {all:?}");
    all[before]
}

/// The numbers of entries that differ, by map.
fn differences(before: &Content, after: &Content) -> BTreeMap<String, usize> {
    assert!(before.keys().eq(after.keys()));
    let maps = before.iter().map(|(name, before)| {
        let after = &after[name];
        let changed = before.iter().filter(|(key, value)| after.get(*key) != Some(value)).count();
        let new = after.keys().filter(|key| !before.contains_key(*key)).count();
        (name.clone(), changed + new)
    });
    maps.filter(|(_, differences)| *differences > 0).collect()
}

fn a_restart_writes_nothing(attach: &str) -> (Cluster, Vec<Content>) {
    let mut cluster = cluster(attach, 200);
    // Flows and next hops exist, some of them for a while.
    for family in Family::BOTH {
        for _ in 0..10 {
            let probe = Probe::tcp(cluster.at(1, family, NODE_PORT));
            probe.answer(cluster.lab.client().netns()).unwrap();
        }
    }
    let before: Vec<_> = cluster.agents.iter().map(content).collect();
    for round in 0..2 {
        if round == 0 {
            cluster.kill_agents().unwrap();
        } else {
            cluster.stop_agents().unwrap();
        }
        cluster.start_agents_again(PATIENCE).unwrap();
        for (agent, before) in cluster.agents.iter().zip(&before) {
            let writes = writes(agent);
            assert_eq!(writes[1..], vec![0; round + 1], "writes of each start");
            assert!(writes[0] > 400, "{writes:?}");
            assert_eq!(differences(before, &content(agent)), BTreeMap::new(), "{}", agent.log());
        }
    }
    (cluster, before)
}

#[test]
fn a_restart_writes_nothing_tc() {
    let _alone = quiet::alone();
    a_restart_writes_nothing("tc");
}

#[test]
fn a_restart_writes_nothing_xdp() {
    let _alone = quiet::alone();
    let (cluster, before) = a_restart_writes_nothing("xdp");
    // Nothing changes later either: some sweeps and an upkeep have passed.
    sleep(Duration::from_millis(5500));
    for (agent, before) in cluster.agents.iter().zip(&before) {
        assert_eq!(differences(before, &content(agent)), BTreeMap::new(), "{}", agent.log());
    }
}

/// The writes and differences of three changes of one Service among `services` others.
fn one_service_changes(services: u16) -> Vec<(usize, BTreeMap<String, usize>)> {
    let cluster = cluster("tc", services);
    let agent = &cluster.agents[0];
    let backends: Vec<Backend> = cluster.backends();
    let mut steps = Vec::new();
    let mut step = |change: &dyn Fn()| {
        let (before, said) = (content(agent), writes(agent).len());
        change();
        let written = next_write(agent, said);
        let mut differences = differences(&before, &content(agent));
        // The bits of a removed Service are cleared by some later sweep.
        assert!(differences.remove("tp_prefilter").unwrap_or(0) <= 1);
        // Removed endpoints, one in each family and protocol or a Service's three in each family,
        // stay recorded until the next sweeps have marked their flows.
        assert!(differences.remove("tp_removed_eps").unwrap_or(0) <= 6);
        steps.push((written, differences));
    };
    let web_local = web().policy(Policy::Local);
    step(&|| cluster.manifests.endpoints(&web(), &backends[..2]).unwrap());
    step(&|| cluster.manifests.service(&web_local).unwrap());
    step(&|| cluster.manifests.apply(&other(900), &backends).unwrap());
    step(&|| cluster.manifests.delete(&other(900)).unwrap());
    steps
}

#[test]
fn one_service_changes_and_only_that_one_is_written() {
    let _alone = quiet::alone();
    let few = one_service_changes(3);
    let many = one_service_changes(200);
    println!("writes and changed entries, 3 other Services: {few:?}\n200 other Services: {many:?}");
    assert_eq!(few, many, "they depend on the number of other Services");
    // A node port is on the node's address of each family and on its loopback, the Service has TCP
    // and UDP: four frontends of each family change, and two endpoints get new slots for each of
    // them; the policy of its four ports is noted. No other entry of any map has changed a bit.
    for (written, differences) in &many {
        assert!(*written <= 20, "{written} writes");
        let known = ["tp_frontends4", "tp_frontends6", "tp_svc_names", "tp_endpoints4", "tp_endpoints6"];
        for map in known {
            assert!(differences.get(map).is_none_or(|changed| *changed <= 4), "{differences:?}");
        }
        assert!(differences.keys().all(|map| known.contains(&map.as_str())), "{differences:?}");
    }
}
