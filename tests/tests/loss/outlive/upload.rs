//! An upload outlives the node in front through which its acknowledgements come (`--forwarding
//! tunnel`). They have died with that node, so the client sends again what the pod has got long
//! ago; by that segment alone the endpoint's node finds out through which node it has to answer.

use std::net::SocketAddr;
use std::time::Duration;

use traffic_policy_testing::cluster::{Cluster, TARGET};
use traffic_policy_testing::lab::Family;
use traffic_policy_testing::pace::until;
use traffic_policy_testing::traffic::Upload;

use super::{VIPS, front_vanishes, start};
use crate::cluster::PATIENCE;
use crate::quiet;

const THROUGH_FRONT: [&str; 4] = ["--forwarding", "tunnel", "--algorithm", "maglev"];
/// A segment this far behind the last one is not known by its own numbers (`NEAR` in numbers.rs).
const FAR_BEHIND: u64 = 64 << 10;
/// The least number of bytes that arrive before the change, and after it.
const MUCH: u64 = 8 << 20;
/// The time in which the client sends again at the latest: it waits for 200 ms, then for twice as
/// long each time.
const SENT_AGAIN: Duration = Duration::from_secs(20);

/// Drops all replies at the first node's port of the switch: the node dies, its queue first.
fn lose_replies_of_front(cluster: &Cluster) {
    let rules = format!(
        "table netdev dying {{\nchain front {{ type filter hook ingress device \"{}\" priority 0;\n\
         ip saddr {} drop\nip6 saddr {} drop\n}}\n}}\n",
        cluster.lab.node(1).name,
        VIPS[0],
        VIPS[1],
    );
    cluster.lab.router().feed("nft", &["-f", "-"], &rules).unwrap();
}

fn an_upload_goes_on(attach: &str, family: Family) {
    let _alone = quiet::alone();
    let mut cluster = start(&[0, 0, 1], attach, &THROUGH_FRONT, &[0]);
    cluster.stop_server("pod-3-1");
    let target = SocketAddr::new(VIPS[usize::from(family == Family::V6)], 80);
    let (client, pod) = (cluster.lab.client(), cluster.lab.node(3).pod(1));
    let upload = Upload::start(client.netns(), target, pod.netns(), TARGET).unwrap();
    until("the client sends much at once", PATIENCE, || {
        upload.arrived().unwrap() > MUCH && upload.window().unwrap() > FAR_BEHIND * 5 / 4
    });
    lose_replies_of_front(&cluster);
    // What it sends as a probe, the last segment, would be near: from now on it sends the first.
    until("the client sends again", PATIENCE, || upload.is_unanswered().unwrap());
    let (unknown, arrived) = (upload.unknown_to_client().unwrap(), upload.arrived().unwrap());
    println!("{attach}, {family:?}: {arrived} bytes arrived, the client does not know of {unknown}");
    assert!(unknown > FAR_BEHIND, "the control: {unknown} bytes");
    let hook = if attach == "tc" { "tc-ingress" } else { "xdp" };
    let replies = |number: usize| cluster.agents[number - 1].packets(hook, "replied-opened").unwrap();
    assert_eq!((replies(1) > 0, replies(2)), (true, 0), "replies pass the node in front");
    front_vanishes(&cluster);
    until("the upload goes on", SENT_AGAIN, || upload.arrived().unwrap() > arrived + MUCH);
    let bytes = upload.finish(SENT_AGAIN).unwrap();
    println!("{attach}, {family:?}: {bytes} bytes, {} replies through the new node", replies(2));
    assert!(replies(2) > 0, "replies follow the requests");
}

#[test]
fn an_upload_goes_on_tc() {
    an_upload_goes_on("tc", Family::V4);
}

#[test]
fn an_upload_goes_on_xdp() {
    an_upload_goes_on("xdp", Family::V6);
}
