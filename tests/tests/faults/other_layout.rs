//! A packet path of another layout version, as before an upgrade: it serves until the new one can,
//! and is then replaced.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use traffic_policy_testing::agent::{Agent, AgentBuilder};
use traffic_policy_testing::attached::{Attached, socket_programs};
use traffic_policy_testing::cgroup::Cgroup;
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::Policy;
use traffic_policy_testing::pace::{pace, until};
use traffic_policy_testing::traffic::NewConnections;

const PORT: u16 = 30080;
const SOON: Duration = Duration::from_secs(20);
const ALL: Attached = Attached { xdp: true, ingress: 1, egress: 1 };

struct Upgrade {
    // The fields are dropped in this order.
    cgroup: Cgroup,
    cluster: Cluster,
}

impl Upgrade {
    /// Makes a node on which an agent of layout version 1 appears to have left its programs and
    /// maps, with some flows.
    fn new() -> Self {
        let cluster = Cluster::start(Lab::builder().pods(&[1, 1])).unwrap();
        let web = Cluster::node_port("web", Policy::Cluster, PORT);
        cluster.manifests.apply(&web, &cluster.backends()).unwrap();
        let upgrade = Self { cgroup: Cgroup::create("other-layout").unwrap(), cluster };
        let mut agent = upgrade.builder().start().unwrap();
        agent.wait_ready(SOON).unwrap();
        upgrade.answers();
        upgrade.becomes_other(&mut agent);
        upgrade
    }

    /// Stops an agent, and makes what it has left appear to be of layout version 1.
    fn becomes_other(&self, agent: &mut Agent) {
        agent.stop().unwrap();
        let pinned = fs::read_dir(self.pins()).unwrap().next().unwrap().unwrap().path();
        fs::rename(pinned, self.pins().join("v1")).unwrap();
    }

    fn builder(&self) -> AgentBuilder {
        Agent::builder(&self.cluster.lab, self.cluster.lab.node(1)).attach("xdp").cgroup(self.cgroup.path())
    }

    fn pins(&self) -> PathBuf {
        self.cluster.lab.bpffs().join("node-1")
    }

    fn answers(&self) {
        for family in Family::BOTH {
            let to = self.cluster.at(1, family, PORT);
            self.cluster.ask_until_all(Protocol::Tcp, to, &["pod-1-1", "pod-2-1"]).unwrap();
        }
    }

    /// The programs of the device and of the cgroup: the number on the device, and the ids on the
    /// cgroup.
    fn attached(&self) -> (Attached, Vec<Vec<u32>>) {
        let device = self.cluster.lab.node(1).netns().attached("eth0").unwrap();
        (device, socket_programs(self.cgroup.path()).unwrap().to_vec())
    }

    fn versions(&self) -> Vec<String> {
        let entries = fs::read_dir(self.pins()).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }
}

#[test]
fn it_stays_or_is_replaced_without_a_gap_once_the_new_maps_are_filled() {
    let upgrade = Upgrade::new();
    it_stays_if_the_new_one_cannot_start(&upgrade);
    let mut agent = it_is_replaced_without_a_gap_and_the_cost_is_said(&upgrade);
    upgrade.becomes_other(&mut agent);
    it_serves_until_the_new_maps_are_filled(&upgrade);
}

fn it_is_replaced_without_a_gap_and_the_cost_is_said(upgrade: &Upgrade) -> Agent {
    let before = upgrade.attached();
    assert_eq!((before.0, upgrade.versions()), (ALL, vec!["v1".to_owned()]));
    let to = upgrade.cluster.at(1, Family::V4, PORT);
    let meter = NewConnections::start(upgrade.cluster.lab.client().netns(), 50, move |_| Some(to));
    let agent = upgrade.builder().start().unwrap();
    agent.wait_ready(SOON).unwrap();
    let said = agent.wait_said(&["another layout version was replaced", "v1", "flows="], SOON).unwrap();
    assert!(!said.contains("flows=0"), "{said}");
    let report = meter.finish();
    // Requests in flight at the moment of the change may fail: each takes at most 30 ms, so one or
    // two of 50 a second may; a tenth of a second without programs would fail more.
    let under_way = (4.0 * pace()).ceil() as u64;
    assert!(report.ok > 0 && report.failed + report.resent <= under_way, "{report}");
    let (device, calls) = upgrade.attached();
    assert_eq!(device, ALL);
    assert!(calls.iter().zip(&before.1).all(|(now, then)| now.len() == 1 && now != then), "{calls:?}");
    assert!(upgrade.versions().iter().all(|version| version != "v1"), "{:?}", upgrade.versions());
    assert_eq!(upgrade.versions().len(), 1);
    upgrade.answers();
    agent
}

/// The API server is unavailable during an upgrade: new maps are empty, and programs on them would
/// serve nothing.
fn it_serves_until_the_new_maps_are_filled(upgrade: &Upgrade) {
    let before = upgrade.attached();
    let folder = upgrade.cluster.manifests.folder().to_owned();
    let hidden = folder.with_extension("hidden");
    fs::rename(&folder, &hidden).unwrap();
    let agent = upgrade.builder().start().unwrap();
    agent.wait_said(&["serve until this one's maps are filled"], SOON).unwrap();
    // The agent looks at the node every 5 s: two such looks have begun, and neither may attach.
    std::thread::sleep(Duration::from_secs(11));
    assert_eq!(upgrade.attached(), before);
    let status = agent.json(&["status"]).unwrap();
    let warnings = status["warnings"].to_string();
    assert!(warnings.contains("layout v1 serves until"), "{warnings}");
    upgrade.answers();
    assert_eq!(agent.healthz().unwrap().status, 503);
    let replaced = || agent.log().matches("another layout version was replaced").count();
    let before = replaced();
    fs::rename(&hidden, &folder).unwrap();
    agent.wait_ready(SOON).unwrap();
    until("the other layout to be replaced", SOON, || replaced() == before + 1);
    upgrade.answers();
}

/// A start that fails leaves the other version as it was.
fn it_stays_if_the_new_one_cannot_start(upgrade: &Upgrade) {
    let before = upgrade.attached();
    let netns = upgrade.cluster.lab.node(1).netns();
    let _taken = netns.run(|| std::net::TcpListener::bind("127.0.0.1:10249").unwrap());
    let mut agent = upgrade.builder().start().unwrap();
    assert_eq!(agent.wait_ended(SOON).unwrap(), Some(1), "{}", agent.log());
    assert_eq!((upgrade.attached(), upgrade.versions()), (before, vec!["v1".to_owned()]));
    upgrade.answers();
}
