//! Network policies about a pod that is a client of Services: between its device and the endpoint
//! its packets have the pod's own address and the endpoint's, so that rules about these hold, on
//! the pod's node (egress) and on the endpoint's (ingress).

use traffic_policy_testing::lab::{Addresses, Node};
use traffic_policy_testing::network_policy::Rules;
use traffic_policy_testing::rows;
use traffic_policy_testing::traffic::Conversation;

use super::*;

/// A Service whose endpoint is on the client's node, and one whose endpoint is elsewhere.
const HERE: u8 = 10;
const ELSEWHERE: u8 = 11;

fn endpoint(cluster: &Cluster, service: u8) -> &Pod {
    if service == HERE { cluster.lab.node(1).pod(2) } else { cluster.lab.node(2).pod(1) }
}

fn prepare(cluster: &Cluster) {
    for number in [HERE, ELSEWHERE] {
        cluster.manifests.apply(&service(number), &[Backend::of(endpoint(cluster, number))]).unwrap();
    }
}

/// Forbids the client new connections to the endpoint of a Service, on one node, and takes that
/// back. The other Service goes on, and so does what exists.
fn forbidden(scene: &Scene, rules: Rules, on: &Node, number: u8) {
    let client = scene.client();
    let pod = endpoint(&scene.cluster, number);
    let other = if number == HERE { ELSEWHERE } else { HERE };
    let each = || Family::BOTH.into_iter().flat_map(|family| Protocol::BOTH.map(|it| (family, it)));
    let open = |(family, protocol)| Conversation::open(client.netns(), protocol, at(number, family)).unwrap();
    let mut existing: Vec<_> = each().map(open).collect();
    assert!(existing.iter_mut().all(Conversation::is_answered));
    rules.forbid(on, client.addresses, pod.addresses).unwrap();
    for (family, protocol) in each() {
        let what = format!("{rules:?} on {} {family:?} {protocol:?}", on.name);
        assert_eq!(scene.ask(protocol, at(number, family)), Outcome::Silent, "{what}");
        assert_eq!(scene.answer(protocol, at(other, family)).pod, endpoint(&scene.cluster, other).name);
    }
    assert!(existing.iter_mut().all(Conversation::is_answered), "{rules:?} on {}", on.name);
    rules.allow(on, pod.addresses).unwrap();
    for (family, protocol) in each() {
        assert_eq!(scene.answer(protocol, at(number, family)).pod, pod.name);
    }
}

/// `direct`: whether packets from outside bypass the stack, which concerns none of these.
fn in_layout(cni: Cni, direct: bool) {
    let flags = if direct { &["--pod-services", "on", "--local-delivery", "direct"][..] } else { ON };
    let Some(scene) = Scene::start(Some(cni), flags, prepare) else { return };
    let [first, second] = [1, 2].map(|number| scene.cluster.lab.node(number));
    for rules in Rules::BOTH {
        forbidden(&scene, rules, first, HERE);
        forbidden(&scene, rules, first, ELSEWHERE);
        forbidden(&scene, rules, second, ELSEWHERE);
    }
    // A policy about what the pod has addressed, the Service, meets nothing.
    let [v4, v6] = Family::BOTH.map(|family| cluster_ip(HERE, family));
    let (IpAddr::V4(v4), IpAddr::V6(v6)) = (v4, v6) else { panic!("both families") };
    let service = Addresses { v4, v6 };
    Rules::Nftables.forbid(first, scene.client().addresses, service).unwrap();
    for family in Family::BOTH {
        scene.answer(Protocol::Tcp, at(HERE, family));
    }
}

rows! {
    fn routed_veth() = in_layout(Cni::Kindnet, false);
    fn routed_veth_with_direct_delivery() = in_layout(Cni::Kindnet, true);
    fn bridge() = in_layout(Cni::FlannelHostGw, false);
    fn bridge_with_direct_delivery() = in_layout(Cni::FlannelHostGw, true);
    fn bridge_and_overlay() = in_layout(Cni::FlannelVxlan, false);
    fn routed_veth_and_overlay() = in_layout(Cni::CalicoVxlan, true);
}
