//! Nodes of a lab for containers made of the pods of `deploy/`, with the host's folders, the API
//! server and the mounts of the kubelet.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::process::Command;
use std::time::Duration;

use k8s_openapi::api::core::v1::PodSpec;
use traffic_policy_testing::api_server::Certificate;
use traffic_policy_testing::attached::{Attached, socket_programs};
use traffic_policy_testing::cgroup::Cgroup;
use traffic_policy_testing::cluster::Cluster;
use traffic_policy_testing::container::{Container, Surroundings};
use traffic_policy_testing::control_plane::ControlPlane;
use traffic_policy_testing::lab::{Cni, Family, Node};
use traffic_policy_testing::matrix::{self, CLUSTER, LOCAL};

use crate::objects;

pub const CLEANUP: &str = "deploy/overlays/cleanup";
pub const SOON: Duration = Duration::from_secs(20);
const TOKEN: &str = "token-of-the-service-account";
/// A name in the certificate of every API server.
const NAME: &str = "kubernetes.default.svc";

/// Nodes with all that their pods need.
pub struct Nodes {
    pub cluster: Cluster,
    plane: ControlPlane,
    certificate: Certificate,
    cgroups: Vec<Cgroup>,
}

impl Nodes {
    pub fn new() -> Self {
        // A node of kind: the container's end of a veth with checksum offload, kindnet's devices,
        // routes and masquerade.
        let lab = match Cni::missing_program() {
            None => matrix::lab().cni(Cni::Kindnet),
            Some(program) => {
                traffic_policy_testing::skipped(
                    "kindnet's layout, plain routes in its place",
                    format!("there is no {program}"),
                );
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

    /// The mounts of a node: folders of the lab in place of the host's, objects of the API, and the
    /// files that the kubelet mounts.
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
        // The address of the API server is the one setting that differs between clusters, and so
        // from the overlay.
        if let Some(url) =
            maps.get_mut("traffic-policy").and_then(|map| map.get_mut("TRAFFIC_POLICY_API_SERVER"))
        {
            *url = self.plane.server().url();
        }
        // The paths are those that kubeadm writes.
        let account_files = "/var/run/secrets/kubernetes.io/serviceaccount";
        let of_kube_proxy = self.kubeconfig(
            &format!("certificate-authority: {account_files}/ca.crt"),
            &format!("tokenFile: {account_files}/token"),
        );
        let of_kube_proxy = BTreeMap::from([("kubeconfig.conf".to_owned(), of_kube_proxy)]);
        maps.insert("kube-proxy".to_owned(), of_kube_proxy);
        // A user copies it with all that it needs.
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

    pub fn start(&self, number: usize, folder: &str, pod: &PodSpec) -> Container {
        let lab = &self.cluster.lab;
        Container::start(lab, lab.node(number), pod, &self.surroundings(number, folder)).unwrap()
    }

    /// The programs on the node's devices and its cgroup, and the pins.
    pub fn traces(&self, number: usize) -> (Attached, usize, Vec<String>) {
        let node: &Node = self.cluster.lab.node(number);
        let attached = node.netns().attached("eth0").unwrap();
        let sockets = socket_programs(self.cgroups[number - 1].path()).unwrap();
        let pins = fs::read_dir(self.cluster.lab.bpffs().join(&node.name)).unwrap();
        let pins = pins.map(|pin| pin.unwrap().file_name().into_string().unwrap()).collect();
        (attached, sockets.iter().map(Vec::len).sum(), pins)
    }
}

/// Checks the answers to curl outside of the cluster, by policy: under Local the node without a pod
/// is silent.
pub fn curl(nodes: &Nodes) {
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
            // Silence is observed for this time; an answer arrives within it, even on a busy
            // machine.
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
