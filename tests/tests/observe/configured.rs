//! `--config` and its change while the agent runs; `/configz`.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use traffic_policy_testing::agent::{Agent, AgentBuilder};
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::control_plane::ControlPlane;
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::Policy;
use traffic_policy_testing::pace::{until, wait_for};
use traffic_policy_testing::traffic::Outcome;

const PORT: u16 = 30080;
const SOON: Duration = Duration::from_secs(20);
const HEAD: &str = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";
/// A file of kubeadm, null and empty fields included.
const KUBEADM: &str = include_str!("../../../traffic-policy-agent/src/command/config_file/kubeadm.yaml");

fn builder(cluster: &Cluster) -> AgentBuilder {
    Agent::builder(&cluster.lab, cluster.lab.node(1))
}

/// A node with one pod, a Service, and a file with these fields.
fn cluster(fields: &str) -> (Cluster, PathBuf) {
    let cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
    cluster.manifests.apply(&Cluster::node_port("web", Policy::Cluster, PORT), &cluster.backends()).unwrap();
    let file = cluster.lab.logs().join("config.conf");
    fs::write(&file, format!("{HEAD}{fields}")).unwrap();
    (cluster, file)
}

fn configz(agent: &Agent) -> Value {
    let answer = agent.ask_metrics("/configz").unwrap();
    assert_eq!(answer.status, 200, "{}", answer.body);
    serde_json::from_str(&answer.body).unwrap()
}

/// The value and the source of a setting.
fn setting(agent: &Agent, flag: &str) -> (Value, Value) {
    let setting = &configz(agent)["traffic-policy"]["settings"][flag];
    (setting["value"].clone(), setting["source"].clone())
}

fn hang_up(agent: &Agent) {
    kill(Pid::from_raw(agent.pid().unwrap() as i32), Signal::SIGHUP).unwrap();
}

/// A start like that of kube-proxy by a DaemonSet of kubeadm: the file, and the node's name from
/// the pod's own object.
#[test]
fn kubeadms_file_is_enough() {
    let cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
    let control_plane = ControlPlane::start(&cluster.lab).unwrap();
    control_plane.apply(&Cluster::node_port("web", Policy::Cluster, PORT), &cluster.backends()).unwrap();
    let kubeconfig = control_plane.kubeconfig().display().to_string();
    let file = cluster.lab.logs().join("config.conf");
    fs::write(&file, KUBEADM.replace("/var/lib/kube-proxy/kubeconfig.conf", &kubeconfig)).unwrap();
    let agent = builder(&cluster)
        .without_source()
        .without_name()
        .environment("TRAFFIC_POLICY_NODE_NAME", "node-1")
        .environment("TRAFFIC_POLICY_CONFIG", &file.display().to_string())
        .start()
        .unwrap();
    agent.wait_ready(SOON).unwrap();
    cluster.answer(Protocol::Tcp, cluster.at(1, Family::V4, PORT)).unwrap();
    for (flag, value, source) in [
        ("--kubeconfig", json!(kubeconfig), "file"),
        ("--node-name", json!("node-1"), "environment"),
        ("--attach", json!("tc"), "flag"),
        ("--idle-established", json!("24h"), "default"),
        ("--manifests", Value::Null, "default"),
    ] {
        assert_eq!(setting(&agent, flag), (value, json!(source)), "{flag}");
    }
    let kube_proxy = &configz(&agent)["kubeproxy.config.k8s.io"];
    assert_eq!(kube_proxy["clientConnection"]["kubeconfig"], kubeconfig.as_str());
    assert_eq!(kube_proxy["conntrack"]["udpTimeout"], "30s");
    assert_eq!(kube_proxy["mode"], "ebpf");
    let log = agent.log();
    for said in [
        "configuration in effect: --config",
        "clusterCIDR: \"10.244.0.0/16\" is not applied",
        "nodePortAddresses is not set",
    ] {
        assert_eq!(log.matches(said).count(), 1, "{said}: {log}");
    }
    assert_eq!(log.matches("is not applied").count(), 1, "null and empty fields ask for nothing: {log}");
}

#[test]
fn a_flag_before_its_variable_before_the_file() {
    let (cluster, file) = cluster(
        "hostnameOverride: Node-1\nconntrack: {tcpEstablishedTimeout: 2h, udpTimeout: 45s, udpStreamTimeout: 3m}\n\
         clientConnection: {kubeconfig: /nowhere}\nconntrac: {}\n",
    );
    let agent = builder(&cluster)
        .without_name()
        .flags(&[
            "--config",
            file.to_str().unwrap(),
            "--idle-established",
            "3h",
            "--affinity-entries",
            "2048",
        ])
        .environment("TRAFFIC_POLICY_IDLE_ESTABLISHED", "4h")
        .environment("TRAFFIC_POLICY_IDLE_UDP", "50s")
        .start()
        .unwrap();
    agent.wait_ready(SOON).unwrap();
    for (flag, value, source) in [
        ("--node-name", json!("node-1"), "file"),
        ("--idle-established", json!("3h"), "flag"),
        ("--idle-udp", json!("50s"), "environment"),
        ("--idle-udp-answered", json!("3m"), "file"),
        ("--drain", json!("30s"), "default"),
        // The manifests that the flag names are the source.
        ("--kubeconfig", Value::Null, "default"),
    ] {
        assert_eq!(setting(&agent, flag), (value, json!(source)), "{flag}");
    }
    assert!(agent.log().contains("conntrac is unknown, and ignored: is conntrack"), "{}", agent.log());
    cluster.answer(Protocol::Tcp, cluster.at(1, Family::V4, PORT)).unwrap();
    let status = agent.json(&["status"]).unwrap();
    let maps = status["maps"].as_array().unwrap();
    let affinity = maps.iter().find(|map| map["name"] == "tp_affinity").unwrap();
    assert_eq!(affinity["size"], 2048);
}

/// Maps are taken over with their sizes, whatever the flags of the next agent.
#[test]
fn sizes_are_those_of_the_pinned_maps() {
    let (cluster, _) = cluster("");
    let sized = |entries| builder(&cluster).flags(&["--flow-entries", entries, "--service-entries", entries]);
    let mut first = sized("2048").start().unwrap();
    first.wait_ready(SOON).unwrap();
    first.stop().unwrap();
    let second = sized("4096").start().unwrap();
    second.wait_ready(SOON).unwrap();
    let settings = &configz(&second)["traffic-policy"]["settings"];
    for flag in ["--flow-entries", "--service-entries"] {
        let expected = json!({"value": "4096", "source": "flag", "in_effect": "2048"});
        assert_eq!(settings[flag], expected, "{flag}");
    }
    cluster.answer(Protocol::Udp, cluster.at(1, Family::V4, PORT)).unwrap();
}

#[test]
fn a_file_that_changes_is_wrong_or_does_not_answer_while_it_runs() {
    let (cluster, file) =
        cluster("nodePortAddresses: [203.0.113.0/24]\nconntrack: {udpTimeout: 1h, udpStreamTimeout: 1h}\n");
    let mut agent = builder(&cluster).flags(&["--config", file.to_str().unwrap()]).start().unwrap();
    agent.wait_ready(SOON).unwrap();
    sighup_applies_what_it_can_and_names_the_rest(&cluster, &agent, &file);
    a_wrong_file_changes_nothing(&cluster, &agent, &file);
    an_agent_that_waits_for_a_file_ends_on_sigterm(&mut agent, &file);
}

fn sighup_applies_what_it_can_and_names_the_rest(cluster: &Cluster, agent: &Agent, file: &Path) {
    let to = cluster.at(1, Family::V4, PORT);
    assert!(!matches!(cluster.ask(Protocol::Tcp, to).unwrap(), Outcome::Answered(_)));
    assert!(!agent.log().contains("DEBUG"), "{}", agent.log());

    let fields = "nodePortAddresses: [all]\nconntrack: {udpTimeout: 1h, udpStreamTimeout: 1h}\n\
                  logging: {verbosity: 4}\nhealthzBindAddress: 127.0.0.1:10999\n";
    fs::write(file, format!("{HEAD}{fields}")).unwrap();
    hang_up(agent);
    let line = agent.wait_said(&["applied"], SOON).unwrap();
    assert!(
        line.contains("--node-port-addresses all (file)") && line.contains("--log debug (file)"),
        "{line}"
    );
    agent.wait_said(&["only a restart applies", "--healthz-address 127.0.0.1:10999"], SOON).unwrap();
    agent.wait_said(&["DEBUG", "logging in this detail from now on"], SOON).unwrap();
    cluster.answer(Protocol::Udp, to).unwrap();
    assert_eq!(setting(agent, "--log"), (json!("debug"), json!("file")));
    let healthz = &configz(agent)["traffic-policy"]["settings"]["--healthz-address"];
    assert_eq!(healthz["after_restart"], "127.0.0.1:10999", "{healthz}");
    assert_eq!(agent.healthz().unwrap().status, 200, "where it was");

    // The flow of that datagram is removed once its idle time is shorter.
    let flows = || agent.json(&["flows"]).unwrap().as_array().map_or(0, Vec::len);
    let there = flows();
    assert!(there > 0);
    // Nothing may happen in two sweeps, 2 s apart.
    sleep(Duration::from_secs(4));
    assert_eq!(flows(), there);
    fs::write(file, format!("{HEAD}{}", fields.replace("1h", "1s"))).unwrap();
    // There is no notification: the agent polls the file.
    agent.wait_said(&["the file has changed: applied", "--idle-udp 1s (file)"], SOON).unwrap();
    until("the idle flow is gone", SOON, || flows() == 0);
}

/// The effective settings stay unchanged.
fn a_wrong_file_changes_nothing(cluster: &Cluster, agent: &Agent, file: &Path) {
    fs::write(file, format!("{HEAD}nodePortAddresses: [all]\nconntrack: {{udpTimeout: 40s}}\n")).unwrap();
    hang_up(agent);
    agent.wait_said(&["applied", "--idle-udp 40s (file)"], SOON).unwrap();
    fs::write(file, format!("{HEAD}conntrack: {{udpTimeout: soon}}\n")).unwrap();
    hang_up(agent);
    agent
        .wait_said(&["ERROR", "what was in effect stays so", "conntrack.udpTimeout is", "soon"], SOON)
        .unwrap();
    assert_eq!(setting(agent, "--idle-udp"), (json!("40s"), json!("file")));
    cluster.answer(Protocol::Tcp, cluster.at(1, Family::V4, PORT)).unwrap();
    assert_eq!(agent.healthz().unwrap().status, 200);
}

#[test]
fn lines_of_json() {
    let (cluster, _) = cluster("");
    let agent = builder(&cluster).flags(&["--log-format", "json"]).start().unwrap();
    agent.wait_ready(SOON).unwrap();
    // Without a file there is nothing to reload, and the agent goes on.
    hang_up(&agent);
    agent.wait_said(&["without --config nothing can have changed"], SOON).unwrap();
    let log = agent.log();
    for line in log.lines() {
        let line: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        assert!(line["level"].is_string() && line["message"].is_string(), "{line}");
    }
    assert!(log.lines().count() > 3, "{log}");
}

/// A FIFO in place of a file: its reader waits for ever, as on a file system that does not answer.
fn an_agent_that_waits_for_a_file_ends_on_sigterm(agent: &mut Agent, file: &Path) {
    fs::remove_file(file).unwrap();
    nix::unistd::mkfifo(file, nix::sys::stat::Mode::S_IRWXU).unwrap();
    // The agent has opened it: before that it cannot be opened for writing without blocking.
    let is_read = || {
        let write = nix::fcntl::OFlag::O_WRONLY | nix::fcntl::OFlag::O_NONBLOCK;
        nix::fcntl::open(file, write, nix::sys::stat::Mode::empty()).ok()
    };
    let held = wait_for("the agent reads the file", SOON, is_read);
    agent.stop().unwrap();
    drop(held);
}
