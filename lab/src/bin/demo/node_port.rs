//! A Service of type NodePort behind a load balancer: asked on its traffic port, and on the health port of an annotation.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use traffic_policy_testing::cluster::TARGET;
use traffic_policy_testing::lab::{Family, Node};
use traffic_policy_testing::object::{Policy, Port, Service};
use traffic_policy_testing::pace::scaled;
use traffic_policy_testing::traffic::balancer::Timing;
use traffic_policy_testing::traffic::{Balancer, NewConnections, Target, http};

use crate::cluster::{DemoCluster, RATE, section};
use crate::foretell;

const TRAFFIC_PORT: u16 = 30090;
const HEALTH_PORT: u16 = 31999;
const ANNOTATION: &str = "traffic-policy.io/health-check-node-port";
/// Between checks of the load balancer, and its time-out for an answer.
const INTERVAL: Duration = Duration::from_millis(500);

pub fn show(cluster: &DemoCluster) -> Result<()> {
    section(
        "6. THE NODE PORT WITHOUT A HEALTH PORT",
        "A Service of type NodePort has no health port, so a load balancer probes its traffic port; under Local a node without a\n\
         pod lets it time out. An annotation gives it one: 503 at once, and already while the last pod of a node terminates and\n\
         still serves. Here the pod of node-1 terminates for 2 seconds, then it is gone. 2 checks a second, 3 failures.",
    );
    let (mut foretold, mut rows) = (Vec::new(), Vec::new());
    for (port, label) in [
        (TRAFFIC_PORT, format!("the traffic port, :{TRAFFIC_PORT}")),
        (HEALTH_PORT, format!("{}, :{HEALTH_PORT}", "health-check-node-port")),
    ] {
        let service = service(port);
        cluster.base.manifests.apply(&service, &cluster.base.backends())?;
        foretold.push(foretell::node(cluster, "plain", "node-3")?);
        let said = answer_of_node_3(cluster, port)?;
        let (requests, ok, lost) = terminate(cluster, &service, port)?;
        rows.push(format!("  {label:<36} {said:<22} {requests:>8} {ok:>6} {lost:>6}"));
    }
    for (line, asked) in foretold.iter().zip(["without", "with"]) {
        println!("  lb: {asked} the annotation: {line}");
    }
    println!("\n  {:<36} {:<22} {:>8} {:>6} {:>6}", "ASKED", "NODE-3 SAYS", "REQUESTS", "OK", "LOST");
    rows.iter().for_each(|row| println!("{row}"));
    cluster.base.manifests.delete(&service(TRAFFIC_PORT))
}

/// With the annotation, if that is the port to be asked.
fn service(asked: u16) -> Service {
    let service =
        Service::new("plain").policy(Policy::Local).port(Port::tcp(80, TARGET).node_port(TRAFFIC_PORT));
    if asked == HEALTH_PORT { service.annotation(ANNOTATION, &HEALTH_PORT.to_string()) } else { service }
}

fn at(node: &Node, port: u16) -> SocketAddr {
    SocketAddr::new(node.address(Family::V4), port)
}

/// The answer of the node without a pod to a check, once the agents of it and of a node with pods know the Service.
fn answer_of_node_3(cluster: &DemoCluster, port: u16) -> Result<String> {
    let client = cluster.base.lab.client().netns();
    let ask = |node: &Node| client.block_on(async || http::get(at(node, port), "/", INTERVAL).await);
    let start = Instant::now();
    while !ask(cluster.base.lab.node(2)).is_ok_and(|response| response.status == 200) {
        ensure!(start.elapsed() < scaled(Duration::from_secs(10)), "node-2 does not follow the Service");
        // Between two looks of a poll that has an end.
        std::thread::sleep(Duration::from_millis(20));
    }
    loop {
        let asked = Instant::now();
        let answer = ask(cluster.base.lab.node(3));
        let took = asked.elapsed();
        match answer {
            Ok(response) => return Ok(format!("{} after {} ms", response.status, took.as_millis())),
            Err(_) if took >= INTERVAL => return Ok(format!("nothing for {} ms", took.as_millis())),
            // Its agent has not come to the Service yet: the kernel refuses.
            Err(_) => {}
        }
        ensure!(start.elapsed() < scaled(Duration::from_secs(10)), "node-3 does not follow the Service");
        // Between two looks of a poll that has an end.
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Requests while the only pod of node-1 terminates and goes: all, answered, lost.
fn terminate(cluster: &DemoCluster, service: &Service, port: u16) -> Result<(u64, u64, u64)> {
    let lab = &cluster.base.lab;
    let targets = lab.nodes().iter().map(|node| Target {
        node: node.name.clone(),
        traffic: at(node, TRAFFIC_PORT),
        health: at(node, port),
        path: "/".to_owned(),
    });
    let timing = Timing { interval: INTERVAL, failures: 3 };
    let balancer = Balancer::start(lab.client().netns(), targets.collect(), timing);
    ensure!(
        balancer.wait_for(&["node-1", "node-2"], Duration::from_secs(5)),
        "the load balancer sees {:?}",
        balancer.healthy()
    );
    let chooser = balancer.chooser();
    let requests = NewConnections::start(lab.client().netns(), RATE, move |number| chooser.choose(number));
    let mut backends = cluster.base.backends();
    let first = backends.remove(0);
    let leaving: Vec<_> = std::iter::once(first.terminating()).chain(backends.clone()).collect();
    cluster.base.manifests.endpoints(service, &leaving)?;
    // The pod goes on serving for as long as the scene's text says.
    std::thread::sleep(Duration::from_secs(2));
    cluster.base.manifests.endpoints(service, &backends)?;
    // Longer than the load balancer takes for three failed checks, each up to its time-out.
    std::thread::sleep(Duration::from_millis(2500));
    let report = requests.finish();
    Ok((report.ok + report.failed, report.ok, report.failed))
}
