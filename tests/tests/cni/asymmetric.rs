//! aws-secondary-eni: requests arrive on eth0, and the routing rules send pods' packets out by
//! eth1, where the cloud accepts no packet with eth0's address. Replies leave by the card whose
//! address they have, without a rule or mark of the user.

use traffic_policy_testing::cluster::Protocol;
use traffic_policy_testing::lab::{Cni, Family};
use traffic_policy_testing::matrix::LOCAL;
use traffic_policy_testing::traffic::Probe;

use crate::layouts::{self, STACK};
use crate::testbed::Testbed;

fn replies_leave_by_the_card_that_the_request_came_by(attach: &'static str) {
    let Some(mut testbed) = Testbed::start(Cni::AwsSecondaryEni, attach, STACK) else { return };
    let lab = &testbed.cluster.lab;
    let redirected =
        |testbed: &Testbed| testbed.cluster.agents[0].packets("tc-egress", "replied-redirected").unwrap();
    // Over IPv6, pods are behind eth0.
    testbed.cluster.answer(Protocol::Tcp, testbed.cluster.at(1, Family::V6, LOCAL)).unwrap();
    assert_eq!(redirected(&testbed), 0, "{attach}");
    // Each answer also passes the program of eth0, which leaves the flow unchanged.
    for _ in 0..4 {
        let probe = Probe::udp(testbed.cluster.at(1, Family::V4, LOCAL)).source_port(4321);
        probe.answer(lab.client().netns()).unwrap();
    }
    assert!(redirected(&testbed) >= 4, "{attach}");
    for (node, agent) in lab.nodes().iter().zip(&testbed.cluster.agents) {
        let found = agent.check().unwrap();
        let finding = found.iter().find(|finding| finding["probe"] == "policy-routing").unwrap();
        assert_eq!(finding["severity"], "ok", "{finding}");
        let said = finding["found"].as_str().unwrap().contains("replied-redirected");
        assert_eq!(said, !node.pods.is_empty(), "{finding}");
    }
    layouts::ask_all(&mut testbed, Cni::AwsSecondaryEni, [attach, STACK], [1300; 2]);
}

#[test]
fn by_tc() {
    replies_leave_by_the_card_that_the_request_came_by("tc");
}

#[test]
fn by_xdp() {
    replies_leave_by_the_card_that_the_request_came_by("xdp");
}
