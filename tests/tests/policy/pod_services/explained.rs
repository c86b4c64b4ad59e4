//! `explain` about a pod as a client: its device, its endpoint, and the way of the reply.

use serde_json::Value;

use super::*;

const DIRECT: [&str; 4] = ["--pod-services", "on", "--local-delivery", "direct"];

fn explain(scene: &Scene, source: IpAddr, to: SocketAddr, more: &[&str]) -> Value {
    let (source, to) = (source.to_string(), to.to_string());
    let output =
        scene.agent().command(&[&["explain", &source, &to, "--output", "json"], more].concat()).unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

#[track_caller]
fn assert_said(answer: &Value, sentence: &str) {
    let steps = answer["steps"].as_array().unwrap();
    let said = steps.iter().any(|step| step.as_str().unwrap().contains(sentence));
    assert!(said, "{sentence}: {steps:#?}");
}

fn in_layout(cni: Cni, device: &str, of_endpoint: &str) {
    let prepare = |cluster: &Cluster| {
        let pods = [(10, 1, 2), (11, 2, 1), (12, 1, 1)];
        for (number, node, pod) in pods {
            let backend = Backend::of(cluster.lab.node(node).pod(pod));
            cluster.manifests.apply(&service(number), &[backend]).unwrap();
        }
        let web = Cluster::node_port("web", Policy::Local, NODE_PORT);
        cluster.manifests.apply(&web, &[Backend::of(cluster.lab.node(1).pod(2))]).unwrap();
    };
    let Some(scene) = Scene::start(Some(cni), &DIRECT, prepare) else { return };
    for family in Family::BOTH {
        let client = scene.client().address(family);
        let endpoint = |node, pod| SocketAddr::new(scene.pod(node, pod).address(family), TARGET);
        for (number, endpoint) in [(10, endpoint(1, 2)), (11, endpoint(2, 1))] {
            let to = at(number, family);
            let answer = explain(&scene, client, to, &[]);
            assert_eq!((&answer["from"], &answer["hook"]), (&"pod-packet".into(), &"tc".into()), "{answer}");
            assert_eq!((&answer["outcome"], &answer["masquerade"]), (&"delivered".into(), &false.into()));
            assert_eq!(answer["endpoint"], endpoint.to_string());
            assert_said(&answer, &format!("device: at {device}, the destination becomes {endpoint}"));
            assert_said(&answer, &format!("the source {endpoint} becomes {to} again there"));
        }
        let answer = explain(&scene, client, at(12, family), &[]);
        assert_eq!(answer["endpoint"], endpoint(1, 1).to_string());
        assert_eq!(answer["source"].as_str().unwrap().parse::<SocketAddr>().unwrap().ip(), {
            scene.cluster.lab.node(1).address(family)
        });
        assert_said(&answer, "and is sent back by the device, as is its reply");
        // A pod whose sockets are seen.
        let answer = explain(&scene, client, at(10, family), &["--from", "pod"]);
        assert_eq!(answer["hook"], "socket");
        assert_said(&answer, &format!("its packets are translated at {device} instead"));
        let outside = scene.cluster.lab.client().address(family);
        let answer = explain(&scene, outside, scene.cluster.at(1, family, NODE_PORT), &[]);
        assert_eq!(answer["outcome"], "delivered");
        assert_said(&answer, &format!("straight into the pod by {of_endpoint} (delivered-direct)"));
    }
}

#[test]
fn behind_a_routed_veth() {
    in_layout(Cni::Kindnet, "veth00010001", "veth00010002");
}

#[test]
fn behind_a_port_of_a_bridge() {
    in_layout(Cni::FlannelHostGw, "its port of cni0", "its port of cni0");
}
