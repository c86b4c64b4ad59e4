//! `--notice logind`, with a system bus of its own on which logind speaks.

use std::fs;
use std::time::Duration;

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::api_server::Kind;
use traffic_policy_testing::cluster::Cluster;
use traffic_policy_testing::control_plane::ControlPlane;
use traffic_policy_testing::lab::Lab;
use traffic_policy_testing::logind::Logind;
use traffic_policy_testing::pace::until;

use crate::fixture::{PATIENCE, expect_leaving, expect_staying, node_with, web};

const ADDRESS: &str = "DBUS_SYSTEM_BUS_ADDRESS";
/// Longer than any wait of a test.
const LONG: Duration = Duration::from_secs(3600);

fn wait_locked(logind: &Logind) {
    let own = ["shutdown", "traffic-policy", "delay"];
    until("the delay lock", PATIENCE, || logind.locks() == [own]);
}

#[test]
fn a_shutdown_is_held_up_until_it_has_been_told_and_may_be_called_off() {
    let folder = tempfile::tempdir().unwrap();
    let logind = Logind::start(&folder.path().join("bus"), LONG).unwrap();
    let environment = vec![(ADDRESS.to_owned(), logind.address())];
    let mut cluster = node_with(&["--notice", "logind"], |_| environment.clone());
    wait_locked(&logind);
    expect_staying(&cluster, &cluster.agents[0], 1);
    logind.prepare(true).unwrap();
    let leaving = expect_leaving(&cluster, &cluster.agents[0], 1);
    assert_eq!(leaving["reason"], "logind: the machine is being shut down");
    assert!(leaving["goneBy"].is_string(), "{leaving}");
    until("the lock to be given back: nobody else is to be told", PATIENCE, || logind.locks().is_empty());
    // An agent that starts meanwhile looks, for no signal comes, and logind gives no lock.
    cluster.agents[0].stop().unwrap();
    cluster.agents[0].start_again().unwrap();
    expect_leaving(&cluster, &cluster.agents[0], 1);
    assert!(logind.locks().is_empty());
    logind.prepare(false).unwrap();
    expect_staying(&cluster, &cluster.agents[0], 1);
    wait_locked(&logind);
}

#[test]
fn the_lock_is_kept_until_other_nodes_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let logind = Logind::start(&folder.path().join("bus"), LONG).unwrap();
    let mut cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
    let control_plane = ControlPlane::start(&cluster.lab).unwrap();
    control_plane.apply(&web(), &cluster.backends()).unwrap();
    let builder = Agent::builder(&cluster.lab, cluster.lab.node(1)).kubeconfig(control_plane.kubeconfig());
    let builder = builder.environment(ADDRESS, &logind.address());
    let agent = builder.flags(&["--notice", "logind", "--announce-leaving", "leaving"]).start().unwrap();
    agent.wait_ready(PATIENCE).unwrap();
    cluster.agents.push(agent);
    wait_locked(&logind);
    let server = control_plane.server();
    server.refuse_patches(Some(500));
    logind.prepare(true).unwrap();
    expect_leaving(&cluster, &cluster.agents[0], 1);
    cluster.agents[0].wait_said(&["WARN", "is not up to date"], PATIENCE).unwrap();
    assert_eq!(logind.locks().len(), 1, "the others do not know");
    server.refuse_patches(None);
    until("the lock to be given back", PATIENCE, || logind.locks().is_empty());
    let name = format!("traffic-policy-leaving-{}", cluster.lab.node(1).name);
    assert!(server.object(Kind::Lease, "leaving", &name).is_some(), "it was told before");
}

#[test]
fn a_bus_that_is_missing_is_named_once_and_found_later() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("bus");
    let environment = vec![(ADDRESS.to_owned(), format!("unix:path={}", socket.display()))];
    let cluster = node_with(&["--notice", "logind"], |_| environment.clone());
    let agent = &cluster.agents[0];
    expect_staying(&cluster, agent, 1);
    agent.wait_said(&["WARN", "news from logind may be missed", "system bus"], PATIENCE).unwrap();
    let logind = Logind::start(&socket, LONG).unwrap();
    wait_locked(&logind);
    logind.prepare(true).unwrap();
    expect_leaving(&cluster, agent, 1);
    // A bus that ends takes nothing back.
    drop(logind);
    agent.wait_said(&["WARN", "news from logind may be missed", "closed the connection"], PATIENCE).unwrap();
    assert_eq!(agent.healthz().unwrap().status, 503);
    let log = agent.log();
    assert_eq!(log.matches("cannot be reached").count(), 1, "each reason once: {log}");
    fs::remove_dir_all(folder.path()).unwrap();
}
