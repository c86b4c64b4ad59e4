//! Pods behind netkit devices, with neighbours (mode L2) and without (mode L3). Kernels that have
//! none are skipped: `cargo xtask vm test --kernel 7.x policy::local_delivery::netkit` has them.

use traffic_policy_testing::lab::{Cni, Family};
use traffic_policy_testing::pace::until;
use traffic_policy_testing::rows;
use traffic_policy_testing::skipped;
use traffic_policy_testing::traffic::transfer::burst;

use super::changes::replace_pod;
use super::{DIRECT, MOST, PATIENCE, STACK, Scene, ask};

const BYTES: u64 = 1_000_000;

fn behind_netkit(test: &str, resolved: bool, flags: &[&str]) {
    let Some(scene) = Scene::start(Cni::Kindnet, "tc", flags) else { return };
    let (node, pod) = (scene.node().netns(), scene.node().pod(1).netns());
    let make = |name: &str, peer: &str| node.netlink(async |net| net.netkit(name, resolved, peer, pod).await);
    if let Err(error) = make("probe0", "probe1") {
        assert!(format!("{error:#}").contains("not supported"), "{error:#}");
        skipped(format!("local_delivery::netkit::{test}"), "the kernel has no netkit devices");
        return;
    }
    scene.ip("link del probe0\n");
    replace_pod(&scene, |name| make(name, "eth0").unwrap());
    if flags == DIRECT {
        let followed = || {
            let status = scene.agent.json(&["status"]).unwrap();
            status["local_delivery"]["direct"] == serde_json::json!([scene.pod_device()])
        };
        until("the program on the device", PATIENCE, followed);
    }
    for family in [Family::V4, Family::V6] {
        let mut stream = scene.connect(scene.at(family));
        ask(&mut stream);
        let [requests, replies] = scene.ask_often(&mut stream);
        if flags == DIRECT {
            assert!(requests >= MOST && replies >= MOST, "{requests} requests, {replies} replies");
        } else {
            assert_eq!([requests, replies], [0, 0]);
        }
        burst(&mut stream, BYTES).unwrap();
        ask(&mut stream);
    }
}

rows! {
    fn with_neighbours() = behind_netkit("with_neighbours", true, DIRECT);
    fn without_neighbours() = behind_netkit("without_neighbours", false, DIRECT);
    fn by_the_stack() = behind_netkit("by_the_stack", true, STACK);
}
