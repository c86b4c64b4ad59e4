//! Session affinity, source ranges and the policy decide on the node in front, whatever packets
//! travel in from there; the endpoint's node asks none of them.

use std::collections::BTreeSet;
use std::time::Duration;

use traffic_policy_testing::harness::{self, Device, Frontend, Hook, Setup, Spot};
use traffic_policy_testing::packet::Packet;

use super::{FRONT, LOCAL, NEAR, VIP, arrives, each_ingress, outer, terms, the_answer_leaves, way::Way};
use crate::forwarding::monotonic;
use crate::table::{CLIENT_PORT, ENDPOINT_PORT, Terms};

const OTHER_NEAR: (Spot, u16) = (Spot::OtherNear, ENDPOINT_PORT);
/// The number of a client's connections. With two endpoints, all get the same one by chance once in
/// 2^31 runs.
const MANY: u16 = 32;

/// A packet of a client of the router.
fn of_client(terms: Terms, client: Spot, port: u16) -> Packet {
    terms.packet((client, port), VIP).macs(Spot::Router.mac(), Device::Eth0.mac())
}

/// The destination of an outer packet.
fn endpoint(frame: &[u8], terms: Terms) -> Vec<u8> {
    let end = 14 + outer(terms);
    frame[end - if terms.v4() { 4 } else { 16 }..end].to_vec()
}

#[test]
fn a_client_stays_with_its_endpoint() {
    each_ingress(|harness, terms| {
        for way in Way::ALL {
            let frontend = || way.frontend(VIP).endpoints(&[NEAR, OTHER_NEAR]);
            for (frontend, expected) in [(frontend(), 2), (frontend().affinity(60), 1)] {
                harness.set_up(&Setup::of(frontend));
                let of_each = (0..MANY).map(|number| {
                    let ran = harness.run(terms.hook, &of_client(terms, Spot::Client, CLIENT_PORT + number));
                    let endpoint = endpoint(&ran.frame, terms);
                    ran.expect("forwarded-direct");
                    endpoint
                });
                let had: BTreeSet<_> = of_each.collect();
                assert_eq!(had.len(), expected, "{terms:?}, {way:?}");
            }
        }
    });
}

#[test]
fn clients_outside_of_the_source_ranges_are_refused() {
    each_ingress(|harness, terms| {
        for way in Way::ALL {
            harness.set_up(&Setup::of(way.frontend(VIP).sources(&[Spot::OtherClient])));
            harness.run(terms.hook, &terms.request(VIP)).expect("dropped-source-range");
            let allowed = of_client(terms, Spot::OtherClient, CLIENT_PORT);
            harness.run(terms.hook, &allowed).expect("forwarded-direct");
        }
    });
}

/// A node may learn of new source ranges later than the one in front.
#[test]
fn the_endpoints_node_opens_for_all_clients() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress) {
            let frontend = Frontend::new(VIP.0, VIP.1).endpoints(&[NEAR]).sources(&[Spot::OtherClient]);
            harness.set_up(&Setup::of(frontend));
            harness.let_send_directly(FRONT);
            harness.open_for(LOCAL.0, 1, LOCAL.1);
            let request = terms.request(VIP);
            let delivered = request.clone().destination(terms.at(LOCAL));
            let ran = harness.run(terms.hook, &arrives(&request, FRONT, LOCAL.0));
            ran.expect("delivered").expect_frame(&delivered);
            the_answer_leaves(harness, terms);
        }
    });
}

/// A node that drains forwards new connections to endpoints of other nodes, as under policy
/// Cluster.
#[test]
fn under_policy_local_a_node_that_drains_forwards() {
    each_ingress(|harness, terms| {
        for way in Way::ALL {
            let until = |until| Setup::of(way.frontend(VIP).local().drain_until(until));
            harness.set_up(&until(0));
            harness.run(terms.hook, &terms.request(VIP)).expect("dropped-no-local-endpoint");
            harness.set_up(&until(monotonic() + Duration::from_secs(60).as_nanos() as u64));
            let request = terms.request(VIP);
            let ran = harness.run(terms.hook, &request);
            let way = way.of(&ran, terms);
            ran.expect("forwarded-direct").expect_frame(&way.sent(&request));
        }
    });
}
