//! Changes in mid-flow: the agent is killed, started again, started without the flag; a pod is
//! replaced by another one with the same address.

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::lab::{Cni, Family};
use traffic_policy_testing::pace::until;

use super::{DIRECT, MOST, PATIENCE, Scene, ask, is_answered, make_stream};

#[test]
fn without_an_agent_and_with_the_next_one() {
    let Some(mut scene) = Scene::start(Cni::Kindnet, "tc", DIRECT) else { return };
    let mut stream = scene.connect(scene.at(Family::V4));
    ask(&mut stream);
    scene.agent.kill().unwrap();
    let [requests, replies] = scene.ask_often(&mut stream);
    assert!(requests >= MOST && replies >= MOST, "{requests} requests, {replies} replies");
    scene.agent.start_again().unwrap();
    scene.agent.wait_ready(PATIENCE).unwrap();
    let [requests, replies] = scene.ask_often(&mut stream);
    assert!(requests >= MOST && replies >= MOST, "{requests} requests, {replies} replies");
    let device = scene.pod_device();
    assert_eq!(scene.node().netns().attached(&device).unwrap().ingress, 1, "taken over, not added");
}

#[test]
fn switched_off_and_on() {
    let Some(mut scene) = Scene::start(Cni::Kindnet, "tc", DIRECT) else { return };
    let (device, to) = (scene.pod_device(), scene.at(Family::V4));
    let mut stream = scene.connect(to);
    ask(&mut stream);
    assert!(scene.ask_often(&mut stream)[0] >= MOST);
    for (flags, programs) in [(&[][..], 0), (DIRECT, 1)] {
        scene.agent.stop().unwrap();
        let builder = Agent::builder(&scene.cluster.lab, scene.node()).attach("tc").flags(flags);
        scene.agent = builder.start().unwrap();
        scene.agent.wait_ready(PATIENCE).unwrap();
        assert_eq!(scene.node().netns().attached(&device).unwrap().ingress, programs);
        let [requests, replies] = scene.ask_often(&mut stream);
        if flags == DIRECT {
            assert!(requests >= MOST && replies >= MOST, "{requests} requests, {replies} replies");
        } else {
            assert_eq!([requests, replies], [0, 0]);
        }
    }
}

/// Replaces the pod's device by another one with the same addresses, as if the pod had been
/// recreated. `make` makes the pair: the device of this name, and the pod's eth0.
pub(super) fn replace_pod(scene: &Scene, make: impl FnOnce(&str)) {
    let (node, pod) = (scene.node(), scene.node().pod(1));
    scene.ip(&format!("link del {}\n", scene.pod_device()));
    make("vethnew");
    let gateway = |family| match node.pod_network.of(family) {
        // The gateway is the first address of the network of the node's pods.
        std::net::IpAddr::V4(network) => std::net::IpAddr::from((u32::from(network) + 1).to_be_bytes()),
        std::net::IpAddr::V6(network) => std::net::IpAddr::from((u128::from(network) + 1).to_be_bytes()),
    };
    let [four, six] = [Family::V4, Family::V6].map(gateway);
    let [pod4, pod6] = [Family::V4, Family::V6].map(|family| pod.address(family));
    scene.ip(&format!(
        "addr add {four}/32 dev vethnew\nroute add {pod4}/32 dev vethnew scope host\n\
         addr add {six}/128 dev vethnew nodad\nroute add {pod6}/128 dev vethnew\n"
    ));
    let inside = format!(
        "link set eth0 up\naddr add {pod4}/24 dev eth0 noprefixroute\naddr add {pod6}/64 dev eth0 noprefixroute nodad\n\
         route add {four} dev eth0 scope link\nroute add default via {four} dev eth0\n\
         route add {six} dev eth0\nroute add default via {six} dev eth0\n"
    );
    pod.netns().feed("ip", &["-batch", "-"], &inside).unwrap();
}

/// Makes a routed pair of veth devices between the node and the pod.
fn veth(scene: &Scene, name: &str) {
    let namespace = scene.node().pod(1).netns().path();
    scene.ip(&format!(
        "link add {name} type veth peer name eth0 netns {}\nlink set {name} up\n",
        namespace.display()
    ));
}

fn another_pod_with_the_same_address(killed: bool) {
    let Some(mut scene) = Scene::start(Cni::Kindnet, "tc", DIRECT) else { return };
    let socket = scene.datagrams(scene.at(Family::V4));
    make_stream(&socket);
    let before = scene.direct();
    assert!((0..50).all(|_| is_answered(&socket)));
    assert!(scene.direct()[0] > before[0]);
    if killed {
        scene.agent.kill().unwrap();
    }
    replace_pod(&scene, |name| veth(&scene, name));
    // Without an agent, until what was learned is old: five seconds.
    until("an answer of the new pod", PATIENCE, || is_answered(&socket));
    let mut stream = scene.connect(scene.at(Family::V4));
    ask(&mut stream);
    if !killed {
        let direct = || {
            let before = scene.direct();
            assert!((0..20).all(|_| is_answered(&socket)));
            let now = scene.direct();
            now[0] > before[0] && now[1] > before[1]
        };
        until("the way to the new pod", PATIENCE, direct);
    }
}

#[test]
fn a_new_pod_with_the_same_address() {
    another_pod_with_the_same_address(false);
}

#[test]
fn a_new_pod_without_an_agent() {
    another_pod_with_the_same_address(true);
}
