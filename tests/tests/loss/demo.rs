//! Scenes of the demo that lose requests, and similar ones that lose none: the prediction of `lb
//! simulate`, the real losses, and its result for the measured times.

use std::time::Duration;

use traffic_policy_lab::demo::cluster::{DemoCluster, RATE};
use traffic_policy_lab::demo::scene::Outcome;
use traffic_policy_lab::demo::{node_port, preemption, switch};
use traffic_policy_lb::{Change, Event, Timed};
use traffic_policy_testing::object::Policy;
use traffic_policy_testing::recording::{agree, allowed};

use crate::quiet;

/// The number of failed checks until the demo's load balancer takes a node out.
const FAILURES: u32 = 3;

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
