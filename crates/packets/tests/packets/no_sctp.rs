//! SCTP on a node that serves none: its programs are not loaded, and packets end as they do where
//! they are loaded and no frontend matches.

use traffic_policy_testing::harness::{self, Device, Frontend, Harness, Setup, Spot};
use traffic_policy_testing::packet::{Extension, Packet};

use crate::answers::port_unreachable;
use crate::sctp::{CLIENT, CLIENT_TAG, ENDPOINT_TAG, data, init, sctp};
use crate::table::{self, Case, ENDPOINT_PORT, PORT, Step, Terms};

const NODE: (Spot, u16) = (Spot::Node, PORT);
const VIP: (Spot, u16) = (Spot::Vip, PORT);
const NEAR: (Spot, u16) = (Spot::Near, ENDPOINT_PORT);
const LOCAL: (Spot, u16) = (Spot::Local, ENDPOINT_PORT);

fn open(packet: &Packet) -> Packet {
    sctp(packet, 0, &init(CLIENT_TAG))
}

/// Services of TCP and UDP: a ClusterIP, and a node port.
fn setup() -> Setup {
    let cluster_ip = Frontend::new(VIP.0, VIP.1).cluster_ip().endpoints(&[NEAR]);
    let node_port = Frontend::new(NODE.0, NODE.1).endpoints(&[LOCAL]);
    let services = Setup::of(cluster_ip).and(node_port).service_cidr(Spot::Vip);
    services.with(|setup| setup.sctp = false)
}

fn rows(terms: Terms) -> Vec<Case> {
    if !terms.tcp {
        return Vec::new();
    }
    let to = |to| terms.request(to);
    let rejected = |packet: &Packet| Step::new(packet, "rejected-unknown-port", &port_unreachable(packet));
    let optional = open(&to(VIP)).with(|packet| {
        if terms.v4() {
            packet.options = vec![1, 1, 1, 1];
        } else {
            packet.extensions = vec![Extension::padding(60, 2)];
        }
    });
    let mut incoming = vec![
        rejected(&open(&to(VIP))),
        rejected(&open(&to((Spot::Vip, PORT + 1)))),
        rejected(&optional),
        Step::passed(&sctp(&to(VIP), ENDPOINT_TAG, &data(100)), "passed-no-flow"),
        Step::dropped(&open(&to((Spot::OtherVip, PORT))), "dropped-unallocated-cluster-ip"),
        Step::passed(&open(&to(NODE)), "passed-not-service"),
        Step::passed(&sctp(&to(NODE), ENDPOINT_TAG, &data(100)), "passed-not-service"),
        Step::passed(&open(&to((Spot::Node, PORT + 1))), "passed"),
        Step::passed(&open(&to((Spot::Stranger, PORT))), "passed"),
        Step::passed(&sctp(&to(VIP), 0, &[1, 0]), "passed-malformed"),
        Step::dropped(&open(&to(VIP)).source(terms.at((Spot::Node, 40_000))), "dropped-martian-source"),
        Step::passed(&open(&to(VIP)).macs(Spot::Router.mac(), Device::Eth1.mac()), "passed-other-host"),
    ];
    if terms.v4() {
        // A loose source route by one address.
        let routed = open(&to(VIP)).with(|packet| packet.options = vec![131, 7, 4, 192, 0, 2, 77, 0]);
        incoming.push(Step::passed(&routed, "passed-unsupported-header"));
    }
    let long = |packet: &Packet| sctp(packet, ENDPOINT_TAG, &data(4000)).with(|packet| packet.label = 9);
    let [first, later] =
        [0, 1].map(|number| move |packet: &Packet| long(packet).fragments(1448).remove(number));
    incoming.push(Step::passed(&first(&to(NODE)), "passed-not-service"));
    incoming.push(Step::passed(&later(&to(NODE)), "passed-fragment"));
    incoming.push(Step::passed(&later(&to(VIP)), "passed-fragment"));

    let here = terms.request(NODE).destination(terms.at(LOCAL));
    let answer = terms.answer(LOCAL, CLIENT);
    let outgoing = [
        Step::passed(&sctp(&answer, CLIENT_TAG, &data(100)), "passed").leaving(),
        // From now on the endpoint has had a flow.
        Step::new(&terms.request(NODE), "delivered", &here),
        Step::passed(&sctp(&answer, CLIENT_TAG, &data(100)), "passed-not-service").leaving(),
        Step::passed(&first(&answer), "passed-not-service").leaving(),
        Step::passed(&later(&answer), "passed-fragment").leaving(),
    ];
    vec![Case::new("incoming", setup(), incoming), Case::new("outgoing", setup(), outgoing)]
}

fn run(harness: &mut Harness, rows: fn(Terms) -> Vec<Case>) {
    table::run_on(harness, &|_: &mut Harness, terms| rows(terms));
}

#[test]
fn a_packet_ends_as_it_does_by_the_programs_of_sctp() {
    harness::with(|harness| {
        run(harness, rows);
        harness.without_sctp(|harness| run(harness, rows));
    });
}

/// The agent writes none before the programs are in place.
#[test]
fn what_has_a_frontend_nevertheless_is_not_forwarded() {
    let rows = |terms: Terms| {
        let outcome = if terms.xdp() { "passed-to-tc" } else { "passed-missed-tail-call" };
        let steps =
            if terms.tcp { vec![Step::passed(&open(&terms.request(NODE)), outcome)] } else { Vec::new() };
        vec![Case::new("a frontend", setup().with(|setup| setup.sctp = true), steps)]
    };
    harness::with(|harness| harness.without_sctp(|harness| run(harness, rows)));
}
