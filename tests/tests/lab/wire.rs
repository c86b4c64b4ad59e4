//! Frames on the wire: checksums and segments with and without offload.

use std::net::SocketAddr;

use traffic_policy_testing::capture::{Capture, Frame};
use traffic_policy_testing::checksum::Checksum;
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::traffic::server::Identity;
use traffic_policy_testing::traffic::transfer::transfer;
use traffic_policy_testing::traffic::{Faults, Ledger, Server};

const PORT: u16 = 8080;

/// The frames that arrive at node-1 while a client exchanges a megabyte with it.
fn frames_of_a_transfer(offloads: bool) -> Vec<Frame> {
    let lab = Lab::builder().nodes(1).wire_offloads(offloads).build().unwrap();
    let identity = Identity { pod: "host".to_owned(), node: "node-1".to_owned() };
    let node = lab.node(1);
    let _server =
        Server::start_in(node.netns(), PORT, identity, Faults::default(), &Ledger::default()).unwrap();
    let capture = Capture::start(node.netns(), "eth0").unwrap();
    for family in Family::BOTH {
        transfer(lab.client().netns(), SocketAddr::new(node.address(family), PORT), 1 << 20).unwrap();
    }
    capture.finish_valid().unwrap().into_iter().filter(|frame| !frame.outgoing).collect()
}

#[test]
fn without_offloads_every_checksum_on_the_wire_is_real() {
    let frames = frames_of_a_transfer(false);
    let unfinished = frames.iter().find(|frame| frame.checksum == Checksum::Unfinished);
    assert!(unfinished.is_none(), "{}", unfinished.unwrap());
    assert!(frames.iter().filter(|frame| frame.checksum == Checksum::Valid).count() > 100);
    let largest = frames.iter().map(|frame| frame.bytes.len()).max().unwrap();
    assert!(largest <= 1514, "{largest}");
}

#[test]
fn with_offloads_checksums_are_unfinished_and_segments_large() {
    let frames = frames_of_a_transfer(true);
    assert!(frames.iter().any(|frame| frame.checksum == Checksum::Unfinished));
    assert!(frames.iter().any(|frame| frame.bytes.len() > 1514));
}
