//! Network policies as plugins write them into a node's firewall: one that comes while a client has
//! connections to a pod forbids it new ones, and leaves those that exist.

use std::sync::atomic::{AtomicU16, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::Family;
use traffic_policy_testing::matrix::LOCAL;
use traffic_policy_testing::network_policy::{self, Rules};
use traffic_policy_testing::traffic::{Conversation, Outcome};

use crate::testbed::Testbed;

/// The right results of one way to write rules, if all are right.
pub const ALL: usize = 12;
/// The requests on a connection that exists while the policy forbids new ones.
pub const REQUESTS: usize = 50;

/// The right results among [`ALL`], by nftables and by iptables. For two families and two
/// protocols: a new connection is not answered while the policy is there, one from before is, and a
/// new one is once the policy is gone.
pub fn right(testbed: &Testbed) -> [usize; 2] {
    network_policy::track(testbed.cluster.lab.node(1)).unwrap();
    // Below those that the kernel chooses: a flow from a port that another one had lately would
    // still be established for conntrack, so the policy would rightly let it pass.
    let ports = AtomicU16::new(20_000);
    Rules::BOTH.map(|rules| right_by(&testbed.cluster, rules, &ports))
}

fn right_by(cluster: &Cluster, rules: Rules, ports: &AtomicU16) -> usize {
    let node = cluster.lab.node(1);
    let (pod, client) = (node.pod(1), cluster.lab.client());
    let asked: Vec<_> =
        Family::BOTH.iter().flat_map(|family| Protocol::BOTH.map(|it| (*family, it))).collect();
    let at = |family| cluster.at(1, family, LOCAL);
    let mut existing: Vec<_> = asked
        .iter()
        .map(|(family, protocol)| Conversation::open(client.netns(), *protocol, at(*family)).unwrap())
        .collect();
    // A flow of datagrams is a stream once it has lasted for two seconds: one that is delivered
    // directly then is what is tested.
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_millis(2500) {
        for connection in &mut existing {
            assert!(connection.is_answered(), "no answer before the policy");
        }
        // Its age is what counts, not the number of datagrams.
        thread::sleep(Duration::from_millis(50));
    }
    let new = |wanted: fn(&Outcome) -> bool| {
        let ask = |(family, protocol): &(Family, Protocol)| {
            let probe = protocol.probe(at(*family)).source_port(ports.fetch_add(1, Ordering::Relaxed));
            let outcome = probe.from(client.netns()).unwrap();
            let right = wanted(&outcome);
            if !right {
                println!("{rules:?} {family:?} {protocol:?}: {outcome:?}");
            }
            usize::from(right)
        };
        // At once: each of those that are not answered takes 0.8 s.
        thread::scope(|scope| {
            let asked: Vec<_> = asked.iter().map(|one| scope.spawn(move || ask(one))).collect();
            asked.into_iter().map(|one| one.join().unwrap()).sum::<usize>()
        })
    };
    rules.forbid(node, client.addresses, pod.addresses).unwrap();
    let mut right = new(|outcome| *outcome == Outcome::Silent);
    for (connection, what) in existing.iter_mut().zip(&asked) {
        let goes_on = (0..REQUESTS).all(|_| connection.is_answered());
        if !goes_on {
            println!("{rules:?} {what:?}: the connection from before does not go on");
        }
        right += usize::from(goes_on);
    }
    rules.allow(node, pod.addresses).unwrap();
    right + new(|outcome| matches!(outcome, Outcome::Answered(_)))
}
