//! The switch from Cluster to Local on a node without an endpoint: its health port shows it at
//! once, and for a while the node still forwards new connections.

use std::time::{Duration, Instant};

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Policy, Service};
use traffic_policy_testing::pace::look_until;
use traffic_policy_testing::traffic::{Outcome, http};

const SOON: Duration = Duration::from_secs(10);

fn service(name: &str, policy: Policy, number: u16) -> Service {
    let service =
        Cluster::node_port(name, policy, 30080 + number).vip(format!("203.0.113.{number}").parse().unwrap());
    if policy == Policy::Local { service.health_port(32000 + number) } else { service }
}

/// Switches to Local, and returns once node-2 has written it: its health port is then open.
fn switch(cluster: &Cluster, service: &Service, number: u16) {
    cluster.manifests.service(service).unwrap();
    let to = cluster.at(2, Family::V4, 32000 + number);
    let ask = || http::get_from(cluster.lab.client().netns(), to, "/");
    let response = look_until("the health port of node-2", SOON, ask, Result::is_ok);
    assert_eq!(response.unwrap().status, 503);
}

fn silent(outcome: &Outcome) -> bool {
    *outcome == Outcome::Silent
}

#[test]
fn lasts_as_long_as_flag_and_annotation_say() {
    let cluster = Cluster::start(Lab::builder().pods(&[1, 0])).unwrap();
    let backends = cluster.backends();
    // The drain lasts 3 s by the flag, is off by the annotation, or is longer than this test by the
    // annotation.
    let variants = [("flag", 1, None), ("none", 2, Some("0")), ("long", 3, Some("1h"))];
    for (name, number, _) in variants {
        cluster.manifests.apply(&service(name, Policy::Cluster, number), &backends).unwrap();
    }
    let agents =
        Agent::start_all(&cluster.lab, |agent| agent.attach("xdp").flags(&["--drain", "3s"])).unwrap();
    for (name, number, drain) in variants {
        let port = 30080 + number;
        let targets = Family::BOTH.map(|family| cluster.at(2, family, port));
        for to in targets {
            cluster.answer(Protocol::Tcp, to).unwrap();
        }
        let mut local = service(name, Policy::Local, number);
        if let Some(drain) = drain {
            local = local.annotation("traffic-policy.io/drain", drain);
        }
        let start = Instant::now();
        switch(&cluster, &local, number);
        for to in targets {
            for protocol in Protocol::BOTH {
                let outcome = cluster.ask(protocol, to).unwrap();
                match name {
                    "none" => assert!(silent(&outcome), "{name} {to}: {outcome:?}"),
                    // On a slow machine the time may be over already.
                    "flag" if start.elapsed() > Duration::from_secs(3) => {}
                    _ => {
                        let answer = outcome.answer().unwrap();
                        assert_eq!(
                            answer.client.ip(),
                            cluster.lab.node(2).address(if to.is_ipv4() { Family::V4 } else { Family::V6 })
                        );
                    }
                }
            }
        }
        if name == "flag" {
            cluster.wait_for(Protocol::Tcp, targets[0], SOON, silent).unwrap();
            assert!(start.elapsed() > Duration::from_secs(3), "over too early");
        }
        // The node with the endpoint is not affected.
        let answer = cluster.answer(Protocol::Tcp, cluster.at(1, Family::V4, port)).unwrap();
        assert_eq!(answer.client.ip(), cluster.lab.client().address(Family::V4), "{name}");
    }
    assert!(agents[1].packets("xdp", "dropped-no-local-endpoint").unwrap() > 0);

    // A drain never begins because the last local endpoint leaves: a pod of another node would see
    // this node's address.
    cluster.manifests.endpoints(&service("long", Policy::Local, 3), &[]).unwrap();
    let to = cluster.at(1, Family::V4, 30083);
    cluster.wait_for(Protocol::Tcp, to, SOON, Outcome::is_refused_at_once).unwrap();
    // The drain ends when the policy returns.
    cluster.manifests.service(&service("flag", Policy::Cluster, 1)).unwrap();
    let answered = |outcome: &Outcome| matches!(outcome, Outcome::Answered(_));
    cluster.wait_for(Protocol::Tcp, cluster.at(2, Family::V4, 30081), SOON, answered).unwrap();
}
