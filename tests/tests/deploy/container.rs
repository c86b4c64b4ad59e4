//! The agent in containers made of the pods of `deploy/`, one overlay a node: the policy matrix passes, and `cleanup` leaves
//! nothing. Root file system: the image that TRAFFIC_POLICY_IMAGE names, else the agent that all suites start.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use k8s_openapi::api::core::v1::PodSpec;
use nix::sys::statvfs::{FsFlags, statvfs};
use traffic_policy_testing::api_server::Certificate;
use traffic_policy_testing::attached::{Attached, socket_programs};
use traffic_policy_testing::cgroup::Cgroup;
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::container::{Container, Surroundings};
use traffic_policy_testing::control_plane::ControlPlane;
use traffic_policy_testing::lab::{Cni, Family, Node};
use traffic_policy_testing::matrix::{self, CLUSTER, LOCAL};
use traffic_policy_testing::netns::is_running;
use traffic_policy_testing::pace::until;
use traffic_policy_testing::traffic::Outcome;

use crate::{objects, pod, remains};

/// Of the nodes in their order.
const OVERLAYS: [&str; 3] = ["deploy/overlays/kind", "deploy/overlays/kubeadm", "deploy/overlays/static-pod"];
const CLEANUP: &str = "deploy/overlays/cleanup";
const SOON: Duration = Duration::from_secs(20);
const TOKEN: &str = "token-of-the-service-account";
/// In every API server's certificate.
const NAME: &str = "kubernetes.default.svc";

/// Nodes with what their pods need of them.
struct Nodes {
    cluster: Cluster,
    plane: ControlPlane,
    certificate: Certificate,
    cgroups: Vec<Cgroup>,
}

impl Nodes {
    fn new() -> Self {
        // As in kind: the container's end of a veth with checksum offload, kindnet's devices, routes and masquerade.
        let lab = match Cni::missing_program() {
            None => matrix::lab().cni(Cni::Kindnet),
            Some(program) => {
                println!("SKIPPED kindnet's layout, plain routes in its place: there is no {program}");
                matrix::lab()
            }
        };
        let cluster = Cluster::start(lab).unwrap();
        let certificate = Certificate::for_name(NAME).unwrap();
        let plane = ControlPlane::start_tls(&cluster.lab, certificate.clone()).unwrap();
        plane.server().require_tokens(&[TOKEN]);
        for service in matrix::services() {
            plane.apply(&service, &cluster.backends()).unwrap();
        }
        let cgroups = cluster.lab.nodes().iter().map(|node| {
            fs::create_dir(cluster.lab.bpffs().join(&node.name)).unwrap();
            Cgroup::create(&format!("{}-{}", cluster.lab.id(), node.name)).unwrap()
        });
        let cgroups = cgroups.collect();
        Self { cluster, plane, certificate, cgroups }
    }

    /// What a node has: of the host's folders, ones of the lab's own; of the cluster, what the API has and the kubelet mounts.
    fn surroundings(&self, number: usize, folder: &str) -> Surroundings {
        let node = self.cluster.lab.node(number);
        let own = self.cluster.lab.logs().join(format!("{}-files", node.name));
        let account = own.join("service-account");
        fs::create_dir_all(&account).unwrap();
        fs::write(account.join("token"), TOKEN).unwrap();
        fs::write(account.join("ca.crt"), &self.certificate.pem).unwrap();
        let mut maps: BTreeMap<_, _> = objects(folder)
            .into_iter()
            .filter(|object| object["kind"] == "ConfigMap")
            .map(|object| {
                let data =
                    serde_json::from_value::<BTreeMap<String, String>>(object["data"].clone()).unwrap();
                (object["metadata"]["name"].as_str().unwrap().to_owned(), data)
            })
            .collect();
        // The one thing that differs from cluster to cluster, and so from the overlay: where the API server is.
        if let Some(url) =
            maps.get_mut("traffic-policy").and_then(|map| map.get_mut("TRAFFIC_POLICY_API_SERVER"))
        {
            *url = self.plane.server().url();
        }
        // As kubeadm writes it.
        let account_files = "/var/run/secrets/kubernetes.io/serviceaccount";
        let of_kube_proxy = self.kubeconfig(
            &format!("certificate-authority: {account_files}/ca.crt"),
            &format!("tokenFile: {account_files}/token"),
        );
        let of_kube_proxy = BTreeMap::from([("kubeconfig.conf".to_owned(), of_kube_proxy)]);
        maps.insert("kube-proxy".to_owned(), of_kube_proxy);
        // As a person copies it, with all that it needs.
        let of_the_node = own.join("etc");
        fs::create_dir_all(&of_the_node).unwrap();
        fs::write(of_the_node.join("ca.crt"), &self.certificate.pem).unwrap();
        let kubeconfig = self.kubeconfig("certificate-authority: ca.crt", &format!("token: {TOKEN}"));
        fs::write(of_the_node.join("kubeconfig"), kubeconfig).unwrap();
        let host = [
            ("/sys/fs/bpf", self.cluster.lab.bpffs().join(&node.name)),
            ("/sys/fs/cgroup", self.cgroups[number - 1].path().to_owned()),
            ("/etc/traffic-policy", of_the_node),
        ];
        Surroundings {
            host: host.map(|(path, folder)| (path.to_owned(), folder)).into(),
            config_maps: maps,
            service_account: (!folder.ends_with("static-pod")).then_some(account),
        }
    }

    fn kubeconfig(&self, authority: &str, credentials: &str) -> String {
        let server = self.plane.server().url();
        format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: default\n\
             clusters: [{{name: default, cluster: {{server: '{server}', tls-server-name: {NAME}, {authority}}}}}]\n\
             users: [{{name: default, user: {{{credentials}}}}}]\n\
             contexts: [{{name: default, context: {{cluster: default, user: default}}}}]\n"
        )
    }

    fn start(&self, number: usize, folder: &str, pod: &PodSpec) -> Container {
        let lab = &self.cluster.lab;
        Container::start(lab, lab.node(number), pod, &self.surroundings(number, folder)).unwrap()
    }

    /// Programs on the node's devices and its cgroup, pins.
    fn traces(&self, number: usize) -> (Attached, usize, Vec<String>) {
        let node: &Node = self.cluster.lab.node(number);
        let attached = node.netns().attached("eth0").unwrap();
        let sockets = socket_programs(self.cgroups[number - 1].path()).unwrap();
        let pins = fs::read_dir(self.cluster.lab.bpffs().join(&node.name)).unwrap();
        let pins = pins.map(|pin| pin.unwrap().file_name().into_string().unwrap()).collect();
        (attached, sockets.iter().map(Vec::len).sum(), pins)
    }
}

/// Of `/proc/PID/status`, a number in hexadecimal.
fn status(pid: u32, field: &str) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("{field}:"))).unwrap();
    u64::from_str_radix(line.trim(), 16).unwrap()
}

/// The privileges are those that the runtime was asked for: the matrix would pass with more, too.
fn is_confined(container: &Container) {
    let pid = container.pid().unwrap();
    // CAP_BPF, CAP_NET_ADMIN, CAP_PERFMON, CAP_SYS_ADMIN, CAP_SYS_PTRACE.
    let five = [39, 12, 38, 21, 19].iter().fold(0, |bits, number| bits | 1 << number);
    for field in ["CapBnd", "CapEff", "CapPrm"] {
        assert_eq!(status(pid, field), five, "{field}");
    }
    assert_eq!(status(pid, "NoNewPrivs"), 1);
    if Path::new("/usr/share/containers/seccomp.json").exists() {
        assert_eq!(status(pid, "Seccomp"), 2, "no filter of system calls");
    }
    let root = statvfs(format!("/proc/{pid}/root/.").as_str()).unwrap();
    assert!(root.flags().contains(FsFlags::ST_RDONLY), "its root can be written to");
}

/// What curl gets outside of the cluster, by policy: under Local silence from the node without a pod.
fn curl(nodes: &Nodes) {
    if Command::new("curl").arg("--version").output().is_err() {
        writeln!(std::io::stderr(), "SKIPPED the requests by curl: there is no curl").ok();
        return;
    }
    let cluster = &nodes.cluster;
    for family in Family::BOTH {
        for (number, port, answered) in
            [(1, CLUSTER, true), (3, CLUSTER, true), (1, LOCAL, true), (3, LOCAL, false)]
        {
            let url = format!("http://{}/", cluster.at(number, family, port));
            let mut command = Command::new("curl");
            // Silence is waited for so long, and an answer comes within it on a busy machine, too.
            let limit = if answered { "20" } else { "1" };
            command.args(["--silent", "--show-error", "--max-time", limit, &url]);
            let output = cluster.lab.client().netns().output(command).unwrap();
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            if answered {
                assert!(output.status.success() && said.contains("\"pod\":\"pod-"), "{url}: {output:?}");
            } else {
                // CURLE_OPERATION_TIMEDOUT
                assert_eq!(output.status.code(), Some(28), "{url}: {output:?}");
            }
        }
    }
}

#[test]
fn the_matrix_passes_in_containers_and_cleanup_leaves_nothing() {
    if !Container::can_run("the_matrix_passes_in_containers_and_cleanup_leaves_nothing") {
        return;
    }
    let nodes = Nodes::new();
    let cluster = &nodes.cluster;
    let untouched: Vec<_> = cluster.lab.nodes().iter().map(|node| remains::of(node.netns())).collect();
    let start = |(at, folder): (usize, &&str)| nodes.start(at + 1, folder, &pod(folder));
    let mut containers: Vec<_> = OVERLAYS.iter().enumerate().map(start).collect();
    for container in &mut containers {
        container.wait_ready(SOON).unwrap();
    }

    matrix::pass(cluster, "containers").unwrap();
    curl(&nodes);
    for (number, container) in (1..).zip(&containers) {
        is_confined(container);
        assert_eq!(container.probe().unwrap(), 200);
        // A test of what is served by something else would pass without the agent.
        let forwarded = container.packets("tc-ingress", "forwarded").unwrap();
        assert!(forwarded > 0, "node-{number} has forwarded nothing");
        let (attached, sockets, pins) = nodes.traces(number);
        assert_eq!((attached.ingress, attached.egress, sockets), (1, 1, 9), "node-{number}");
        assert_eq!(pins, ["traffic-policy"]);
        let log = container.log();
        assert!(!log.contains("ERROR"), "{log}");
    }
    let silent = cluster.at(3, Family::V4, LOCAL).to_string();
    let client = cluster.lab.client().address(Family::V4).to_string();
    let explained = containers[2].exec(&["explain", &client, &silent]).unwrap();
    let explained = String::from_utf8(explained.stdout).unwrap();
    assert!(explained.contains("dropped-no-local-endpoint"), "{explained}");

    // The comparison can tell: programs on devices are in it.
    let in_use = remains::of(cluster.lab.node(1).netns());
    assert_ne!(in_use, untouched[0]);

    // As when the DaemonSet is deleted: what serves, serves on.
    let pids: Vec<_> = containers.iter().map(|container| container.pid().unwrap()).collect();
    for container in containers {
        container.stop().unwrap();
    }
    assert!(!pids.into_iter().any(is_running));
    cluster.answer(Protocol::Tcp, cluster.at(3, Family::V4, CLUSTER)).unwrap();

    let cleanup = pod(CLEANUP);
    for number in 1..=3 {
        assert_ne!(nodes.traces(number).2, [""; 0]);
        let mut container = nodes.start(number, CLEANUP, &cleanup);
        let code = container.wait_ended(SOON).unwrap();
        assert_eq!(code, Some(0), "{}", container.log());
        assert_eq!(nodes.traces(number), (Attached::default(), 0, Vec::new()), "node-{number}");
        // The kubelet starts it again, and then there is nothing to do.
        drop(container);
        let mut again = nodes.start(number, CLEANUP, &cleanup);
        assert_eq!(again.wait_ended(SOON).unwrap(), Some(0), "{}", again.log());
        let left = remains::of(cluster.lab.node(number).netns());
        remains::assert_same(&format!("node-{number}"), &untouched[number - 1], &left);
    }
    let at = cluster.at(3, Family::V4, CLUSTER);
    let outcome = cluster.ask(Protocol::Tcp, at).unwrap();
    assert!(!matches!(outcome, Outcome::Answered(_)), "something else answers, too: {outcome:?}");
}

/// Also after a failed assertion: what a test leaves running would serve the next one's packets.
#[test]
fn a_container_ends_with_its_value() {
    if !Container::can_run("a_container_ends_with_its_value") {
        return;
    }
    let nodes = Nodes::new();
    let mut container = nodes.start(1, OVERLAYS[0], &pod(OVERLAYS[0]));
    container.wait_ready(SOON).unwrap();
    let pid = container.pid().unwrap();
    assert!(is_running(pid));
    drop(container);
    until("its process ends", SOON, || !is_running(pid));
}

/// A container without the capabilities is told so, and the node stays as it was.
#[test]
fn without_a_capability_the_container_ends_with_a_reason() {
    if !Container::can_run("without_a_capability_the_container_ends_with_a_reason") {
        return;
    }
    let nodes = Nodes::new();
    for missing in ["NET_ADMIN", "PERFMON", "BPF"] {
        let mut pod = pod(OVERLAYS[0]);
        let security = pod.containers[0].security_context.as_mut().unwrap();
        let added = security.capabilities.as_mut().unwrap().add.as_mut().unwrap();
        // SYS_ADMIN stands for the others.
        added.retain(|name| name != missing && name != "SYS_ADMIN");
        // Its profile forbids bpf(2) without SYS_ADMIN, which is another reason.
        security.seccomp_profile = None;
        let mut container = nodes.start(1, OVERLAYS[0], &pod);
        assert_eq!(container.wait_ended(SOON).unwrap(), Some(1), "{missing}: {}", container.log());
        assert!(container.log().contains(&format!("CAP_{missing}")), "{missing}: {}", container.log());
        assert_eq!(nodes.traces(1), (Attached::default(), 0, Vec::new()), "{missing}");
    }
}
