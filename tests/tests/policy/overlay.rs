//! Other nodes' pods behind a VXLAN device: packets arrive on one attached device and leave by
//! another of a different kind.

use traffic_policy_testing::agent::{Agent, AgentBuilder};
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Backend, Policy};
use traffic_policy_testing::pace::scaled;
use traffic_policy_testing::rows;
use traffic_policy_testing::traffic::Outcome;
use traffic_policy_testing::traffic::transfer::transfer;

const CLUSTER: u16 = 30080;
const LOCAL: u16 = 30081;
const REMOTE: u16 = 30082;

fn overlay(what: &str, wire_offloads: bool, adapt: impl Fn(AgentBuilder) -> AgentBuilder) {
    let lab = Lab::builder().pods(&[1, 1, 0]).overlay().wire_offloads(wire_offloads);
    let cluster = Cluster::start(lab).unwrap();
    let lab = &cluster.lab;
    for (name, policy, port) in [("cluster", Policy::Cluster, CLUSTER), ("local", Policy::Local, LOCAL)] {
        cluster.manifests.apply(&Cluster::node_port(name, policy, port), &cluster.backends()).unwrap();
    }
    let far = [Backend::of(lab.node(2).pod(1))];
    cluster.manifests.apply(&Cluster::node_port("remote", Policy::Cluster, REMOTE), &far).unwrap();
    let agents = Agent::start_all(lab, adapt).unwrap();
    for agent in &agents {
        for device in ["eth0", "flannel.1"] {
            let device = format!("device=\"{device}\"");
            let log = agent.log();
            assert!(log.lines().any(|line| line.contains("attached") && line.contains(&device)), "{log}");
        }
    }
    for family in Family::BOTH {
        for protocol in Protocol::BOTH {
            for (number, node) in (1..).zip(lab.nodes()) {
                let what = format!("{what} {family:?} {protocol:?} {}", node.name);
                let to = cluster.at(number, family, CLUSTER);
                for answer in cluster.ask_until_all(protocol, to, &["pod-1-1", "pod-2-1"]).unwrap() {
                    let client = answer.client.ip();
                    if answer.node == node.name {
                        assert_eq!(client, lab.client().address(family), "{what}");
                    } else {
                        // The route leads through the overlay, and the source address is that of
                        // the overlay.
                        assert_eq!(client, node.pod_network.of(family), "{what}");
                    }
                }
                let outcome = cluster.ask(protocol, cluster.at(number, family, LOCAL)).unwrap();
                match outcome {
                    Outcome::Silent => assert!(node.pods.is_empty(), "{what} Local"),
                    outcome => {
                        let answer = outcome.answer().unwrap();
                        assert_eq!(answer.node, node.name, "{what} Local");
                        assert_eq!(answer.client.ip(), lab.client().address(family), "{what} Local");
                    }
                }
            }
        }
        transfer(lab.client().netns(), cluster.at(1, family, REMOTE), 4_000_000).unwrap();
    }
}

rows! {
    fn named_devices_by_tc() =
        overlay("tc", true, |agent| agent.attach("tc").devices(&["eth0", "flannel.1"]));
    fn found_devices() = overlay("found", true, |agent| agent.attach("auto").devices(&[]));
    /// XDP on the wire, TC on the overlay: no driver accepts XDP frames for a tunnel.
    fn named_devices_by_generic_xdp() =
        overlay("xdp-generic", false, |agent| agent.attach("xdp-generic").devices(&["eth0", "flannel.1"]));
}

/// XDP refuses packets that need no other device before an skb is allocated, which is why `auto`
/// keeps XDP on a card next to an overlay.
#[test]
fn refusals_stay_with_xdp_beside_an_overlay() {
    let lab = Lab::builder().pods(&[0, 1]).overlay().wire_offloads(false);
    let cluster = Cluster::start(lab).unwrap();
    let far = [Backend::of(cluster.lab.node(2).pod(1))];
    cluster.manifests.apply(&Cluster::node_port("local", Policy::Local, LOCAL), &far).unwrap();
    cluster.manifests.apply(&Cluster::node_port("remote", Policy::Cluster, REMOTE), &far).unwrap();
    let adapt = |agent: AgentBuilder| agent.attach("xdp-generic").devices(&["eth0", "flannel.1"]);
    let agents = Agent::start_first(1, &cluster.lab, adapt).unwrap();
    let packets = |hook, outcome| agents[0].packets(hook, outcome).unwrap();
    assert_eq!(cluster.ask(Protocol::Udp, cluster.at(1, Family::V4, LOCAL)).unwrap(), Outcome::Silent);
    assert!(packets("xdp", "dropped-no-local-endpoint") > 0);
    assert_eq!((packets("xdp", "passed-to-tc"), packets("tc-ingress", "dropped-no-local-endpoint")), (0, 0));
    cluster.answer(Protocol::Udp, cluster.at(1, Family::V4, REMOTE)).unwrap();
    assert!(packets("xdp", "passed-to-tc") > 0 && packets("tc-ingress", "forwarded") > 0);
    let flags = ["--attach", "xdp-generic", "--device", "eth0", "--device", "flannel.1", "--output", "json"];
    let check = agents[0].command(&[&["check"], &flags[..]].concat()).unwrap();
    let findings: Vec<serde_json::Value> = serde_json::from_slice(&check.stdout).unwrap();
    let said = findings.iter().find(|finding| finding["probe"] == "overlay").expect("a finding");
    assert!(said["found"].as_str().unwrap().contains("flannel.1 takes no frames from XDP"), "{said}");
}

/// An overlay's neighbours are static, and nothing would answer if the kernel were made to probe
/// them.
#[test]
fn neighbours_written_by_hand_stay() {
    let cluster = Cluster::start(Lab::builder().pods(&[1, 1]).overlay()).unwrap();
    let lab = &cluster.lab;
    let far = [Backend::of(lab.node(2).pod(1))];
    cluster.manifests.apply(&Cluster::node_port("remote", Policy::Cluster, REMOTE), &far).unwrap();
    let _agents = Agent::start_first(1, lab, |agent| agent.devices(&["eth0", "flannel.1"])).unwrap();
    for family in Family::BOTH {
        cluster.answer(Protocol::Tcp, cluster.at(1, family, REMOTE)).unwrap();
    }
    // The agent maintains the neighbours of its next hops every 5 s, and the kernel sends probes
    // that it requests at once.
    std::thread::sleep(std::time::Duration::from_secs(9));
    for family in Family::BOTH {
        let (near, far) = (lab.node(1).pod(1), lab.node(2).pod(1));
        near.netns().ping(far.address(family), scaled(std::time::Duration::from_secs(2))).unwrap();
        cluster.answer(Protocol::Tcp, cluster.at(1, family, REMOTE)).unwrap();
    }
}
