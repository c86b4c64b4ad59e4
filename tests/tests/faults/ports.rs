//! A health-check node port that is in use by another process.

use std::net::TcpListener;
use std::time::Duration;

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Policy, Service};
use traffic_policy_testing::pace::until;
use traffic_policy_testing::traffic::http;

const SOON: Duration = Duration::from_secs(20);

fn balanced(name: &str, number: u16) -> Service {
    let vip = format!("203.0.113.{number}").parse().unwrap();
    Cluster::node_port(name, Policy::Local, 30080 + number).vip(vip).health_port(32000 + number)
}

#[test]
fn a_taken_health_check_port_is_tried_again() {
    let cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
    for (name, number) in [("one", 1), ("two", 2)] {
        cluster.manifests.apply(&balanced(name, number), &cluster.backends()).unwrap();
    }
    let node = cluster.lab.node(1);
    let taken = node.netns().run(|| TcpListener::bind("0.0.0.0:32001").unwrap());
    let agents = Agent::start_all(&cluster.lab, |agent| agent.attach("xdp")).unwrap();
    let texts = ["failed to start healthcheck", "default/one", "32001", "in use"];
    agents[0].wait_said(&texts, SOON).unwrap();
    let status = |number: u16| {
        let to = cluster.at(1, Family::V4, 32000 + number);
        http::get_from(cluster.lab.client().netns(), to, "/").ok().map(|response| response.status)
    };
    // The health port of the other Service answers, and traffic of both is forwarded.
    assert_eq!(status(2), Some(200));
    for number in [1, 2] {
        cluster.answer(Protocol::Tcp, cluster.at(1, Family::V4, 30080 + number)).unwrap();
    }
    drop(taken);
    until("the port to be opened, since it is free", SOON, || status(1) == Some(200));
    // Logged once, not at each attempt.
    let log = agents[0].log();
    assert_eq!(log.lines().filter(|line| line.contains("failed to start healthcheck")).count(), 1, "{log}");
}
