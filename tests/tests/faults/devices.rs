//! Devices that disappear and appear while the agent runs.

use std::time::Duration;

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::attached::Attached;
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::{Family, Lab, LabBuilder};
use traffic_policy_testing::netlink::VethEnd;
use traffic_policy_testing::object::Policy;
use traffic_policy_testing::pace::until;
use traffic_policy_testing::traffic::Outcome;

const PORT: u16 = 30080;
const SOON: Duration = Duration::from_secs(15);

/// A driver reset: the device is gone with its addresses, routes and programs, and another one
/// takes its name.
fn vanishes_and_returns(cluster: &Cluster, agent: &Agent, [number, other]: [usize; 2]) {
    let lab = &cluster.lab;
    let (node, far) = (lab.node(number), &lab.node(other).name);
    let pods = ["pod-1-1", "pod-2-1"];
    for family in Family::BOTH {
        cluster.ask_until_all(Protocol::Tcp, cluster.at(number, family, PORT), &pods).unwrap();
    }
    for _ in 0..2 {
        lab.remove_uplink(node).unwrap();
        agent.wait_said(&["detached: the device is gone", "eth0"], SOON).unwrap();
        assert_eq!(agent.livez().unwrap().status, 200);
        lab.restore_uplink(node).unwrap();
        for family in Family::BOTH {
            for protocol in Protocol::BOTH {
                let to = cluster.at(number, family, PORT);
                let by_far =
                    |outcome: &Outcome| matches!(outcome, Outcome::Answered(answer) if answer.node == *far);
                cluster.wait_for(protocol, to, SOON, by_far).unwrap();
                cluster.ask_until_all(protocol, to, &pods).unwrap();
            }
        }
    }
    // The other nodes were affected only by the pod that was unreachable.
    cluster.ask_until_all(Protocol::Tcp, cluster.at(other, Family::V4, PORT), &pods).unwrap();
}

/// Two nodes with a pod each.
fn cluster(lab: LabBuilder) -> Cluster {
    let cluster = Cluster::start(lab.pods(&[1, 1])).unwrap();
    cluster.manifests.apply(&Cluster::node_port("web", Policy::Cluster, PORT), &cluster.backends()).unwrap();
    cluster
}

/// Each of the nodes is the other one's other node.
#[test]
fn a_device_vanishes_and_returns_at_a_node_with_tc_and_at_one_with_xdp() {
    let cluster = cluster(Lab::builder());
    let lab = &cluster.lab;
    let agents =
        [(1, "tc"), (2, "xdp")].map(|(node, mode)| Agent::builder(lab, lab.node(node)).attach(mode).start());
    let [tc, xdp] = agents.map(|agent| agent.unwrap());
    for agent in [&tc, &xdp] {
        agent.wait_ready(SOON).unwrap();
    }
    vanishes_and_returns(&cluster, &tc, [1, 2]);
    vanishes_and_returns(&cluster, &xdp, [2, 1]);
}

/// The overlay's device disappears with the one below it, and no flag names either.
#[test]
fn found_devices_vanish_and_return() {
    let cluster = cluster(Lab::builder().overlay());
    let agents = Agent::start_all(&cluster.lab, |agent| agent.attach("auto").devices(&[])).unwrap();
    vanishes_and_returns(&cluster, &agents[0], [1, 2]);
}

/// A device comes back as one that cannot have XDP: the others go on, and the attempt is repeated.
#[test]
fn a_device_returns_unfit() {
    let cluster = cluster(Lab::builder());
    let lab = &cluster.lab;
    let node = lab.node(1).netns();
    let fit = || {
        let (end, peer) = (end("up1"), end("up1-peer"));
        node.netlink(async |net| net.veth(&end, None, &peer, lab.router()).await).unwrap();
    };
    fit();
    let agent = Agent::builder(lab, lab.node(1)).attach("xdp").devices(&["eth0", "up1"]).start().unwrap();
    agent.wait_ready(SOON).unwrap();
    node.netlink(async |net| net.delete("up1").await).unwrap();
    agent.wait_said(&["detached: the device is gone", "up1"], SOON).unwrap();
    node.netlink(async |net| net.bridge("up1", [2, 0, 0, 0, 0, 9], 1500).await).unwrap();
    agent.wait_said(&["not attached, trying again", "the driver of up1 (bridge) has no XDP"], SOON).unwrap();
    let to = cluster.at(1, Family::V4, PORT);
    cluster.ask_until_all(Protocol::Tcp, to, &["pod-1-1", "pod-2-1"]).unwrap();
    node.netlink(async |net| net.delete("up1").await).unwrap();
    fit();
    until("the device to be attached to again", SOON, || node.attached("up1").unwrap().xdp);
    cluster.ask_until_all(Protocol::Tcp, to, &["pod-1-1", "pod-2-1"]).unwrap();
}

/// The route that made a device one of those on which packets arrive is gone, and stays gone.
#[test]
fn a_device_that_no_route_needs_any_more_is_let_go() {
    let cluster = Cluster::start(Lab::builder().pods(&[1, 1])).unwrap();
    let lab = &cluster.lab;
    let node = lab.node(1).netns();
    let (one, peer) = (end("up1"), end("up1-peer"));
    let (network, gateway) = ("198.18.7.0".parse().unwrap(), "198.18.8.1".parse().unwrap());
    node.netlink(async |net| {
        net.veth(&one, None, &peer, lab.router()).await?;
        net.route_on_link(network, 24, gateway, "up1").await
    })
    .unwrap();
    let agent = Agent::builder(lab, lab.node(1)).devices(&[]).start().unwrap();
    agent.wait_ready(SOON).unwrap();
    let all = Attached { xdp: false, ingress: 1, egress: 1 };
    assert_eq!(node.attached("up1").unwrap(), all);
    // Absent for a moment, as while it is replaced: nothing is detached. The time is longer than
    // the 5 s between two looks at the devices, and shorter than the 30 s for which a device may be
    // without a route.
    let delete = || node.netlink(async |net| net.delete_route(network, 24).await).unwrap();
    delete();
    std::thread::sleep(Duration::from_secs(7));
    node.netlink(async |net| net.route_on_link(network, 24, gateway, "up1").await).unwrap();
    assert_eq!(node.attached("up1").unwrap(), all);
    delete();
    agent.wait_said(&["no route of this node", "up1"], Duration::from_secs(60)).unwrap();
    assert_eq!(node.attached("up1").unwrap(), Attached::default());
    assert_eq!(node.attached("eth0").unwrap(), all);
}

fn end(name: &str) -> VethEnd<'_> {
    VethEnd { name, mac: None, mtu: None }
}

/// The pods of other nodes are behind the overlay's device, which no flag names: the log reports
/// it, not only a counter.
#[test]
fn endpoints_behind_a_device_without_programs_are_told_of() {
    let cluster = Cluster::start(Lab::builder().pods(&[0, 1]).overlay()).unwrap();
    cluster.manifests.apply(&Cluster::node_port("web", Policy::Cluster, PORT), &cluster.backends()).unwrap();
    let agent = Agent::builder(&cluster.lab, cluster.lab.node(1)).devices(&["eth0"]).start().unwrap();
    agent.wait_ready(SOON).unwrap();
    for _ in 0..2 {
        let outcome = cluster.ask(Protocol::Udp, cluster.at(1, Family::V4, PORT)).unwrap();
        assert!(!matches!(outcome, Outcome::Answered(_)), "{outcome:?}");
    }
    let pod = cluster.lab.node(2).pod(1).address(Family::V4).to_string();
    let said = agent.wait_said(&["dropped-unattached-device", "--device names eth0;", &pod], SOON).unwrap();
    assert!(said.contains("nothing is attached to it"), "{said}");
    assert_eq!(agent.log().matches("dropped-unattached-device").count(), 1, "{}", agent.log());
}
