//! Packets that bypass the stack, in both directions: by the counters of outcomes, and by those of
//! the pod's device, whose host side counts what the stack sends to the pod.

use traffic_policy_testing::cluster::Protocol;
use traffic_policy_testing::lab::{Cni, Family};
use traffic_policy_testing::rows;
use traffic_policy_testing::traffic::transfer::burst;

use super::{DIRECT, FEW, MOST, QUESTIONS, STACK, Scene, ask, is_answered, make_stream};

const BYTES: u64 = 8_000_000;

fn tcp(cni: Cni, attach: &str, flags: &[&str]) {
    let Some(scene) = Scene::start(cni, attach, flags) else { return };
    for family in [Family::V4, Family::V6] {
        let to = scene.at(family);
        scene.cluster.answer(Protocol::Tcp, to).unwrap();
        let mut stream = scene.connect(to);
        ask(&mut stream);
        let host_side = scene.sent_by_host_side();
        let [requests, replies] = scene.ask_often(&mut stream);
        let host_side = scene.sent_by_host_side() - host_side;
        println!("{cni:?} {attach} {family:?}: by the host side {host_side}, direct {requests}, {replies}");
        if flags == DIRECT {
            assert!(requests >= MOST && replies >= MOST, "{requests} requests, {replies} replies");
            assert!(host_side < FEW, "the stack has sent {host_side}\n{}", scene.agent.log());
        } else {
            assert_eq!([requests, replies], [0, 0]);
            assert!(host_side >= QUESTIONS, "the stack has sent {host_side}");
        }
        // Aggregates, their acknowledgements, and what is cut to fit.
        burst(&mut stream, BYTES).unwrap();
        ask(&mut stream);
    }
    for outcome in ["dropped-internal-error", "dropped-mtu-exceeded", "passed-malformed"] {
        for hook in ["xdp", "tc-ingress", "tc-egress"] {
            assert_eq!(scene.agent.packets(hook, outcome).unwrap(), 0, "{hook} {outcome}");
        }
    }
}

rows! {
    fn tcp_to_a_routed_pod() = tcp(Cni::Kindnet, "tc", DIRECT);
    fn tcp_by_the_stack() = tcp(Cni::Kindnet, "tc", STACK);
    fn tcp_to_a_port_of_a_bridge() = tcp(Cni::Bridge, "tc", DIRECT);
    fn tcp_behind_xdp() = tcp(Cni::Kindnet, "xdp", DIRECT);
}

/// A UDP flow counts as established once it has lasted for two seconds.
#[test]
fn udp() {
    let Some(scene) = Scene::start(Cni::Kindnet, "tc", DIRECT) else { return };
    for family in [Family::V4, Family::V6] {
        let socket = scene.datagrams(scene.at(family));
        let before = scene.direct();
        assert!(is_answered(&socket));
        assert_eq!(scene.direct(), before, "the first datagram and its answer");
        make_stream(&socket);
        let before = scene.direct();
        (0..QUESTIONS).for_each(|_| assert!(is_answered(&socket)));
        let now = scene.direct();
        let [requests, replies] = [now[0] - before[0], now[1] - before[1]];
        assert!(requests >= MOST && replies >= MOST, "{requests} requests, {replies} replies");
        // Longer than the MTU: fragments both ways, which the stack delivers.
        let long = vec![b'x'; 4000];
        socket.send(&long).unwrap();
        let mut buffer = [0; 8192];
        assert!(socket.recv(&mut buffer).unwrap() > 0);
    }
}
