//! `explain` answers from the pinned maps, changed by hand, as the next client meets them: it runs
//! the programs on the maps that decide, and does not know the objects behind them.

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use aya::maps::{Array, HashMap, Map, MapData};
use traffic_policy_dataplane::ToWire;
use traffic_policy_ebpf::abi::{
    Address, Address4, Address6, Frontend, FrontendKey, IndexRange, Port, SLOT_LOCAL, Slot, frontend,
};
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::explain::{self, Answer, Flow};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Backend, Policy};
use traffic_policy_testing::pace::scaled;
use traffic_policy_testing::traffic::Outcome;

const PORT: u16 = 30_080;

fn pinned(agent: &Agent, name: &str) -> MapData {
    let versions: Vec<PathBuf> =
        fs::read_dir(agent.pin_dir()).unwrap().map(|entry| entry.unwrap().path()).collect();
    let [version] = versions.as_slice() else { panic!("not one layout: {versions:?}") };
    MapData::from_pin(version.join("maps").join(name)).unwrap()
}

/// The two maps of one family that the test changes by hand.
struct Maps<A: Address> {
    frontends: HashMap<MapData, FrontendKey<A>, Frontend>,
    slots: Array<MapData, Slot<A>>,
}

impl<A: Address> Maps<A> {
    fn of(agent: &Agent, family: Family) -> Self {
        let number = if family == Family::V4 { 4 } else { 6 };
        let frontends = Map::HashMap(pinned(agent, &format!("tp_frontends{number}")));
        let slots = Map::Array(pinned(agent, &format!("tp_endpoints{number}")));
        Self { frontends: frontends.try_into().unwrap(), slots: slots.try_into().unwrap() }
    }

    fn key(address: A) -> FrontendKey<A> {
        FrontendKey { address, port: Port::from_host(PORT), protocol: 6, scope: 0 }
    }

    fn frontend(&self, address: A) -> Frontend {
        self.frontends.get(&Self::key(address), 0).unwrap()
    }

    fn change(&mut self, address: A, change: impl FnOnce(&mut Frontend)) {
        let mut frontend = self.frontend(address);
        change(&mut frontend);
        self.frontends.insert(Self::key(address), frontend, 0).unwrap();
    }
}

struct World<'a> {
    cluster: &'a Cluster,
    agent: &'a Agent,
    family: Family,
}

impl World<'_> {
    fn node_port(&self) -> SocketAddr {
        self.cluster.at(1, self.family, PORT)
    }

    fn explained(&self, options: &[&str]) -> Answer {
        let client = SocketAddr::new(self.cluster.lab.client().address(self.family), 41_000);
        explain::live(self.agent, &[Flow::new("TCP", client, self.node_port())], options).unwrap().remove(0)
    }

    /// Checks that the result of `explain` agrees with a client's experience.
    #[track_caller]
    fn expect(&self, outcome: &str, pod: Option<(usize, usize)>) -> Answer {
        let answer = self.explained(&[]);
        let steps = &answer.steps;
        assert_eq!(answer.outcome, outcome, "{:?}: {steps:?}", self.family);
        let pod = pod.map(|(node, pod)| self.cluster.lab.node(node).pod(pod));
        let endpoint = pod.map(|pod| pod.address(self.family));
        assert_eq!(answer.endpoint.map(|endpoint| endpoint.ip()), endpoint, "{:?}: {steps:?}", self.family);
        // Over IPv6 a client may notice a refusal at its second SYN only.
        let patience = Duration::from_secs(if outcome.starts_with("rejected") { 3 } else { 1 });
        let patience = if pod.is_some() { scaled(patience) } else { patience };
        let probe = Protocol::Tcp.probe(self.node_port()).limit(patience);
        let met = probe.from(self.cluster.lab.client().netns()).unwrap();
        let fits = match (&met, pod) {
            (Outcome::Answered(met), Some(pod)) => met.pod == pod.name,
            (Outcome::Silent, None) => outcome.starts_with("dropped"),
            (Outcome::Refused(_), None) => !outcome.starts_with("dropped"),
            _ => false,
        };
        assert!(fits, "{:?}: {answer:?}, but on the wire {met:?}", self.family);
        answer
    }
}

/// One endpoint on another node; a second pod there and one on this node, which are not endpoints.
#[test]
fn follows_the_maps_and_says_other_programs_than_its_own() {
    let cluster = Cluster::start(Lab::builder().pods(&[1, 2])).unwrap();
    let service = Cluster::node_port("web", Policy::Cluster, PORT);
    cluster.manifests.apply(&service, &[Backend::of(cluster.lab.node(2).pod(1))]).unwrap();
    let agent = Agent::builder(&cluster.lab, cluster.lab.node(1)).attach("tc").start().unwrap();
    agent.wait_ready(Duration::from_secs(20)).unwrap();
    follows_the_maps::<Address4>(&cluster, &agent, Family::V4, |ip| match ip {
        IpAddr::V4(ip) => ip.to_wire(),
        IpAddr::V6(ip) => panic!("{ip} is no IPv4 address"),
    });
    follows_the_maps::<Address6>(&cluster, &agent, Family::V6, |ip| match ip {
        IpAddr::V6(ip) => ip.to_wire(),
        IpAddr::V4(ip) => panic!("{ip} is no IPv6 address"),
    });
    other_programs_than_its_own_are_said(&agent);
}

fn follows_the_maps<A: Address + PartialEq>(
    cluster: &Cluster,
    agent: &Agent,
    family: Family,
    address: impl Fn(IpAddr) -> A,
) {
    let world = World { cluster, agent, family };
    let mut maps = Maps::<A>::of(world.agent, family);
    let lab = &world.cluster.lab;
    let node = address(lab.node(1).address(family));
    let pod = |node: usize, pod| address(lab.node(node).pod(pod).address(family));

    // The endpoint in the slot is changed.
    world.expect("forwarded", Some((2, 1)));
    let untouched = maps.frontend(node);
    assert_eq!((untouched.cluster.len, untouched.local.len), (1, 0));
    let index = untouched.cluster.base;
    let slot = maps.slots.get(&index, 0).unwrap();
    assert!(slot.address == pod(2, 1), "slot {index} is not the endpoint's");
    maps.slots.set(index, Slot { address: pod(2, 2), ..slot }, 0).unwrap();
    world.expect("forwarded", Some((2, 2)));
    // Its port is changed.
    maps.slots.set(index, Slot { port: Port::from_host(9), ..slot }, 0).unwrap();
    assert_eq!(world.explained(&[]).endpoint.unwrap().port(), 9);
    // What-ifs read the same maps: no endpoint is marked as local to this node, and then one is.
    maps.slots.set(index, slot, 0).unwrap();
    assert_eq!(world.explained(&["--policy", "Cluster"]).outcome, "forwarded");
    assert_eq!(world.explained(&["--policy", "Local"]).outcome, "dropped-no-local-endpoint");
    let to = format!("{}/tcp", world.node_port());
    let said = |policy| {
        let client = lab.client().address(family).to_string();
        let output = world.agent.command(&["explain", &client, &to, "--policy", policy]).unwrap();
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    // The list is derived from the other one, and lacks what that one leaves out.
    assert!(said("Local").contains("terminating ones"), "{}", said("Local"));
    assert_eq!(said("Cluster"), "");
    maps.slots.set(index, Slot { flags: SLOT_LOCAL, ..slot }, 0).unwrap();
    let answer = world.explained(&["--policy", "Local"]);
    assert_eq!(answer.endpoint, world.explained(&[]).endpoint, "{answer:?}");
    maps.slots.set(index, slot, 0).unwrap();

    // The frontend is changed: its policy, its lists, its existence.
    maps.change(node, |frontend| frontend.flags |= frontend::LOCAL);
    world.expect("dropped-no-local-endpoint", None);
    assert_eq!(world.explained(&["--policy", "Cluster"]).outcome, "forwarded");
    maps.change(node, |frontend| frontend.local = frontend.cluster);
    world.expect("forwarded", Some((2, 1)));
    maps.change(node, |frontend| {
        frontend.flags &= !frontend::HAS_ENDPOINTS;
        (frontend.cluster, frontend.local) = (IndexRange::default(), IndexRange::default());
    });
    world.expect("rejected-no-endpoint", None);
    maps.frontends.remove(&Maps::key(node)).unwrap();
    world.expect("passed-not-service", None);
    maps.frontends.insert(Maps::key(node), untouched, 0).unwrap();
    world.expect("forwarded", Some((2, 1)));
}

/// An agent of another build has set the node up, or its programs were replaced: answers of this
/// program may be wrong, which it reports.
fn other_programs_than_its_own_are_said(agent: &Agent) {
    let said = || {
        let output = agent.command(&["explain", "192.0.2.10", &format!("172.18.0.11:{PORT}")]).unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(!said().contains("differ"), "the control: {}", said());
    let version = fs::read_dir(agent.pin_dir()).unwrap().next().unwrap().unwrap().path();
    let programs = version.join("programs");
    let mut names: Vec<_> = fs::read_dir(&programs).unwrap().map(|entry| entry.unwrap().path()).collect();
    names.sort();
    // One program replaces another.
    fs::rename(&names[0], &names[1]).unwrap();
    let replaced = names[1].file_name().unwrap().to_str().unwrap();
    let said = said();
    assert!(said.contains("are not those of this traffic-policy-agent") && said.contains(replaced), "{said}");
}
