//! Endpoints on the pod's own node, on another one, and the pod itself, in the layouts of network
//! plugins: a routed veth, ports of a bridge, overlays.

use std::process::Command;

use traffic_policy_testing::rows;
use traffic_policy_testing::traffic::server::Identity;
use traffic_policy_testing::traffic::transfer::transfer;
use traffic_policy_testing::traffic::{Faults, Server};

use super::*;

/// The pod asks until each of four pods has answered: its own node's, another node's, and itself.
fn all_endpoints_answer(scene: &Scene) {
    let client = scene.client();
    let node = scene.cluster.lab.node(1);
    for family in Family::BOTH {
        for protocol in Protocol::BOTH {
            let what = format!("{family:?} {protocol:?}");
            for pod in scene.cluster.lab.pods() {
                let mut tries = 0..200;
                let answer = loop {
                    assert!(tries.next().is_some(), "{what}: {} never answered", pod.name);
                    let answer = scene.answer(protocol, at(10, family));
                    if answer.pod == pod.name {
                        break answer;
                    }
                };
                if pod.name == client.name {
                    // It would not accept its own address as a source.
                    assert_eq!(answer.client.ip(), node.address(family), "{what}");
                } else {
                    assert_eq!(answer.client.ip(), client.address(family), "{what} {}", pod.name);
                }
            }
        }
        scene.cluster.lab.pods().for_each(know_gateway);
        // A request in fragments, of which the first alone has ports.
        let probe = Protocol::Udp.probe(at(10, family)).length(1600);
        // Where an overlay takes less than the pods' devices, their nodes say so to the first
        // request of this pod, and to the first answer of each of the two on the other node.
        let asked = || probe.answer(client.netns());
        let answer = asked().or_else(|_| asked()).or_else(|_| asked()).or_else(|_| asked());
        assert_eq!(answer.unwrap().said.len(), 1600, "{family:?}");
    }
}

/// Marks a pod's gateway as a router, which it is once the pod has asked for its address. If the
/// gateway asked first, the kernel forgets path MTUs by it whenever it collects garbage, which is
/// every 30 s (`rt6_age_examine_exception`), and a busy machine waits that long for four answers:
/// <https://github.com/torvalds/linux/blob/v6.12/net/ipv6/route.c>
fn know_gateway(pod: &Pod) {
    let ip = |arguments: &str| {
        let mut command = Command::new("ip");
        command.arg("-6").args(arguments.split_whitespace());
        let output = pod.netns().output(command).unwrap();
        assert!(output.status.success(), "{}: ip -6 {arguments}: {output:?}", pod.name);
        String::from_utf8(output.stdout).unwrap()
    };
    // `fe80::1 dev eth0 lladdr 02:00:00:00:00:01 REACHABLE`
    for neighbour in ip("neigh show").lines().filter(|line| line.contains(" lladdr ")) {
        let words: Vec<_> = neighbour.split_whitespace().collect();
        let [address, "dev", device, "lladdr", mac, ..] = words[..] else {
            panic!("{}: `{neighbour}`", pod.name)
        };
        if ip("route show default").contains(&format!("via {address} ")) {
            ip(&format!("neigh replace {address} dev {device} lladdr {mac} router nud reachable"));
        }
    }
}

/// The other node has an agent, too: its programs meet what the pod and its own pods send.
fn in_layout(cni: Option<Cni>) {
    let prepare = |cluster: &Cluster| {
        cluster.manifests.apply(&service(10), &cluster.backends()).unwrap();
    };
    let Some(scene) = Scene::start_with([2, 2], 2, cni, ON, prepare) else { return };
    all_endpoints_answer(&scene);
}

rows! {
    fn plain() = in_layout(None);
    fn routed_veth() = in_layout(Some(Cni::Kindnet));
    fn bridge() = in_layout(Some(Cni::FlannelHostGw));
    fn bridge_and_overlay() = in_layout(Some(Cni::FlannelVxlan));
    fn routed_veth_and_overlay() = in_layout(Some(Cni::CalicoVxlan));
}

#[test]
fn nothing_answers_without_the_flag() {
    let prepare = |cluster: &Cluster| {
        cluster.manifests.apply(&service(10), &cluster.backends()).unwrap();
    };
    let Some(scene) = Scene::start(Some(Cni::Kindnet), OFF, prepare) else { return };
    for family in Family::BOTH {
        for protocol in Protocol::BOTH {
            let asked = protocol.probe(at(10, family)).from(scene.client().netns());
            assert!(asked.and_then(Outcome::answer).is_err(), "{family:?} {protocol:?}");
        }
    }
}

/// Both flags: one program at a pod's device does the work of both.
#[test]
fn with_direct_delivery() {
    for cni in [Cni::Kindnet, Cni::FlannelHostGw] {
        let prepare = |cluster: &Cluster| {
            cluster.manifests.apply(&service(10), &cluster.backends()).unwrap();
            let web = Cluster::node_port("web", Policy::Local, NODE_PORT);
            cluster.manifests.apply(&web, &cluster.backends()).unwrap();
        };
        let flags = [ON, &["--local-delivery", "direct"]].concat();
        let Some(scene) = Scene::start_with([2, 2], 2, Some(cni), &flags, prepare) else { return };
        all_endpoints_answer(&scene);
        for family in Family::BOTH {
            let to = scene.cluster.at(1, family, NODE_PORT);
            let client = scene.cluster.lab.client().netns();
            transfer(client, to, 1_000_000).unwrap();
            transfer(scene.client().netns(), at(10, family), 1_000_000).unwrap();
        }
        // Packets from outside bypass the stack, in both directions.
        for outcome in ["delivered-direct", "replied-direct"] {
            assert!(scene.packets("tc-ingress", outcome) > 10, "{cni:?} {outcome}");
        }
    }
}

/// Endpoints in nodes' own networks, as the API server's: the pod's node answers itself, and the
/// plugin masquerades what goes to another one.
#[test]
fn endpoints_in_nodes_own_networks() {
    let prepare = |cluster: &Cluster| {
        for number in [1, 2] {
            let node = cluster.lab.node(number);
            let backend = Backend::at(&node.addresses).on_node(&node.name);
            cluster.manifests.apply(&service(10 + number as u8), &[backend]).unwrap();
        }
    };
    let Some(scene) = Scene::start(Some(Cni::Kindnet), ON, prepare) else { return };
    let servers = [1, 2].map(|number| {
        let node = scene.cluster.lab.node(number);
        let identity = Identity { pod: format!("host-{number}"), node: node.name.clone() };
        let ledger = &scene.cluster.ledger;
        Server::start_in(node.netns(), TARGET, identity, Faults::default(), ledger).unwrap()
    });
    for family in Family::BOTH {
        for protocol in Protocol::BOTH {
            let what = format!("{family:?} {protocol:?}");
            // A datagram's answer would have the source that routes choose towards the pod.
            if protocol == Protocol::Tcp {
                let here = scene.answer(protocol, at(11, family));
                let client = scene.client().address(family);
                assert_eq!((here.pod.as_str(), here.client.ip()), ("host-1", client), "{what}");
            }
            let there = scene.answer(protocol, at(12, family));
            let node = scene.cluster.at(1, family, 0).ip();
            assert_eq!((there.pod.as_str(), there.client.ip()), ("host-2", node), "{what}");
        }
    }
    drop(servers);
}
