//! Devices that others use keep the stack's way, and `status` and `check` say why.

use serde_json::Value;
use traffic_policy_dataplane::Kernel;
use traffic_policy_testing::lab::{Cni, Family};
use traffic_policy_testing::pace::until;
use traffic_policy_testing::skipped;

use super::{DIRECT, MOST, PATIENCE, Scene, ask};

fn state(scene: &Scene) -> Value {
    scene.agent.json(&["status"]).unwrap()["local_delivery"].clone()
}

/// The findings of `check` with the flag.
fn findings(scene: &Scene) -> Vec<Value> {
    let output = scene.agent.command(&["check", "--local-delivery", "direct", "--output", "json"]).unwrap();
    serde_json::from_slice(&output.stdout).unwrap()
}

#[track_caller]
fn assert_found(scene: &Scene, reason: &str) {
    let findings = findings(scene);
    let found = findings.iter().find(|finding| finding["found"].as_str().unwrap().contains(reason));
    assert_eq!(found.unwrap_or_else(|| panic!("{findings:?}"))["probe"], "local-delivery");
}

/// Puts something on the node or the pod's device while a connection is open, and takes it off
/// again.
fn used_by_others<T>(put: impl FnOnce(&Scene, &str) -> T, take: impl FnOnce(&Scene, &str, T), reason: &str) {
    let Some(scene) = Scene::start(Cni::Kindnet, "tc", DIRECT) else { return };
    let device = scene.pod_device();
    let mut stream = scene.connect(scene.at(Family::V4));
    ask(&mut stream);
    assert!(scene.ask_often(&mut stream)[0] >= MOST);
    assert_eq!(state(&scene)["direct"], serde_json::json!([device]));

    let held = put(&scene, &device);
    let said = || {
        let said = &state(&scene)["by_stack"][&device];
        said.as_str().is_some_and(|said| said.contains(reason))
    };
    until("the reason in status", PATIENCE, said);
    // The agent's own look may be a moment later than that of `status`.
    until("no program on the device", PATIENCE, || state(&scene)["direct"] == serde_json::json!([]));
    assert_eq!(scene.ask_often(&mut stream), [0, 0]);
    assert_found(&scene, reason);

    take(&scene, &device, held);
    until("the program on the device", PATIENCE, || state(&scene)["direct"] == serde_json::json!([device]));
    until("direct packets", PATIENCE, || scene.ask_often(&mut stream)[0] >= MOST);
}

#[test]
fn a_queueing_discipline() {
    used_by_others(
        |scene, device| {
            scene.tc(&format!("qdisc add dev {device} root tbf rate 1gbit burst 1mb latency 50ms\n"));
        },
        |scene, device, ()| scene.tc(&format!("qdisc del dev {device} root\n")),
        "queueing discipline tbf",
    );
}

#[test]
fn a_filter() {
    used_by_others(
        |scene, device| {
            scene.tc(&format!(
                "qdisc add dev {device} clsact\nfilter add dev {device} egress bpf da bytecode '1,6 0 0 0,'\n"
            ));
        },
        |scene, device, ()| scene.tc(&format!("filter del dev {device} egress\n")),
        "a TC filter is on it",
    );
}

/// Attaches a program by a link of tcx, as Cilium's chaining mode and the agent of network policies
/// of AWS VPC CNI do.
fn a_program_of_another(ingress: bool, place: &str) {
    if Kernel::running().is_ok_and(|kernel| !kernel.has_tcx()) {
        skipped("local_delivery", "before Linux 6.6 programs are filters");
        return;
    }
    used_by_others(
        |scene, device| scene.node().netns().attach_foreign(device, ingress).unwrap(),
        |_, _, held| drop(held),
        place,
    );
}

#[test]
fn a_program_of_another_at_ingress() {
    a_program_of_another(true, "of another is on it, at TC ingress");
}

#[test]
fn a_program_of_another_at_egress() {
    a_program_of_another(false, "of another is on it, at TC egress");
}

/// IPsec policies (xfrm) of the node would not see packets that bypass the stack, so all devices of
/// pods are left to the stack.
#[test]
fn policies_of_ipsec() {
    const POLICY: &str = "src 192.0.2.0/24 dst 198.18.0.0/24 dir fwd";
    used_by_others(
        |scene, _| scene.ip(&format!("xfrm policy add {POLICY}\n")),
        |scene, _, ()| scene.ip(&format!("xfrm policy delete {POLICY}\n")),
        "1 IPsec policies (ip xfrm policy)",
    );
}

/// A tap of the node's own, as of a virtual machine or a VPN, and a device that shares another
/// one's: nothing is attached to them, and the pod beside them is served.
#[test]
fn devices_without_another_end() {
    let flags = [DIRECT, &["--pod-services", "on"]].concat();
    let Some(scene) = Scene::start(Cni::Kindnet, "tc", &flags) else { return };
    let device = scene.pod_device();
    scene.ip("tuntap add mode tap name vmtap0\nlink set vmtap0 up\n\
         link add link vmtap0 name shared0 type macvlan mode bridge\nlink set shared0 up\n");
    let status = || scene.agent.json(&["status"]).unwrap();
    for (name, reason) in [("vmtap0", "it is a tap device"), ("shared0", "the device that it shares")] {
        let said = |of: &str, list: &str| {
            status()[of][list][name].as_str().is_some_and(|said| said.contains(reason))
        };
        until("the reason in status", PATIENCE, || said("local_delivery", "by_stack"));
        until("the reason in status", PATIENCE, || said("pod_services", "unserved"));
        assert_found(
            &scene,
            &format!("{name}: {}", if name == "vmtap0" { "it is a tap" } else { "its packets" }),
        );
        let attached = scene.node().netns().attached(name).unwrap();
        assert_eq!((attached.ingress, attached.egress), (0, 0), "{name}");
    }
    assert_eq!(status()["local_delivery"]["direct"], serde_json::json!([device]));
    assert_eq!(status()["pod_services"]["served"], serde_json::json!([device]));
    let mut stream = scene.connect(scene.at(Family::V4));
    ask(&mut stream);
    assert!(scene.ask_often(&mut stream)[0] >= MOST);
}

/// A port of another master than a bridge, as of Open vSwitch: nothing is attached to it. VRF
/// stands for all of them; most kernels of distributions have it.
#[test]
fn a_port_of_another_master() {
    let flags = [DIRECT, &["--pod-services", "on"]].concat();
    let Some(scene) = Scene::start(Cni::Kindnet, "tc", &flags) else { return };
    let (device, pod) = (scene.pod_device(), scene.node().pod(1).netns());
    let master = "link add vrf0 type vrf table 10\nlink set vrf0 up\n";
    if scene.node().netns().feed("ip", &["-batch", "-"], master).is_err() {
        skipped("local_delivery::left_to_the_stack::a_port_of_another_master", "the kernel has no VRF");
        return;
    }
    scene.ip(&format!(
        "link add port0 type veth peer name port0 netns {}\nlink set port0 master vrf0\nlink set port0 up\n",
        pod.path().display()
    ));
    let status = || scene.agent.json(&["status"]).unwrap();
    let reason = "its master vrf0 is no bridge of the kernel";
    for (of, list) in [("local_delivery", "by_stack"), ("pod_services", "unserved")] {
        until("the reason in status", PATIENCE, || {
            status()[of][list]["port0"].as_str().is_some_and(|said| said.contains(reason))
        });
    }
    assert_found(&scene, &format!("port0: {reason}"));
    let attached = scene.node().netns().attached("port0").unwrap();
    assert_eq!((attached.ingress, attached.egress), (0, 0));
    assert_eq!(status()["local_delivery"]["direct"], serde_json::json!([device]));
}
