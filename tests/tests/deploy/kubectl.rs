//! The plugin of kubectl, under the names by which users install it; and `explain`, which reads
//! clusters in the same way.

use std::{
    env, fs,
    io::Write,
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
    process::{Command, Output},
};

use serde_json::Value;
use tempfile::TempDir;
use traffic_policy_testing::{agent, api_server::ApiServer, plugin};

const MANIFESTS: &str = "apiVersion: v1
kind: Node
metadata: {name: node-1}
status: {addresses: [{type: InternalIP, address: 192.0.2.1}]}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {type: NodePort, clusterIP: 10.96.0.80, externalTrafficPolicy: Local, ports: [{port: 80, nodePort: 30080}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
addressType: IPv4
metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
ports: [{port: 8080}]
endpoints: [{addresses: [10.244.1.2], nodeName: node-1, conditions: {ready: true}}]
";

/// A kubectl that knows one pod, on node-1, and records its arguments.
const KUBECTL: &str = r#"#!/bin/sh
case "$*" in
*" get pods "*spec.nodeName=node-1,*) echo pod/traffic-policy-abcde ;;
*" get pods "*) ;;
*" exec "*) echo "asked: $*" ;;
*) echo "what is $*?" >&2; exit 9 ;;
esac
"#;

/// A folder of PATH with the plugin under both names and a kubectl, and a folder of manifests.
pub struct Installed {
    pub folder: TempDir,
}

impl Installed {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let program = fs::canonicalize(plugin::program().unwrap()).unwrap();
        for name in ["kubectl-traffic_policy", "kubectl_complete-traffic_policy"] {
            symlink(&program, folder.path().join(name)).unwrap();
        }
        fs::create_dir(folder.path().join("manifests")).unwrap();
        fs::write(folder.path().join("manifests/a.yaml"), MANIFESTS).unwrap();
        let kubectl = folder.path().join("fake-kubectl");
        fs::write(&kubectl, KUBECTL).unwrap();
        fs::set_permissions(&kubectl, fs::Permissions::from_mode(0o755)).unwrap();
        Self { folder }
    }

    pub fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    fn run(&self, program: &Path, words: &[&str]) -> Output {
        let path = format!("{}:{}", self.folder.path().display(), env::var("PATH").unwrap());
        let mut command = Command::new(program);
        // The machine's own cluster, if any, is not used.
        command.env("PATH", path).env("HOME", self.folder.path()).env_remove("KUBECONFIG");
        command.args(words).output().unwrap()
    }

    pub fn plugin(&self, words: &[&str]) -> Output {
        self.run(&self.folder.path().join("kubectl-traffic_policy"), words)
    }

    /// Runs the agent's program on the same machine.
    pub fn agent(&self, words: &[&str]) -> Output {
        self.run(&agent::program().unwrap(), words)
    }
}

pub fn out(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[test]
fn it_judges_a_cluster() {
    let installed = Installed::new();
    let manifests = installed.path("manifests");
    let text = out(&installed.plugin(&["lb", "web", "--manifests", &manifests, "--output", "json"]));
    let document: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(document["services"][0]["name"], "web");
    let help = out(&installed.plugin(&["--help"]));
    assert!(help.contains("Usage: kubectl traffic-policy"), "{help}");
    // The plugin cannot start an agent.
    assert_eq!(installed.plugin(&["run"]).status.code(), Some(2));
}

/// One line names the program that has the command.
#[test]
fn each_program_names_the_other() {
    let installed = Installed::new();
    for (output, other) in [
        (installed.agent(&["lb", "web", "--manifests", "/nowhere"]), "kubectl-traffic_policy lb"),
        (installed.plugin(&["explain", "192.0.2.9", "192.0.2.1:30080"]), "traffic-policy-agent explain"),
    ] {
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(other) && said.lines().count() == 1, "{said}");
    }
}

#[test]
fn flows_are_explained_from_manifests_or_the_api() {
    let installed = Installed::new();
    let manifests = installed.path("manifests");
    let flow = ["explain", "192.0.2.9", "192.0.2.1:30080", "--node-name", "node-1"];
    let text = out(&installed.agent(&[&flow[..], &["--manifests", &manifests]].concat()));
    assert!(text.contains("VERDICT     to 10.244.1.2:8080"), "{text}");
    // No API server can be found here.
    let output = installed.agent(&[&flow[..], &["--api"]].concat());
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("no kubeconfig") && said.contains("--kubeconfig"), "{said}");
    let output = installed.agent(&["explain", "192.0.2.9", "192.0.2.1:30080", "--api"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("--node-name"), "{output:?}");
}

/// The cluster is found by --kubeconfig and by KUBECONFIG; a context that does not exist is named.
#[tokio::test(flavor = "multi_thread")]
async fn the_api_is_asked_as_kubectl_does() {
    let installed = Installed::new();
    let server = ApiServer::start().unwrap();
    server.apply(MANIFESTS).unwrap();
    let file = installed.folder.path().join("kubeconfig");
    server.write_kubeconfig(&file).unwrap();
    let kubeconfig = file.display().to_string();
    let text = out(&installed.plugin(&["lb", "--kubeconfig", &kubeconfig, "--output", "json"]));
    let document: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(document["services"][0]["name"], "web");
    let flow = ["explain", "192.0.2.9", "192.0.2.1:30080", "--api", "--node-name"];
    let text = out(&installed.agent(&[&flow[..], &["node-1", "--kubeconfig", &kubeconfig]].concat()));
    assert!(text.contains("VERDICT     to 10.244.1.2:8080"), "{text}");
    let output = installed.agent(&[&flow[..], &["node-9", "--kubeconfig", &kubeconfig]].concat());
    assert!(String::from_utf8_lossy(&output.stderr).contains("no Node node-9"), "{output:?}");
    let mut command = Command::new(installed.folder.path().join("kubectl-traffic_policy"));
    command.args(["lb", "web", "--context", "c"]).env("KUBECONFIG", &file);
    assert!(out(&command.output().unwrap()).contains("shop/web"));
    let output = installed.plugin(&["lb", "--kubeconfig", &kubeconfig, "--context", "other"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && said.contains("other"), "{said}");
}

#[test]
fn a_node_s_status_comes_from_its_pod() {
    let installed = Installed::new();
    let kubectl = installed.path("fake-kubectl");
    let of = |node: &str, more: &[&str]| {
        installed.plugin(&[&["status", node, "--kubectl", &kubectl, "--context", "c"], more].concat())
    };
    assert_eq!(
        out(&of("node-1", &["--output", "json"])).trim(),
        "asked: --context c --namespace kube-system exec pod/traffic-policy-abcde --container agent -- \
         /traffic-policy-agent status --output json"
    );
    let output = of("node-2", &[]);
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("no pod with the label") && said.contains("node-2"), "{said}");
    // Another field of the selector.
    assert_eq!(of("node-1,status.phase=Failed", &[]).status.code(), Some(2));
    let output = installed.plugin(&["status", "node-1", "--kubectl", "/nowhere"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("name it by --kubectl"), "{output:?}");
}

/// The pod, its container and its label are those of deploy/.
#[test]
fn a_node_s_status_is_asked_where_deploy_puts_it() {
    let objects = crate::objects("deploy/base");
    let set = objects.iter().find(|object| object["kind"] == "DaemonSet").unwrap();
    assert_eq!(set["metadata"]["namespace"], "kube-system");
    let template = &set["spec"]["template"];
    assert_eq!(template["metadata"]["labels"]["app.kubernetes.io/name"], "traffic-policy");
    assert_eq!(template["spec"]["containers"][0]["name"], "agent");
    assert!(crate::text("deploy/Containerfile").contains("ENTRYPOINT [\"/traffic-policy-agent\"]"));
}

/// kubectl finds the plugin; the test is skipped with a message on a machine without kubectl.
#[test]
fn kubectl_finds_it() {
    let installed = Installed::new();
    let path = format!("{}:{}", installed.folder.path().display(), env::var("PATH").unwrap());
    let kubectl = |words: &[&str]| {
        let mut command = Command::new("kubectl");
        command.args(words).env("PATH", &path).env("HOME", installed.folder.path()).env_remove("KUBECONFIG");
        command.output()
    };
    if !kubectl(&["version", "--client"]).is_ok_and(|output| output.status.success()) {
        writeln!(std::io::stderr(), "SKIPPED kubectl_finds_it: there is no kubectl").unwrap();
        return;
    }
    let manifests = installed.path("manifests");
    let text = out(&kubectl(&["traffic-policy", "lb", "shop/web", "--manifests", &manifests]).unwrap());
    assert!(text.contains("shop/web"), "{text}");
    let text = out(&kubectl(&["__complete", "traffic-policy", "lb", "what"]).unwrap());
    assert!(text.lines().any(|line| line == "what-if"), "{text}");
}
