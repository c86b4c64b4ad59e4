//! Simulated connections that outlive the node in front: under each forwarding and algorithm, when
//! a node dies, when nodes are replaced one after the other, and when a router spreads connections
//! anew.

use std::time::Duration;

use super::{
    scene::{SECOND, Scene, counts},
    *,
};
use crate::{Proxy, Simulated, Why};

const WAYS: [&str; 5] = [
    "forwarding=direct algorithm=maglev",
    "forwarding=tunnel algorithm=maglev",
    "forwarding=direct algorithm=random",
    "forwarding=snat algorithm=maglev",
    "",
];

/// Plays a scene with requests that take 2 s, in a cluster whose third node has no pod.
fn play(balancer: &str, annotations: &str, events: &[&str]) -> Simulated {
    let yaml = manifests("n1 n2 n3", &format!("LoadBalancer Cluster {annotations}"), "a@n1 b@n2");
    let mut scene = Scene::new(balancer, events);
    scene.load.request = SECOND * 2;
    // The hold time of BGP sessions is longer than the run.
    scene.balancer.vanished.value = SECOND * 10;
    scene.run(&yaml).unwrap()
}

fn cut_by(run: &Simulated, why: Why) -> u64 {
    run.why.get(&why).copied().unwrap_or(0)
}

/// A node without pods dies: the requests on their way through it, a third of those of 2 s, are cut
/// under every way but direct forwarding and tunnels with Maglev tables.
#[test]
fn a_node_that_dies_cuts_what_goes_through_it_unless_others_find_the_pods() {
    for (annotations, (cut, outlived)) in WAYS.into_iter().zip([(0, 67), (0, 67), (67, 0), (67, 0), (67, 0)])
    {
        let run = play("metallb-bgp", annotations, &["5s node=n3=gone"]);
        let gone = cut_by(&run, Why::NodeGone) - run.by_node()["n3"].lost;
        assert!(gone.abs_diff(cut) <= 1, "{annotations}: {gone} {:?}", run.why);
        let through = run.seconds[3..5].iter().map(|second| second.all.delayed).sum::<u64>();
        assert!(through.abs_diff(outlived) <= 1, "{annotations}: {through} delayed, {:?}", run.total());
        assert!(run.outlived >= outlived.saturating_sub(1), "{annotations}: {}", run.outlived);
    }
}

/// The router spreads connections anew when the number of nodes changes: connections by nodes that
/// live are moved, too.
#[test]
fn a_router_that_rehashes_cuts_connections_by_other_nodes() {
    for (at, annotations) in WAYS.into_iter().enumerate() {
        let run = play("metallb-bgp", annotations, &["5s node=n4=added", "6s scale=2"]);
        assert_eq!(run.total().lost, 0, "{annotations}: {:?}", run.why);
        match at {
            // Three nodes become four: most of the 200 on their way come by another one.
            0 | 1 => {
                assert!(run.total().cut == 0 && run.outlived > 100, "{:?} {}", run.total(), run.outlived);
            }
            _ => {
                assert!(cut_by(&run, Why::Rehashed) > 100, "{annotations}: {:?}", run.why);
                assert_eq!(run.outlived, 0);
            }
        }
    }
    // The control: the successor of a node that has the address alone is not concerned.
    let run = play("metallb-l2", "", &["5s node=n4=added"]);
    assert_eq!(cut_by(&run, Why::Rehashed), 0, "{:?}", run.why);
}

/// Nodes are replaced one after the other: only the connections to their own pods are cut.
#[test]
fn nodes_that_are_replaced_cut_connections_to_their_own_pods_alone() {
    let events = ["5s node=n1=gone", "20s node=n1=back", "25s node=n2=gone", "45s node=n2=back"];
    let run = play("metallb-bgp", WAYS[0], &events);
    assert_eq!(cut_by(&run, Why::Rehashed) + cut_by(&run, Why::CutByBalancer), 0, "{:?}", run.why);
    let pods = run.by_pod();
    assert_eq!(pods["a"].cut + pods["b"].cut, run.total().cut, "{:?}", run.total());
    let snat = play("metallb-bgp", "", &events);
    assert!(snat.total().cut > 3 * run.total().cut, "{:?} {:?}", run.total(), snat.total());
    // Every request has an end, also those that wait for a node at the end of the run.
    for events in [&events[..1], &["59s node=n3=gone"], &["5s node=n3=gone", "6s node=n3=back"]] {
        let run = play("metallb-bgp", WAYS[0], events);
        assert_eq!(run.total().all(), 6000, "{events:?}");
    }
}

/// A flow keeps the way that it began with, and needs nodes that know both annotations.
#[test]
fn annotations_that_change_and_what_does_not_know_them() {
    let way = WAYS[0];
    let events = ["1s forwarding=direct", "1s algorithm=maglev", "5s node=n3=gone"];
    assert_eq!(cut_by(&play("metallb-bgp", "", &events), Why::Rehashed), 0);
    assert!(play("metallb-bgp", "", &events).outlived > 60);
    // Connections that began before, those of an API that is away, and those that nobody finds now.
    for events in [
        &["4900ms forwarding=direct", "4900ms algorithm=maglev", "5s node=n3=gone"][..],
        &["1s outage=20s", "2s forwarding=direct", "2s algorithm=maglev", "5s node=n3=gone"],
    ] {
        assert!(cut_by(&play("metallb-bgp", "", events), Why::NodeGone) > 60, "{events:?}");
    }
    let back = ["5s node=n3=gone", "6s algorithm=random"];
    assert_eq!(play("metallb-bgp", way, &back).outlived, 0);

    // A balancer whose address does not move, policy Local, and kube-proxy.
    let yaml = |policy| manifests("n1 n2 n3", &format!("LoadBalancer {policy} {way}"), "a@n1 b@n2");
    let mut scene = Scene::new("metallb-bgp", &["5s node=n1=gone"]);
    scene.load.request = SECOND * 2;
    assert_eq!(scene.run(&yaml("Local")).unwrap().outlived, 0);
    scene.proxy = Proxy::KubeProxy;
    assert_eq!(scene.run(&yaml("Cluster")).unwrap().outlived, 0);
    assert_eq!(play("aws-nlb", way, &["5s node=n3=gone"]).outlived, 0);
}

/// The node that has the address at layer 2 dies: all that went through it goes on elsewhere.
#[test]
fn the_node_that_has_the_address_dies() {
    let yaml = manifests("n1 n2 n3", &format!("LoadBalancer Cluster {}", WAYS[0]), "a@n1 b@n2 c@n3");
    let mut scene = Scene::new("metallb-l2", &[]);
    scene.load.request = SECOND * 2;
    let run = scene.run(&yaml).unwrap();
    assert_eq!(run.total(), counts(6000, 0, 0));
    let (front, _) = run.by_node().into_iter().find(|(_, counts)| counts.all() > 0).unwrap();
    let gone = format!("5s node={front}=gone");
    let events = [gone.as_str()];
    scene.events = &events;
    let run = scene.run(&yaml).unwrap();
    // 200 are on their way, a third of them to a pod of the node itself.
    let (cut, delayed) = (run.total().cut, run.outlived);
    assert!((50..85).contains(&cut) && cut + delayed >= 199, "{cut} cut, {delayed} went on");
    let moved = run.line.iter().find(|moment| moment.at > Duration::from_secs(14)).unwrap();
    assert!(moved.at < Duration::from_secs(16), "{:?}", run.line);
}
