//! `check --migrate`, on a node with active rules of kube-proxy.

use std::net::{IpAddr, SocketAddr};
use std::process::Command;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use traffic_policy_testing::agent::{self, Agent};
use traffic_policy_testing::kube_proxy::{Backend, KubeProxy, Rules, TCP_AND_UDP};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::traffic::{Ledger, Probe, Server};

use crate::output::{CheckOutput, check, one_node};

#[test]
fn kube_proxy_and_what_goes_through_it() {
    let lab = one_node(Lab::builder());
    let node = lab.node(1);
    let none = check(&lab, &["--migrate"]);
    assert!(none.findings.iter().any(|finding| {
        finding["found"].as_str().is_some_and(|found| found.starts_with("no rules of kube-proxy"))
    }));
    for backend in Backend::ALL.into_iter().filter(|backend| backend.is_there()) {
        let address = |text: &str| -> IpAddr { text.parse().unwrap() };
        let endpoint = SocketAddr::new(node.pod(1).address(Family::V4), 8080);
        let rules = Rules {
            name: "web".to_owned(),
            protocols: TCP_AND_UDP.to_vec(),
            cluster_ip: SocketAddr::new(address("10.96.0.10"), 80),
            vip: Some(SocketAddr::new(address("198.51.100.10"), 80)),
            node_port: Some(30080),
            endpoints: vec![endpoint],
            local: None,
        };
        let proxy = KubeProxy::start(node, Family::V4, backend, &[rules]).unwrap();
        let _server = Server::start(node.pod(1), 8080, &Ledger::default()).unwrap();
        let frontend = SocketAddr::new(node.address(Family::V4), 30080);
        let checked = while_datagrams_are_answered(&lab, frontend, || check(&lab, &["--migrate"]));
        let found = match backend {
            Backend::Nftables => "nftables, table ip kube-proxy, 2 Service ports",
            Backend::IptablesNft => "iptables-nft, 2 Service ports",
            Backend::IptablesLegacy => "iptables-legacy has a table nat",
        };
        checked.has("note", "migrate", found, "run --adopt");
        checked.has("note", "migrate", "kube-proxy --cleanup", "the way back");
        leaves_the_rest_to_the_steps(&checked);

        let counted = checked.findings.iter().filter_map(|finding| finding["found"].as_str());
        let counted = counted.filter(|found| found.contains("UDP flows go through a translation"));
        let counted: Vec<_> = counted.filter(|found| !found.contains("and 0 UDP flows")).collect();
        assert_eq!(counted.len(), 1, "the flow through {backend:?} is not counted: {checked:#?}");
        proxy.clean().unwrap();
    }
}

/// Returns the result of a call. Meanwhile a datagram of a new flow is answered each second:
/// conntrack forgets one after 30 s, and `check` may take longer on a busy machine.
fn while_datagrams_are_answered<T>(lab: &Lab, frontend: SocketAddr, call: impl FnOnce() -> T) -> T {
    let answer = || Probe::udp(frontend).answer(lab.client().netns()).unwrap();
    answer();
    // The other end is dropped when the call returns, and when it panics.
    let (calling, called) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let _calling = calling;
        scope.spawn(move || {
            while called.recv_timeout(Duration::from_secs(1)) == Err(RecvTimeoutError::Timeout) {
                answer();
            }
        });
        call()
    })
}

/// The steps remove kube-proxy's own rules: no other advice concerns them.
fn leaves_the_rest_to_the_steps(checked: &CheckOutput) {
    let other = checked.findings.iter().filter(|finding| {
        let found = finding["found"].as_str().unwrap_or_default();
        finding["probe"] == "kube-proxy" || finding["probe"] != "migrate" && found.contains("kube-proxy")
    });
    assert_eq!(other.count(), 0, "{checked:#?}");
}

/// Mode ipvs is recognised by kube-proxy's device, whose name a bridge has here; its table is that
/// of a kernel with ipvs, which need not be the running one.
#[test]
fn mode_ipvs_has_steps_of_its_own_and_is_not_adopted() {
    let lab = one_node(Lab::builder());
    let node = lab.node(1).netns();
    node.netlink(async |net| net.bridge("kube-ipvs0", [2, 0, 0, 0, 0, 1], 1500).await).unwrap();
    let checked = check(&lab, &["--migrate"]);
    checked.has("note", "migrate", "ipvs, by the device kube-ipvs0", "run --adopt");
    leaves_the_rest_to_the_steps(&checked);
    checked.has(
        "warning",
        "migrate",
        "they cannot be adopted, and end when its virtual servers",
        "drain the node",
    );
    checked.has(
        "note",
        "migrate",
        "the steps in mode ipvs: 1. drain the node",
        "the way back: start kube-proxy",
    );
    let agent = Agent::builder(&lab, lab.node(1)).flags(&["--adopt"]).start().unwrap();
    let limit = Duration::from_secs(20);
    agent
        .wait_said(&["WARN", "not adopted: connections that ipvs holds", "kube-ipvs0 is here"], limit)
        .unwrap();
    agent.wait_ready(limit).unwrap();
    let adopted = agent.command(&["adopt"]).unwrap();
    let adopted = String::from_utf8(adopted.stdout).unwrap();
    assert!(adopted.contains("not adopted: connections that ipvs holds"), "{adopted}");
}

#[test]
fn a_configuration_that_is_none() {
    let lab = one_node(Lab::builder());
    let file = lab.manifests().join("service.yaml");
    std::fs::write(&file, "kind: Service\n").unwrap();
    let run = |flags: &[&str]| {
        let mut command = Command::new(agent::program().unwrap());
        command.arg("check").args(flags).env_clear();
        lab.node(1).netns().output(command).unwrap()
    };
    let output = run(&["--migrate", "--kube-proxy-config", file.to_str().unwrap()]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("service.yaml is no configuration of kube-proxy")
            && said.contains("its kind is Service"),
        "{said}"
    );
    assert_eq!(run(&["--kube-proxy-config", "x"]).status.code(), Some(2), "without --migrate");
}
