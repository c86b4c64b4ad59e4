//! `bugtool`: one tar archive with all that a report needs, with an agent and without; secrets are
//! left out.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::exposition::Exposition;
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::Policy;

const PORT: u16 = 30080;
const SOON: Duration = Duration::from_secs(20);
const SECRETS: [&str; 3] = ["s3cr3t-bearer", "s3cr3t-key", "s3cr3t-password"];
const PARTS: [&str; 15] = [
    "summary.json",
    "status.json",
    "services.json",
    "flows.json",
    "check.json",
    "metrics.txt",
    "configz.json",
    "network/links.txt",
    "network/addresses.txt",
    "network/routes-ipv4.txt",
    "network/routes-ipv6.txt",
    "network/rules-ipv4.txt",
    "network/rules-ipv6.txt",
    "network/neighbours.txt",
    "log.txt",
];

fn parts(tar: &Path) -> BTreeMap<String, String> {
    let mut archive = tar::Archive::new(File::open(tar).unwrap());
    let entries = archive.entries().unwrap().map(|entry| {
        let mut entry = entry.unwrap();
        let name = entry
            .path()
            .unwrap()
            .to_str()
            .unwrap()
            .strip_prefix("traffic-policy-bugtool/")
            .unwrap()
            .to_owned();
        let mut content = String::new();
        entry.read_to_string(&mut content).unwrap();
        (name, content)
    });
    entries.collect()
}

fn errors(parts: &BTreeMap<String, String>) -> Vec<String> {
    let summary: Value = serde_json::from_str(&parts["summary.json"]).unwrap();
    let wrong = summary["parts"].as_array().unwrap().iter().filter(|part| !part["error"].is_null());
    wrong.map(|part| part["name"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn one_tar_with_an_agent_and_without() {
    let cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
    cluster.manifests.apply(&Cluster::node_port("web", Policy::Cluster, PORT), &cluster.backends()).unwrap();
    let mut agent = Agent::start_all(&cluster.lab, |agent| agent).unwrap().remove(0);
    for _ in 0..3 {
        cluster.answer(Protocol::Tcp, cluster.at(1, Family::V4, PORT)).unwrap();
    }
    let log = cluster.lab.logs().join("secret.log");
    let text = format!(
        "{}GET / Authorization: Bearer {}\nclient-key-data: {}\nurl=https://user:{}@192.0.2.1\nthe last line\n",
        agent.log(),
        SECRETS[0],
        SECRETS[1],
        SECRETS[2]
    );
    fs::write(&log, text).unwrap();
    let collect = |agent: &Agent, name: &str| {
        let tar = cluster.lab.logs().join(name);
        let words = [
            "bugtool",
            "--out",
            tar.to_str().unwrap(),
            "--log-file",
            log.to_str().unwrap(),
            "--sample-flows",
            "2",
        ];
        let output = agent.command(&words).unwrap();
        assert!(output.status.success(), "{output:?}");
        assert_eq!(fs::metadata(&tar).unwrap().permissions().mode() & 0o777, 0o600);
        // An existing file is not overwritten.
        let again = agent.command(&words).unwrap();
        assert_eq!(again.status.code(), Some(1), "{again:?}");
        assert!(String::from_utf8_lossy(&again.stderr).contains("--out"), "{again:?}");
        let parts = parts(&tar);
        let names: Vec<_> = PARTS.iter().filter(|name| !parts.contains_key(**name)).collect();
        assert!(names.is_empty(), "missing: {names:?}");
        for (name, content) in &parts {
            for secret in SECRETS {
                assert!(!content.contains(secret), "{name} has {secret}: {content}");
            }
        }
        assert!(parts["log.txt"].ends_with("the last line\n"), "{}", parts["log.txt"]);
        assert!(parts["network/links.txt"].contains("eth0"), "{}", parts["network/links.txt"]);
        parts
    };

    let running = collect(&agent, "with.tar");
    assert_eq!(errors(&running), [""; 0], "{}", running["summary.json"]);
    let json = |name: &str| -> Value { serde_json::from_str(&running[name]).unwrap() };
    assert_eq!(json("status.json")["agent"]["running"], true);
    assert!(json("status.json")["maps"].as_array().unwrap().len() > 10, "names, sizes, bytes");
    assert!(running["services.json"].contains("web"));
    assert_eq!(json("flows.json").as_array().unwrap().len(), 2, "a sample");
    assert!(json("check.json").as_array().unwrap().len() > 5);
    assert_eq!(json("configz.json")["kubeproxy.config.k8s.io"]["mode"], "ebpf");
    assert!(Exposition::parse(&running["metrics.txt"]).unwrap().families.len() > 20);
    assert!(running["network/neighbours.txt"].lines().count() > 0);

    // The packet path goes on without the agent, and so do the commands that read the maps.
    agent.stop().unwrap();
    let stopped = collect(&agent, "stopped.tar");
    assert_eq!(errors(&stopped), ["metrics.txt", "configz.json"]);
    assert!(stopped["metrics.txt"].starts_with("not available: 127.0.0.1:10249 does not answer"));

    assert!(agent.command(&["cleanup"]).unwrap().status.success());
    let nothing = collect(&agent, "nothing.tar");
    assert_eq!(
        errors(&nothing),
        ["status.json", "services.json", "flows.json", "metrics.txt", "configz.json"]
    );
    assert!(nothing["status.json"].contains("no packet path is pinned"), "{}", nothing["status.json"]);
    agent.start_again().unwrap();
    agent.wait_ready(SOON).unwrap();
}
