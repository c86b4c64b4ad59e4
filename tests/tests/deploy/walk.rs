//! The guides docs/install.md and docs/vagrant.md from their first command to their last, each in
//! one shell, in a copy of `deploy/`, on a lab with agents. Whatever is not available here (kind,
//! docker, kubectl with a cluster, kubeadm, Vagrant with a provider, builds of minutes) is replaced
//! by a stand-in on PATH that records its calls, checks the files that it gets, and does what is
//! possible: `kubectl exec` and `vagrant ssh` run the agent's command on a node of the lab,
//! `vagrant halt` takes one off the network. Scripts of `deploy/` are the real ones. A command that
//! is in no table here fails.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;
use tempfile::TempDir;
use traffic_policy_testing::agent;
use traffic_policy_testing::cluster::Cluster;
use traffic_policy_testing::matrix;

use crate::guide::commands;
use crate::{root, text};

/// The health port in the Vagrant guide and its `manifests.sh`.
const HEALTH_PORT: u16 = 32081;

/// A command of a guide, by the program that runs it.
#[derive(Clone, Copy, Debug)]
enum By {
    /// A single stand-in, called with exactly these words.
    StandIn,
    /// The shell itself, or a program that is installed everywhere.
    Shell,
    /// A script, which calls these stand-ins.
    Script(&'static [&'static str]),
}
use By::{Script, Shell, StandIn};

const INSTALL: &[(&str, By)] = &[
    ("cargo xtask image", StandIn),
    ("ctr --namespace k8s.io images import target/image/traffic-policy.tar", StandIn),
    ("podman load --input target/image/traffic-policy.tar", StandIn),
    ("kind load image-archive target/image/traffic-policy.tar --name traffic-policy", StandIn),
    ("podman run --rm localhost/traffic-policy:0.1.0 explain --help", StandIn),
    (
        "deploy/kind/up.sh",
        Script(&[
            "kind get clusters",
            "kind create cluster --config deploy/kind/cluster.yaml",
            "kind load image-archive target/image/traffic-policy.tar --name traffic-policy",
            "kind get nodes --name traffic-policy",
            "docker exec traffic-policy-control-plane sh -c mountpoint -q /sys/fs/bpf || mount -t bpf bpf /sys/fs/bpf",
            "docker exec traffic-policy-worker sh -c mountpoint -q /sys/fs/bpf || mount -t bpf bpf /sys/fs/bpf",
            "docker exec traffic-policy-worker2 sh -c mountpoint -q /sys/fs/bpf || mount -t bpf bpf /sys/fs/bpf",
            "kubectl --context kind-traffic-policy apply -k deploy/overlays/kind",
            "kubectl --context kind-traffic-policy -n kube-system rollout status daemonset/traffic-policy --timeout 3m",
            "kubectl --context kind-traffic-policy wait nodes --all --for condition=Ready --timeout 3m",
        ]),
    ),
    (
        "kubectl --context kind-traffic-policy -n kube-system get pods -l app.kubernetes.io/name=traffic-policy",
        StandIn,
    ),
    (
        "deploy/kind/up.sh --xdp",
        Script(&[
            "kind get clusters",
            "kind load image-archive target/image/traffic-policy.tar --name traffic-policy",
            "kind get nodes --name traffic-policy",
            "docker exec traffic-policy-control-plane sh -c mountpoint -q /sys/fs/bpf || mount -t bpf bpf /sys/fs/bpf",
            "docker exec traffic-policy-worker sh -c mountpoint -q /sys/fs/bpf || mount -t bpf bpf /sys/fs/bpf",
            "docker exec traffic-policy-worker2 sh -c mountpoint -q /sys/fs/bpf || mount -t bpf bpf /sys/fs/bpf",
            "docker exec traffic-policy-control-plane cat /sys/class/net/eth0/iflink",
            "docker exec traffic-policy-worker cat /sys/class/net/eth0/iflink",
            "docker exec traffic-policy-worker2 cat /sys/class/net/eth0/iflink",
            "kubectl --context kind-traffic-policy apply -k deploy/overlays/kind-xdp",
            "kubectl --context kind-traffic-policy -n kube-system rollout status daemonset/traffic-policy --timeout 3m",
            "kubectl --context kind-traffic-policy wait nodes --all --for condition=Ready --timeout 3m",
        ]),
    ),
    ("deploy/kind/down.sh", Script(&["kind delete cluster --name traffic-policy"])),
    ("kubeadm init", StandIn),
    ("kubectl -n kube-system delete daemonset kube-proxy", StandIn),
    ("kubectl apply -k deploy/overlays/kubeadm", StandIn),
    ("kubectl -n kube-system rollout status daemonset/traffic-policy", StandIn),
    ("kubectl apply -k deploy/overlays/registry", StandIn),
    ("mkdir -p /etc/traffic-policy", Shell),
    (
        "kubeadm kubeconfig user --client-name system:kube-proxy > /etc/traffic-policy/kubeconfig",
        Script(&["kubeadm kubeconfig user --client-name system:kube-proxy"]),
    ),
    ("cp deploy/overlays/static-pod/pod.yaml /etc/kubernetes/manifests/traffic-policy.yaml", Shell),
    ("kubectl -n kube-system exec daemonset/traffic-policy -- /traffic-policy-agent status", StandIn),
    ("kubectl -n kube-system exec daemonset/traffic-policy -- /traffic-policy-agent check", StandIn),
    ("kubectl -n kube-system logs daemonset/traffic-policy", StandIn),
    ("kubectl apply -k deploy/overlays/cleanup", StandIn),
    ("kubectl -n kube-system logs --prefix --selector app.kubernetes.io/name=traffic-policy", StandIn),
    ("kubectl delete -k deploy/overlays/cleanup", StandIn),
];

const VAGRANT: &[(&str, By)] = &[
    (
        "deploy/vagrant/build.sh",
        Script(&[
            "cargo xtask setup",
            "cargo build --release -p traffic-policy-agent -p traffic-policy-lb -p traffic-policy-lab -p traffic-policy-bench",
        ]),
    ),
    ("export VAGRANT_CWD=\"$PWD/deploy/vagrant\"", Shell),
    ("vagrant up", StandIn),
    ("cargo xtask vm lab", StandIn),
    ("cargo xtask vm lab -- deploy/vagrant/stories.sh", StandIn),
    ("deploy/vagrant/stories.sh", Script(&["vagrant halt --force node-3"])),
    ("vagrant ssh node-1 -c \"sudo /usr/local/lib/traffic-policy/traffic-policy-agent status\"", StandIn),
    (
        "vagrant ssh node-1 -c \"sudo /usr/local/lib/traffic-policy/traffic-policy-agent explain 172.18.0.1 172.18.0.11:30081\"",
        StandIn,
    ),
    ("vagrant ssh node-1 -c \"sudo /usr/local/lib/traffic-policy/bench established\"", StandIn),
    ("vagrant destroy --force", StandIn),
];

/// The script of every stand-in: its name shows which one it is.
const STAND_IN: &str = include_str!("../../testdata/deploy/stand-in.sh");
const STAND_INS: [&str; 8] = ["cargo", "ctr", "docker", "kind", "kubeadm", "kubectl", "podman", "vagrant"];

fn there_is(test: &str, programs: &[&str]) -> bool {
    let missing: Vec<_> =
        programs.iter().filter(|program| Command::new(program).arg("--version").output().is_err()).collect();
    if !missing.is_empty() {
        writeln!(std::io::stderr(), "SKIPPED {test}: {missing:?} are not here").ok();
    }
    missing.is_empty()
}

/// A lab like the clusters of the guides, a copy of `deploy/`, and stand-ins.
struct Ground {
    // The fields are dropped in this order.
    cluster: Cluster,
    folder: TempDir,
}

impl Ground {
    fn new() -> Self {
        let mut cluster = Cluster::start(matrix::lab()).unwrap();
        let [every, near] = matrix::services();
        let near = near.spec("type", json!("LoadBalancer")).health_port(HEALTH_PORT);
        for service in [every, near] {
            cluster.manifests.apply(&service, &cluster.backends()).unwrap();
        }
        cluster.launch(|agent| agent).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let copied =
            Command::new("cp").arg("-r").arg(root().join("deploy")).arg(folder.path()).status().unwrap();
        assert!(copied.success());
        let stand_ins = folder.path().join("stand-ins");
        fs::create_dir(&stand_ins).unwrap();
        let script = stand_ins.join("stand-in.sh");
        fs::write(&script, STAND_IN).unwrap();
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
        for name in STAND_INS {
            symlink(&script, stand_ins.join(name)).unwrap();
        }
        let stand_ins = STAND_INS.join(", ");
        writeln!(std::io::stderr(), "the guides are run with stand-ins of {stand_ins}").ok();
        Self { cluster, folder }
    }

    fn record(&self) -> PathBuf {
        self.folder.path().join("record")
    }

    /// Runs commands in one shell, as the client of the lab; returns the calls of stand-ins by each
    /// command, in order.
    fn walk(&self, commands: &[String]) -> Vec<(String, Vec<String>)> {
        fs::write(self.record(), "").unwrap();
        // /etc is that of the guide's node: this machine's is not modified. Debian finds awk
        // through a link in /etc/alternatives.
        let mut script = "mkdir -p \"$STATE/etc/kubernetes/manifests\" || exit 9\n\
            if [ -d /etc/alternatives ]; then cp -a /etc/alternatives \"$STATE/etc/\"; fi\n\
            mount --bind \"$STATE/etc\" /etc || exit 9\n"
            .to_owned();
        for command in commands {
            script +=
                &format!("echo '@@' >>\"$RECORD\"\n{command} || {{ echo \"FAILED ($?)\" >&2; exit 1; }}\n");
        }
        let lab = &self.cluster.lab;
        let path = |path: &Path| path.display().to_string();
        let node = |number: usize| path(&lab.node(number).netns().path());
        let mut shell = Command::new("unshare");
        shell.args(["--mount", "--propagation", "private", "bash", "-u", "-c", &script]);
        shell.current_dir(self.folder.path());
        let own = path(&self.folder.path().join("stand-ins"));
        shell.env("PATH", format!("{own}:{}", env::var("PATH").unwrap()));
        for name in
            ["TRAFFIC_POLICY_AGENT", "KIND_EXPERIMENTAL_PROVIDER", "POWER_OFF", "KUBECONFIG", "VAGRANT_CWD"]
        {
            shell.env_remove(name);
        }
        let real = fs::canonicalize(agent::program().unwrap()).unwrap();
        shell.env("RECORD", self.record()).env("STATE", self.folder.path()).env("AGENT_PROGRAM", real);
        shell.env("NODE_1", node(1)).env("NODE_3", node(3));
        shell.env("NODE_1_PINS", self.cluster.agents[0].pin_dir());
        // A busy machine answers late, and the stories count late answers as lost.
        shell.env("TIMEOUT", "5");
        let output = lab.client().netns().output(shell).unwrap();
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        println!("{said}");
        let record = fs::read_to_string(self.record()).unwrap();
        assert!(output.status.success(), "{:?}\n{record}\n{said}", output.status);
        let called = record.split("@@\n").skip(1).map(|lines| lines.lines().map(str::to_owned).collect());
        commands.iter().cloned().zip(called).collect()
    }
}

/// A word as the shell passes it on.
fn without_quotes(command: &str) -> String {
    command.replace('"', "")
}

/// The commands that the table does not have.
fn unknown<'a>(commands: &'a [String], known: &[(&str, By)]) -> Vec<&'a str> {
    let is_known = |command: &&str| known.iter().any(|(one, _)| one == command);
    commands.iter().map(String::as_str).filter(|command| !is_known(command)).collect()
}

fn page(path: &str, known: &[(&str, By)]) -> Vec<String> {
    let commands = commands(&text(path));
    let unknown = unknown(&commands, known);
    assert!(unknown.is_empty(), "{path}: no test runs {unknown:?}");
    for (command, _) in known {
        assert!(commands.iter().any(|one| one == command), "{path} has no `{command}` any more");
    }
    commands
}

#[test]
fn a_command_that_no_test_knows_is_told() {
    let page = "```console\n$ kubectl apply -k deploy/overlays/kubeadm\n# rm -rf /etc/kubernetes\n```\n";
    assert_eq!(unknown(&commands(page), INSTALL), ["rm -rf /etc/kubernetes"]);
}

#[test]
fn every_command_of_the_guides_runs() {
    if !there_is("every_command_of_the_guides_runs", &["bash", "curl", "unshare", "nsenter"]) {
        return;
    }
    let guides = [("docs/install.md", INSTALL), ("docs/vagrant.md", VAGRANT)];
    let pages = guides.map(|(path, known)| (path, known, page(path, known)));
    let ground = Ground::new();
    for (path, known, commands) in pages {
        let known: BTreeMap<&str, By> = known.iter().copied().collect();
        for (command, called) in ground.walk(&commands) {
            let expected = match known[command.as_str()] {
                StandIn => vec![without_quotes(&command)],
                Shell => Vec::new(),
                Script(calls) => calls.iter().map(|call| (*call).to_owned()).collect(),
            };
            assert_eq!(called, expected, "{path}: {command}");
        }
    }
}
