//! Changes from one small cluster to the next, as lines.

use std::time::Duration;

use super::{
    super::{
        Answer, Judge, Overrides, Question,
        probe::{Asking, Heard as Answered, Http, Probed},
        tests::{balancer, cluster, manifests, web},
    },
    Heard, Snapshot,
};

fn snapshot(nodes: &str, service: &str, pods: &str) -> Snapshot {
    let cluster = cluster(&manifests(nodes, service, pods));
    let judge = Judge::new(&cluster, balancer("gke"), Overrides::default());
    let judgements: Vec<_> = judge.service(&web()).into_iter().collect();
    Snapshot::new(&judge, &judgements)
}

const LOCAL: &str = "LoadBalancer Local";
const CLUSTER: &str = "LoadBalancer Cluster";

/// Nodes, Service and pods before and after; and the expected lines.
type Case = ([&'static str; 3], [&'static str; 3], &'static [&'static str]);

const CASES: &[Case] = &[
    (["n1 n2", LOCAL, "a@n1 b@n2"], ["n1 n2", LOCAL, "a@n1 b@n2"], &[]),
    // The last pod of a node goes, and a request there would be dropped.
    (
        ["n1 n2", LOCAL, "a@n1 b@n2"],
        ["n1 n2", LOCAL, "a@n1"],
        &[
            "shop/web: n2: turns unhealthy: 200, 1 endpoint → 503; 1 → 0 pods; a request there: served → dropped; gke knows within 6 s",
        ],
    ),
    (
        ["n1 n2", LOCAL, "a@n1"],
        ["n1 n2", LOCAL, "a@n1 b@n2"],
        &[
            "shop/web: n2: turns healthy: 503 → 200, 1 endpoint; 0 → 1 pod; a request there: dropped → served; gke knows within 6 s",
        ],
    ),
    (
        ["n1 n2", LOCAL, "a@n1 b@n2 c@n2"],
        ["n1 n2", LOCAL, "a@n1 b@n2"],
        &[
            "shop/web: n2: stays healthy: 200, 2 endpoints → 200, 1 endpoint; 2 → 1 pod",
            "shop/web: uneven is over",
        ],
    ),
    // Nodes without a pod share a line.
    (
        ["n1 n2 n3", CLUSTER, "a@n1"],
        ["n1 n2 n3", LOCAL, "a@n1"],
        &[
            "shop/web: externalTrafficPolicy Cluster → Local",
            "shop/web: n1: stays healthy: 200 → 200, 1 endpoint",
            "shop/web: 2 nodes without a pod: turns unhealthy: 200 → 503; a request there: forwarded → dropped; gke knows within 6 s",
            "shop/web: healthy-without-pod is over",
        ],
    ),
    // A Node is added, is removed, and changes.
    (
        ["n1 n2", LOCAL, "a@n1 b@n2"],
        ["n1", LOCAL, "a@n1"],
        &["n2: the Node is gone", "shop/web: n2: is gone, healthy, 1 pod"],
    ),
    (
        ["n1", CLUSTER, "a@n1"],
        ["n1 n2", CLUSTER, "a@n1"],
        &[
            "n2: a new Node",
            "shop/web: n2: is there, healthy, 0 pods",
            "shop/web: warning healthy-without-pod: node n2 is healthy without a pod of shop/web and gets 50.0 % of its requests: \
             each is forwarded, and dies if that node goes",
        ],
    ),
    (
        ["n1 n2", CLUSTER, "a@n1"],
        ["n1 n2/leaving", CLUSTER, "a@n1"],
        &[
            "n2: said of the Node: nothing → leaving",
            "shop/web: n2: turns unhealthy: 200 → 503; gke knows within 24 s",
            "shop/web: healthy-without-pod is over",
        ],
    ),
];

#[test]
fn what_has_happened() {
    for (before, after, wanted) in CASES {
        let [old, new] = [before, after].map(|[nodes, service, pods]| snapshot(nodes, service, pods));
        assert_eq!(old.changes(&new), *wanted, "{before:?} → {after:?}");
    }
}

/// Warnings are told as errors are: at the beginning, when they begin, and when they are over.
#[test]
fn warnings_are_told() {
    let lines = |snapshot: &Snapshot| snapshot.beginning().split_off(1);
    let [uneven, even] = ["a@n1 b@n2 c@n2", "a@n1 b@n2"].map(|pods| snapshot("n1 n2", LOCAL, pods));
    let begins = lines(&uneven);
    assert!(begins.len() == 1 && begins[0].starts_with("shop/web: warning uneven: "), "{begins:?}");
    assert_eq!(lines(&even), [""; 0]);
    assert_eq!(even.changes(&uneven).split_off(1), begins);
    // Its sentence has numbers.
    let more = snapshot("n1 n2", LOCAL, "a@n1 b@n2 c@n2 d@n2");
    assert!(!uneven.changes(&more).concat().contains("uneven"), "{:?}", uneven.changes(&more));
}

#[test]
fn the_beginning_and_the_end_of_a_service() {
    let (with, without) = (snapshot("n1 n2", LOCAL, "a@n1"), snapshot("n1 n2", "ClusterIP", "a@n1"));
    assert_eq!(with.beginning(), ["shop/web: policy Local, 1 of 2 nodes healthy, 1 ready pod"]);
    assert_eq!(with.changes(&without), ["shop/web: is not reached from outside any more"]);
    assert_eq!(
        without.changes(&with),
        ["shop/web: is reached from outside: policy Local, 1 of 2 nodes healthy, 1 ready pod"]
    );
    // The beginning and the end of an error are reported.
    let nobody = snapshot("n1 n2", LOCAL, "");
    let lines = with.changes(&nobody);
    assert!(lines.iter().any(|line| line.starts_with("shop/web: error no-endpoint: ")), "{lines:?}");
    let lines = nobody.changes(&with);
    assert!(lines.iter().any(|line| line == "shop/web: no-endpoint is over"), "{lines:?}");
}

#[test]
fn many_nodes_share_a_line() {
    let names = |count: usize| (1..=count).map(|number| format!("n{number} ")).collect::<String>();
    let pods = |count: usize| (1..=count).map(|number| format!("p{number}@n{number} ")).collect::<String>();
    let old = snapshot(&names(12), LOCAL, &pods(12));
    let lines = old.changes(&snapshot(&names(12), LOCAL, &pods(1)));
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].starts_with("shop/web: 11 nodes (n10, n11, n12, …): turns unhealthy: "), "{lines:?}");
}

fn round(heard: &Answered) -> Probed {
    let asking = Asking {
        node: "n1".to_owned(),
        service: Some(web()),
        question: Question::ServiceHealth(32080),
        to: None,
        expected: Answer::Unavailable,
        kubelet_silent: false,
        decides: true,
    };
    Probed::new(vec![(asking, heard.clone(), Duration::ZERO)])
}

/// A difference seen once may be transient; one seen twice is reported, once; and so is its end.
#[test]
fn a_difference_is_told_when_it_lasts() {
    let mut heard = Heard::default();
    let body =
        br#"{"service":{"namespace":"shop","name":"web"},"localEndpoints":0,"serviceProxyHealthy":true}"#;
    let well = Answered::Http(Http::read(Question::ServiceHealth(32080), 503, Some(b"0"), body));
    assert_eq!((heard.round(&round(&well)), heard.doubts()), (vec![], false));
    assert_eq!((heard.round(&round(&Answered::Refused)), heard.doubts()), (vec![], true));
    assert_eq!((heard.round(&round(&well)), heard.doubts()), (vec![], false));
    heard.round(&round(&Answered::Refused));
    assert_eq!(
        heard.round(&round(&Answered::Refused)),
        ["n1: shop/web: GET :32080: refused, and the objects say 503 (nothing-listens)"]
    );
    assert!(heard.cause(&web(), "n1").is_some() && !heard.doubts());
    assert_eq!(heard.round(&round(&Answered::Refused)), [""; 0]);
    assert_eq!(heard.round(&round(&well)), ["n1: shop/web: GET :32080: 503, as the objects say"]);
    assert!(heard.cause(&web(), "n1").is_none());
}

/// An agent says itself that it is cut off, or which nodes it leaves out.
#[test]
fn silent_nodes_are_told() {
    let mut heard = Heard::default();
    let mut round = |status: u16, more: &str| {
        let body =
            format!(r#"{{"lastUpdated":"t","currentTime":"t","nodeEligible":true,"healthy":true{more}}}"#);
        let http = Http::read(Question::ProxyHealth, status, None, body.as_bytes());
        let asking = Asking {
            node: "n1".to_owned(),
            service: None,
            question: Question::ProxyHealth,
            to: None,
            expected: Answer::Ok(None),
            kubelet_silent: false,
            decides: true,
        };
        let lines = heard.round(&Probed::new(vec![(asking, Answered::Http(http), Duration::ZERO)]));
        (lines, heard.answers(&web(), "n1"), heard.answers(&web(), "n3"))
    };
    let well = || "as told".to_owned();
    assert_eq!(round(200, ""), (vec![], well(), well()));
    let begins = "n1: leaves out the endpoints of n3: no answer from there".to_owned();
    let left_out = (vec![begins], well(), "left out by 1".to_owned());
    assert_eq!(round(200, r#","cutOff":false,"leftOut":["n3"]"#), left_out);
    let ends = "n1: does not leave out n3 any more".to_owned();
    let cut_off = r#","cutOff":true,"leftOut":[]"#;
    assert_eq!(round(503, cut_off).0, [ends]);
    let (lines, row, _) = round(503, cut_off);
    assert_eq!(lines, ["n1: GET :10256/healthz: 503, cutOff true, and the objects say 200 (cut-off)"]);
    assert_eq!(row, "cut-off");
    let back = ["n1: GET :10256/healthz: 200, as the objects say"];
    assert_eq!(round(200, "").0, back);
    let leaving = r#","leaving":{"reason":"gce: preempted"}"#;
    assert!(round(503, leaving).0.is_empty(), "a second answer confirms it");
    let (lines, row, _) = round(503, leaving);
    assert_eq!(lines, ["n1: GET :10256/healthz: 503, leaving, and the objects say 200 (leaving)"]);
    assert_eq!(row, "leaving");
    assert_eq!(round(200, "").0, back);
}
