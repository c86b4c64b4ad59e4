//! `status` shows what is attached, in sync, and in the way; with and without an agent.

use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use traffic_policy_testing::agent::{Agent, program};
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::Policy;
use traffic_policy_testing::pace::{look_until, until};

const LIMIT: Duration = Duration::from_secs(10);

fn hooks(status: &Value) -> Vec<String> {
    let attached = status["attached"].as_array().unwrap();
    attached
        .iter()
        .filter(|link| link["target"] == "eth0" && link["present"] == true)
        .map(|link| link["hook"].as_str().unwrap().to_owned())
        .collect()
}

/// The numbers of flows of IPv4 and IPv6 that no client has confirmed.
fn unassured(status: &Value) -> [u64; 2] {
    [0, 1].map(|family| status["flows"]["unassured"][family].as_u64().unwrap())
}

#[test]
fn attached_in_sync_and_after_death() {
    for (attach, expected) in [
        ("tc", &["tc-ingress", "tc-egress"][..]),
        ("xdp", &["xdp (driver)", "tc-ingress", "tc-egress"]),
        ("xdp-generic", &["xdp (generic)", "tc-ingress", "tc-egress"]),
    ] {
        let cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
        let service = Cluster::node_port("web", Policy::Cluster, 30080);
        cluster.manifests.apply(&service, &cluster.backends()).unwrap();
        let agents = Agent::start_all(&cluster.lab, |agent| {
            agent.attach(attach).flags(&["--unassured-entries", "64"])
        });
        let mut agent = agents.unwrap().remove(0);
        cluster.answer(Protocol::Tcp, cluster.at(1, Family::V4, 30080)).unwrap();

        let status = agent.json(&["status"]).unwrap();
        assert_eq!(hooks(&status), expected, "{attach}");
        assert!(status["attached"][0]["program"].as_u64().unwrap() > 0);
        assert_eq!(status["agent"]["running"], true);
        assert_eq!(status["agent"]["pid"], agent.pid().unwrap());
        assert_eq!(status["agent"]["report"]["in_sync"], true, "{status}");
        assert_eq!(status["agent"]["report"]["waiting_for"], serde_json::json!([]));
        assert!(status["agent"]["synced_seconds_ago"].as_f64().unwrap() < 60.0);
        assert_eq!(status["warnings"], serde_json::json!([]));
        assert!(status["snat_ports"].as_u64().unwrap() > 1000);
        let maps = status["maps"].as_array().unwrap();
        let flows = maps.iter().find(|map| map["name"] == "tp_flows4").unwrap();
        assert_eq!(
            (&flows["used"], &flows["size"]),
            (&2.into(), &262_144.into()),
            "both entries of one flow"
        );
        assert!(flows["bytes"].as_u64().unwrap() > 262_144 * 100);
        assert_eq!(status["flows"]["entries"][0], 2);
        assert_eq!(status["flows"]["full_seconds_ago"], Value::Null);
        assert!(status["map_bytes"].as_u64().unwrap() > 30_000_000);

        assert_eq!(unassured(&status), [0, 0], "{attach}: the client's connection is assured");
        // A queue goes round after 64 flows of UDP. Each question is a flow of its own.
        for (family, flows, expected) in
            [(Family::V6, 1, [0, 1]), (Family::V4, 3, [3, 1]), (Family::V4, 80, [64, 1])]
        {
            for _ in 0..flows {
                cluster.answer(Protocol::Udp, cluster.at(1, family, 30080)).unwrap();
            }
            let status = agent.json(&["status"]).unwrap();
            assert_eq!(unassured(&status), expected, "{attach}: after {flows} flows of {family:?}");
        }

        let seen = |status: &Value| status["agent"]["seen_seconds_ago"].as_f64().unwrap();
        agent.kill().unwrap();
        let ask = || agent.json(&["status"]).unwrap();
        let dead = look_until("3 s of silence", LIMIT, ask, |status| seen(status) > 3.0);
        assert_eq!(dead["agent"]["running"], false);
        assert_eq!(dead["agent"]["report"], Value::Null);
        assert_eq!(hooks(&dead), expected, "{attach}: it goes on");
        let text = agent.command(&["status"]).unwrap();
        let text = String::from_utf8(text.stdout).unwrap();
        assert!(text.starts_with("agent       not running, last seen "), "{text}");
        assert!(text.contains(expected[0]) && text.contains("tp_flows4"), "{text}");
    }
}

/// Stops the agent at arbitrary points until the answer of `status` meets the condition, and
/// returns that answer; the agent remains stopped.
fn stopped_when(agent: &Agent, is_it: impl Fn(&Value) -> bool) -> Value {
    let process = Pid::from_raw(agent.pid().unwrap().try_into().unwrap());
    let start = Instant::now();
    loop {
        kill(process, Signal::SIGSTOP).unwrap();
        // Before the maps exist, `status` has no answer.
        let status = agent.json(&["status"]);
        if let Ok(status) = &status
            && is_it(status)
        {
            return status.clone();
        }
        kill(process, Signal::SIGCONT).unwrap();
        assert!(start.elapsed() < Duration::from_secs(60), "{status:?}\n{}", agent.log());
        sleep(Duration::from_millis(2));
    }
}

#[test]
fn while_programs_are_loaded() {
    let cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
    let mut agent = Agent::builder(&cluster.lab, cluster.lab.node(1)).start().unwrap();
    let goes_on = |agent: &Agent| {
        let process = Pid::from_raw(agent.pid().unwrap().try_into().unwrap());
        kill(process, Signal::SIGCONT).unwrap();
        agent.wait_ready(Duration::from_secs(60)).unwrap();
        let status = agent.json(&["status"]).unwrap();
        assert_eq!((&status["agent"]["running"], &status["agent"]["loading"]), (&true.into(), &false.into()));
        assert_eq!(status["agent"]["pid"], agent.pid().unwrap());
        assert!(status["agent"]["started_seconds_ago"].as_f64().unwrap() < 60.0);
    };
    let text = |agent: &Agent| String::from_utf8(agent.command(&["status"]).unwrap().stdout).unwrap();

    let first = stopped_when(&agent, |status| status["agent"]["running"] == true);
    assert_eq!(first["agent"]["loading"], true, "{first}");
    assert_eq!(first["agent"]["pid"], agent.pid().unwrap());
    assert_eq!(
        (&first["agent"]["started_seconds_ago"], &first["warnings"]),
        (&Value::Null, &Value::Array(vec![]))
    );
    let said = format!("agent       process {} is loading its programs; nothing is", agent.pid().unwrap());
    assert!(text(&agent).starts_with(&said), "{}", text(&agent));
    goes_on(&agent);

    agent.kill().unwrap();
    agent.start_again().unwrap();
    // At no time the answer shows that the previous agent runs.
    let successor = stopped_when(&agent, |status| status["agent"]["running"] == true);
    assert_eq!(successor["agent"]["loading"], true, "{successor}");
    assert_eq!(successor["agent"]["pid"], agent.pid().unwrap());
    assert_eq!(hooks(&successor), ["tc-ingress", "tc-egress"]);
    assert!(text(&agent).contains("until then the packet path goes on"), "{}", text(&agent));
    goes_on(&agent);
}

/// The command runs in another container: /proc/locks does not show the agent there, its signs of
/// life do.
#[test]
fn from_another_pid_namespace() {
    let cluster = Cluster::start(Lab::builder().pods(&[0])).unwrap();
    let mut agent = Agent::start_all(&cluster.lab, |agent| agent).unwrap().remove(0);
    let pins = agent.pin_dir().to_owned();
    let is_running = || -> bool {
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--mount-proc"]).arg(program().unwrap());
        command.args(["status", "--output", "json"]).env("TRAFFIC_POLICY_PIN_DIR", &pins);
        let output = cluster.lab.node(1).netns().output(command).unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        let status: Value = serde_json::from_slice(&output.stdout).expect(&said);
        status["agent"]["running"].as_bool().unwrap()
    };
    assert!(is_running());
    // Longer than the 5 s for which one sign of life is valid.
    sleep(Duration::from_secs(7));
    assert!(is_running(), "it goes on giving signs of life");
    agent.kill().unwrap();
    until("the agent to count as gone", LIMIT, || !is_running());
}

#[test]
fn what_blocks_readiness_is_named() {
    let cluster = Cluster::start(Lab::builder().pods(&[0])).unwrap();
    let nowhere = cluster.lab.manifests().join("nowhere");
    let agent = Agent::builder(&cluster.lab, cluster.lab.node(1)).manifests(&nowhere).start().unwrap();
    agent.wait_said(&["nowhere"], Duration::from_secs(20)).unwrap();
    let ask = || agent.json(&["status"]).unwrap();
    // Until its source has started, the report contains no more.
    let status = look_until("the reason", LIMIT, ask, |status| {
        status["agent"]["report"]["waiting_for"].to_string().contains("nowhere")
    });
    let report = &status["agent"]["report"];
    assert_eq!(report["in_sync"], false);
    let blocked = report["waiting_for"].to_string();
    assert!(
        blocked.contains("waiting for the first look at manifests") && blocked.contains("nowhere"),
        "{blocked}"
    );
    let text = agent.command(&["status"]).unwrap();
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.contains("NOT in sync, last sync never, because:\n            - waiting for"), "{text}");
}
