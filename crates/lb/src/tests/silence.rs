//! Simulations of nodes that go without a word: when the other nodes notice, what becomes of
//! requests until then and after, and the same with kube-proxy.

use std::time::Duration;

use super::{
    manifests,
    scene::{SECOND, Scene, counts, minds},
};
use crate::{Measured, Proxy, Silence, Simulated, What, Why};

fn milliseconds(time: u64) -> Duration {
    Duration::from_millis(time)
}

/// Settings of the agents that leave out every dead node.
const ALL: Silence = Silence { suspect_syns: 3, max_left_out: 100, other_tcp: 0 };

fn ours(silence: Silence) -> Proxy {
    Proxy::TrafficPolicy(silence)
}

/// Returns what nodes noticed, in milliseconds: `5600 n1: n3 left out`.
fn noticed(run: &Simulated) -> Vec<String> {
    let moments = run.line.iter().filter_map(|moment| {
        let what = match &moment.what {
            What::LeftOut(node) => format!("{node} left out"),
            What::NotLeftOut(node) => format!("{node} not left out"),
            What::TakenBack(node) => format!("{node} back"),
            What::CutOff => "cut off".to_owned(),
            What::InTouch => "in touch".to_owned(),
            _ => return None,
        };
        Some(format!("{} {}: {what}", moment.at.as_millis(), moment.nodes.join(" ")))
    });
    moments.collect()
}

/// Returns the numbers of delayed and lost requests that were sent from one second to another.
fn harm(run: &Simulated, from: usize, to: usize) -> (u64, u64) {
    let seconds = run.seconds[from..to].iter();
    seconds.fold((0, 0), |(delayed, lost), second| (delayed + second.all.delayed, lost + second.all.lost))
}

/// Asserts that about this number of independent requests had one of two equally likely outcomes.
fn assert_half(found: u64, of: u64) {
    // Five standard deviations of a binomial distribution.
    let allowed = 2.5 * (of as f64).sqrt() + 1.0;
    assert!((found as f64 - of as f64 / 2.0).abs() <= allowed, "{found} of {of}");
}

/// Nodes n1 and n2 forward; the pods are on nodes that the balancer does not use.
const APART: &str = "n1 n2 n3/excluded n4/excluded";

#[test]
fn requests_to_a_silent_node_are_delayed_for_the_first_moments_and_none_is_lost() {
    let yaml = manifests(APART, "LoadBalancer Cluster", "c@n3 d@n4");
    let mut scene = Scene::new("haproxy", &["5s node=n3=gone"]);
    let run = scene.run(&yaml).unwrap();
    // The first unanswered SYN of each node within a few requests, 200 ms until a suspicion, 300 ms
    // of asking, 100 ms until the agent has written it.
    let found = noticed(&run);
    assert_eq!(found.len(), 2, "{found:?}");
    for moment in &run.line[1..3] {
        assert!(moment.what == What::LeftOut("n3".to_owned()), "{:?}", run.line);
        assert!((milliseconds(5600)..milliseconds(6000)).contains(&moment.at), "{:?}", run.line);
    }
    let total = run.total();
    assert_eq!((total.lost, total.cut), (0, 0), "{:?}", run.why);
    assert_eq!(harm(&run, 5, 6).0, total.delayed, "all in one second");
    // 60 ms to 100 ms more than 600 ms, at 100 requests a second.
    let last = run.line[2].at.max(run.line[1].at) - SECOND * 5;
    assert_half(total.delayed, (last.as_secs_f64() * 100.0).round() as u64);
    assert_eq!(run.by_pod()["d"].delayed, total.delayed);

    scene.proxy = Proxy::KubeProxy;
    let run = scene.run(&yaml).unwrap();
    // Until 50 s later the endpoints are removed, and 100 ms until the proxy has written it.
    assert_eq!((noticed(&run), run.total().delayed), (vec![], 0));
    assert_half(run.total().lost, 5010);
    assert_eq!(harm(&run, 56, 60), (0, 0));
    assert_eq!(run.why.keys().collect::<Vec<_>>(), [&Why::PodGone]);

    // Without suspicions, the agents are no better.
    scene.proxy = ours(Silence::OFF);
    assert_half(scene.run(&yaml).unwrap().total().lost, 5010);
}

#[test]
fn each_node_notices_by_its_own_traffic() {
    let yaml = manifests(APART, "LoadBalancer Cluster", "c@n3");
    let at = |moments: &[u64]| {
        let mut scene = Scene::new("haproxy", &["4s node=n3=gone"]);
        scene.proxy = ours(ALL);
        let requests = moments.iter().copied().map(milliseconds).collect();
        scene.measured = Measured { requests: Some(requests), ..Measured::default() };
        noticed(&scene.run(&yaml).unwrap())
    };
    // Requests go to n1 and n2 in turn. The third SYN of n2 is the second of its first request.
    let both = at(&[5000, 5010, 5020, 5030, 5040]);
    assert_eq!(both, ["5600 n1: n3 left out", "6410 n2: n3 left out"]);
    // One request alone: SYNs after 1 s and 3 s.
    assert_eq!(at(&[5000]), ["8400 n1: n3 left out"]);
    // Three SYNs in an instant are no suspicion before 200 ms have passed.
    assert_eq!(at(&[5000, 5000, 5001, 5000, 5002]), ["5600 n1: n3 left out", "6400 n2: n3 left out"]);
}

#[test]
fn more_syns_or_none_at_all_may_be_wanted() {
    let yaml = manifests("n1 n3/excluded", "LoadBalancer Cluster", "c@n3");
    let mut scene = Scene::new("haproxy", &["5s node=n3=gone"]);
    let mut with = |suspect_syns| {
        scene.proxy = ours(Silence { suspect_syns, ..ALL });
        noticed(&scene.run(&yaml).unwrap())
    };
    // The fiftieth SYN comes 490 ms after the first.
    assert_eq!(with(50), ["5890 n1: n3 left out"]);
    assert_eq!(with(0), Vec::<String>::new());
}

#[test]
fn udp_raises_no_suspicion_and_is_lost_until_tcp_has() {
    let yaml = manifests(APART, "LoadBalancer Cluster", "c@n3 d@n4")
        .replace("{name: http, ", "{name: dns, protocol: UDP, ");
    let mut scene = Scene::new("haproxy", &["5s node=n3=gone"]);
    let run = scene.run(&yaml).unwrap();
    assert_eq!((noticed(&run), run.total().delayed), (vec![], 0));
    assert_half(run.total().lost, 5010);
    // Other connections of the same nodes, ten a second: the third begins 200 ms after the first.
    scene.proxy = ours(Silence { other_tcp: 10, ..Silence::default() });
    let run = scene.run(&yaml).unwrap();
    let last = run.line.iter().rfind(|moment| moment.what == What::LeftOut("n3".to_owned()));
    let last = last.unwrap().at;
    assert!((milliseconds(5600)..milliseconds(5700)).contains(&last), "{:?}", run.line);
    assert_eq!((run.total().delayed, harm(&run, 6, 60)), (0, (0, 0)));
    assert_half(run.total().lost, (last - SECOND * 5).as_millis() as u64 / 10);
}

#[test]
fn the_last_endpoints_are_never_left_out() {
    let yaml = manifests("n1 n3/excluded", "LoadBalancer Cluster", "c@n3");
    let mut scene = Scene::new("haproxy", &["5s node=n3=gone"]);
    for proxy in [ours(ALL), Proxy::KubeProxy] {
        scene.proxy = proxy;
        let run = scene.run(&yaml).unwrap();
        assert_eq!(run.total(), counts(500, 5500, 0));
        // There is nowhere else to go until Kubernetes removes the endpoint, and it is written.
        assert_eq!(run.why.into_iter().collect::<Vec<_>>(), [(Why::Refused, 490), (Why::PodGone, 5010)]);
    }
}

/// The agent counts its own node, whether or not that has endpoints: two of four are the half.
#[test]
fn a_node_without_endpoints_counts_itself() {
    let nodes = "n1 n2/excluded n3/excluded n4/excluded";
    let yaml = manifests(nodes, "LoadBalancer Cluster", "b@n2 c@n3 d@n4");
    let mut scene = Scene::new("haproxy", &["5s node=n2=gone", "10s node=n3=gone"]);
    let mut told = |max_left_out| {
        scene.proxy = ours(Silence { max_left_out, ..ALL });
        let told = noticed(&scene.run(&yaml).unwrap());
        told.iter().take(2).map(|line| line.split_once(' ').unwrap().1.to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(told(50), ["n1: n2 left out", "n1: n3 left out"]);
    assert_eq!(told(49), ["n1: n2 left out", "n1: n3 not left out"]);
}

#[test]
fn half_of_the_nodes_with_endpoints_are_left_out_at_most() {
    let nodes = "n1 n2/excluded n3/excluded n4/excluded n5/excluded";
    let yaml = manifests(nodes, "LoadBalancer Cluster", "b@n2 c@n3 d@n4 e@n5");
    let gone = ["5s node=n2=gone", "10s node=n3=gone", "15s node=n4=gone"];
    let mut scene = Scene::new("haproxy", &gone);
    let run = scene.run(&yaml).unwrap();
    let told: Vec<_> = noticed(&run).iter().map(|line| line.split_once(' ').unwrap().1.to_owned()).collect();
    // Two of four are the half.
    assert_eq!(told[..3], ["n1: n2 left out", "n1: n3 left out", "n1: n4 not left out"]);
    assert_eq!(run.total().lost, 0, "the second SYN still goes elsewhere");
    // Half of the new connections go to n4, of n4 and n5, until Kubernetes removes n2.
    assert_half(harm(&run, 17, 55).0, 3800);

    scene.proxy = ours(Silence { max_left_out: 75, ..ALL });
    let run = scene.run(&yaml).unwrap();
    assert_eq!(noticed(&run).len(), 3);
    assert_eq!((run.total().lost, harm(&run, 17, 60)), (0, (0, 0)));

    scene.proxy = Proxy::KubeProxy;
    let run = scene.run(&yaml).unwrap();
    // Three of four until 55 s.
    let lost = harm(&run, 16, 55).1 as f64 / 3900.0;
    assert!((lost - 0.75).abs() < 0.04, "{lost}");
}

#[test]
fn a_node_that_hears_nobody_is_cut_off_itself_and_says_so() {
    let yaml = manifests("n1 n2 n3", "LoadBalancer Cluster", "a@n1 b@n2 c@n3");
    let mut scene = Scene::new("gke", &["5s node=n1=cut-off", "40s node=n1=back"]);
    let run = scene.run(&yaml).unwrap();
    let noticed = noticed(&run);
    let of_n1: Vec<_> = noticed.iter().filter(|line| line.contains(" n1:")).collect();
    let begin = of_n1.iter().position(|line| line.ends_with("n1: cut off")).unwrap();
    // It may leave out the first one before it finds that the other is silent, too.
    assert!(begin <= 1 && of_n1.len() >= begin + 2, "{noticed:?}");
    assert!(of_n1[begin + 1].ends_with("n1: in touch"), "{noticed:?}");
    // The others are fine: each of them leaves out n1, and takes it back.
    for node in ["n2", "n3"] {
        let of: Vec<_> =
            run.line.iter().filter(|moment| moment.nodes.iter().any(|name| name == node)).collect();
        let whats: Vec<_> = of.iter().map(|moment| moment.what.clone()).collect();
        assert_eq!(whats, [What::LeftOut("n1".to_owned()), What::TakenBack("n1".to_owned())], "{node}");
    }
    // /healthz says 503: three checks, 8 s apart, and healthy again after one.
    let [(at, first), (back, second)] = minds(&run).try_into().unwrap();
    assert_eq!((first.as_str(), second.as_str()), ("n1 unhealthy", "n1 healthy"));
    assert!((21.0..30.0).contains(&at) && (40.0..50.0).contains(&back), "{at} {back}");
    // What n1 is sent until then goes to its own pod: a third at once, the rest by the second SYN.
    let sent = (at - 5.0) * 100.0 / 3.0;
    let delayed = run.by_node()["n1"].delayed as f64;
    assert!((delayed / sent - 2.0 / 3.0).abs() < 0.12, "{delayed} of {sent}");
    assert_eq!(run.total().lost, 0, "{:?}", run.why);

    // kube-proxy says 200 all the time, and the balancer goes on sending.
    scene.proxy = Proxy::KubeProxy;
    let run = scene.run(&yaml).unwrap();
    assert_eq!(minds(&run), vec![]);
    // Two of three at n1, one of three at n2 and n3: four ninths of all.
    let lost = harm(&run, 5, 40).1 as f64 / 3500.0;
    assert!((lost - 4.0 / 9.0).abs() < 0.05, "{lost}");
}

#[test]
fn of_two_nodes_the_one_that_stays_is_not_cut_off() {
    let yaml = manifests("n1 n2/excluded", "LoadBalancer Cluster", "a@n1 b@n2");
    let run = Scene::new("haproxy", &["5s node=n2=gone"]).run(&yaml).unwrap();
    let [line] = noticed(&run).try_into().unwrap();
    assert!(line.ends_with("n1: n2 left out"), "{line}");
    assert_eq!(run.total().lost, 0);
}

#[test]
fn a_node_is_taken_back_after_two_answers() {
    let yaml = manifests("n1 n3/excluded", "LoadBalancer Cluster", "c@n3");
    let mut scene = Scene::new("haproxy", &["5s node=n3=gone", "10s node=n3=back"]);
    scene.proxy = ours(ALL);
    let run = scene.run(&yaml).unwrap();
    // It is asked every second since 5.6 s: the answers of 10.6 s and 11.6 s count.
    assert_eq!(noticed(&run), ["5600 n1: n3 left out", "11600 n1: n3 back"]);
    // Its endpoints are the last ones, and so get connections before: those of 9 s and later are
    // answered at their second SYN, a second later.
    assert_eq!(run.seconds[8].all, counts(0, 100, 0));
    assert_eq!(run.seconds[9].all.delayed, 100);
    assert_eq!(run.seconds[10].all, counts(100, 0, 0));
    assert!(run.line.iter().all(|moment| moment.what != What::TakenForLost), "{:?}", run.line);
    // A node that is back before it is judged is never left out.
    scene.events = &["5s node=n3=gone", "5500ms node=n3=back"];
    assert_eq!(noticed(&scene.run(&yaml).unwrap()), Vec::<String>::new());
}

#[test]
fn a_node_that_is_back_has_its_endpoints_again() {
    let yaml = manifests("n1 n3", "LoadBalancer Cluster", "a@n1 c@n3");
    for proxy in [Proxy::default(), Proxy::KubeProxy] {
        let mut scene = Scene::new("haproxy", &["5s node=n3=gone", "30s node=n3=back"]);
        (scene.proxy, scene.learn.node_grace) = (proxy, SECOND * 10);
        let run = scene.run(&yaml).unwrap();
        let by = |from: usize, to: usize| {
            run.seconds[from..to].iter().flat_map(|second| second.pods.get(&1)).map(|pod| pod.ok).sum::<u64>()
        };
        assert_eq!(run.pods[1], "c");
        assert_eq!((by(16, 30), harm(&run, 16, 60)), (0, (0, 0)), "{:?}", run.line);
        assert_half(by(31, 60), 2900);
    }
}

#[test]
fn nobody_asks_while_the_agent_is_down() {
    let yaml = manifests("n1 n3/excluded n4/excluded", "LoadBalancer Cluster", "c@n3 d@n4");
    let run = Scene::new("haproxy", &["4s crash=n1", "5s node=n3=gone"]).run(&yaml).unwrap();
    // It is back at 9 s, asks for 300 ms, and has written it after 100 ms.
    assert_eq!(noticed(&run), ["9400 n1: n3 left out"]);
    // Its packet path suspects the node by itself: the second SYN goes elsewhere.
    assert_eq!(run.total().lost, 0, "{:?}", run.why);
    assert_half(run.total().delayed, 440);
}

#[test]
fn a_node_that_goes_with_notice_loses_nothing() {
    let yaml = manifests("n1 n3", "LoadBalancer Cluster", "a@n1 c@n3");
    let mut scene = Scene::new("haproxy", &["5s node=n3=notice", "30s node=n3=gone"]);
    let run = scene.run(&yaml).unwrap();
    // Three checks, 2 s apart, say 503 at once.
    let [(at, mind)] = minds(&run).try_into().unwrap();
    assert!(mind == "n3 unhealthy" && (9.0..11.1).contains(&at), "{at} {mind}");
    assert_eq!((run.total(), noticed(&run)), (counts(6000, 0, 0), vec![]));
    // n1 leaves it out after 100 ms; only n3 itself still uses its pod.
    assert_eq!(run.seconds[12..].iter().filter(|second| second.pods.contains_key(&1)).count(), 0);

    scene.proxy = Proxy::KubeProxy;
    let run = scene.run(&yaml).unwrap();
    // Half of the traffic to n3 for the time of three checks and an answer, half of the rest to its
    // pod until the end.
    assert_eq!(harm(&run, 0, 30), (0, 0));
    assert_half(harm(&run, 40, 60).1, 2000);
}

#[test]
fn endpoints_of_nodes_that_leave_are_used_while_there_are_no_others() {
    let yaml = manifests("n1 n3/excluded n4/excluded", "LoadBalancer Cluster", "c@n3 d@n4");
    let run = Scene::new("haproxy", &["5s node=n3=notice", "10s node=n4=gone"]).run(&yaml).unwrap();
    // n4 is dead and n3 only leaves: what is left out first is what does not answer.
    assert_eq!(run.total().lost, 0, "{:?}", run.why);
    assert_eq!(harm(&run, 11, 60), (0, 0));
    assert_eq!(run.seconds[20].pods.keys().map(|pod| run.pods[*pod].as_str()).collect::<Vec<_>>(), ["c"]);
}

#[test]
fn kube_proxy_has_no_drain_and_reads_no_annotation() {
    let lost = |service: &str, proxy: Proxy| {
        let mut scene = Scene::new("haproxy", &["5s policy=Local"]);
        scene.proxy = proxy;
        let run = scene.run(&manifests("n1 n2", service, "a@n1")).unwrap();
        assert!(
            run.line.iter().all(|moment| !matches!(moment.what, What::Drains(_)))
                || proxy != Proxy::KubeProxy
        );
        run.total().lost
    };
    for service in ["LoadBalancer Cluster drain=60s", "LoadBalancer Cluster external-fallback=cluster"] {
        assert_eq!(lost(service, Proxy::default()), 0, "{service}");
        // n2 has no pod: half of the requests of some checks.
        assert!(lost(service, Proxy::KubeProxy) > 100, "{service}");
    }
}
