//! Starts of agents, and the manifests they are given. A stand-in plays the agent: the subject is
//! how it is started, watched, killed and started again.

#![expect(clippy::unwrap_used, reason = "a test fails with the error as it is")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::Duration;

use traffic_policy_testing::agent::{Agent, AgentBuilder};
use traffic_policy_testing::lab::Lab;
use traffic_policy_testing::object::{Backend, Manifests, Policy, Port, Service};

const SOON: Duration = Duration::from_secs(5);

/// Makes a program that prints its arguments and then serves on the agent's health port.
fn stand_in(lab: &Lab, script: &str) -> PathBuf {
    let path = lab.logs().join("stand-in");
    let serve = format!("exec {} serve stand-in here --port 10256", env!("CARGO_BIN_EXE_lab"));
    fs::write(&path, format!("#!/bin/sh\necho \"$@\"\n{script}\n{serve}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

#[test]
fn an_agent_is_started_killed_and_started_again() {
    let lab = Lab::builder().nodes(2).build().unwrap();
    let program = stand_in(&lab, "");
    let adapt = |agent: AgentBuilder| agent.program(&program).attach("xdp").flags(&["--drain", "5s"]);
    let mut agents = Agent::start_all(&lab, adapt).unwrap();
    let (folder, bpffs) = (lab.manifests(), lab.bpffs());
    let expected = format!(
        "run --node-name node-1 --device eth0 --manifests {} --pin-dir {}/node-1 --cgroup none --attach xdp --drain 5s\n",
        folder.display(),
        bpffs.display()
    );
    assert_eq!(agents[0].log(), expected);

    let first = agents[0].pid();
    agents[0].kill().unwrap();
    assert!(!agents[0].is_running() && agents[0].healthz().is_err());
    assert!(agents[1].is_running() && agents[1].healthz().is_ok());
    agents[0].start_again().unwrap();
    agents[0].wait_ready(SOON).unwrap();
    assert_ne!(agents[0].pid(), first);
    assert_eq!(agents[0].log(), expected.repeat(2));
    agents[0].stop().unwrap();
    assert!(!agents[0].is_running());
}

#[test]
fn an_agent_that_fails_is_reported_with_its_log() {
    let lab = Lab::builder().nodes(1).build().unwrap();
    let program = stand_in(&lab, "echo no such device >&2; exit 1");
    let agent = Agent::builder(&lab, lab.node(1)).program(&program).start().unwrap();
    let error = format!("{:#}", agent.wait_ready(SOON).unwrap_err());
    assert!(error.contains("ended") && error.contains("no such device"), "{error}");

    let program = stand_in(&lab, "sleep 100");
    let agent = Agent::builder(&lab, lab.node(1)).program(&program).start().unwrap();
    let error = format!("{:#}", agent.wait_ready(Duration::from_millis(200)).unwrap_err());
    assert!(error.contains("is not ready"), "{error}");
}

#[test]
fn manifests_are_ordinary_yaml() {
    let lab = Lab::builder().nodes(2).build().unwrap();
    let manifests = Manifests::of(&lab).unwrap();
    let service = Service::new("web")
        .policy(Policy::Local)
        .vip("203.0.113.10".parse().unwrap())
        .health_port(32000)
        .port(Port::tcp(80, 8080).node_port(30080));
    let backends = [Backend::of(lab.node(1).pod(1)), Backend::of(lab.node(2).pod(1)).terminating()];
    manifests.apply(&service, &backends).unwrap();
    let read = |name: &str| fs::read_to_string(lab.manifests().join(name)).unwrap();
    let mut names: Vec<_> = fs::read_dir(lab.manifests())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["endpoints-default-web.yaml", "nodes.yaml", "service-default-web.yaml"]);
    assert_eq!(read("service-default-web.yaml"), SERVICE);
    assert_eq!(read("endpoints-default-web.yaml").split("---\n").next().unwrap(), ENDPOINTS);
    assert!(read("nodes.yaml").starts_with(NODE), "{}", read("nodes.yaml"));
    manifests.delete(&service).unwrap();
    assert_eq!(fs::read_dir(lab.manifests()).unwrap().count(), 1);
}

const SERVICE: &str = "\
apiVersion: v1
kind: Service
metadata:
  name: web
  namespace: default
spec:
  externalTrafficPolicy: Local
  healthCheckNodePort: 32000
  internalTrafficPolicy: Cluster
  ipFamilies:
  - IPv4
  - IPv6
  ipFamilyPolicy: PreferDualStack
  ports:
  - name: tcp-80
    nodePort: 30080
    port: 80
    protocol: TCP
    targetPort: 8080
  selector:
    app: web
  type: LoadBalancer
status:
  loadBalancer:
    ingress:
    - ip: 203.0.113.10
";

const ENDPOINTS: &str = "\
addressType: IPv4
apiVersion: discovery.k8s.io/v1
endpoints:
- addresses:
  - 10.244.1.2
  conditions:
    ready: true
    serving: true
    terminating: false
  nodeName: node-1
  targetRef:
    kind: Pod
    name: pod-1-1
    namespace: default
- addresses:
  - 10.244.2.2
  conditions:
    ready: false
    serving: true
    terminating: true
  nodeName: node-2
  targetRef:
    kind: Pod
    name: pod-2-1
    namespace: default
kind: EndpointSlice
metadata:
  labels:
    kubernetes.io/service-name: web
  name: web-v4
  namespace: default
ports:
- name: tcp-80
  port: 8080
  protocol: TCP
";

const NODE: &str = "\
apiVersion: v1
kind: Node
metadata:
  labels:
    kubernetes.io/hostname: node-1
  name: node-1
spec:
  podCIDR: 10.244.1.0/24
  podCIDRs:
  - 10.244.1.0/24
  - fd00:10:244:1::/64
status:
  addresses:
  - address: 172.18.0.11
    type: InternalIP
  - address: fd00:172:18::11
    type: InternalIP
";
