//! Requests of pods that lead nowhere, and pods that are left out.

use std::net::UdpSocket;

use traffic_policy_testing::netlink;
use traffic_policy_testing::pace::{scaled, wait_for};

use super::*;

/// Whether a request is refused at once; over IPv6 a connection may be at its second SYN only: an
/// ICMPv6 error that arrives before `connect` has released the socket is not delivered.
#[track_caller]
fn assert_refused(scene: &Scene, protocol: Protocol, to: SocketAddr) {
    let probe = protocol.probe(to).limit(scaled(Duration::from_secs(3)));
    let outcome = probe.from(scene.client().netns()).unwrap();
    assert!(matches!(outcome, Outcome::Refused(_)), "{protocol:?} {to}: {outcome:?}");
}

#[test]
fn each_reason_is_answered_as_from_outside_and_a_foreign_source_is_dropped() {
    let scene = Scene::start(None, ON, |cluster| {
        let remote = Backend::of(cluster.lab.node(2).pod(1));
        cluster.manifests.apply(&service(10), &[]).unwrap();
        cluster.manifests.apply(&service(11), &cluster.backends()).unwrap();
        cluster.manifests.apply(&service(12).internal_policy(Policy::Local), &[remote]).unwrap();
    })
    .unwrap();
    for family in Family::BOTH {
        for protocol in Protocol::BOTH {
            for (to, outcome) in [
                (at(10, family), "rejected-no-endpoint"),
                (SocketAddr::new(cluster_ip(11, family), PORT + 1), "rejected-unknown-port"),
            ] {
                let before = scene.packets("tc-ingress", outcome);
                assert_refused(&scene, protocol, to);
                assert!(scene.packets("tc-ingress", outcome) > before, "{protocol:?} {to}");
            }
            let before = scene.packets("tc-ingress", "dropped-no-local-endpoint");
            assert_eq!(scene.ask(protocol, at(12, family)), Outcome::Silent, "{family:?} {protocol:?}");
            assert!(scene.packets("tc-ingress", "dropped-no-local-endpoint") > before);
            scene.answer(protocol, at(11, family));
        }
    }
    a_foreign_source_is_dropped(&scene, 11);
}

/// A pod's address is behind its device; a packet with another one begins no flow.
fn a_foreign_source_is_dropped(scene: &Scene, number: u8) {
    let foreign = IpAddr::from([198, 51, 100, 7]);
    scene.client().netns().netlink(async |net| net.address("lo", foreign, 32).await).unwrap();
    let before = scene.packets("tc-ingress", "dropped-martian-source");
    scene.client().netns().run(|| {
        let socket = UdpSocket::bind((foreign, 0)).unwrap();
        socket.send_to(b"who\n", at(number, Family::V4)).unwrap();
    });
    assert_eq!(scene.packets("tc-ingress", "dropped-martian-source"), before + 1);
    scene.answer(Protocol::Udp, at(number, Family::V4));
}

/// A device on which others have a filter is left out, and named; once they are gone it is served.
#[test]
fn devices_of_others_are_left_out_and_named() {
    let prepare = |cluster: &Cluster| {
        cluster.manifests.apply(&service(10), &cluster.backends()).unwrap();
    };
    let Some(scene) = Scene::start(Some(Cni::Kindnet), ON, prepare) else { return };
    let node = scene.cluster.lab.node(1);
    let devices = node.netns().run(|| netlink::devices().unwrap());
    let devices: Vec<_> = devices.into_iter().filter(|name| name.starts_with("veth")).collect();
    let state = || scene.agent().json(&["status"]).unwrap()["pod_services"].clone();
    assert_eq!(state()["served"], serde_json::json!(devices));
    let first = &devices[0];
    let filter = format!(
        "qdisc add dev {first} clsact\n\
         filter add dev {first} ingress protocol all u32 match u8 0 0 action mirred egress mirror dev lo\n"
    );
    node.netns().feed("tc", &["-batch", "-"], &filter).unwrap();
    let limit = Duration::from_secs(20);
    wait_for("the device to be left out", limit, || {
        (state()["unserved"][first] == "a TC filter is on it").then_some(())
    });
    let findings = scene.agent().command(&["check", "--pod-services", "on", "--cgroup", "none"]).unwrap();
    let text = String::from_utf8_lossy(&findings.stdout).into_owned();
    assert!(text.contains(&format!("what the pod behind {first} sends to Services")), "{text}");
    node.netns().feed("tc", &["-batch", "-"], &format!("qdisc del dev {first} clsact\n")).unwrap();
    wait_for("the device to be served again", limit, || {
        (state()["served"] == serde_json::json!(devices)).then_some(())
    });
    scene.answer(Protocol::Tcp, at(10, Family::V4));
}
