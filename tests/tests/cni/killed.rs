//! An agent that is killed under load and restarted.

use std::thread::sleep;
use std::time::Duration;

use traffic_policy_testing::cluster::Cluster;
use traffic_policy_testing::lab::Family;
use traffic_policy_testing::matrix::CLUSTER;
use traffic_policy_testing::pace::{pace, scaled};
use traffic_policy_testing::state::State;
use traffic_policy_testing::traffic::{Datagrams, HeldConnections, NewConnections, datagrams};

use crate::testbed::Testbed;

/// The rate of a meter, which a fast machine handles with ease. An emulated one, whose processors
/// verify the new agent's programs for minutes meanwhile, would lose packets at that rate in its
/// own queues.
fn rate(per_second: u32) -> u32 {
    (f64::from(per_second) / pace()).ceil().max(5.0) as u32
}

/// Describes the losses; returns `None` if nothing was lost. A retransmitted segment does not
/// count: on a busy machine a timer may cause it.
pub fn lost(testbed: &mut Testbed) -> Option<String> {
    let cluster = &mut testbed.cluster;
    let targets = Family::BOTH.map(|family| cluster.at(1, family, CLUSTER));
    let client = cluster.lab.client().netns().clone();
    let state = |cluster: &Cluster| State::read(&cluster.lab.namespaces(), &cluster.agents[0]);
    let before = state(cluster);
    let held = HeldConnections::start(&client, &targets, 10, scaled(Duration::from_millis(20))).unwrap();
    let datagrams = targets.map(|to| Datagrams::start(&client, to, 10, rate(200), &cluster.ledger).unwrap());
    let new = NewConnections::start(&client, rate(50), move |number| {
        targets.get(number as usize % targets.len()).copied()
    });
    cluster.agents[0].kill().unwrap();
    // The programs alone serve for a while.
    sleep(Duration::from_millis(500));
    cluster.agents[0].start_again().unwrap();
    cluster.agents[0].wait_ready(Duration::from_secs(30)).unwrap();
    let (held, new) = (held.finish(), new.finish());
    let reports = datagrams.map(|meter| meter.finish().unwrap());
    let all_answered = held.requests > 0 && held.broken.is_empty() && new.ok > 0 && new.failed == 0;
    let words = format!("{held}\n{new}\n{}\n{}", reports[0], reports[1]);
    println!("{words}");
    let is_lost = !all_answered || !reports.iter().all(datagrams::Report::is_clean);
    is_lost.then(|| format!("{words}\n{}", before.until(&state(cluster))))
}
