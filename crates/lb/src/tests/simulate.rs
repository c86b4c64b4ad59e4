//! Simulations: scenes by the second, and properties that hold for all of them.

use std::time::Duration;

use proptest::prelude::*;
use traffic_policy_cluster::model::Policy;

use super::{
    scene::{SECOND, Scene, counts, minds},
    *,
};
use crate::{
    Change, Counts, Event, Load, NodeChange, PROFILES, Proxy, SimulateError, Timed, What, WhatIf, Why,
};

#[test]
fn a_switch_loses_nothing_with_the_drain_and_what_is_not_covered_without() {
    for (service, lost) in
        [("LoadBalancer Cluster drain=38s", false), ("LoadBalancer Cluster drain=0s", true)]
    {
        let yaml = manifests("n1 n2 n3", service, "a@n1 b@n2");
        let run = Scene::new("gke", &["5s policy=Local"]).run(&yaml).unwrap();
        // 30 s for the controller, then two checks, 3 s apart.
        let [(at, mind)] = minds(&run).try_into().unwrap();
        assert_eq!(mind, "n3 unhealthy");
        assert!((38.0..41.0).contains(&at), "{at}");
        let expected = if lost { ((at - 5.1) * 100.0 / 3.0) as u64 } else { 0 };
        assert!(run.total().lost.abs_diff(expected) <= 1, "{expected}: {:?}", run.total());
        assert_eq!(run.why.get(&Why::Dropped).copied().unwrap_or(0), run.total().lost);
        assert_eq!(run.by_node()["n1"].lost + run.by_node()["n2"].lost, 0);
        assert!(
            run.line.iter().any(|moment| matches!(moment.what, What::Drains(_))) != lost,
            "{:?}",
            run.line
        );
    }
}

/// A node without a pod keeps forwarding: nothing drains until the annotation is removed.
#[test]
fn a_node_that_falls_back_does_not_drain() {
    let drains = |service: &str, events: &[&str]| {
        let run = Scene::new("gke", events).run(&manifests("n1 n2", service, "a@n1")).unwrap();
        let drains = run.line.iter().filter(|moment| matches!(moment.what, What::Drains(_)));
        (drains.flat_map(|moment| moment.nodes.clone()).collect::<Vec<_>>(), run.total().lost)
    };
    let fallback = "LoadBalancer Cluster external-fallback=cluster";
    assert_eq!(drains(fallback, &["5s policy=Local"]), (vec![], 0));
    // The same without the annotation, as a control.
    assert_eq!(drains("LoadBalancer Cluster", &["5s policy=Local"]).0, ["n2"]);
}

#[test]
fn a_preempted_node_loses_what_is_sent_until_it_turns_unhealthy_and_what_goes_to_its_pods() {
    let yaml = manifests("n1 n2 n3", "LoadBalancer Cluster", "a@n1 b@n2");
    let run = Scene::new("haproxy", &["5s node=n3=gone"]).run(&yaml).unwrap();
    let [(at, _)] = minds(&run).try_into().unwrap();
    // Three checks, 2 s apart, and 2 s for the last answer.
    assert!((11.0..13.0).contains(&at), "{at}");
    assert!(run.total().lost.abs_diff(((at - 5.0) * 100.0 / 3.0) as u64) <= 1, "{:?}", run.total());
    assert_eq!(run.why.keys().collect::<Vec<_>>(), [&Why::NodeGone]);

    // With a pod: until Kubernetes considers the node lost, others with kube-proxy forward to it.
    let mut scene = Scene::new("haproxy", &["5s node=n2=gone"]);
    scene.proxy = Proxy::KubeProxy;
    let run = scene.run(&yaml).unwrap();
    let lost_after = |second: usize| run.seconds[second..].iter().map(|second| second.all.lost).sum::<u64>();
    assert!(lost_after(20) > 1000 && lost_after(56) == 0, "{:?}", run.total());
    assert_eq!(run.by_pod()["a"].lost, 0);
    assert!(run.by_pod()["b"].lost > 1000);

    let local = manifests("n1 n2 n3", "LoadBalancer Local", "a@n1 b@n2");
    let run = Scene::new("haproxy", &["5s node=n3=gone"]).run(&local).unwrap();
    assert_eq!((run.total(), minds(&run)), (counts(6000, 0, 0), vec![]));
}

#[test]
fn requests_under_way_are_cut_with_what_they_go_through() {
    let yaml = manifests("n1 n2", "LoadBalancer Local", "a@n1 b@n2");
    let mut scene = Scene::new("haproxy", &["5s node=n2=gone"]);
    scene.load.request = SECOND * 2;
    let run = scene.run(&yaml).unwrap();
    // Half of the requests of 2 s are with this node.
    assert_eq!(run.total().cut, 100);
    assert_eq!(run.by_pod()["b"].cut, 100);
    // A balancer that cuts connections cuts the rest when it considers the node unhealthy.
    let yaml = manifests("n1 n2", "LoadBalancer Local", "a@n1 b@n2");
    scene.balancer = by_name("aws-nlb").unwrap().clone();
    scene.events = &["5s pod=b"];
    scene.learn.pod_stop = SECOND * 40;
    let run = scene.run(&yaml).unwrap();
    assert_eq!(run.why.keys().collect::<Vec<_>>(), [&Why::CutByBalancer], "{:?}", run.why);
    assert_eq!(run.total().cut, 100);
}

#[test]
fn a_rolling_update_is_lossless_if_pods_go_on_serving() {
    let yaml = manifests("n1 n2 n3", "LoadBalancer Local", "a@n1 b@n2");
    let mut scene = Scene::new("gke", &["5s rollout"]);
    let run = scene.run(&yaml).unwrap();
    // n1 has no pod until its new one is ready, n2 has none permanently.
    assert!(run.total().lost > 100, "{:?}", run.total());
    let unhealthy: Vec<_> = minds(&run).into_iter().map(|(_, mind)| mind).collect();
    assert_eq!(unhealthy.last().unwrap(), "n2 unhealthy", "{unhealthy:?}");
    // 500 ms for the endpoints, 100 ms for the agent, two checks, 3 s apart.
    scene.learn.pod_stop = Duration::from_millis(6600);
    let run = scene.run(&yaml).unwrap();
    assert_eq!(run.total(), counts(6000, 0, 0), "{:?} {:?}", run.why, run.line);
    let new: Vec<_> =
        run.by_pod().into_iter().filter(|(pod, counts)| pod.starts_with("new") && counts.ok > 0).collect();
    assert_eq!(new.len(), 2, "{new:?}");
}

#[test]
fn what_a_dead_agent_has_written_goes_on_while_its_health_ports_fail() {
    let yaml = manifests("n1 n2", "LoadBalancer Local", "a@n1 b@n2");
    let mut scene = Scene::new("gke", &["5s crash=n1"]);
    scene.learn.agent_restart = SECOND * 20;
    let run = scene.run(&yaml).unwrap();
    assert_eq!(run.total(), counts(6000, 0, 0), "{:?}", run.why);
    let minds = minds(&run);
    assert_eq!(minds.len(), 2, "{minds:?}");
    assert!(minds[0].1 == "n1 unhealthy" && minds[1].1 == "n1 healthy" && minds[1].0 > 25.0, "{minds:?}");

    // An agent that is down does not learn of a change.
    let yaml = manifests("n1 n2 n3", "LoadBalancer Cluster drain=0s", "a@n1 b@n2");
    scene.events = &["5s crash=n3", "6s policy=Local"];
    let run = scene.run(&yaml).unwrap();
    let dropped: Vec<_> = (0..60).filter(|second| run.seconds[*second].all.lost > 0).collect();
    assert!(dropped.iter().all(|second| *second >= 25), "{dropped:?}");
}

#[test]
fn nobody_learns_of_a_change_while_the_api_is_away() {
    let yaml = manifests("n1 n2 n3", "LoadBalancer Cluster drain=0s", "a@n1 b@n2");
    let run = Scene::new("haproxy", &["5s outage=20s", "10s policy=Local"]).run(&yaml).unwrap();
    let written = run.line.iter().find(|moment| moment.what == What::Written).unwrap();
    assert_eq!((written.at, written.nodes.len()), (Duration::from_millis(25_100), 3));
    assert_eq!(run.seconds[..25].iter().map(|second| second.all.lost).sum::<u64>(), 0);
    assert!(run.total().lost > 100);
    // It does not learn of pods that are gone either, and keeps sending to them.
    let yaml = manifests("n1 n2", "LoadBalancer Cluster", "a@n1 b@n2");
    let mut scene = Scene::new("haproxy", &["5s node=n2=gone", "6s outage=50s"]);
    scene.proxy = Proxy::KubeProxy;
    let run = scene.run(&yaml).unwrap();
    assert!(run.seconds[55].all.lost > 20 && run.seconds[57].all.lost == 0, "{:?}", run.seconds[55].all);
}

#[test]
fn balancers_differ() {
    // One node gets everything; its successor does so once its time is over.
    let yaml = manifests("n1 n2 n3", "LoadBalancer Cluster", "a@n1 b@n1");
    let mut scene = Scene::new("metallb-l2", &[]);
    let run = scene.run(&yaml).unwrap();
    let used: Vec<_> = run.by_node().into_iter().filter(|(_, counts)| counts.all() > 0).collect();
    assert_eq!(used.len(), 1, "{used:?}");
    let gone = format!("5s node={}=gone", used[0].0);
    let events = [gone.as_str()];
    scene.events = &events;
    if used[0].0 != "n1" {
        let run = scene.run(&yaml).unwrap();
        assert_eq!(run.total().lost, 1000, "10 s of all");
    }
    // A balancer that fails open keeps sending; another has no node to send to.
    let yaml = manifests("n1", "LoadBalancer Local", "a@n1");
    for (name, what) in [("aws-nlb", What::FailsOpen), ("haproxy", What::NobodyLeft)] {
        let run = Scene::new(name, &["5s crash=n1", "6s outage=50s"]).run(&yaml).unwrap();
        assert!(run.line.iter().any(|moment| moment.what == what), "{name}: {:?}", run.line);
        assert_eq!(run.why.contains_key(&Why::NoNode), name == "haproxy", "{name}");
        assert_eq!(run.total().lost > 0, name == "haproxy", "{name}");
    }
    // Nodes with more pods get more requests.
    let yaml = manifests("n1 n2", "LoadBalancer Local weighted", "a@n1 b@n1 c@n1 d@n2");
    let run = Scene::new("gke", &[]).run(&yaml).unwrap();
    let share = run.by_node()["n1"].ok as f64 / 6000.0;
    assert!((0.7..0.8).contains(&share), "{share}");
}

#[test]
fn nodes_are_drained_and_added_and_pods_scaled() {
    let yaml = manifests("n1 n2 n3", "LoadBalancer Local", "a@n1 b@n2");
    let mut scene = Scene::new("gke", &["5s node=n1=drained"]);
    scene.learn.pod_stop = SECOND * 7;
    let run = scene.run(&yaml).unwrap();
    assert_eq!(run.total().lost, 0, "{:?}", run.line);
    assert!(run.seconds[50].nodes.keys().map(|node| run.nodes[*node].as_str()).eq(["n2", "n3"]));
    scene.events = &["5s node=n4=added", "6s scale=4"];
    let run = scene.run(&yaml).unwrap();
    let last: Vec<_> = run.seconds[59].nodes.keys().map(|node| run.nodes[*node].as_str()).collect();
    assert_eq!(last, ["n1", "n2", "n3", "n4"]);
    scene.events = &["5s scale=0"];
    let run = scene.run(&yaml).unwrap();
    assert_eq!(run.seconds[59].all, counts(0, 100, 0));
}

#[test]
fn events_that_are_wrong_are_refused_in_words() {
    for (text, told) in [
        ("", "`` is not a time"),
        ("policy=Local", "`policy=Local` is not a time"),
        ("5s", "`5s` does not say what happens: policy=Local|Cluster, drain=TIME"),
        ("5s policy=Locale", "`locale` is not a policy: Local or Cluster"),
        ("5s node=n1", "`node=n1` is not node=NAME=gone, back, cut-off, notice, drained or added"),
        ("5s node=n1=away", "`away` is not node=NAME=gone, back, cut-off, notice, drained or added"),
        ("5s scale=many", "`scale=many` is not scale=N"),
        ("5s outage", "`` is not a time: write outage=30s"),
        ("5s crash=", "`crash=` does not name a node"),
        ("5s rollout=now", "rollout takes no value"),
        ("5s explode", "`explode` is no event: policy=Local|Cluster"),
    ] {
        let error = text.parse::<Timed>().unwrap_err();
        assert!(error.contains(told), "{text:?}: {error}");
    }
    let timed: Timed = "1m30s  node=n1=gone".parse().unwrap();
    let gone = Event::Change(Change::Node("n1".to_owned(), NodeChange::Gone));
    assert_eq!((timed.at, timed.event), (SECOND * 90, gone));

    let yaml = manifests("n1", "LoadBalancer Local", "a@n1");
    let error = |event: &str| Scene::new("gke", &[event]).run(&yaml).unwrap_err().to_string();
    assert_eq!(error("5s node=n9=gone"), "the event at 5s cannot happen: there is no Node n9");
    assert_eq!(error("5s crash=n9"), "the event at 5s cannot happen: there is no Node n9");
    assert_eq!(error("5s pod=z"), "the event at 5s cannot happen: no ready pod z of shop/web: it has a");
    assert!(error("60s rollout").contains("comes after the end"));
    let mut scene = Scene::new("gke", &[]);
    scene.load.rate = u32::MAX;
    assert!(scene.run(&yaml).unwrap_err().to_string().contains("requests are too many"));
    let yaml = manifests("n1", "ClusterIP", "a@n1");
    assert!(
        Scene::new("gke", &[]).run(&yaml).unwrap_err().to_string().contains("is not reached from outside")
    );
}

fn profile() -> impl Strategy<Value = &'static str> {
    prop::sample::select(PROFILES.map(|balancer| balancer.name).to_vec())
}

fn pods(most: usize) -> impl Strategy<Value = String> {
    prop::collection::vec(
        (1usize..4, prop::sample::select(vec!["", "", "", "/terminating", "/unready"])),
        0..=most,
    )
    .prop_map(|pods| {
        let pods = (1..).zip(pods).map(|(number, (node, state))| format!("p{number}@n{node}{state}"));
        pods.collect::<Vec<_>>().join(" ")
    })
}

fn event() -> impl Strategy<Value = String> {
    let what = prop::sample::select(vec![
        "policy=Local",
        "policy=Cluster",
        "drain=3s",
        "node=n1=gone",
        "node=n3=gone",
        "node=n2=drained",
        "node=n4=added",
        "node=n1=back",
        "node=n3=back",
        "node=n1=cut-off",
        "node=n2=notice",
        "scale=1",
        "scale=5",
        "spread",
        "rollout",
        "crash=n1",
        "crash=n3",
        "outage=9s",
    ]);
    (0u64..39_000, what).prop_map(|(at, what)| format!("{at}ms {what}"))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    /// Each request has one outcome, at one node and one pod at most, and the same one again for
    /// the same seed.
    #[test]
    fn every_request_is_counted_once(
        profile in profile(), pods in pods(4), local: bool, seed: u64,
        rate in 1u32..200, request in 0u64..3000, stop in 0u64..9000,
        events in prop::collection::vec(event(), 0..4), kube_proxy: bool,
    ) {
        let policy = if local { "Local" } else { "Cluster" };
        let cluster = cluster(&manifests("n1 n2 n3/spot", &format!("LoadBalancer {policy}"), &pods));
        let events: Vec<Timed> = events.iter().map(|event| event.parse().unwrap()).collect();
        let mut scene = Scene::new(profile, &[]);
        scene.seed = seed;
        if kube_proxy {
            scene.proxy = Proxy::KubeProxy;
        }
        scene.load = Load { rate, lasts: SECOND * 40, request: Duration::from_millis(request) };
        scene.learn.pod_stop = Duration::from_millis(stop);
        let run = match scene.with(&cluster, events.clone()) {
            Ok(run) => run,
            // For example a new node that already exists, or pods without a node to move to.
            Err(SimulateError::Event { .. }) => return Ok(()),
            Err(error) => return Err(TestCaseError::fail(error.to_string())),
        };
        prop_assert_eq!(&run, &scene.with(&cluster, events).unwrap());
        prop_assert_eq!(run.total().all(), u64::from(rate) * 40);
        let mut nobody = 0;
        for second in &run.seconds {
            prop_assert_eq!(second.all.all(), u64::from(rate));
            let sum = |counts: &std::collections::BTreeMap<usize, Counts>| counts.values().fold(Counts::default(), |a, b| a + *b);
            let (nodes, pods) = (sum(&second.nodes), sum(&second.pods));
            nobody += second.all.lost - nodes.lost;
            let reached = |counts: Counts| (counts.ok, counts.delayed, counts.cut);
            prop_assert_eq!(reached(nodes), reached(second.all));
            // A request that is answered or cut has reached a pod.
            prop_assert_eq!(reached(pods), reached(second.all));
            prop_assert!(pods.lost <= nodes.lost);
        }
        prop_assert_eq!(nobody, run.why.get(&Why::NoNode).copied().unwrap_or(0));
        prop_assert_eq!(run.why.values().sum::<u64>(), run.total().lost + run.total().cut);
        let by_node = run.by_node().into_values().fold(Counts::default(), |a, b| a + b);
        prop_assert_eq!(by_node.all() + nobody, run.total().all());
    }

    /// A change to Local loses nothing with the computed drain or a longer one, whatever the
    /// phases.
    #[test]
    fn the_drain_that_is_computed_loses_nothing(
        profile in profile(), pods in 1usize..4, seed: u64, more in 0u64..3000, agent in 0u64..3000, at in 0u64..9000,
    ) {
        let names: Vec<_> = (1..=pods).map(|pod| format!("p{pod}@n{pod}")).collect();
        let yaml = manifests("n1 n2 n3 n4", "LoadBalancer Cluster", &names.join(" "));
        let before = cluster(&yaml);
        let switch = [Change::Policy(Policy::Local)];
        let what_if = WhatIf::new(&before, &web(), &switch, Proxy::default()).unwrap().unwrap();
        let [old, new] = what_if.judges(balancer(profile), &Overrides::default());
        let cost = what_if.cost(&(&old, &old.service(&web()).unwrap()), &(&new, &new.service(&web()).unwrap()));
        let mut scene = Scene::new(profile, &[]);
        scene.seed = seed;
        scene.learn.agent = Duration::from_millis(agent);
        scene.load.lasts = SECOND * 90;
        let needed = scene.balancer.drain().value;
        let run = |drain: Duration| {
            let drain = Timed { at: Duration::ZERO, event: Event::Change(Change::Drain(drain)) };
            let policy = Timed { at: Duration::from_millis(at), event: Event::Change(switch[0].clone()) };
            scene.with(&before, vec![drain, policy]).unwrap()
        };
        if cost.drain.is_some() {
            prop_assert_eq!(cost.drain.unwrap().0, needed.as_secs_f64());
            let found = run(needed + Duration::from_millis(more));
            prop_assert_eq!(found.total().lost, 0, "{:?}", found.line);
        } else {
            prop_assert_eq!(profile, "aws-alb");
            prop_assert!(run(needed + SECOND).total().lost > 0);
        }
        // Without a drain, requests are lost until the balancer considers the nodes unhealthy,
        // unless the agents are slower than that.
        let late = agent + 1000 >= u64::try_from(scene.balancer.controller.value.as_millis()).unwrap();
        if !late && !scene.balancer.one_node {
            prop_assert!(run(Duration::ZERO).total().lost > 0);
        }
    }

    /// Each node gets the share that `lb` computes in a steady state, and a change loses no more
    /// than the maximum of `lb what-if`.
    #[test]
    fn it_agrees_with_the_judgement(
        profile in profile(), pods in pods(4), local: bool, seed: u64, drain in 0u64..40,
    ) {
        let policy = if local { "Local" } else { "Cluster" };
        let yaml = manifests("n1 n2 n3 n4 n5/excluded", &format!("LoadBalancer {policy} drain={drain}s"), &pods);
        let before = cluster(&yaml);
        let mut scene = Scene::new(profile, &[]);
        scene.seed = seed;
        scene.load.lasts = SECOND * 110;
        let judge = Judge::new(&before, balancer(profile), Overrides::default());
        let judgement = judge.service(&web()).unwrap();
        let port = &judgement.ports[0];
        if !scene.balancer.one_node {
            let run = scene.with(&before, Vec::new()).unwrap();
            for row in &port.rows {
                for name in judge.names(port, row, row.count) {
                    let expected = row.share / row.count as f64;
                    let found = run.by_node().get(name).map_or(0, |counts| counts.all()) as f64 / 11_000.0;
                    prop_assert!((found - expected).abs() < 0.001, "{name}: {found} {expected}");
                }
            }
            let lost = run.total().lost as f64 / 11_000.0;
            let expected = if port.taking() == 0 { 1.0 } else { port.lost };
            prop_assert!((lost - expected).abs() < 0.05, "{lost} {expected}");
        }
        for change in [Change::Policy(Policy::Local), Change::Node("n4".to_owned(), NodeChange::Gone)] {
            let what_if = WhatIf::new(&before, &web(), std::slice::from_ref(&change), Proxy::default()).unwrap().unwrap();
            let [old, new] = what_if.judges(balancer(profile), &Overrides::default());
            let (a, b) = (old.service(&web()).unwrap(), new.service(&web()).unwrap());
            let loses = |judgement: &Judgement<'_>| judgement.ports[0].lost > 0.0 || judgement.ports[0].taking() == 0;
            let steady = loses(&a) || loses(&b);
            let cost = what_if.cost(&(&old, &a), &(&new, &b));
            // A balancer that sends all traffic to one node loses all or nothing, and no share of
            // it.
            if !steady && !scene.balancer.one_node {
                let run = scene.with(&before, vec![Timed { at: SECOND * 5, event: Event::Change(change) }]).unwrap();
                let most = cost.weight() * 100.0 + 2.0;
                prop_assert!(run.total().lost as f64 <= most, "{} > {most}: {:?} {:?}", run.total().lost, cost.lost, run.line);
            }
        }
    }
}
