//! Changes while pods ask: their device goes and comes back with the same name and number, with an
//! agent and without one.

use traffic_policy_testing::netlink;
use traffic_policy_testing::pace::{until, wait_for};
use traffic_policy_testing::rows;
use traffic_policy_testing::traffic::Conversation;

use super::*;

const PATIENCE: Duration = Duration::from_secs(20);

/// A Service with an endpoint on the pod's node, and one with an endpoint elsewhere.
fn prepare(cluster: &Cluster) {
    for (number, node, pod) in [(10, 1, 2), (11, 2, 1)] {
        let backend = Backend::of(cluster.lab.node(node).pod(pod));
        cluster.manifests.apply(&service(number), &[backend]).unwrap();
    }
}

/// Whether both Services answer the client, by both families and protocols.
fn all_answer(scene: &Scene) -> bool {
    Family::BOTH.iter().all(|family| {
        Protocol::BOTH.iter().all(|protocol| {
            [10, 11]
                .iter()
                .all(|number| matches!(scene.ask(*protocol, at(*number, *family)), Outcome::Answered(_)))
        })
    })
}

/// The name of the host side of a pod's device on the first node; pods count from 1.
fn device(pod: usize) -> String {
    format!("veth0001{pod:04x}")
}

fn served(scene: &Scene) -> serde_json::Value {
    scene.agent().json(&["status"]).unwrap()["pod_services"]["served"].clone()
}

/// The device of the pod that asks is replaced, and so is that of its endpoint.
fn recreated(cni: Cni, killed: bool) {
    let flags = [ON, &["--local-delivery", "direct"]].concat();
    let Some(mut scene) = Scene::start(Some(cni), &flags, prepare) else { return };
    let node = |scene: &Scene| scene.cluster.lab.node(1).netns().clone();
    let devices = serde_json::json!([device(1), device(2)]);
    assert!(all_answer(&scene));
    assert_eq!(served(&scene), devices);
    let number = |scene: &Scene, pod| node(scene).run(|| netlink::index(&device(pod)).unwrap());
    for pod in [1, 2] {
        let before = number(&scene, pod);
        if killed {
            scene.cluster.agents[0].kill().unwrap();
        }
        scene.cluster.lab.node(1).recreate_device(cni, pod as u8).unwrap();
        assert_eq!(number(&scene, pod), before, "the number is used again");
        if killed {
            assert_eq!(node(&scene).attached(&device(pod)).unwrap().ingress, 0, "its programs went with it");
            scene.cluster.agents[0].start_again().unwrap();
            scene.agent().wait_ready(PATIENCE).unwrap();
        }
        until("programs on the new device", PATIENCE, || {
            let attached = node(&scene).attached(&device(pod)).unwrap();
            (attached.ingress, attached.egress) == (1, 1)
        });
        until("answers by the new device", PATIENCE, || all_answer(&scene));
        assert_eq!(served(&scene), devices);
    }
}

rows! {
    fn a_routed_device_comes_back() = recreated(Cni::Kindnet, false);
    fn a_routed_device_comes_back_without_an_agent() = recreated(Cni::Kindnet, true);
    fn a_port_of_a_bridge_comes_back() = recreated(Cni::FlannelHostGw, false);
}

/// A pod that goes takes nothing from the others: their conversations go on, and its device is
/// forgotten.
#[test]
fn a_device_goes() {
    let Some(scene) = Scene::start(Some(Cni::Kindnet), ON, prepare) else { return };
    let mut conversations: Vec<_> = Protocol::BOTH
        .map(|protocol| Conversation::open(scene.client().netns(), protocol, at(11, Family::V4)).unwrap())
        .into();
    assert!(conversations.iter_mut().all(Conversation::is_answered));
    let gone = format!("link del {}\n", device(2));
    scene.cluster.lab.node(1).netns().feed("ip", &["-batch", "-"], &gone).unwrap();
    assert!(conversations.iter_mut().all(Conversation::is_answered));
    wait_for("the device to be forgotten", PATIENCE, || {
        (served(&scene) == serde_json::json!([device(1)])).then_some(())
    });
    assert!(conversations.iter_mut().all(Conversation::is_answered));
    assert_eq!(scene.ask(Protocol::Tcp, at(10, Family::V4)), Outcome::Silent, "its endpoint is gone");
}

/// Conversations of all kinds go on while no agent runs, and by the next one.
#[test]
fn conversations_outlive_the_agent() {
    let Some(mut scene) = Scene::start(Some(Cni::FlannelHostGw), ON, prepare) else { return };
    let each = Family::BOTH.into_iter().flat_map(|family| Protocol::BOTH.map(|it| (family, it)));
    let each = each.flat_map(|(family, protocol)| [10, 11].map(|number| (protocol, at(number, family))));
    let mut conversations: Vec<_> = each
        .map(|(protocol, to)| Conversation::open(scene.client().netns(), protocol, to).unwrap())
        .collect();
    let mut all_go_on = || conversations.iter_mut().all(Conversation::is_answered);
    assert!(all_go_on());
    scene.cluster.kill_agents().unwrap();
    assert!(all_go_on() && all_answer(&scene), "the programs serve alone");
    scene.cluster.start_agents_again(PATIENCE).unwrap();
    assert!(all_go_on() && all_answer(&scene));
    let attached = scene.cluster.lab.node(1).netns().attached(&device(1)).unwrap();
    assert_eq!((attached.ingress, attached.egress), (1, 1), "taken over, not added");
}
