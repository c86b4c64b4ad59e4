//! Upgrade and rollback as a DaemonSet does it: the agent is stopped, nothing runs for a while,
//! then another version or the same with other flags starts. Under load: held TCP connections,
//! flows of datagrams, new connections.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use traffic_policy_testing::agent::{self, Agent, AgentBuilder};
use traffic_policy_testing::cluster::Cluster;
use traffic_policy_testing::lab::Family;
use traffic_policy_testing::object::Backend;
use traffic_policy_testing::pace::{pace, scaled, until};
use traffic_policy_testing::traffic::{Datagrams, HeldConnections, NewConnections};

use crate::cluster::{self, NODE_PORT, PATIENCE, web};
use crate::meters::{Meters, both};
use crate::{other_object, quiet};

/// The time between the deletion of a DaemonSet's pod and the start of the next.
const GAP: Duration = Duration::from_secs(3);
/// The same for all later replacements: the packet path does not depend on how long no agent runs.
const SHORT_GAP: Duration = Duration::from_secs(1);
/// The duration of the load before and after a change.
const AROUND: Duration = Duration::from_millis(300);
/// The time within which all connections were begun that one change of the programs may break.
const UNDER_WAY: Duration = Duration::from_millis(100);

fn targets(cluster: &Cluster, first: Family) -> [SocketAddr; 2] {
    both(first, |family| cluster.at(1, family, NODE_PORT))
}

/// Stops the agents, lets nothing run, starts others; nothing is lost meanwhile.
fn replaced(
    cluster: &mut Cluster,
    what: &str,
    first: Family,
    gap: Duration,
    adapt: impl Fn(AgentBuilder) -> AgentBuilder,
) {
    let targets = targets(cluster, first);
    let meters = Meters::start(what, &cluster.lab, &targets, &cluster.ledger);
    // The sleeps are part of the test: load under the old agents, without agents, and under the new
    // ones.
    sleep(AROUND);
    cluster.stop_agents().unwrap();
    sleep(gap);
    cluster.launch(adapt).unwrap();
    sleep(AROUND);
    let counted = meters.finish(&cluster.lab);
    // The path to a pod of the node itself and the one to another node's were both under load.
    assert_eq!(counted.new.by_pod.len(), 2, "{}", counted.report);
}

#[test]
fn the_same_version() {
    let _alone = quiet::alone();
    let mut cluster = cluster::start(&[1, 1], "tc");
    let what = "SIGTERM, 3 s of nothing, the same version";
    replaced(&mut cluster, what, Family::V4, GAP, |agent| agent.attach("tc"));
}

/// The output of `explain` of a build about the programs of node-1.
fn explained(cluster: &Cluster, program: &Path) -> String {
    let (client, port) = (cluster.lab.client().address(Family::V4), cluster.at(1, Family::V4, NODE_PORT));
    let mut command = Command::new(program);
    command.args(["explain", &client.to_string(), &port.to_string(), "--pin-dir"]);
    command.arg(cluster.agents[0].pin_dir());
    let output = cluster.lab.node(1).netns().output(command).unwrap();
    String::from_utf8([output.stdout, output.stderr].concat()).unwrap()
}

/// Another build of the BPF object, with the same layout of maps (see [`other_object`]), and back.
#[test]
fn other_programs_and_back() {
    const DIFFER: &str = "are not those of this traffic-policy-agent";
    let _alone = quiet::alone();
    let folder = tempfile::tempdir().unwrap();
    let (own, other) = (agent::program().unwrap(), folder.path().join("traffic-policy-agent"));
    let programs = other_object::write(&own, &other).unwrap();
    println!("two instructions are swapped in {programs} programs and functions of the other build");
    let mut cluster = cluster::start(&[1, 1], "xdp");
    assert!(!explained(&cluster, &own).contains(DIFFER));
    let what = "SIGTERM, 3 s of nothing, a version with other programs";
    replaced(&mut cluster, what, Family::V6, GAP, |agent| agent.attach("xdp").program(&other));
    let said = explained(&cluster, &own);
    assert!(said.contains(DIFFER), "{said}");
    replaced(&mut cluster, "back", Family::V4, SHORT_GAP, |agent| agent.attach("xdp"));
    assert!(!explained(&cluster, &own).contains(DIFFER));
}

/// Another hook, another range of node ports (and so another SNAT port range, without most of
/// those in use), other sizes of maps; and back.
#[test]
fn other_flags_and_back() {
    let _alone = quiet::alone();
    let mut cluster = cluster::on_finished_checksums(&[1, 1], "tc");
    let entries = ["--flow-entries", "1024", "--flow-entries-v6", "1024", "--frontend-entries", "128"];
    let ports = ["--node-ports", "1024-31000", "--snat-ports", "1024-65535", "--idle-udp", "10s"];
    replaced(&mut cluster, "other flags: XDP, node ports, sizes of maps", Family::V4, SHORT_GAP, |agent| {
        agent.attach("xdp").flags(&entries).flags(&ports)
    });
    for agent in &cluster.agents {
        // Sizes are kept, and the log names the map.
        for map in ["tp_flows4", "tp_flows6", "tp_frontends4"] {
            agent.wait_said(&["the pinned map keeps its size", map], PATIENCE).unwrap();
        }
    }
    replaced(&mut cluster, "back", Family::V6, SHORT_GAP, |agent| agent.attach("tc"));
}

/// A node on which an agent has flows, and whose maps an agent of another layout version will find.
struct OtherLayout {
    cluster: Cluster,
    agent: Agent,
}

const HELD: usize = 40;
const UDP_FLOWS: usize = 20;

impl OtherLayout {
    fn new() -> Self {
        let cluster = cluster::without_agents(&[1, 1], "tc");
        cluster.manifests.apply(&web(), &cluster.backends()).unwrap();
        Self::with(cluster, &[])
    }

    fn with(cluster: Cluster, flags: &[&str]) -> Self {
        let agent = Agent::builder(&cluster.lab, cluster.lab.node(1)).flags(flags).start().unwrap();
        agent.wait_ready(PATIENCE).unwrap();
        Self { cluster, agent }
    }

    /// The folder of the only layout that is pinned.
    fn pinned(&self) -> PathBuf {
        let mut versions = fs::read_dir(self.agent.pin_dir()).unwrap();
        let version = versions.next().unwrap().unwrap().path();
        assert!(versions.next().is_none(), "more than one layout is pinned");
        version
    }

    /// The numbers of TCP and UDP flows in the table.
    fn flows(&self) -> [usize; 2] {
        let flows = self.agent.json(&["flows"]).unwrap();
        let flows = flows.as_array().unwrap();
        ["TCP", "UDP"].map(|name| flows.iter().filter(|flow| flow["protocol"] == name).count())
    }

    /// Stops the agent, gives its pins another layout version, by which alone an agent
    /// distinguishes layouts, and starts the next. Returns the number of flows that this ended,
    /// from its log.
    fn replace(&mut self, version: &str) -> usize {
        self.agent.stop().unwrap();
        let pinned = self.pinned();
        fs::rename(&pinned, pinned.with_file_name(version)).unwrap();
        // Nothing runs, as between two pods of a DaemonSet.
        sleep(SHORT_GAP);
        self.agent.start_again().unwrap();
        self.agent.wait_ready(PATIENCE).unwrap();
        let from = format!("from=\"{version}\"");
        let said = self.agent.wait_said(&["another layout version was replaced", &from], PATIENCE).unwrap();
        let flows = said.split("flows=").nth(1).and_then(|rest| rest.split_whitespace().next());
        flows.and_then(|number| number.parse().ok()).unwrap_or_else(|| panic!("{said}"))
    }
}

/// Flows of another layout cannot be taken over: those end that the log counts, and no more. TCP
/// connections are reset, datagrams go on with new flows; new connections are served throughout.
fn another_layout(version: &str, what: &str) {
    let _alone = quiet::alone();
    let mut node = OtherLayout::new();
    let client = node.cluster.lab.client().netns();
    let targets = targets(&node.cluster, Family::V4);
    let held = HeldConnections::start(client, &targets, HELD, Duration::from_millis(20)).unwrap();
    let datagrams = Datagrams::start(client, targets[0], UDP_FLOWS, 400, &node.cluster.ledger).unwrap();
    until("all are in the table", PATIENCE, || node.flows() == [HELD, UDP_FLOWS]);
    let ended = node.replace(version);
    // Each connection sends a request every 20 ms and each UDP flow every 50 ms: those that have
    // not noticed do so now.
    until("all connections are reset, all datagrams have flows", PATIENCE, || {
        held.is_finished() && node.flows() == [0, UDP_FLOWS]
    });
    let (held, datagrams) = (held.finish(), datagrams.finish().unwrap());
    println!("{what} to another layout: by the log {ended} flows ended\n  {held}\n  {datagrams}");
    assert_eq!((held.connections, held.broken.len()), (HELD as u64, HELD), "{held}");
    assert!(held.broken.iter().all(|reason| reason.contains("reset by peer")), "{held}");
    // Answers that are in flight at the moment of the change have no flow any more: a tenth of a
    // second without programs would cost more.
    let under_way = (40.0 * pace()).ceil() as u64;
    assert!(datagrams.lost_there == 0 && datagrams.lost_back <= under_way, "{datagrams}");
    assert_eq!(ended, HELD + UDP_FLOWS);
    assert_ne!(node.pinned().file_name().unwrap(), version);
}

/// The node has maps of an older layout.
#[test]
fn another_layout_by_an_upgrade() {
    another_layout("v2", "upgrade");
}

/// The node has maps of a newer layout, as after a rollback to an older version.
#[test]
fn another_layout_by_a_rollback() {
    another_layout("v999", "rollback");
}

/// The programs at pods' devices are replaced, too: what pods send to Services has flows of the new
/// layout from one packet to the next.
#[test]
fn another_layout_with_programs_at_pods_devices() {
    const CLUSTER_IP: [u8; 4] = [10, 96, 0, 10];
    let _alone = quiet::alone();
    let cluster = cluster::without_agents(&[1, 1], "tc");
    let far = Backend::of(cluster.lab.node(2).pod(1));
    cluster.manifests.apply(&web().cluster_ip(CLUSTER_IP.into()), &[far]).unwrap();
    let flags = ["--pod-services", "on", "--local-delivery", "direct"];
    let mut node = OtherLayout::with(cluster, &flags);
    let pod = node.cluster.lab.node(1).pod(1).netns().clone();
    let to = SocketAddr::from((CLUSTER_IP, 80));
    let device = "veth1";
    let attached = |node: &OtherLayout| {
        let attached = node.cluster.lab.node(1).netns().attached(device).unwrap();
        (attached.ingress, attached.egress)
    };
    assert_eq!(attached(&node), (1, 1));
    for version in ["v11", "v999"] {
        let datagrams = Datagrams::start(&pod, to, UDP_FLOWS, 400, &node.cluster.ledger).unwrap();
        let new = NewConnections::start(&pod, 100, move |_| Some(to));
        node.replace(version);
        // The load goes on for a while with the new programs alone.
        sleep(AROUND);
        let (new, datagrams) = (new.finish(), datagrams.finish().unwrap());
        println!("from {version}\n  {new}\n  {datagrams}");
        // Those that are under way at the moment of the change have no flow any more: at a hundred
        // a second and some milliseconds for each, one or two, and no others. Five seconds without
        // programs delay thirty.
        let broken = new.ended.iter().filter(|ended| ended.pod.is_none() || ended.resent);
        let broken: Vec<_> = broken.map(|ended| ended.at).collect();
        let first = broken.iter().min().copied().unwrap_or_default();
        let at_once = broken.iter().all(|at| *at - first < scaled(UNDER_WAY));
        assert!(new.ok > 0 && broken.len() <= 3 && at_once, "{new}: {broken:?}");
        let under_way = (40.0 * pace()).ceil() as u64;
        assert!(datagrams.lost_there == 0 && datagrams.lost_back <= under_way, "{datagrams}");
        assert_eq!(attached(&node), (1, 1), "replaced, not added");
    }
}
