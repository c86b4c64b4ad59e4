//! Streams that carry data both ways at once, like HTTP/2, replication and tunnels: real stacks,
//! many megabytes in flight, also with loss and reordering. Each remains tracked while it lives,
//! and its end is noticed.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::impaired::{ImpairedWay, Impairment};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Backend, Policy};
use traffic_policy_testing::pace::{scaled, until};
use traffic_policy_testing::rows;
use traffic_policy_testing::traffic::Answer;
use traffic_policy_testing::traffic::transfer::burst as exchange;

const REMOTE: u16 = 30080;
const LOCAL: u16 = 30081;
const CONNECTIONS: usize = 8;
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes of each connection in each direction; fewer on a path that loses packets.
const BYTES: u64 = 32_000_000;
const BYTES_WITH_LOSS: u64 = 4_000_000;
/// The number of bursts of data, each followed by a request.
const BURSTS: usize = 3;

fn flows(agent: &Agent, to: SocketAddr) -> Vec<Value> {
    let all = agent.json(&["flows"]).unwrap();
    let to = to.to_string();
    all.as_array().unwrap().iter().filter(|flow| flow["frontend"] == *to).cloned().collect()
}

/// A connection that sends a burst both ways, sends a request, repeats this, and is closed.
fn bursts(cluster: &Cluster, agent: &Agent, to: SocketAddr, bytes: u64) {
    let stream = cluster.lab.client().netns().run(|| TcpStream::connect(to)).unwrap();
    stream.set_read_timeout(Some(scaled(PATIENCE))).unwrap();
    // The sender stops, too, when nothing reads any more.
    stream.set_write_timeout(Some(scaled(PATIENCE))).unwrap();
    let client = stream.local_addr().unwrap().to_string();
    let mut stream = BufReader::new(stream);
    for burst in 0..BURSTS {
        exchange(&mut stream, bytes / BURSTS as u64 / 8 * 8).unwrap();
        let asked = Instant::now();
        stream.get_mut().write_all(b"still there\n").unwrap();
        let mut line = String::new();
        stream.read_line(&mut line).unwrap();
        Answer::parse(&line).unwrap();
        let flow = flows(agent, to).into_iter().find(|flow| flow["client"] == *client);
        let flow = flow.unwrap_or_else(|| panic!("{client} is not known after burst {burst}"));
        assert_eq!(flow["state"], "assured", "burst {burst}: {flow}");
        // The request and its answer are packets of the flow.
        let idle = flow["idle_seconds"].as_f64().unwrap();
        assert!(idle <= asked.elapsed().as_secs_f64() + 1.0, "burst {burst} has not renewed it: {flow}");
    }
}

fn ended(flow: &Value) -> bool {
    matches!(flow["state"].as_str().unwrap(), "finished" | "reset")
}

fn both_ways(attach: &str, wire_offloads: bool, impairment: Option<Impairment>) {
    let cluster = Cluster::start(Lab::builder().pods(&[1, 1]).wire_offloads(wire_offloads)).unwrap();
    for (name, port, number) in [("remote", REMOTE, 2), ("local", LOCAL, 1)] {
        let backend = Backend::of(cluster.lab.node(number).pod(1));
        cluster.manifests.apply(&Cluster::node_port(name, Policy::Cluster, port), &[backend]).unwrap();
    }
    // The time-out is as long as the test, so that an end can be observed.
    let agents = Agent::start_first(1, &cluster.lab, |agent| {
        agent.attach(attach).flags(&["--idle-finished", "10m", "--idle-reset", "10m"])
    })
    .unwrap();
    let way = impairment.map(|impairment| ImpairedWay::start(&cluster.lab, impairment).unwrap());
    let bytes = if impairment.is_some() { BYTES_WITH_LOSS } else { BYTES };
    for (family, port) in
        [(Family::V4, REMOTE), (Family::V6, REMOTE), (Family::V4, LOCAL), (Family::V6, LOCAL)]
    {
        let to = cluster.at(1, family, port);
        cluster.answer(Protocol::Tcp, to).unwrap();
        thread::scope(|scope| {
            for _ in 0..CONNECTIONS {
                scope.spawn(|| bursts(&cluster, &agents[0], to, bytes));
            }
        });
        until(&format!("the end of every connection with {to} by {attach}"), PATIENCE, || {
            flows(&agents[0], to).iter().all(ended)
        });
        // The connection of the first request is counted, too.
        assert_eq!(flows(&agents[0], to).len(), CONNECTIONS + 1, "{attach} {to}");
    }
    if let Some(way) = way {
        let carried = way.carried();
        println!("{attach}: {carried:?}");
        assert!(carried.lost.load(Ordering::Relaxed) > 100, "{carried:?}");
        assert!(carried.reordered.load(Ordering::Relaxed) > 100, "{carried:?}");
    }
}

/// One packet in 200 is lost, one in 50 is late.
const POOR: Impairment =
    Impairment { delay: Duration::from_millis(5), lose: 200, reorder: 50, late: Duration::from_millis(4) };

rows! {
    fn are_followed_by_xdp() = both_ways("xdp", false, None);
    fn are_followed_by_tc_with_offloads() = both_ways("tc", true, None);
    fn are_followed_by_xdp_with_loss() = both_ways("xdp", false, Some(POOR));
    fn are_followed_by_tc_with_loss() = both_ways("tc", true, Some(POOR));
}
