//! Scenes of the demo that lose requests, and similar ones that lose none: the prediction of `lb
//! simulate`, the real losses, and its result for the measured times.

use std::time::Duration;

use traffic_policy_lab::demo::cluster::{DemoCluster, RATE};
use traffic_policy_lab::demo::dead_front::{self, Pods, Way};
use traffic_policy_lab::demo::dead_node::{self, Death, KubeProxyCluster};
use traffic_policy_lab::demo::scene::Outcome;
use traffic_policy_lab::demo::{node_port, preemption, switch};
use traffic_policy_lb::{Change, Event, Timed};
use traffic_policy_testing::cluster::Protocol;
use traffic_policy_testing::object::Policy;
use traffic_policy_testing::pace::{self, scaled};
use traffic_policy_testing::recording::{agree, allowed};

use crate::quiet;

/// The number of failed checks until the demo's load balancer takes a node out.
const FAILURES: u32 = 3;
const PODS: [&str; 3] = ["pod-1-1", "pod-2-1", "pod-2-2"];

fn check(outcome: &Outcome) {
    let Outcome { label, recorded, predicted, replayed, late, phases, planned, .. } = outcome;
    let lost = recorded.lost();
    let figures = format!(
        "{label}: lost {lost} of {}, predicted {predicted}, replayed {replayed}, {late:?} off the plan; {}; {:?}; {:?}",
        recorded.all(),
        recorded.report,
        recorded.events,
        recorded.balancer.changes()
    );
    println!("{figures}");
    assert!(outcome.difference().is_none() && agree(*replayed, lost), "{figures}");
    // No timer fires early, so no check and no event comes before its time: the phases are the
    // predicted ones.
    for (node, phase) in phases {
        let first = recorded.balancer.all_checks().into_iter().find(|check| check.node == *node).unwrap();
        assert!(first.began >= recorded.balancer.started() + *phase, "{node}: {figures}");
    }
    let events = recorded.events.iter().zip(planned);
    assert!(events.clone().count() > 0 && phases.len() == 3, "{figures}");
    for (happened, planned) in events {
        assert!(happened.at >= planned.at && happened.event == planned.event, "{figures}");
    }
    // The scene was played as predicted, except for the delays of this machine, which are measured.
    let by_lateness = f64::from(RATE) * late.as_secs_f64();
    assert!(predicted.abs_diff(lost) <= allowed(lost) + by_lateness as u64, "{figures}");
}

/// Checks that requests are lost, and that a simulator with a more patient balancer does not agree.
fn loses(outcome: &Outcome) {
    check(outcome);
    let (lost, wrong) = (outcome.recorded.lost(), outcome.replayed_with(FAILURES + 1, &[]).unwrap());
    assert!(lost > 100, "{}: {lost}", outcome.label);
    assert!(!agree(wrong, lost), "{}: one failure more changes nothing: {lost}, {wrong}", outcome.label);
}

fn loses_nothing(outcome: &Outcome) {
    check(outcome);
    assert_eq!(outcome.recorded.lost(), 0, "{}", outcome.label);
}

#[test]
fn a_preempted_node() {
    let _alone = quiet::alone();
    let cluster = DemoCluster::build("tc").unwrap();
    for policy in [Policy::Cluster, Policy::Local] {
        cluster.set(policy, Some("0")).unwrap();
        let scene = preemption::predict(&cluster).unwrap();
        let outcome = preemption::play(&cluster, scene, policy).unwrap();
        if policy == Policy::Cluster { loses(&outcome) } else { loses_nothing(&outcome) }
    }
}

#[test]
fn a_live_switch() {
    let _alone = quiet::alone();
    let cluster = DemoCluster::build("tc").unwrap();
    // The time that the agents need is known once they have written a change.
    cluster.set(Policy::Local, Some("0")).unwrap();
    for drain in ["6s", "0"] {
        let scene = switch::predict(&cluster, drain).unwrap();
        let outcome = switch::play(&cluster, scene, drain).unwrap();
        if drain == "0" {
            loses(&outcome);
        } else {
            loses_nothing(&outcome);
            let none = Timed { at: Duration::ZERO, event: Event::Change(Change::Drain(Duration::ZERO)) };
            let wrong = outcome.replayed_with(FAILURES, &[none]).unwrap();
            assert!(!agree(wrong, 0), "the drain changes nothing: {wrong}");
        }
    }
}

#[test]
fn a_node_port_with_a_health_port_and_without() {
    let _alone = quiet::alone();
    let cluster = DemoCluster::build("tc").unwrap();
    for (number, (port, _)) in node_port::ASKED.into_iter().enumerate() {
        let scene = node_port::predict(&cluster, port).unwrap();
        let (said, outcome) = node_port::play(&cluster, scene, port).unwrap();
        if number == 0 {
            loses(&outcome);
            assert!(said.starts_with("nothing"), "{said}");
        } else {
            loses_nothing(&outcome);
            assert!(said.starts_with("503"), "{said}");
        }
    }
}

/// No connection that sees the node die is lost, and none takes longer than a client's second SYN,
/// a second later, does.
const SLOWEST: Duration = Duration::from_millis(1600);

#[test]
fn a_node_that_dies() {
    let _alone = quiet::alone();
    let cluster = DemoCluster::build("tc").unwrap();
    cluster.set(Policy::Cluster, Some("0")).unwrap();
    dead_node::exclude(&cluster, true).unwrap();
    // Agents that have run for a while have the kernel keep their next hops resolved.
    let lab = &cluster.base.lab;
    for number in [2, 3] {
        cluster.base.ask_until_all(Protocol::Tcp, cluster.node_port(lab.node(number)), &PODS).unwrap();
        let managed =
            || lab.node(number).netns().netlink(async |net| net.managed_neighbours().await).unwrap();
        pace::until("the next hops to be kept resolved", Duration::from_secs(15), || managed() > 0);
    }
    let death = dead_node::death(&cluster).unwrap();
    let Death { cut, gone, report, pod, predicted, replayed, left_out, .. } = &death;
    let figures = format!(
        "cut at {cut:?} to {gone:?}, left out after {left_out:?}: {report}; predicted {predicted:?}, replayed {replayed:?}"
    );
    println!("agents: {figures}");
    assert_eq!(death.differences(), [""; 0], "{figures}");
    assert_eq!(death.lost(), 0, "{figures}");
    // What was established when the node died, and only that, has died with it.
    let after: Vec<_> = death.cut_off().filter(|ended| ended.at > *gone).collect();
    println!("{} connections were under way", death.cut_off().count());
    assert!(after.is_empty(), "{after:?}: {figures}");
    assert!(report.slowest < scaled(SLOWEST), "{figures}");
    assert!(death.count(0, |ended| ended.pod.as_ref() == Some(pod)) > 40, "it was used: {figures}");
    assert!(report.resent > 0, "{figures}");
    // From a second after the death on, nothing is sent there.
    let late = report.ended.iter().filter(|ended| ended.at > *cut + scaled(Duration::from_secs(1)));
    let harmed: Vec<_> = late.filter(|ended| ended.resent || ended.pod.as_ref() == Some(pod)).collect();
    assert!(harmed.is_empty(), "{harmed:?}: {figures}");
    let back = dead_node::back(&cluster).unwrap();
    println!("back after {:?}, {:.2} of all connections", back.after, back.share);
    // Five standard deviations of 250 random choices, a third of which is the pod.
    assert!((back.share - 1.0 / 3.0).abs() < 0.15, "{}", back.share);

    let without = KubeProxyCluster::build("tc").unwrap().death(&cluster).unwrap();
    println!("kube-proxy: {}; replayed {:?}", without.report, without.replayed);
    assert_eq!(without.differences(), [""; 0], "{}", without.report);
    assert!(without.lost() > 200, "{}", without.report);
    // The control: a simulator whose agents notice as little as kube-proxy does not agree.
    let (delayed, lost) = (report.resent, without.replayed.lost);
    assert!(lost.abs_diff(delayed) > dead_node::allowed(lost), "{delayed}, {lost}");
}

/// Direct forwarding with Maglev tables cuts no connection, also while a pod is replaced; the
/// control is SNAT, which cuts all that passed the node, at least.
#[test]
fn a_node_in_front_that_dies() {
    let _alone = quiet::alone();
    let cluster = DemoCluster::build("tc").unwrap();
    cluster.set(Policy::Cluster, Some("0")).unwrap();
    let all = dead_front::CONNECTIONS as u64;
    for pods in Pods::BOTH {
        for way in Way::BOTH {
            let counts = dead_front::play(&cluster, way, pods).unwrap();
            println!("{way:?}, {pods:?}: {counts}");
            let through = counts.through as u64;
            assert_eq!(counts.held.connections, all, "{counts}");
            assert!(through > all / 6 && through < all / 2, "{counts}");
            assert_eq!(counts.ended > all / 4, pods == Pods::Replaced, "{counts}");
            if way == Way::Snat {
                assert!(counts.held.broken.len() as u64 >= through, "{counts}");
                continue;
            }
            let of_pod = if pods == Pods::Replaced { counts.held.by_pod["pod-2-1"] } else { 0 };
            assert_eq!((counts.cut(), counts.ended, counts.new.failed), (0, of_pod, 0), "{counts}");
            assert!(counts.new.ok > u64::from(RATE), "{counts}");
            assert!(counts.held.clients.iter().eq([&cluster.client()]), "pods see the client: {counts}");
        }
    }
}
