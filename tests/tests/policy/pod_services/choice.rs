//! The endpoint that a pod gets: policies, affinity, and the addresses by which a Service is
//! reached.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpStream;

use serde_json::json;
use traffic_policy_testing::pace::scaled;

use super::*;

fn vip(family: Family) -> IpAddr {
    match family {
        Family::V4 => [203, 0, 113, 9].into(),
        Family::V6 => [0x2001, 0xdb8, 0xf, 0, 0, 0, 0, 9].into(),
    }
}

/// Returns the pods of the second node.
fn elsewhere(cluster: &Cluster) -> Vec<Backend> {
    (1..=2).map(|pod| Backend::of(cluster.lab.node(2).pod(pod))).collect()
}

#[test]
fn policies_affinity_and_addresses() {
    let scene = Scene::start(None, ON, |cluster| {
        let all = cluster.backends();
        let apply = |service: Service, backends: &[Backend]| {
            cluster.manifests.apply(&service, backends).unwrap();
        };
        apply(service(10).internal_policy(Policy::Local), &all);
        let sticky = service(11)
            .spec("sessionAffinity", json!("ClientIP"))
            .spec("sessionAffinityConfig", json!({"clientIP": {"timeoutSeconds": 600}}));
        apply(sticky, &all);
        let announced = Cluster::node_port("web", Policy::Local, NODE_PORT);
        apply(
            Family::BOTH.iter().fold(announced, |service, family| service.vip(vip(*family))),
            &elsewhere(cluster),
        );
    })
    .unwrap();
    let client = scene.client();
    for family in Family::BOTH {
        for protocol in Protocol::BOTH {
            let what = format!("{family:?} {protocol:?}");
            // internalTrafficPolicy Local: of four endpoints, the two of this node.
            for _ in 0..12 {
                assert_eq!(scene.answer(protocol, at(10, family)).node, "node-1", "{what}");
            }
            // By chance, 13 requests all get one of 4 endpoints once in 10^7 runs.
            let first = scene.answer(protocol, at(11, family)).pod;
            for _ in 0..12 {
                assert_eq!(scene.answer(protocol, at(11, family)).pod, first, "{what}");
            }
            // externalTrafficPolicy Local without an endpoint here does not apply to pods.
            for to in [scene.cluster.at(1, family, NODE_PORT), SocketAddr::new(vip(family), PORT)] {
                let answer = scene.answer(protocol, to);
                assert_eq!(answer.node, "node-2", "{what} {to}");
                assert_eq!(answer.client.ip(), client.address(family), "{what} {to}");
            }
        }
    }
}

/// Connections go on without an agent, and by the next one.
#[test]
fn a_connection_outlives_the_agent() {
    let mut scene = Scene::start(None, ON, |cluster| {
        cluster.manifests.apply(&service(10), &elsewhere(cluster)).unwrap();
    })
    .unwrap();
    let limit = scaled(Duration::from_secs(5));
    let connect = || TcpStream::connect_timeout(&at(10, Family::V4), limit);
    let stream = scene.client().netns().run(connect).unwrap();
    stream.set_read_timeout(Some(limit)).unwrap();
    let mut stream = BufReader::new(stream);
    let mut ask = || {
        stream.get_mut().write_all(b"there?\n").unwrap();
        let mut line = String::new();
        stream.read_line(&mut line).unwrap();
        Answer::parse(&line).unwrap().pod
    };
    let pod = ask();
    scene.cluster.kill_agents().unwrap();
    assert_eq!(ask(), pod);
    scene.answer(Protocol::Tcp, at(10, Family::V4));
    scene.cluster.start_agents_again(Duration::from_secs(20)).unwrap();
    assert_eq!(ask(), pod);
}
