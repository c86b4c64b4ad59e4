//! Changes: the nodes that turn unhealthy, the shares, the losses, and the conditions for a
//! lossless change.

use std::time::Duration;

use proptest::prelude::*;
use traffic_policy_cluster::model::Policy;

use super::*;
use crate::{Change, ChangeError, Cost, NodeChange, PROFILES, Proxy, Silence, WhatIf};

fn changed<T>(
    yaml: &str,
    name: &str,
    changes: &[Change],
    look: impl FnOnce(&str, &str, &Cost) -> T,
) -> Result<T, ChangeError> {
    changed_by(Proxy::default(), yaml, name, changes, look)
}

fn changed_by<T>(
    proxy: Proxy,
    yaml: &str,
    name: &str,
    changes: &[Change],
    look: impl FnOnce(&str, &str, &Cost) -> T,
) -> Result<T, ChangeError> {
    let cluster = cluster(yaml);
    let what_if = WhatIf::new(&cluster, &web(), changes, proxy)?.expect("the Service is there");
    let [before, after] = what_if.judges(balancer(name), &Overrides::default());
    let (old, new) = (before.service(&web()).unwrap(), after.service(&web()).unwrap());
    let cost = what_if.cost(&(&before, &old), &(&after, &new));
    Ok(look(&table(&before, &old), &table(&after, &new), &cost))
}

/// Returns shares (in percent) and seconds of the losses.
fn lost(cost: &Cost) -> Vec<(u32, u32)> {
    cost.lost.iter().map(|loss| ((loss.share * 100.0).round() as u32, loss.seconds.round() as u32)).collect()
}

fn gone(name: &str) -> Change {
    Change::Node(name.to_owned(), NodeChange::Gone)
}

#[test]
fn a_switch_loses_what_the_drain_does_not_cover() {
    let yaml = manifests("n1 n2 n3", "LoadBalancer Cluster", "a@n1 b@n2");
    let to_local = Change::Policy(Policy::Local);
    // 30 s for the controller, 2 checks every 3 s, 1 s for the answer; 30 s are the default.
    let needed = changed(&yaml, "gke", std::slice::from_ref(&to_local), |_, after, cost| {
        assert!(after.contains("n3 0 Unavailable no dropped 0"), "{after}");
        assert_eq!(lost(cost), [(33, 7)]);
        assert!(cost.cut.is_empty(), "{:?}", cost.cut);
        cost.drain.unwrap().0
    })
    .unwrap();
    assert_eq!(needed, 37.0);
    let drain = Change::Drain(Duration::from_secs(37));
    let enough = changed(&yaml, "gke", &[to_local.clone(), drain], |_, _, cost| lost(cost)).unwrap();
    assert!(enough.is_empty(), "{enough:?}");
    let none = Change::Drain(Duration::ZERO);
    assert_eq!(changed(&yaml, "gke", &[to_local, none], |_, _, cost| lost(cost)).unwrap(), [(33, 37)]);
}

#[test]
fn no_drain_helps_a_balancer_that_asks_the_traffic_port() {
    let yaml = manifests("n1 n2", "NodePort Cluster", "a@n1");
    let changes = [Change::Policy(Policy::Local), Change::Drain(Duration::from_secs(3600))];
    changed(&yaml, "aws-alb", &changes, |_, after, cost| {
        assert!(after.contains("n2 0 Silence no dropped 0"), "{after}");
        assert_eq!(lost(cost), [(50, 35)]);
        assert_eq!(cost.drain, None);
        assert!(cost.advice[0].contains("no drain"), "{:?}", cost.advice);
    })
    .unwrap();
}

#[test]
fn a_preempted_node_without_a_pod_costs_under_cluster_and_nothing_under_local() {
    for (policy, expected) in [("Cluster", vec![(33, 25)]), ("Local", vec![])] {
        let yaml = manifests("n1 n2 n3/spot", &format!("LoadBalancer {policy}"), "a@n1 b@n2");
        let found = changed(&yaml, "gke", &[gone("n3")], |_, _, cost| lost(cost)).unwrap();
        assert_eq!(found, expected, "{policy}");
    }
}

/// Agents leave out a node whose pods do not answer; kube-proxy goes on until Kubernetes removes
/// them. So do agents for UDP, for more than half of the nodes, and if there is nothing else.
#[test]
fn agents_notice_a_node_that_is_gone() {
    let yaml = manifests("n1 n2 n3/excluded", "LoadBalancer Cluster", "a@n1 b@n3");
    let late = |cost: &Cost| {
        let late = cost.late.iter().map(|late| ((late.share * 100.0).round() as u32, late.seconds));
        (lost(cost), late.collect::<Vec<_>>())
    };
    let of = |proxy, yaml: &str, nodes: &[&str]| {
        let changes: Vec<_> = nodes.iter().map(|node| gone(node)).collect();
        changed_by(proxy, yaml, "gke", &changes, |_, _, cost| late(cost)).unwrap()
    };
    let agents = Proxy::default();
    assert_eq!(of(agents, &yaml, &["n3"]), (vec![], vec![(50, 0.6)]));
    let until_removed = (vec![(50, 50)], vec![]);
    assert_eq!(of(Proxy::KubeProxy, &yaml, &["n3"]), until_removed);
    let off = Proxy::TrafficPolicy(Silence { suspect_syns: 0, ..Silence::default() });
    assert_eq!(of(off, &yaml, &["n3"]), until_removed);
    let udp = yaml.replace("{name: http, ", "{name: http, protocol: UDP, ");
    assert_ne!(udp, yaml);
    assert_eq!(of(agents, &udp, &["n3"]), until_removed);
    let two = manifests("n1 n2 n3/excluded n4/excluded", "LoadBalancer Cluster", "a@n1 b@n3 c@n4");
    assert_eq!(of(agents, &two, &["n3", "n4"]), (vec![(33, 50)], vec![(33, 0.6)]), "half of three is one");
    let alone = manifests("n1 n3/excluded", "LoadBalancer Cluster", "b@n3");
    assert_eq!(of(agents, &alone, &["n3"]), (vec![(100, 50)], vec![]));
}

/// Each endpoint has its own zone as its hint under `trafficDistribution`, also where a change
/// places it.
#[test]
fn traffic_stays_in_its_zone_through_a_change() {
    let yaml = manifests("n1/a n2/b n3/b", "LoadBalancer Cluster", "p@n1/a q@n2/b");
    let after = |change: Change| changed(&yaml, "gke", &[change], |_, after, _| after.to_owned());
    let own_zone = |table: &str, node: &str| {
        let row = table.lines().find(|line| line.starts_with(node)).unwrap_or_else(|| panic!("{table}"));
        row.to_owned()
    };
    // A third pod, on n3: n1 still has only its own, and the nodes of zone b have both of theirs.
    let scaled = after(Change::Scale(3)).unwrap();
    assert!(own_zone(&scaled, "n1").contains("1/1"), "{scaled}");
    assert!(own_zone(&scaled, "n2").contains("1/2"), "{scaled}");
    // The pod of n1 moves into zone b: no endpoint names zone a, whose node uses all.
    let drained = after(Change::Node("n1".to_owned(), NodeChange::Drained)).unwrap();
    assert!(own_zone(&drained, "n2").contains("1/2"), "{drained}");
    // Hints by the zones' CPUs: the hints that the controller would write are not known.
    let by_cpu = manifests("n1/a n2/b n3/b", "LoadBalancer Cluster", "p@n1/a q@n2/a");
    let refused = changed(&by_cpu, "gke", &[Change::Scale(3)], |_, _, _| ()).unwrap_err();
    assert!(
        matches!(refused, ChangeError::Hints(_)) && refused.to_string().contains("topology-mode"),
        "{refused}"
    );
    // A change that moves no pod is judged all the same.
    changed(&by_cpu, "gke", &[Change::Policy(Policy::Local)], |_, _, _| ()).unwrap();
}

#[test]
fn a_preempted_node_takes_its_pods_with_it() {
    let yaml = manifests("n1 n2", "LoadBalancer Cluster", "a@n1 b@n2");
    changed(&yaml, "gke", &[gone("n2")], |_, after, cost| {
        assert_eq!(after, "n1 1 Ok(None) yes 1/1 100\n  a 100");
        // Its own half is lost for 25 s; half of the other's until its agent leaves n2 out.
        assert_eq!((lost(cost), cost.late.len()), (vec![(50, 25)], 1));
        assert_eq!(cost.cut.len(), 2);
    })
    .unwrap();
}

#[test]
fn pods_that_move_leave_their_node_unhealthy() {
    let yaml = manifests("n1 n2 n3", "LoadBalancer Local", "a@n1 b@n2");
    let drained = Change::Node("n1".to_owned(), NodeChange::Drained);
    changed(&yaml, "gke", &[drained], |_, after, cost| {
        assert!(after.contains("n3 1 Ok(Some(1)) yes 1/1 50"), "{after}");
        assert!(after.contains("n1 0 Unavailable no dropped 0"), "{after}");
        assert_eq!(lost(cost), [(50, 6)]);
        assert!(cost.advice[0].contains("6 s after its deletion"), "{:?}", cost.advice);
    })
    .unwrap();
}

#[test]
fn scaling_and_spreading_follow_the_scheduler() {
    let yaml = manifests("n1 n2 n3", "LoadBalancer Local", "a@n1 b@n1 c@n1");
    let after = |changes: &[Change]| changed(&yaml, "gke", changes, |_, after, _| after.to_owned()).unwrap();
    let text = after(&[Change::Spread]);
    assert_eq!(text.matches("1/1 33").count(), 3, "{text}");
    let text = after(&[Change::Scale(5)]);
    assert!(text.contains("n1 3") && text.contains("n2 1") && text.contains("n3 1"), "{text}");
    let text = after(&[Change::Spread, Change::Scale(1), Change::Node("n4".to_owned(), NodeChange::Added)]);
    assert_eq!(text.matches("1/1 100").count(), 1, "{text}");
    assert!(text.contains("n4"), "{text}");
    assert!(after(&[Change::Scale(0)]).contains("refused"));
}

/// A health port by annotation makes a change lossless that the traffic port cannot.
#[test]
fn a_drain_helps_who_asks_a_health_port() {
    let switch = [Change::Policy(Policy::Local)];
    for (service, drain) in [
        ("NodePort Cluster", None),
        ("NodePort Cluster health-check-node-port=\"31999\"", Some(65.0)),
        ("NodePort Cluster health-check-node-port=\"30080\"", None),
    ] {
        let yaml = manifests("n1 n2", service, "a@n1");
        changed(&yaml, "aws-alb", &switch, |_, _, cost| {
            assert_eq!(cost.drain.map(|(seconds, _)| seconds), drain, "{service}");
        })
        .unwrap();
    }
}

/// Requests are not lost merely because they arrive at the wrong node.
#[test]
fn the_fallback_loses_nothing() {
    let switch = [Change::Policy(Policy::Local), Change::Drain(Duration::ZERO)];
    let deleted = [Change::PodDeleted("a".to_owned())];
    for (fallback, lossless) in [("", false), ("external-fallback=cluster", true)] {
        let cluster = manifests("n1 n2", &format!("LoadBalancer Cluster {fallback}"), "a@n1");
        let local = manifests("n1 n2", &format!("LoadBalancer Local {fallback}"), "a@n1 b@n2");
        for (yaml, changes) in [(&cluster, &switch[..]), (&local, &deleted[..])] {
            changed(yaml, "gke", changes, |_, after, cost| {
                assert_eq!(lost(cost).is_empty(), lossless, "{fallback:?} {changes:?}\n{after}");
            })
            .unwrap();
        }
    }
}

#[test]
fn what_is_not_there_cannot_change() {
    let yaml = manifests("n1", "LoadBalancer Local", "a@n1");
    let error = |change: Change| changed(&yaml, "gke", &[change], |_, _, _| ()).unwrap_err().to_string();
    assert_eq!(error(gone("n9")), "there is no Node n9");
    assert_eq!(error(Change::Node("n1".to_owned(), NodeChange::Added)), "there is a Node n1 already");
    assert_eq!(error(Change::PodDeleted("b".to_owned())), "no ready pod b of shop/web: it has a");
    let drained = Change::Node("n1".to_owned(), NodeChange::Drained);
    assert_eq!(error(drained), "no node is left that a pod could be put on");
}

proptest! {
    #[test]
    fn the_drain_that_is_named_loses_nothing(
        profile in prop::sample::select(PROFILES.map(|balancer| balancer.name).to_vec()),
        pods in 1usize..4,
        more in 0u64..100,
    ) {
        let names: Vec<_> = (1..=pods).map(|pod| format!("p{pod}@n{pod}")).collect();
        let yaml = manifests("n1 n2 n3 n4", "LoadBalancer Cluster", &names.join(" "));
        let switch = [Change::Policy(Policy::Local)];
        let needed = changed(&yaml, profile, &switch, |_, _, cost| cost.drain).unwrap();
        // There is no remedy for a balancer that checks the traffic port.
        if let Some((needed, _)) = needed {
            let drain = Duration::from_secs_f64(needed) + Duration::from_secs(more);
            let changes = [Change::Policy(Policy::Local), Change::Drain(drain)];
            let found = changed(&yaml, profile, &changes, |_, _, cost| lost(cost)).unwrap();
            prop_assert!(found.is_empty(), "{:?}", found);
        } else {
            prop_assert_eq!(profile, "aws-alb");
        }
    }
}

/// Another node finds the pods of connections through a node that is gone, by direct forwarding and
/// Maglev tables, if the balancer moves their address; those to its own pods end with it.
#[test]
fn connections_outlive_the_node_in_front() {
    let cut = |annotations: &str, balancer: &str, proxy| {
        let service = format!("LoadBalancer Cluster {annotations}");
        let yaml = manifests("n1 n2 n3", &service, "a@n1 b@n2");
        changed_by(proxy, &yaml, balancer, &[gone("n3")], |_, _, cost| {
            cost.cut.iter().map(|(share, _)| (share * 100.0).round() as u32).collect::<Vec<_>>()
        })
        .unwrap()
    };
    let (both, ours) = ("forwarding=direct algorithm=maglev", Proxy::default());
    assert_eq!(cut(both, "metallb-bgp", ours), [0; 0]);
    // The controls: each alone, addresses that do not move, and a proxy that knows neither.
    assert_eq!(cut("forwarding=direct", "metallb-bgp", ours), [33]);
    assert_eq!(cut("algorithm=maglev", "metallb-bgp", ours), [33]);
    assert_eq!(cut(both, "aws-nlb", ours), [33]);
    assert_eq!(cut(both, "metallb-bgp", Proxy::KubeProxy), [33]);
    // An endpoint that affinity has chosen need not be that of the table.
    assert_eq!(cut(&format!("affinity {both}"), "metallb-bgp", ours), [33]);
    let yaml = manifests("n1 n2", "LoadBalancer Cluster forwarding=direct algorithm=maglev", "a@n1 b@n2");
    let of_its_own = changed(&yaml, "metallb-bgp", &[gone("n1")], |_, _, cost| cost.cut.clone()).unwrap();
    let why: Vec<_> = of_its_own.iter().map(|(share, why)| ((share * 100.0).round(), why.as_str())).collect();
    assert_eq!(
        why,
        [(25.0, "connections by n1 to its own pods"), (25.0, "connections by other nodes to pods of n1")]
    );
}

/// Pods see the client where packets travel unchanged, so nothing is said of its address.
#[test]
fn direct_forwarding_keeps_the_clients_address() {
    use traffic_policy_cluster::model::Forwarding;
    let yaml = manifests("n1 n2 n3", "LoadBalancer Cluster ranges", "a@n1 b@n2");
    let cluster = cluster(&yaml);
    let codes = |changes: &[Change]| -> Vec<&str> {
        let what_if = WhatIf::new(&cluster, &web(), changes, Proxy::default()).unwrap().unwrap();
        let [_, after] = what_if.judges(balancer("metallb-bgp"), &Overrides::default());
        after.service(&web()).unwrap().findings.iter().map(|finding| finding.code).collect()
    };
    assert!(codes(&[]).contains(&"client-address"));
    assert!(codes(&[Change::Forwarding(Forwarding::Snat)]).contains(&"client-address"));
    assert!(!codes(&[Change::Forwarding(Forwarding::Direct)]).contains(&"client-address"));
}

/// Findings that advise a policy say if the annotations change their reason.
#[test]
fn findings_know_what_direct_forwarding_keeps() {
    let found = |service: &str, pods: &str, balancer: &str, code: &str| {
        judged(&manifests("n1 n2 n3", service, pods), balancer, |_, judgement| {
            let finding = judgement.findings.iter().find(|finding| finding.code == code).unwrap();
            (finding.level.name(), finding.fix.clone())
        })
    };
    let direct = "forwarding: direct, which keeps the client's address";
    let (code, pods) = ("healthy-without-pod", "a@n1 b@n2");
    let (level, fix) = found("LoadBalancer Cluster", pods, "metallb-bgp", code);
    assert!(
        level == "warning" && fix.contains("algorithm: maglev, with which open connections go on"),
        "{fix}"
    );
    let (level, fix) = found("LoadBalancer Cluster", pods, "gke", code);
    assert!(level == "warning" && !fix.contains("maglev"), "{fix}");
    let both = "LoadBalancer Cluster forwarding=direct algorithm=maglev";
    let (level, fix) = found(both, pods, "metallb-bgp", code);
    assert!(level == "note" && !fix.contains("Local"), "{fix}");
    assert_eq!(found(both, pods, "gke", code).0, "warning");

    let pods = "a@n1 b@n1 c@n1 d@n2";
    let (_, fix) = found("LoadBalancer Local", pods, "gke", "uneven");
    assert!(fix.contains("or externalTrafficPolicy: Cluster") && fix.contains(direct), "{fix}");
    let (_, fix) = found("LoadBalancer Local forwarding=direct", pods, "gke", "uneven");
    assert!(fix.contains("its annotation traffic-policy.io/forwarding: direct then keeps"), "{fix}");
    // The balancer's own address is what pods would see.
    assert!(!found("LoadBalancer Local", pods, "haproxy", "uneven").1.contains("direct"));
    let (_, fix) = found("NodePort Local", "a@n1", "haproxy", "check-times-out");
    assert!(!fix.contains("direct"), "{fix}");
}
