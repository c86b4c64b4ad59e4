//! Edge cases of the command line: wrong usage, `cleanup`, `status` with nothing to show.

use std::fs;
use std::process::{Command, Output};
use std::time::Duration;

use traffic_policy_testing::agent::{self, Agent};
use traffic_policy_testing::attached::Attached;
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::Policy;
use traffic_policy_testing::pace::until;
use traffic_policy_testing::xdp::Always;

fn run(arguments: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(agent::program().unwrap()).args(arguments).env_clear().output().unwrap();
    (output.status.code(), text(&output))
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&[output.stdout.clone(), output.stderr.clone()].concat()).into_owned()
}

#[test]
fn wrong_usage_exits_with_2_and_helps() {
    let run_with = |more: &'static [&'static str]| {
        let mut arguments = vec!["run", "--node-name", "n", "--manifests", "/tmp"];
        arguments.extend(more);
        arguments
    };
    for (arguments, texts) in [
        (vec![], &["Usage: traffic-policy-agent", "run", "status", "cleanup"][..]),
        (vec!["walk"], &["unrecognized subcommand 'walk'", "--help"]),
        (vec!["run", "--manifests", "/tmp"], &["--node-name"]),
        (run_with(&["--atach", "xdp"]), &["'--atach'", "--attach"]),
        (run_with(&["--attach", "fast"]), &["fast", "auto, xdp, xdp-generic, tc"]),
        (run_with(&["--kubeconfig", "/x"]), &["--manifests", "cannot be used with", "--kubeconfig"]),
        (run_with(&["--drain", "soon"]), &["soon", "is not a time", "30s"]),
        (run_with(&["--snat-ports", "9-1"]), &["`9-1` ends before it begins"]),
        (run_with(&["--node-port-addresses", "some"]), &["some", "primary", "CIDR"]),
        (run_with(&["--service-cidr", "10.96.0.0"]), &["10.96.0.0", "is not a CIDR"]),
        (run_with(&["--service-cidr", "10.96.0.0/12,::/0"]), &["::/0", "every address"]),
        (run_with(&["--healthz-address", "10256"]), &["10256", "--healthz-address"]),
        (run_with(&["--flow-entries", "1"]), &["--flow-entries", "64"]),
        (vec!["status", "--output", "xml"], &["xml", "table, json"]),
    ] {
        let (code, said) = run(&arguments);
        assert_eq!(code, Some(2), "{arguments:?}: {said}");
        for text in texts {
            assert!(said.contains(text), "{arguments:?}: no {text:?} in {said}");
        }
    }
    let (code, said) = run(&["run", "--help"]);
    assert_eq!(code, Some(0));
    for flag in [
        "--node-name",
        "--device",
        "--manifests",
        "--attach",
        "--pin-dir",
        "--cgroup",
        "--drain",
        "[env: TRAFFIC_POLICY_",
    ] {
        assert!(said.contains(flag), "no {flag} in the help");
    }
}

/// The old name of a flag and that of its variable are read as the present ones, which come first.
#[test]
fn names_of_before_a_renaming_still_work() {
    let run = |flags: &[&str], variables: &[(&str, &str)]| {
        let arguments = [&["run", "--node-name", "n", "--manifests", "/tmp"], flags].concat();
        let mut command = Command::new(agent::program().unwrap());
        let output = command.args(&arguments).env_clear().envs(variables.iter().copied()).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}, {variables:?}: {}", text(&output));
        text(&output)
    };
    let renamed =
        [("snat-ports", "pool-ports", "9-1", "8-1"), ("idle-unassured", "idle-unconfirmed", "soon", "later")];
    for (now, old, wrong, other) in renamed {
        let refused = |said: String, value: &str| {
            assert!(said.contains(&format!("'{value}' for '--{now}")), "--{old}: {said}");
        };
        let variable = |flag: &str| format!("TRAFFIC_POLICY_{}", flag.to_uppercase().replace('-', "_"));
        refused(run(&[&format!("--{old}"), wrong], &[]), wrong);
        refused(run(&[], &[(&variable(old), wrong)]), wrong);
        refused(run(&[], &[(&variable(old), wrong), (&variable(now), other)]), other);
    }
}

#[test]
fn status_and_cleanup_without_pins() {
    let lab = Lab::builder().pods(&[0]).build().unwrap();
    let pins = lab.bpffs().join("nobody");
    let (code, said) = run(&["status", "--pin-dir", pins.to_str().unwrap()]);
    assert_eq!(code, Some(1), "{said}");
    assert!(
        said.contains("no packet path is pinned below") && said.contains("is `run` given another --pin-dir?"),
        "{said}"
    );
    let (code, said) = run(&["cleanup", "--pin-dir", pins.to_str().unwrap()]);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("nothing is pinned in"), "{said}");
}

#[test]
fn cleanup_releases_what_another_layout_left() {
    let cluster = Cluster::start(Lab::builder().pods(&[0, 1])).unwrap();
    cluster.manifests.apply(&Cluster::node_port("web", Policy::Cluster, 30080), &cluster.backends()).unwrap();
    let mut agent = Agent::builder(&cluster.lab, cluster.lab.node(1)).attach("tc").start().unwrap();
    agent.wait_ready(Duration::from_secs(20)).unwrap();
    cluster.answer(Protocol::Tcp, cluster.at(1, Family::V4, 30080)).unwrap();
    let netns = cluster.lab.node(1).netns();
    let managed = || netns.netlink(async |net| net.managed_neighbours().await).unwrap();
    until("the endpoint's next hop to be kept resolved", Duration::from_secs(10), || managed() > 0);
    agent.stop().unwrap();
    let [pins] = fs::read_dir(agent.pin_dir())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect::<Vec<_>>()
        .try_into()
        .unwrap();
    let other = agent.pin_dir().join("v1");
    fs::rename(pins, &other).unwrap();
    // The name of the map before layout version 3.
    fs::rename(other.join("maps/tp_devices"), other.join("maps/DEVICES")).unwrap();
    assert!(managed() > 0);
    let cleaned = agent.command(&["cleanup"]).unwrap();
    assert!(cleaned.status.success(), "{}", text(&cleaned));
    assert_eq!(managed(), 0);
}

#[test]
fn cleanup_removes_everything_and_only_ours() {
    let cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
    let (lab, node) = (&cluster.lab, cluster.lab.node(1));
    cluster.manifests.apply(&Cluster::node_port("web", Policy::Cluster, 30080), &cluster.backends()).unwrap();
    let mut agent = Agent::start_all(lab, |agent| agent.attach("xdp")).unwrap().remove(0);
    let to = cluster.at(1, Family::V4, 30080);
    cluster.answer(Protocol::Tcp, to).unwrap();

    let refused = agent.command(&["cleanup"]).unwrap();
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        text(&refused).contains("is using") && text(&refused).contains("stop it first"),
        "{}",
        text(&refused)
    );
    cluster.answer(Protocol::Tcp, to).unwrap();

    agent.stop().unwrap();
    // The programs keep serving after the agent is killed.
    cluster.answer(Protocol::Tcp, to).unwrap();
    let everything = Attached { xdp: true, ingress: 1, egress: 1 };
    assert_eq!(node.netns().attached("eth0").unwrap(), everything);
    // Programs of others on this node: one on another device, and a pin in the same folder.
    node.netns().attach_xdp("veth1", Always::Pass).unwrap();
    let theirs = agent.pin_dir().join("theirs");
    fs::create_dir(&theirs).unwrap();
    let cleaned = agent.command(&["cleanup"]).unwrap();
    assert!(cleaned.status.success(), "{}", text(&cleaned));
    assert!(text(&cleaned).contains("removed all programs and maps"), "{}", text(&cleaned));
    // Programs are recognised by the names of their pins.
    for hook in ["xdp", "ingress", "egress"] {
        let detached = text(&cleaned)
            .lines()
            .any(|line| line.starts_with(&format!("detached {hook}-")) && line.ends_with("-eth0"));
        assert!(detached, "{hook} is not named: {}", text(&cleaned));
    }
    assert_eq!(
        agent.json(&["cleanup"]).unwrap()["links"],
        serde_json::json!([]),
        "nothing is left to detach"
    );
    assert_eq!(node.netns().attached("eth0").unwrap(), Attached::default());
    assert!(node.netns().attached("veth1").unwrap().xdp);
    let left: Vec<_> = fs::read_dir(agent.pin_dir()).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(left, [theirs]);
    let outcome = cluster.ask(Protocol::Tcp, to).unwrap();
    assert!(outcome.is_refused_at_once(), "{outcome:?}");
    // The next start makes all of it anew.
    agent.start_again().unwrap();
    agent.wait_ready(Duration::from_secs(20)).unwrap();
    cluster.answer(Protocol::Tcp, to).unwrap();
}
