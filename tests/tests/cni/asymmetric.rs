//! aws-secondary-eni: requests come by eth0, and the rules of routing lead pods' packets out by eth1, where the cloud takes no packet with
//! eth0's address. The rule that `check` names keeps a connection to the card that it came by.

use std::process::Command;

use traffic_policy_testing::cluster::Protocol;
use traffic_policy_testing::lab::{Cni, Family, Node};
use traffic_policy_testing::matrix::LOCAL;
use traffic_policy_testing::traffic::Outcome;

use crate::layouts;
use crate::testbed::Testbed;

fn replies_leave_by_the_card_that_the_request_came_by(attach: &'static str) {
    let Some(mut testbed) = Testbed::start(Cni::AwsSecondaryEni, attach) else { return };
    let lab = &testbed.cluster.lab;
    let at = |family| testbed.cluster.at(1, family, LOCAL);
    // Without the rule they are lost. By IPv6 pods are behind eth0.
    assert_eq!(testbed.cluster.ask(Protocol::Tcp, at(Family::V4)).unwrap(), Outcome::Silent, "{attach}");
    testbed.cluster.answer(Protocol::Tcp, at(Family::V6)).unwrap();
    let agents = &testbed.cluster.agents;
    for (node, agent) in lab.nodes().iter().zip(agents).filter(|(node, _)| !node.pods.is_empty()) {
        let found = agent.check().unwrap();
        let finding = found.iter().find(|finding| finding["probe"] == "policy-routing").unwrap();
        assert_eq!(finding["severity"], "warning", "{finding}");
        carry_out(node, finding["fix"].as_str().unwrap());
    }
    layouts::ask_all(&mut testbed, Cni::AwsSecondaryEni, attach, [1300; 2]);
}

fn carry_out(node: &Node, command: &str) {
    let mut shell = Command::new("sh");
    shell.args(["-c", command]);
    let output = node.netns().output(shell).unwrap();
    assert!(output.status.success(), "{command}: {output:?}");
}

#[test]
fn by_tc() {
    replies_leave_by_the_card_that_the_request_came_by("tc");
}

#[test]
fn by_xdp() {
    replies_leave_by_the_card_that_the_request_came_by("xdp");
}
