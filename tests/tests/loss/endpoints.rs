//! Endpoints change while no agent runs.

use std::net::SocketAddr;
use std::thread::sleep;
use std::time::Duration;

use traffic_policy_testing::lab::Family;
use traffic_policy_testing::object::Backend;
use traffic_policy_testing::pace;
use traffic_policy_testing::traffic::{self, Outcome, Probe};

use crate::cluster::{self, NODE_PORT, PATIENCE, web};
use crate::meters::{Meters, both};
use crate::quiet;
use traffic_policy_testing::cluster::Cluster;

/// node-1 loses the second of its two pods, and the pod of node-3 is new; the other pods stay.
fn endpoints_change_without_an_agent(attach: &str, family: Family) {
    let _alone = quiet::alone();
    let mut cluster = cluster::start(&[2, 2, 1], attach);
    let pods = ["pod-1-1", "pod-1-2", "pod-2-1", "pod-2-2", "pod-3-1"];
    let backends = |names: &[&str]| -> Vec<Backend> {
        let pods = cluster.lab.pods().filter(|pod| names.contains(&pod.name.as_str()));
        pods.map(Backend::of).collect()
    };
    let before = backends(&pods[..4]);
    let after = backends(&[pods[0], pods[2], pods[4]]);
    cluster.manifests.endpoints(&web(), &before).unwrap();
    let targets = both(family, |family| cluster.at(1, family, NODE_PORT));
    let client = cluster.lab.client().netns().clone();
    let ask = |port: u16| Probe::udp(targets[0]).source_port(port).answer(&client).unwrap().pod;
    let is_old = || (0..40).all(|number| ask(20_100 + number) != "pod-3-1");
    pace::until("the endpoints without the new pod", Duration::from_secs(5), is_old);

    // Flows known by their source ports, some of them to pods that will be removed, one of node-1
    // and one of node-2.
    let ports = 21_000..21_040;
    let flows: Vec<(u16, String)> = ports.clone().map(|port| (port, ask(port))).collect();
    for pod in &pods[..4] {
        assert!(flows.iter().any(|(_, answered)| answered == pod), "{pod} answers nobody: {flows:?}");
    }

    let meters = Meters::start(
        &format!("{attach} {family:?} endpoints change while no agent runs"),
        &cluster.lab,
        &targets,
        &cluster.ledger,
    );
    // The sleeps are part of the test: load under the agents, and then without agents.
    sleep(Duration::from_millis(300));
    cluster.kill_agents().unwrap();
    cluster.manifests.endpoints(&web(), &after).unwrap();
    sleep(Duration::from_secs(1));
    // Nothing could notice the change: the flows go on with their pods.
    assert!(flows.iter().all(|(port, pod)| ask(*port) == *pod));
    cluster.start_agents_again(PATIENCE).unwrap();
    // The removed pods still run, so clients that use them over a held connection continue: nothing
    // is lost.
    let counted = meters.finish(&cluster.lab);
    assert!(counted.new.by_pod.contains_key("pod-1-2"), "nobody asked the pod that will go: {}", counted.new);

    // The agents are back. New flows go to the current endpoints, all of them and no other.
    let meters = Meters::start("  … and after the agents' return", &cluster.lab, &targets, &cluster.ledger);
    sleep(Duration::from_millis(700));
    let counted = meters.finish(&cluster.lab);
    let now = ["pod-1-1", "pod-2-1", "pod-3-1"];
    assert!(counted.new.by_pod.keys().eq(now), "{}", counted.new);
    assert!(counted.datagrams.by_pod.keys().all(|pod| now.contains(&pod.as_str())), "{}", counted.datagrams);

    // Old flows: those to endpoints that stayed are unchanged, the others have moved.
    for (port, pod) in &flows {
        let answered = ask(*port);
        if now.contains(&pod.as_str()) {
            assert_eq!(answered, *pod, "a flow to an endpoint that stayed has moved");
        } else {
            assert!(now.contains(&answered.as_str()), "a flow from {pod} went to {answered}");
        }
    }
}

#[test]
fn tc() {
    endpoints_change_without_an_agent("tc", Family::V6);
}

#[test]
fn xdp() {
    endpoints_change_without_an_agent("xdp", Family::V4);
}

/// The only endpoint vanishes with its node while no agent runs: after the agents' return no client
/// waits for it.
#[test]
fn a_vanished_endpoint_is_asked_by_nobody() {
    let _alone = quiet::alone();
    let mut cluster = cluster::start(&[1, 1, 0], "tc");
    cluster.kill_agents().unwrap();
    // Pod and node are silent from now on; a connection that is forwarded there fails.
    cluster.lab.cut(cluster.lab.node(2)).unwrap();
    let left: Vec<_> = [cluster.lab.node(1).pod(1)].map(Backend::of).to_vec();
    cluster.manifests.endpoints(&web(), &left).unwrap();
    let to = |cluster: &Cluster, family| -> SocketAddr { cluster.at(1, family, NODE_PORT) };
    let probe = |cluster: &Cluster, family| Probe::tcp(to(cluster, family));
    let someone_waits = (0..12).any(|_| {
        let probe = probe(&cluster, Family::V4).limit(Duration::from_millis(150));
        probe.from(cluster.lab.client().netns()).unwrap() == Outcome::Silent
    });
    assert!(someone_waits, "without an agent nobody can know that the endpoint is gone");
    cluster.start_agents_again(PATIENCE).unwrap();
    for family in Family::BOTH {
        traffic::probe::answers(cluster.lab.client().netns(), probe(&cluster, family), 30).unwrap();
    }
}
