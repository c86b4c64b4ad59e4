//! Distant clients open connections in a flood of forged SYNs: each SYN takes a place in the queue
//! of unassured flows, and a client's has to last until its third packet has come, a round trip
//! later.

use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use serde_json::Value;
use traffic_policy_dataplane::MapSizes;
use traffic_policy_testing::cluster::{Cluster, TARGET};
use traffic_policy_testing::flood::{STRANGERS, Variation, Wire, stranger};
use traffic_policy_testing::impaired::{ImpairedWay, Impairment};
use traffic_policy_testing::lab::{Addresses, Family, plan};
use traffic_policy_testing::object::{Backend, Port, Service};
use traffic_policy_testing::packet::{Packet, flag};

use crate::cluster::{self, NODE_PORT};
use crate::crowd::Conversation;
use crate::{meters, quiet};

/// The delay of each direction: a round trip is longer than a queue of 8,192 places lasts at
/// [`RATE`], so that a short queue shows.
const DELAY: Duration = Duration::from_millis(100);
const CONNECTIONS: usize = 1_000;
/// The number of clients, which connect one after the other.
const CLIENTS: usize = 50;

/// SYNs per second, in bursts that leave the clients' packets room in queues; a slow machine sends
/// fewer. A flow then has 1.3 s to be assured, so that a segment which a busy machine loses is
/// retransmitted in time. (At 100,000 it has 0.65 s.)
const RATE: u32 = 50_000;
const BURST: u32 = 500;
const BURST_EVERY: Duration = Duration::from_micros(1_000_000 * BURST as u64 / RATE as u64);
/// The places of the queue of unassured IPv4 TCP flows.
const PLACES: u32 = MapSizes::DEFAULT.unassured;

/// The port of a Service whose endpoints are unused addresses: several, as only the source ports of
/// one node are available towards each.
const NOBODY_PORT: u16 = 30_082;
const NOBODIES: u8 = 8;

fn distant_clients(attach: &str) {
    let _alone = quiet::alone();
    let mut cluster = cluster::without_agents(&[1, 1], attach);
    let far = cluster.lab.node(2).pod(1);
    cluster.manifests.apply(&cluster::web(), &[Backend::of(far)]).unwrap();
    let nobody = Service::new("nobody").port(Port::tcp(80, TARGET).node_port(NOBODY_PORT));
    let nobodies = (0..NOBODIES).map(|number| {
        let v6 = [0x2001, 0xdb8, 0xf100, 1, 0, 0, 0, 1 + u16::from(number)];
        Backend::at(&Addresses::new([11, 255, 255, number], v6))
    });
    cluster.manifests.apply(&nobody, &nobodies.collect::<Vec<_>>()).unwrap();
    // Packets to the forged sources end at the client, which does not answer them, and do not take
    // the long path.
    let client = cluster.lab.client();
    let quietly = cluster.lab.router().netlink(async |net| {
        let [(network, prefix), _] = STRANGERS;
        net.route(network, prefix, client.address(Family::V4)).await
    });
    quietly.unwrap();
    cluster.launch(|agent| agent.attach(attach)).unwrap();
    let _way =
        ImpairedWay::start(&cluster.lab, Impairment { delay: DELAY, ..Impairment::default() }).unwrap();
    let (router, node) = (cluster.lab.router(), cluster.lab.node(1));
    let wire = Wire::open(router, ("br0", &node.name), plan::gateway(0), node.addresses).unwrap();

    // The flood fills the queue before the first client comes, and lasts until the last one has
    // gone.
    let (filled, done) = (AtomicBool::new(false), AtomicBool::new(false));
    let target = cluster.at(1, Family::V4, NODE_PORT);
    let (failures, took, sent, flooded) = scope(|scope| {
        let flood = scope.spawn(|| flood(&wire, target, &filled, &done));
        while !filled.load(Ordering::Relaxed) && !flood.is_finished() {
            // Clients begin when the queue has wrapped around once.
            sleep(Duration::from_millis(10));
        }
        let started = Instant::now();
        let failures = connect(&cluster, target);
        let took = started.elapsed();
        done.store(true, Ordering::Relaxed);
        let (sent, flooded) = flood.join().unwrap();
        (failures, took, sent, flooded)
    });
    println!(
        "{attach}: {} of {CONNECTIONS} connections failed in {took:?} under {:.0} SYNs a second",
        failures.len(),
        sent as f64 / flooded.as_secs_f64()
    );
    let status = cluster.agents[0].json(&["status"]).unwrap();
    let of_outcome = |row: &&Value| row["outcome"] == "forwarded" && row["hook"] != "socket";
    let rows = status["counters"].as_array().unwrap().iter().filter(of_outcome);
    let forwarded: u64 = rows.map(|row| row["packets"].as_u64().unwrap()).sum();
    // Most have created flows, which pushed each other out.
    assert!(forwarded > u64::from(PLACES + PLACES / 4), "only {forwarded} packets were forwarded");
    // Those of the nodes answer endpoints that answer forged SYNs; a client hears of none.
    let resets = meters::resets(&cluster.lab);
    assert!(
        failures.is_empty(),
        "{attach}: {} failed: {:?}; resets by the kernel of: {resets:?}",
        failures.len(),
        &failures[..failures.len().min(5)]
    );
}

/// Sends forged SYNs until all clients are done; returns their number and the duration.
fn flood(wire: &Wire, target: SocketAddr, filled: &AtomicBool, done: &AtomicBool) -> (u64, Duration) {
    let node = (target.ip(), 0);
    let started = Instant::now();
    let (mut number, mut sent) = (0_u32, 0);
    while !done.load(Ordering::Relaxed) {
        let burst = Instant::now();
        let copies = (number..number + BURST).map(|number| Variation {
            source: (stranger(Family::V4, number), 1024 + (number & 0x7fff) as u16),
            // One in a hundred goes to the clients' endpoint, which answers: more would only cost
            // this machine time.
            destination_port: if number % 100 == 0 { NODE_PORT } else { NOBODY_PORT },
            sequence: number.wrapping_mul(0x9e37_79b9),
        });
        sent += wire.flood(Packet::tcp(node, node, flag::SYN), copies).unwrap();
        number += BURST;
        filled.store(number > PLACES + PLACES / 2, Ordering::Relaxed);
        let took = burst.elapsed();
        // If this machine stood still, so did the clients' packets: the flood is slower for a while
        // then.
        let stood_still = took > 4 * BURST_EVERY && filled.load(Ordering::Relaxed);
        sleep(if stood_still { 8 * took } else { BURST_EVERY.saturating_sub(took) });
    }
    (sent, started.elapsed())
}

/// Opens all connections, each with one request. Returns those that failed.
fn connect(cluster: &Cluster, target: SocketAddr) -> Vec<String> {
    let (next, failures) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let client = cluster.lab.client().netns();
    scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(|| {
                client.run(|| {
                    while next.fetch_add(1, Ordering::Relaxed) < CONNECTIONS {
                        if let Err(error) = Conversation::open(target) {
                            failures.lock().unwrap().push(format!("{error:#}"));
                        }
                    }
                });
            });
        }
    });
    failures.into_inner().unwrap()
}

#[test]
fn xdp() {
    distant_clients("xdp");
}

#[test]
fn tc() {
    distant_clients("tc");
}
