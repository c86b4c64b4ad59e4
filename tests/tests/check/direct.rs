//! Direct forwarding: what is in its way on a node, and whether another node answers.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use traffic_policy_testing::cluster::{Cluster, TARGET};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Port, Service, lease};
use traffic_policy_testing::pace::until;

use crate::output::{CheckOutput, check, one_node};

#[test]
fn a_fit_node_is_asked_for_its_lease_alone() {
    let lab = one_node(Lab::builder());
    check(&lab, &["--direct"]).only("note", "direct-lease", "was not asked", "--announce-opening NAMESPACE");
}

#[test]
fn strict_source_checks_matter_with_one_uplink_too() {
    let lab = one_node(Lab::builder());
    lab.node(1).netns().run(|| std::fs::write("/proc/sys/net/ipv4/conf/all/rp_filter", "1").unwrap());
    check(&lab, &["--direct"]).has("warning", "direct", "rp_filter is strict on eth0", "eth0.rp_filter=2");
}

/// Until the other node knows this one's addresses, it opens nothing: nobody answers, which the
/// check cannot tell from a network that lets nothing pass.
#[test]
fn another_node_answers_once_it_opens_packets() {
    let vips: [IpAddr; 2] =
        [Ipv4Addr::new(203, 0, 113, 9).into(), Ipv6Addr::new(0x2001, 0xdb8, 5, 0, 0, 0, 0, 9).into()];
    let mut cluster = Cluster::start(Lab::builder().pods(&[0, 1])).unwrap();
    let of = |number| lease::opens_dispatch(cluster.lab.node(number), &Family::BOTH, "ipip,udp");
    cluster.manifests.write("other", &[of(2)]).unwrap();
    let own = of(1);
    let service = Service::new("web").port(Port::tcp(80, TARGET)).vip(vips[0]).vip(vips[1]);
    cluster.manifests.apply(&service, &cluster.backends()).unwrap();
    cluster.launch(|agent| agent.flags(&["--forwarding", "direct"])).unwrap();
    let asked = || {
        let flags = ["check", "--direct", "node-2", "--cgroup", "none", "--output", "json"];
        CheckOutput::of(&cluster.agents[0].command(&flags).unwrap())
    };
    asked().has("warning", "direct-peer", "node-2", "--forwarding snat");
    cluster.manifests.write("own", &[own]).unwrap();
    until("node-2 answers", Duration::from_secs(20), || {
        let answered = asked().findings.into_iter().filter(|finding| {
            finding["probe"] == "direct-peer"
                && finding["severity"] == "ok"
                && finding["found"].as_str().unwrap().contains("and within UDP")
        });
        answered.count() == 2
    });
}
