//! `lb simulate` compared with reality: scenes with real agents, a real load balancer and real
//! requests, and the same scenes in the simulator. It is given the measurements of the lab's run:
//! when requests were sent, when checks began, when something was changed and when the agents had
//! written it. It has to find out by itself how each request ends, and when the balancer changes
//! its mind.

use std::net::SocketAddr;
use std::thread::sleep;
use std::time::{Duration, Instant};

use traffic_policy_cluster::model::{self, ServiceName};
use traffic_policy_lb::{self as lb, Change, Event, NodeChange, PodEvent, Timed};
use traffic_policy_testing::cluster::Cluster;
use traffic_policy_testing::lab::Family;
use traffic_policy_testing::object::{Backend, Service};
use traffic_policy_testing::pace;
use traffic_policy_testing::recording::{Recorded, Recording, agree, profile};
use traffic_policy_testing::traffic::balancer::Timing;

use crate::cluster;
use crate::quiet;
use crate::switch::{Balanced, HEALTH_PORT, policy_cluster, policy_local};

const PER_SECOND: u32 = 200;
/// The timing of the lab's load balancer.
const TIMING: Timing = Timing { interval: Duration::from_secs(1), failures: 3 };

/// Begins a scene, once each node was checked while all was well.
fn begin(balanced: Balanced, total: u64) -> (Cluster, Recording) {
    let Balanced { balancer, cluster } = balanced;
    let recording = Recording::begin(&cluster, balancer, PER_SECOND, total).unwrap();
    // One check of each node before anything happens.
    sleep(TIMING.interval);
    (cluster, recording)
}

/// Waits until shortly before the next check of a node.
fn wait_for_check(recording: &Recording, node: &str) {
    let last = recording.balancer().all_checks().into_iter().rfind(|check| check.node == node).unwrap();
    let next = last.began + TIMING.interval;
    // A packet that is sent now meets the changes that follow.
    sleep(next.saturating_duration_since(Instant::now()).saturating_sub(Duration::from_millis(2)));
}

/// Ends a scene, plays it again in the simulator, and compares. Returns the number of requests that
/// were lost.
///
/// A simulator that leaves out the point of the scene must not agree: `wrong` is the balancer's
/// patience and the events before.
fn compare(what: &str, cluster: Cluster, recording: Recording, wrong: Option<(u32, &[Timed])>) -> u64 {
    let name = ServiceName { namespace: "default".to_owned(), name: "web".to_owned() };
    let recorded = recording.end();
    let with = |timing| profile(&lb::CUSTOM, timing);
    let simulated = recorded.simulate(&name, with(TIMING)).unwrap();
    let (lost, total) = (recorded.lost(), simulated.total());
    // One that was answered to its second segment counts as lost in the lab.
    let missed = total.missed();
    let control = wrong.map(|(failures, before)| {
        let wrong = recorded.simulate_with(&name, with(Timing { failures, ..TIMING }), before).unwrap();
        wrong.total().missed()
    });
    let Recorded { balancer, report, .. } = recorded;
    let balanced = Balanced { balancer, cluster };
    let mut figures = balanced.figures(what, &report);
    figures += &format!("\n  simulated: {total:?} {:?}\n  {:?}", simulated.why, simulated.line);
    println!("{what}: lost in the lab {lost}, simulated {missed}, wrongly {control:?}\n{figures}");
    assert_eq!(total.all(), report.ok + report.failed, "{figures}");
    assert!(agree(missed, lost), "lost in the lab {lost}, simulated {missed}: {figures}");
    for node in balanced.cluster.lab.nodes() {
        let at = SocketAddr::new(node.address(Family::V4), cluster::NODE_PORT);
        let sent = report.by_target.get(&at).copied().unwrap_or(0);
        let found = simulated.by_node()[node.name.as_str()].all();
        assert!(agree(found, sent), "{}: sent {sent}, simulated {found}: {figures}", node.name);
    }
    assert!(control.is_none_or(|wrong| !agree(wrong, lost)), "the test cannot fail: {control:?}, {figures}");
    lost
}

/// One more failed check until the balancer changes its mind.
const PATIENT: Option<(u32, &[Timed])> = Some((TIMING.failures + 1, &[]));

fn drain(service: &Service, time: &str) -> Service {
    service.clone().annotation("traffic-policy.io/drain", time)
}

fn preempt(what: &str, upon_a_check: bool) {
    let _alone = quiet::alone();
    let balanced = Balanced::start("xdp", &[], &policy_cluster(), 10256);
    balanced.wait_for(&["node-1", "node-2", "node-3"]);
    let (cluster, mut recording) = begin(balanced, 1600);
    if upon_a_check {
        wait_for_check(&recording, "node-3");
    }
    let gone = Event::Change(Change::Node("node-3".to_owned(), NodeChange::Gone));
    recording.happens(gone, &[2], || cluster.lab.cut(cluster.lab.node(3))).unwrap();
    let lost = compare(what, cluster, recording, PATIENT);
    assert!(lost > 100, "{lost}");
}

#[test]
fn a_preempted_node() {
    preempt("node-3 is preempted", false);
}

/// No clock shows whether the cable or the check was first: the check's answer does.
#[test]
fn a_node_that_is_preempted_upon_a_check() {
    preempt("node-3 is preempted upon a check", true);
}

fn switch(what: &str, time: &str, wrong: Option<(u32, &[Timed])>) -> u64 {
    let _alone = quiet::alone();
    let balanced = Balanced::start("xdp", &[], &drain(&policy_cluster(), time), 10256);
    balanced.wait_for(&["node-1", "node-2", "node-3"]);
    let (cluster, mut recording) = begin(balanced, 2400);
    let local = Event::Change(Change::Policy(model::Policy::Local));
    recording.changes(local, || cluster.manifests.service(&drain(&policy_local(), time))).unwrap();
    // The balancer's controller takes this long to move the check to the health port.
    sleep(TIMING.interval * 3);
    recording.controller_asks(HEALTH_PORT, "/healthz").unwrap();
    compare(what, cluster, recording, wrong)
}

#[test]
fn a_switch_without_a_drain() {
    let lost = switch("Cluster → Local, no drain", "0", PATIENT);
    assert!(lost > 100, "{lost}");
}

#[test]
fn a_switch_with_a_drain_that_is_too_short() {
    let lost = switch("Cluster → Local, 2 s", "2s", PATIENT);
    assert!(lost > 100, "{lost}");
}

#[test]
fn a_switch_with_a_drain() {
    let none = Timed { at: Duration::ZERO, event: Event::Change(Change::Drain(Duration::ZERO)) };
    let lost = switch("Cluster → Local, 60 s", "60s", Some((TIMING.failures, &[none])));
    assert_eq!(lost, 0);
}

/// A step of a rolling update: the new pod, the old one, its node by number, the ready pods with
/// both, and those after it.
type Step = (&'static str, &'static str, usize, &'static [&'static str], &'static [&'static str]);

/// Replaces the pods of node-1 and node-2 by two on node-3, under policy Local.
fn rolling_update(what: &str, stops_at_once: bool) -> u64 {
    let _alone = quiet::alone();
    let mut base = cluster::without_agents(&[1, 1, 2], "xdp");
    let backends = |base: &Cluster, names: &[&str]| -> Vec<Backend> {
        base.lab.pods().filter(|pod| names.contains(&pod.name.as_str())).map(Backend::of).collect()
    };
    let first = backends(&base, &["pod-1-1", "pod-2-1"]);
    base.manifests.apply(&policy_local(), &first).unwrap();
    base.launch(|agent| agent.attach("xdp")).unwrap();
    let balanced = Balanced::before(base, HEALTH_PORT);
    balanced.wait_for(&["node-1", "node-2"]);
    let (mut cluster, mut recording) = begin(balanced, if stops_at_once { 3000 } else { 4000 });
    let steps: [Step; 2] = [
        ("pod-3-1", "pod-1-1", 0, &["pod-1-1", "pod-2-1", "pod-3-1"], &["pod-2-1", "pod-3-1"]),
        ("pod-3-2", "pod-2-1", 1, &["pod-2-1", "pod-3-1", "pod-3-2"], &["pod-3-1", "pod-3-2"]),
    ];
    for (new, old, node, with_both, after) in steps {
        let ready = Event::Pod(new.to_owned(), PodEvent::Ready("node-3".to_owned()));
        let with_both = backends(&cluster, with_both);
        recording.changes(ready, || cluster.manifests.endpoints(&policy_local(), &with_both)).unwrap();
        let stop = |cluster: &mut Cluster, recording: &mut Recording| {
            let stopped = Event::Pod(old.to_owned(), PodEvent::Stopped);
            let stop = || {
                cluster.stop_server(old);
                Ok(())
            };
            recording.happens(stopped, &[], stop).unwrap();
        };
        if stops_at_once {
            stop(&mut cluster, &mut recording);
        }
        let mut backends = backends(&cluster, after);
        let event = if stops_at_once {
            PodEvent::Removed
        } else {
            let pod = cluster.lab.pods().find(|pod| pod.name == old).unwrap();
            backends.push(Backend::of(pod).terminating());
            PodEvent::Terminating
        };
        let write = || cluster.manifests.endpoints(&policy_local(), &backends);
        recording.changes(Event::Pod(old.to_owned(), event), write).unwrap();
        let name = &cluster.lab.nodes()[node].name;
        pace::until("the balancer", Duration::from_secs(20), || {
            !recording.balancer().healthy().contains(name)
        });
        if !stops_at_once {
            // A pod that stops gracefully answers the requests that have reached it.
            let sent = recording.sent();
            pace::until("answers to all requests", Duration::from_secs(20), || recording.are_over(sent));
            stop(&mut cluster, &mut recording);
        }
    }
    compare(what, cluster, recording, stops_at_once.then_some(PATIENT).flatten())
}

#[test]
fn a_rolling_update_of_pods_that_stop_at_once() {
    let lost = rolling_update("rolling update, pods stop at once", true);
    assert!(lost > 100, "{lost}");
}

#[test]
fn a_rolling_update_of_pods_that_go_on_serving() {
    let lost = rolling_update("rolling update, pods go on serving", false);
    assert_eq!(lost, 0);
}
