//! Invalid questions, and environments without an answer.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use traffic_policy_testing::agent::{self, Agent};
use traffic_policy_testing::cluster::Cluster;
use traffic_policy_testing::lab::Lab;
use traffic_policy_testing::object::Policy;

/// Runs `explain` outside of any lab; it must fail, and print nothing that could be taken for an
/// answer.
fn complaint(arguments: &[&str], input: &str) -> String {
    let mut command = Command::new(agent::program().unwrap());
    command
        .arg("explain")
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut process = command.spawn().unwrap();
    // An invalid command line ends it before it reads.
    process.stdin.take().unwrap().write_all(input.as_bytes()).ok();
    failed(&process.wait_with_output().unwrap())
}

fn failed(output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{said}");
    assert!(output.stdout.is_empty(), "{}", String::from_utf8_lossy(&output.stdout));
    said
}

#[track_caller]
fn says(said: &str, texts: &[&str]) {
    assert!(texts.iter().all(|text| said.contains(text)), "not {texts:?}: {said}");
}

/// A folder with a Node object only.
fn manifests() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let node = "apiVersion: v1\nkind: Node\nmetadata: {name: n}\nstatus: {addresses: [{type: InternalIP, address: 192.0.2.1}]}\n";
    std::fs::write(folder.path().join("node.yaml"), node).unwrap();
    folder
}

fn of_flows(manifests: &Path, flows: &str) -> String {
    complaint(&["--flows", "-", "--node-name", "n", "--manifests", &manifests.display().to_string()], flows)
}

#[test]
fn flows_that_are_not_understood_are_named_by_line_and_field() {
    let manifests = manifests();
    let good = r#"{"name":"good","src":"192.0.2.9","dst":"192.0.2.1","dport":30080,"proto":"TCP"}"#;
    let with = |field: &str, value: &str| {
        let mut flow: serde_json::Value = serde_json::from_str(good).unwrap();
        flow[field] = serde_json::from_str(value).unwrap();
        flow.to_string()
    };
    for (field, value) in [
        ("src", "\"192.0.2\""),
        ("src", "7"),
        ("src", "null"),
        ("src", "\"2001:db8::9\""),
        ("dst", "\"nowhere\""),
        ("dst", "null"),
        ("sport", "65536"),
        ("sport", "-1"),
        ("dport", "\"http\""),
        ("dport", "null"),
        ("proto", "\"quic\""),
        ("from", "\"moon\""),
    ] {
        // Once as lines with an empty one among them, and once as an array over several lines: the
        // third line each time.
        let wrong = with(field, value);
        // Either of two addresses of different families may be reported.
        let field = if value.contains("db8") { "dst" } else { field };
        for flows in [format!("{good}\n\n{wrong}\n{good}\n"), format!("[\n{good},\n{wrong},\n{good}\n]\n")] {
            says(&of_flows(manifests.path(), &flows), &[&format!("line 3: {field}")]);
        }
    }
    // Every invalid flow is reported, not only the first.
    let flows = format!("{}\n{good}\n{}\n", with("dport", "70000"), with("src", "\"x\""));
    says(&of_flows(manifests.path(), &flows), &["line 1: dport", "line 3: src"]);
    for flows in [format!("{good}\n{{\"src\": \n"), format!("[\n{good}\n"), format!("{good}\n17\n")] {
        says(&of_flows(manifests.path(), &flows), &["line "]);
    }
}

#[test]
fn single_flows_that_are_not_understood() {
    let folder = manifests();
    let folder = folder.path().display().to_string();
    for (source, destination, texts) in [
        ("192.0.2.9", "192.0.2.1", ["192.0.2.1", "port"]),
        ("here", "192.0.2.1:80", ["here", "address"]),
        ("192.0.2.9", "192.0.2.1:80/quic", ["quic", "protocol"]),
        ("2001:db8::9", "192.0.2.1:80", ["2001:db8::9", "famil"]),
    ] {
        says(&complaint(&[source, destination, "--manifests", &folder, "--node-name", "n"], ""), &texts);
    }
    says(&complaint(&["192.0.2.9"], ""), &["DST:PORT"]);
    says(&complaint(&[], ""), &["SRC"]);
    says(
        &complaint(&["--flows", "/nowhere/flows", "--manifests", &folder, "--node-name", "n"], ""),
        &["/nowhere/flows"],
    );
    says(&complaint(&["192.0.2.9", "192.0.2.1:80", "--manifests", &folder], ""), &["--node-name"]);
    says(
        &complaint(&["192.0.2.9", "192.0.2.1:80", "--manifests", "/nowhere", "--node-name", "n"], ""),
        &["/nowhere"],
    );
}

#[test]
fn nobody_to_ask() {
    // No agent has this folder, and no manifests are given.
    for pins in ["/nowhere/pins", "/sys/fs/bpf/traffic-policy-tests-nobody"] {
        let said = complaint(&["192.0.2.9", "192.0.2.1:30080", "--pin-dir", pins], "");
        says(&said, &[pins, "--pin-dir", "--manifests"]);
    }
}

#[test]
fn devices_without_the_packet_path() {
    let cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
    let web = Cluster::node_port("web", Policy::Cluster, 30080);
    cluster.manifests.apply(&web, &cluster.backends()).unwrap();
    let agents = Agent::start_all(&cluster.lab, |agent| agent.attach("tc")).unwrap();
    let ask = |device| {
        agents[0].command(&["explain", "192.0.2.10", "172.18.0.11:30080", "--device", device]).unwrap()
    };
    let answered = ask("eth0");
    assert!(answered.status.success(), "{}", String::from_utf8_lossy(&answered.stderr));
    says(&failed(&ask("cni0")), &["cni0", "not attached"]);
    says(&failed(&ask("eth7")), &["eth7", "no device"]);
}
