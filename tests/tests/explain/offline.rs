//! Direct forwarding without a node: by the API's Leases, and by the settings that agents have.

use std::process::{Command, Output};

use serde_json::{Value, json};
use tempfile::TempDir;
use traffic_policy_testing::agent;
use traffic_policy_testing::api_server::{ApiServer, Kind};

const NAMESPACE: &str = "opening";
const CLIENT: &str = "198.51.100.9";
/// The node ports of a Service with the annotation, and of one without.
const ANNOTATED: &str = "192.0.2.1:30080";
const PLAIN: &str = "192.0.2.1:30081";

/// Nodes `here` and `there`, and two Services with endpoints on the latter.
fn objects() -> Vec<Value> {
    let node = |name: &str, last: u8| {
        json!({
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": name},
            "status": {"addresses": [{"type": "InternalIP", "address": format!("192.0.2.{last}")}]},
        })
    };
    let service = |name: &str, last: u8, annotations: Value| {
        json!({
            "apiVersion": "v1", "kind": "Service",
            "metadata": {"name": name, "namespace": "default", "annotations": annotations},
            "spec": {
                "type": "NodePort", "clusterIP": format!("10.96.0.{last}"),
                "ports": [{"port": 80, "nodePort": 30080 + u16::from(last)}],
            },
        })
    };
    let slice = |name: &str| {
        json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": {
                "name": format!("{name}-1"), "namespace": "default",
                "labels": {"kubernetes.io/service-name": name},
            },
            "ports": [{"port": 8080}],
            "endpoints": [
                {"addresses": ["10.244.2.2"], "nodeName": "there"},
                {"addresses": ["10.244.2.3"], "nodeName": "there"},
            ],
        })
    };
    let direct = json!({"traffic-policy.io/forwarding": "direct"});
    vec![
        node("here", 1),
        node("there", 2),
        service("annotated", 0, direct),
        service("plain", 1, json!({})),
        slice("annotated"),
        slice("plain"),
    ]
}

fn lease(node: &str, last: u8) -> Value {
    json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": {
            "name": format!("traffic-policy-opens-{node}"), "namespace": NAMESPACE,
            "labels": {"traffic-policy.io/opens": "ipip"},
            "annotations": {
                "traffic-policy.io/opens-from": format!("192.0.2.{last}"),
                "traffic-policy.io/opens-dispatch": "ipip,udp",
                "traffic-policy.io/opens-reply": "tunnel",
            },
        },
        "spec": {"holderIdentity": node},
    })
}

struct Api {
    server: ApiServer,
    folder: TempDir,
}

impl Api {
    fn start(leases: &[Value]) -> Self {
        let api = Self { server: ApiServer::start().unwrap(), folder: tempfile::tempdir().unwrap() };
        api.server.write_kubeconfig(&api.folder.path().join("kubeconfig")).unwrap();
        for object in objects().iter().chain(leases) {
            api.server.put(object.clone()).unwrap();
        }
        api
    }

    fn explain(&self, to: &str, flags: &[&str]) -> String {
        let kubeconfig = self.folder.path().join("kubeconfig").display().to_string();
        answered(&explain(
            to,
            &[&["--api", "--node-name", "here", "--kubeconfig", &kubeconfig], flags].concat(),
        ))
    }
}

fn explain(to: &str, flags: &[&str]) -> Output {
    Command::new(agent::program().unwrap()).args(["explain", CLIENT, to]).args(flags).output().unwrap()
}

fn answered(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[track_caller]
fn says(said: &str, texts: &[&str]) {
    assert!(texts.iter().all(|text| said.contains(text)), "not {texts:?}: {said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_leases_of_the_api_count() {
    let api = Api::start(&[lease("here", 1), lease("there", 2)]);
    says(&api.explain(ANNOTATED, &[]), &["(forwarded-direct, at xdp)", "which opens it: unchanged"]);
    says(&api.explain(PLAIN, &[]), &["(forwarded, at xdp)"]);
    let of_namespace = |name| api.explain(ANNOTATED, &["--announce-opening", name]);
    says(&of_namespace(NAMESPACE), &["(forwarded-direct, at xdp)"]);
    says(&of_namespace("other"), &["(forwarded, at xdp)", "direct forwarding: none, for here has no Lease"]);
    // A node that opens nothing, and one whose own agent takes no part.
    let mut closed = lease("there", 2);
    closed["metadata"]["labels"]["traffic-policy.io/opens"] = "none".into();
    api.server.put(closed).unwrap();
    says(&api.explain(ANNOTATED, &[]), &["(forwarded, at xdp)"]);
    api.server.put(lease("there", 2)).unwrap();
    api.server.delete(Kind::Lease, NAMESPACE, "traffic-policy-opens-here");
    says(&api.explain(ANNOTATED, &[]), &["(forwarded, at xdp)", "here has no Lease"]);
    assert!(!api.explain(PLAIN, &[]).contains("Lease"));
}

#[tokio::test(flavor = "multi_thread")]
async fn leases_that_may_not_be_listed_are_named_in_the_answer() {
    let api = Api::start(&[lease("here", 1), lease("there", 2)]);
    api.server.refuse(Kind::Lease, 403);
    let said = api.explain(ANNOTATED, &[]);
    says(&said, &["(forwarded, at xdp)", "list on leases.coordination.k8s.io is needed", "403"]);
    assert!(!api.explain(PLAIN, &[]).contains("leases"));
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_of_agents_are_flags() {
    let api = Api::start(&[lease("here", 1), lease("there", 2)]);
    let folder = tempfile::tempdir().unwrap();
    let leases = [lease("there", 2)];
    for (number, object) in objects().iter().chain(&leases).enumerate() {
        std::fs::write(folder.path().join(format!("{number}.json")), object.to_string()).unwrap();
    }
    let of_folder = |flags: &[&str]| {
        let folder = folder.path().display().to_string();
        answered(&explain(PLAIN, &[&["--manifests", &folder, "--node-name", "here"], flags].concat()))
    };
    let of_api = |flags: &[&str]| api.explain(PLAIN, flags);
    for is_folder in [true, false] {
        let of = |flags: &[&str]| if is_folder { of_folder(flags) } else { of_api(flags) };
        says(&of(&[]), &["(forwarded, at xdp)"]);
        says(&of(&["--forwarding", "direct"]), &["(forwarded-direct, at xdp)", "IPv4 in IPv4"]);
        says(&of(&["--forwarding", "tunnel"]), &["(forwarded-direct, at xdp)"]);
        says(&of(&["--forwarding", "direct", "--dispatch", "udp"]), &["(forwarded-direct, at xdp)", "UDP"]);
        says(&of(&["--algorithm", "maglev", "--maglev-size", "251"]), &["Maglev table"]);
        assert!(!of(&[]).contains("Maglev table"));
    }
}

#[test]
fn a_running_agent_has_settings_of_its_own() {
    for flag in [
        ["--forwarding", "direct"],
        ["--algorithm", "maglev"],
        ["--maglev-size", "251"],
        ["--dispatch", "udp"],
        ["--announce-opening", "opening"],
    ] {
        let output = explain(PLAIN, &flag);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        says(&said, &[flag[0], "running agent", "--manifests"]);
    }
    // An agent's pod has variables for the agent.
    let mut command = Command::new(agent::program().unwrap());
    command.args(["explain", CLIENT, PLAIN, "--pin-dir", "/nowhere/pins"]);
    let output = command.env("TRAFFIC_POLICY_FORWARDING", "direct").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    says(&said, &["/nowhere/pins"]);
    let folder = ["--manifests", "/nowhere", "--node-name", "here", "--announce-opening", "opening"];
    let output = explain(PLAIN, &folder);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
}
