//! `lb --probe` from the client's namespace: working agents agree with the objects, and each fault
//! is named.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::Value;
use traffic_policy_testing::cluster::Cluster;
use traffic_policy_testing::lab::Lab;
use traffic_policy_testing::netns::Process;
use traffic_policy_testing::nftables::{Chain, Family};
use traffic_policy_testing::object::{Manifests, Policy, Service};
use traffic_policy_testing::pace::{look_until, scaled, until, wait_for};
use traffic_policy_testing::{agent::Agent, plugin};

const PORT: u16 = 30080;
const HEALTH: u16 = 32000;
const SOON: Duration = Duration::from_secs(30);

fn web() -> Service {
    Cluster::node_port("web", Policy::Local, PORT).vip("203.0.113.1".parse().unwrap()).health_port(HEALTH)
}

/// A cluster of nodes with two pods, one and none, and an agent on each.
fn cluster() -> Cluster {
    cluster_with(&[])
}

fn cluster_with(flags: &[&str]) -> Cluster {
    let mut cluster = Cluster::start(Lab::builder().pods(&[2, 1, 0])).unwrap();
    cluster.manifests.apply(&web(), &cluster.backends()).unwrap();
    cluster.launch(|agent| agent.flags(flags)).unwrap();
    cluster
}

/// The exit code and the output of `lb web --probe`, run by the client.
fn run(cluster: &Cluster, folder: &Path, more: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(plugin::program().unwrap());
    let within = format!("{}ms", scaled(Duration::from_secs(2)).as_millis());
    command.args(["lb", "web", "--probe", "--balancer", "gke", "--answer-within", &within]).args(more);
    command.arg("--manifests").arg(folder);
    let output = cluster.lab.client().netns().output(command).unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(matches!(output.status.code(), Some(0 | 3)), "{:?}: {said}", output.status);
    (output.status.code(), String::from_utf8(output.stdout).unwrap())
}

fn json(cluster: &Cluster, folder: &Path, more: &[&str]) -> (Option<i32>, Value) {
    let (code, text) = run(cluster, folder, &[&["--output", "json"], more].concat());
    (code, serde_json::from_str(&text).unwrap())
}

/// The answers that differ: node, request, cause.
fn differences(document: &Value) -> Vec<(String, String, String)> {
    let answers = document["probe"]["answers"].as_array().unwrap().iter();
    let differ = answers.filter(|answer| !answer["difference"].is_null());
    let text = |answer: &Value, field: &str| answer[field].as_str().unwrap().to_owned();
    differ
        .map(|answer| (text(answer, "node"), text(answer, "question"), text(answer, "difference")))
        .collect()
}

fn of(found: &[(String, String, String)]) -> Vec<(&str, &str, &str)> {
    found.iter().map(|(node, question, cause)| (node.as_str(), question.as_str(), cause.as_str())).collect()
}

/// Probes until nothing differs.
fn wait_agreed(cluster: &Cluster, more: &[&str]) -> (Option<i32>, Value) {
    let ask = || json(cluster, cluster.manifests.folder(), more);
    look_until("nothing to differ", SOON, ask, |(_, document)| document["probe"]["differ"] == 0)
}

/// A copy of the manifests, for objects that a user has on disk and the cluster has not.
fn copy(cluster: &Cluster) -> (tempfile::TempDir, Manifests) {
    let folder = tempfile::tempdir().unwrap();
    for file in fs::read_dir(cluster.manifests.folder()).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), folder.path().join(file.file_name())).unwrap();
    }
    let manifests = Manifests::at(folder.path()).unwrap();
    (folder, manifests)
}

fn findings(document: &Value) -> Vec<(&str, &str)> {
    let own = document["probe"]["findings"].as_array().unwrap().iter();
    let of_service = document["services"][0]["findings"].as_array().unwrap().iter();
    let all = own.chain(of_service);
    all.map(|finding| (finding["level"].as_str().unwrap(), finding["code"].as_str().unwrap())).collect()
}

/// `lb watch --probe` at the client.
struct Watch {
    process: Process,
    out: PathBuf,
}

impl Watch {
    fn start(cluster: &Cluster) -> Self {
        let out = cluster.lab.logs().join("watch");
        let file = File::create(&out).unwrap();
        let mut command = Command::new(plugin::program().unwrap());
        let within = format!("{}ms", scaled(Duration::from_secs(2)).as_millis());
        command.args(["lb", "watch", "web", "--probe", "--probe-every", "1s", "--answer-within", &within]);
        command.arg("--manifests").arg(cluster.manifests.folder());
        command.stdin(Stdio::null()).stdout(file).stderr(Stdio::null());
        let watch = Self { process: cluster.lab.client().netns().spawn(command).unwrap(), out };
        watch.wait_said(&["2 of 3 nodes healthy"]);
        watch
    }

    fn wait_said(&self, texts: &[&str]) {
        until(&format!("a line with {texts:?}"), SOON, || {
            let text = fs::read_to_string(&self.out).unwrap();
            text.lines().any(|line| texts.iter().all(|text| line.contains(text)))
        });
    }

    fn end(mut self) -> Option<i32> {
        self.process.signal(Signal::SIGINT).unwrap();
        wait_for("the end of lb watch", SOON, || self.process.try_wait().unwrap()).code()
    }
}

#[test]
fn agents_that_work_are_as_the_objects_have_them() {
    let cluster = cluster();
    let (code, document) = wait_agreed(&cluster, &["--traffic"]);
    assert_eq!(code, Some(0), "{document}");
    // For each node: /healthz, the health port, and the node port in both families.
    assert_eq!(document["probe"]["asked"], 12);
    let answers = document["probe"]["answers"].as_array().unwrap();
    let mut told: Vec<_> = answers
        .iter()
        .map(|answer| {
            let text = |field: &str| answer[field].as_str().unwrap();
            format!("{} {} {}", text("node"), text("question"), text("answer"))
        })
        .collect();
    told.sort();
    told.dedup();
    assert_eq!(
        told,
        [
            "node-1 GET :10256/healthz 200",
            "node-1 GET :32000 200, 2 endpoints",
            "node-1 connect :30080 connects",
            "node-2 GET :10256/healthz 200",
            "node-2 GET :32000 200, 1 endpoint",
            "node-2 connect :30080 connects",
            "node-3 GET :10256/healthz 200",
            "node-3 GET :32000 503",
            "node-3 connect :30080 silence",
        ]
    );
    let not_asked = document["probe"]["not_asked"].as_array().unwrap();
    assert!(
        not_asked.iter().all(|port| port == "default/web:udp-80") && !not_asked.is_empty(),
        "{not_asked:?}"
    );

    // The table has a line for each probe, and names what is not probed.
    let (code, text) = run(&cluster, cluster.manifests.folder(), &["--traffic"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("asked from here  12 questions"), "{text}");
    assert!(text.contains("UDP and SCTP are not asked"), "{text}");
    // Without the flag no node port is probed.
    let (_, document) = json(&cluster, cluster.manifests.folder(), &[]);
    assert_eq!(document["probe"]["asked"], 6);
}

#[test]
fn an_agent_that_is_killed_is_dead_and_its_packet_path_lives() {
    let mut cluster = cluster();
    wait_agreed(&cluster, &["--traffic"]);
    let watch = Watch::start(&cluster);
    cluster.agents[1].kill().unwrap();
    let (code, document) = json(&cluster, cluster.manifests.folder(), &["--traffic"]);
    assert_eq!(code, Some(3));
    assert_eq!(
        of(&differences(&document)),
        [("node-2", "GET :10256/healthz", "dead-agent"), ("node-2", "GET :32000", "dead-agent")]
    );
    let found = findings(&document);
    assert_eq!(found.iter().filter(|found| **found == ("error", "dead-agent")).count(), 2, "{found:?}");
    let (_, text) = run(&cluster, cluster.manifests.folder(), &[]);
    assert!(text.contains("GET :10256/healthz at node node-2: refused"), "{text}");
    assert!(text.contains("no proxy runs on it"), "{text}");

    watch.wait_said(&["node-2: GET :10256/healthz: refused", "(dead-agent)"]);
    watch.wait_said(&["node-2: default/web: GET :32000: refused", "(dead-agent)"]);
    cluster.agents[1].start_again().unwrap();
    Agent::wait_ready(&cluster.agents[1], SOON).unwrap();
    wait_agreed(&cluster, &["--traffic"]);
    watch.wait_said(&["node-2: default/web: GET :32000: 200, 1 endpoint, as the objects say"]);
    assert_eq!(watch.end(), Some(0));
}

#[test]
fn a_firewall_on_the_way_times_out() {
    let cluster = cluster();
    wait_agreed(&cluster, &[]);
    let drops = Chain { family: Family::Inet, table: "wall", name: "forward", forward: Some(true) };
    cluster.lab.router().nft_chain(&drops).unwrap();
    let (code, document) = json(&cluster, cluster.manifests.folder(), &[]);
    assert_eq!(code, Some(3));
    let found = differences(&document);
    assert!(found.iter().all(|(.., cause)| cause == "firewall") && found.len() == 6, "{found:?}");
    let answers = document["probe"]["answers"].as_array().unwrap();
    assert!(answers.iter().all(|answer| answer["kind"] == "silence"), "{answers:?}");
    cluster.lab.router().delete_nft_table(Family::Inet, "wall").unwrap();
    wait_agreed(&cluster, &[]);
}

/// The objects do not know it: agents have heard it from their machines.
#[test]
fn nodes_that_are_about_to_go_are_no_fault() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("leaving");
    let cluster = cluster_with(&["--notice", &format!("file:{}", path.display())]);
    wait_agreed(&cluster, &[]);
    fs::write(&path, "preempted\n").unwrap();
    let ask = || {
        let (code, document) = json(&cluster, cluster.manifests.folder(), &[]);
        (code, differences(&document))
    };
    // Health ports of the two nodes with pods, and /healthz of all three.
    let (code, found) = look_until("five differences", SOON, ask, |(_, found)| found.len() == 5);
    assert!(found.iter().all(|(.., cause)| cause == "leaving"), "{found:?}");
    assert_eq!(code, Some(0), "warnings alone");
    fs::remove_file(&path).unwrap();
    wait_agreed(&cluster, &[]);
}

#[test]
fn objects_that_are_not_the_clusters_are_named() {
    let cluster = cluster();
    wait_agreed(&cluster, &[]);
    let backends = cluster.backends();

    // One endpoint is missing: another count is a warning. The one of node-2 is missing: an error.
    let (folder, manifests) = copy(&cluster);
    manifests.endpoints(&web(), &backends[..1]).unwrap();
    let (code, document) = json(&cluster, folder.path(), &[]);
    assert_eq!(code, Some(3));
    assert_eq!(
        of(&differences(&document)),
        [("node-1", "GET :32000", "stale-proxy"), ("node-2", "GET :32000", "stale-proxy")]
    );
    let found = findings(&document);
    assert!(
        found.contains(&("error", "stale-proxy")) && found.contains(&("warning", "stale-proxy")),
        "{found:?}"
    );

    // A health port that the Service has only in this copy.
    let (folder, manifests) = copy(&cluster);
    manifests.service(&web().health_port(HEALTH + 1)).unwrap();
    let (_, document) = json(&cluster, folder.path(), &[]);
    let found = differences(&document);
    assert!(found.iter().all(|(.., cause)| cause == "nothing-listens") && found.len() == 3, "{found:?}");

    // Another node's address, and one without a route.
    let (folder, manifests) = copy(&cluster);
    let nodes = fs::read_to_string(folder.path().join("nodes.yaml")).unwrap();
    let own = cluster.lab.node(1).addresses.v4.to_string();
    assert!(nodes.contains(&own), "{nodes}");
    manifests.write_text("nodes", &nodes.replace(&own, "198.18.0.1")).unwrap();
    let (code, document) = json(&cluster, folder.path(), &[]);
    assert_eq!(code, Some(3));
    assert_eq!(
        of(&differences(&document)),
        [("node-1", "GET :10256/healthz", "wrong-address"), ("node-1", "GET :32000", "wrong-address")]
    );

    // No Node has an ExternalIP.
    let (_, document) = json(&cluster, cluster.manifests.folder(), &["--node-address", "external"]);
    let found = differences(&document);
    assert!(found.iter().all(|(.., cause)| cause == "no-address") && found.len() == 6, "{found:?}");
}
