//! Programs that others detach while the agent runs: they are attached again, or the node answers
//! 503.

use std::fs;
use std::time::Duration;

use traffic_policy_dataplane::Kernel;
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::attached::{Attached, detach_links, socket_programs};
use traffic_policy_testing::cgroup::Cgroup;
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::Policy;
use traffic_policy_testing::pace;
use traffic_policy_testing::xdp::Always;

const PORT: u16 = 30080;
const SOON: Duration = Duration::from_secs(20);

fn cluster() -> Cluster {
    let cluster = Cluster::start(Lab::builder().pods(&[1, 1])).unwrap();
    cluster.manifests.apply(&Cluster::node_port("web", Policy::Cluster, PORT), &cluster.backends()).unwrap();
    cluster
}

fn started(cluster: &Cluster, attach: &str) -> Agent {
    let agent = Agent::builder(&cluster.lab, cluster.lab.node(1)).attach(attach).start().unwrap();
    agent.wait_ready(SOON).unwrap();
    agent
}

fn until(what: &str, condition: impl FnMut() -> bool) {
    pace::until(what, SOON, condition);
}

fn restored(agent: &Agent) -> f64 {
    agent.scrape().unwrap().value("traffic_policy_programs_restored_total", &[]).unwrap_or(0.0)
}

fn come_back(cluster: &Cluster, agent: &Agent, all: Attached) {
    // Below Linux 6.6 TC programs are filters, which have no links that could be detached.
    let has_tcx = Kernel::running().unwrap().has_tcx();
    if !has_tcx && !all.xdp {
        traffic_policy_testing::skipped("come_back tc", "TC programs have no links on this kernel");
        return;
    }
    let links = u32::from(all.xdp) + if has_tcx { all.ingress + all.egress } else { 0 };
    let rest = if has_tcx { Attached::default() } else { Attached { xdp: false, ..all } };
    let place = if has_tcx { "TC egress" } else { "XDP" };
    let (node, to) = (cluster.lab.node(1).netns(), cluster.at(1, Family::V4, PORT));
    let attached = || node.attached("eth0").unwrap();
    assert_eq!(attached(), all);
    assert_eq!(detach_links(agent.pin_dir(), "").unwrap() as u32, links);
    assert_eq!(attached(), rest, "the control: they were taken off");
    until("attached again", || attached() == all);
    agent.wait_said(&["somebody has taken programs off", "eth0", place], SOON).unwrap();
    until("counted", || restored(agent) >= 1.0);
    cluster.ask_until_all(Protocol::Tcp, to, &["pod-1-1", "pod-2-1"]).unwrap();
    assert_eq!(agent.healthz().unwrap().status, 200);
    // A single link, and pins that are deleted: the programs are detached with them.
    detach_links(agent.pin_dir(), "egress").unwrap();
    until("one attached again", || attached() == all);
    for version in fs::read_dir(agent.pin_dir()).unwrap() {
        for link in fs::read_dir(version.unwrap().path().join("links")).unwrap() {
            fs::remove_file(link.unwrap().path()).unwrap();
        }
    }
    until("the control: gone with the pins", || attached() != all);
    until("attached again after the pins went", || attached() == all);
    cluster.ask_until_all(Protocol::Tcp, to, &["pod-1-1", "pod-2-1"]).unwrap();
}

#[test]
fn programs_come_back_tc() {
    let cluster = cluster();
    let agent = started(&cluster, "tc");
    come_back(&cluster, &agent, Attached { xdp: false, ingress: 1, egress: 1 });
}

#[test]
fn programs_come_back_xdp_or_the_node_is_not_healthy() {
    let cluster = cluster();
    let agent = started(&cluster, "xdp");
    come_back(&cluster, &agent, Attached { xdp: true, ingress: 1, egress: 1 });
    a_node_that_cannot_put_them_back_is_not_healthy(&cluster, &agent);
}

#[test]
fn programs_of_a_cgroup_come_back() {
    let cluster = cluster();
    let cgroup = Cgroup::create("taken-off").unwrap();
    let agent = Agent::builder(&cluster.lab, cluster.lab.node(1)).cgroup(cgroup.path()).start().unwrap();
    agent.wait_ready(SOON).unwrap();
    let each =
        |number| socket_programs(cgroup.path()).unwrap().iter().all(|programs| programs.len() == number);
    assert!(each(1));
    assert_eq!(detach_links(agent.pin_dir(), "cgroup-").unwrap(), 10);
    assert!(each(0), "the control: they were taken off");
    until("attached again", || each(1));
    agent.wait_said(&["somebody has taken programs off the cgroup", "connect4"], SOON).unwrap();
    until("counted", || restored(&agent) >= 1.0);
}

/// Another program takes the place.
fn a_node_that_cannot_put_them_back_is_not_healthy(cluster: &Cluster, agent: &Agent) {
    let node = cluster.lab.node(1).netns();
    assert_eq!(detach_links(agent.pin_dir(), "xdp-").unwrap(), 1);
    node.attach_xdp("eth0", Always::Pass).unwrap();
    until("503", || agent.healthz().unwrap().status == 503);
    assert_eq!(agent.livez().unwrap().status, 200, "a restart would mend nothing");
    let status = agent.json(&["status"]).unwrap();
    let why = status["agent"]["report"]["waiting_for"].to_string();
    assert!(why.contains("eth0") && why.contains("another XDP program is on eth0"), "{status:#}");
    node.detach_xdp("eth0").unwrap();
    until("200", || agent.healthz().unwrap().status == 200);
    assert!(node.attached("eth0").unwrap().xdp);
}

/// A device keeps its index when it is renamed, as udev does at boot: it always has exactly one set
/// of programs.
#[test]
fn a_renamed_device_keeps_one_set_of_programs() {
    let cluster = cluster();
    let mut agent =
        Agent::builder(&cluster.lab, cluster.lab.node(1)).attach("xdp").devices(&[]).start().unwrap();
    agent.wait_ready(SOON).unwrap();
    let (node, to) = (cluster.lab.node(1).netns(), cluster.at(1, Family::V4, PORT));
    let all = Attached { xdp: true, ingress: 1, egress: 1 };
    assert_eq!(node.attached("eth0").unwrap(), all);
    node.netlink(async |net| net.rename("eth0", "uplink9").await).unwrap();
    until("known by its new name", || {
        agent.scrape().unwrap().samples("traffic_policy_attached_devices", &[("device", "uplink9")]).len()
            == 1
    });
    assert_eq!(node.attached("uplink9").unwrap(), all);
    assert!(!agent.log().contains("not attached"), "{}", agent.log());
    cluster.ask_until_all(Protocol::Tcp, to, &["pod-1-1", "pod-2-1"]).unwrap();
    // The next agent finds the programs by the pins under the old name.
    agent.stop().unwrap();
    agent.start_again().unwrap();
    agent.wait_ready(SOON).unwrap();
    assert_eq!(node.attached("uplink9").unwrap(), all);
    agent.stop().unwrap();
    let agent = Agent::builder(&cluster.lab, cluster.lab.node(1)).attach("tc").devices(&[]).start().unwrap();
    agent.wait_ready(SOON).unwrap();
    assert_eq!(node.attached("uplink9").unwrap(), Attached { xdp: false, ingress: 1, egress: 1 });
    cluster.ask_until_all(Protocol::Tcp, to, &["pod-1-1", "pod-2-1"]).unwrap();
}
