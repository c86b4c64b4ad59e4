//! A node that is itself cut off from all others, while clients still reach it: it leaves out
//! nobody, and says 503 to load balancers until somebody answers.

use std::net::SocketAddr;
use std::time::Duration;

use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Policy, Port, Service};
use traffic_policy_testing::pace::until;
use traffic_policy_testing::traffic::http;

use crate::watched::Watched;

const HEALTHZ: u16 = 10_256;
/// The healthCheckNodePort of a Service with policy Local and a pod on the first node.
const HEALTH_PORT: u16 = 32_090;
const LIMIT: Duration = Duration::from_secs(20);

/// The client is a neighbour of the nodes: it reaches the first one, whatever becomes of the
/// router.
fn watched() -> Watched {
    let watched = Watched::start_in(Lab::builder().client_on_switch());
    let local = Service::new("local")
        .policy(Policy::Local)
        .vip([203, 0, 113, 90].into())
        .port(Port::tcp(80, 8080).node_port(30_090))
        .health_port(HEALTH_PORT);
    watched.cluster.manifests.apply(&local, &watched.cluster.backends()).unwrap();
    until("the health port", LIMIT, || status(&watched, HEALTH_PORT, "/") == Some(200));
    watched
}

/// The status that a load balancer gets from the first node.
fn status(watched: &Watched, port: u16, path: &str) -> Option<u16> {
    let lab = &watched.cluster.lab;
    let at = SocketAddr::new(lab.node(1).address(Family::V4), port);
    http::get_from(lab.client().netns(), at, path).ok().map(|response| response.status)
}

fn statuses(watched: &Watched) -> [Option<u16>; 2] {
    [status(watched, HEALTHZ, "/healthz"), status(watched, HEALTH_PORT, "/")]
}

fn said(watched: &Watched) -> String {
    String::from_utf8_lossy(&watched.agent.command(&["status"]).unwrap().stdout).into_owned()
}

/// `drops`: as of [`Watched::on_switch`].
fn cut_off(drops: &[(&str, &str)]) {
    let watched = watched();
    let report = watched.connect(1);
    assert!(report.is_clean() && report.by_pod.len() == 3, "{report}");
    assert_eq!((statuses(&watched), said(&watched).contains("CUT OFF")), ([Some(200); 2], false));

    watched.on_switch(drops);
    until("503 on both ports", LIMIT, || {
        // Without connections nobody would be missed.
        watched.connect(1);
        statuses(&watched) == [Some(503); 2]
    });
    // It stays so, and nobody is left out meanwhile: the node's own pod goes on serving clients.
    let report = watched.connect(3);
    let own = &watched.cluster.lab.node(1).pod(1).name;
    assert!(report.by_pod.get(own).is_some_and(|answers| *answers > 20), "{report}");
    assert_eq!((statuses(&watched), watched.left_out()), ([Some(503); 2], vec![]));
    assert!(watched.suspicions("dead") < 0.5, "{}", watched.agent.log());
    let status = said(&watched);
    assert!(status.contains("CUT OFF: no other node and no gateway answers"), "{status}");
    assert_eq!(watched.agent.livez().unwrap().status, 200, "a restart would mend nothing");

    watched.on_switch(&[]);
    until("200 on both ports", LIMIT, || statuses(&watched) == [Some(200); 2]);
    let status = said(&watched);
    assert!(!status.contains("CUT OFF"), "{status}");
    until("connections to all pods", LIMIT, || {
        let report = watched.connect(1);
        report.is_clean() && report.by_pod.len() == 3
    });
    assert!(watched.suspicions("dead") < 0.5, "{}", watched.agent.log());

    // The control: where one node alone is silent, that one is left out, and the others are used.
    watched.on_switch(&[("forward", r#"iifname "node-1" oifname "node-3""#)]);
    until("the silent node to be left out", LIMIT, || {
        watched.connect(1);
        watched.left_out() == [watched.far().name.clone()]
    });
    assert_eq!(statuses(&watched), [Some(200); 2]);
    let status = said(&watched);
    assert!(!status.contains("CUT OFF") && status.contains("left out"), "{status}");
}

#[test]
fn what_it_sends_to_the_others_is_lost() {
    cut_off(&[
        ("forward", r#"iifname "node-1" oifname { "node-2", "node-3" }"#),
        ("input", r#"iifname "node-1""#),
    ]);
}

#[test]
fn what_the_others_send_to_it_is_lost() {
    cut_off(&[
        ("forward", r#"iifname { "node-2", "node-3" } oifname "node-1""#),
        ("output", r#"oifname "node-1""#),
    ]);
}
