//! Packets of a pod to a Service, at the host side of its device: translated on its way into the
//! stack, and back on its way out of it; a pod that is its own endpoint; and what is left alone.

use traffic_policy_testing::harness::{self, Device, Frontend, Harness, Hook, Input, Ran, Setup, Spot};
use traffic_policy_testing::packet::Packet;

use crate::table::{CLIENT_PORT, ENDPOINT_PORT, PORT, Terms};

const SERVICE: (Spot, u16) = (Spot::Vip, PORT);
const POD: (Spot, u16) = (Spot::Local, CLIENT_PORT);
const FAR: (Spot, u16) = (Spot::Far, ENDPOINT_PORT);
const ITSELF: (Spot, u16) = (Spot::Local, ENDPOINT_PORT);

/// The terms of TC, each on a node with this Service, whose pod is a client.
fn everywhere(frontend: impl Fn() -> Frontend + Sync, test: impl Fn(&mut Harness, Terms) + Sync) {
    harness::with(|harness| {
        for terms in Terms::all().filter(|terms| !terms.xdp()) {
            println!("{terms:?}");
            harness.set_up(&Setup::of(frontend()).snat_ports([40_000]));
            harness.serve_pod_clients();
            test(harness, terms);
        }
    });
}

/// A packet as it comes out of the pod.
fn from_pod(terms: Terms, from: (Spot, u16), to: (Spot, u16)) -> Packet {
    terms.packet(from, to).macs(Spot::Local.mac(), Device::Pod0.mac())
}

#[track_caller]
fn comes_out(harness: &Harness, packet: &Packet) -> Ran {
    harness.input(&Input { device: Device::Pod0, ..Input::new(Hook::FromClientPod, packet.bytes()) })
}

#[track_caller]
fn goes_in(harness: &Harness, packet: &Packet) -> Ran {
    harness.input(&Input { device: Device::Pod0, ..Input::new(Hook::ToClientPod, packet.bytes()) })
}

/// The answer to the packet that [`from_pod`] made, as it is about to enter the pod.
fn answer(terms: Terms, from: (Spot, u16)) -> Packet {
    terms.answer(from, POD).macs(Device::Pod0.mac(), Spot::Local.mac())
}

#[test]
fn there_and_back_through_the_stack() {
    let elsewhere = || Frontend::new(SERVICE.0, SERVICE.1).cluster_ip().endpoints(&[FAR]);
    everywhere(elsewhere, |harness, terms| {
        let request = from_pod(terms, POD, SERVICE);
        // Nothing but the destination: the stack routes the packet, here to another node.
        let translated = request.clone().destination(terms.at(FAR));
        comes_out(harness, &request).expect("delivered").expect_frame(&translated);
        let reply = answer(terms, FAR);
        goes_in(harness, &reply)
            .expect("replied-local")
            .expect_frame(&reply.clone().source(terms.at(SERVICE)));
        // To and from the endpoint itself, from another port.
        let direct = from_pod(terms, (POD.0, CLIENT_PORT + 1), FAR);
        assert_eq!(comes_out(harness, &direct).outcome, "");
    });
}

#[test]
fn a_pod_that_is_its_own_endpoint() {
    let itself = || Frontend::new(SERVICE.0, SERVICE.1).cluster_ip().endpoints(&[ITSELF]);
    everywhere(itself, |harness, terms| {
        let request = from_pod(terms, POD, SERVICE);
        let node = (Spot::Node, 40_000);
        // The kernel writes the MAC addresses: this pod's neighbour entry is not resolved.
        let hop = |packet: &Packet| packet.clone().ttl(63);
        let translated = hop(&request).source(terms.at(node)).destination(terms.at(ITSELF));
        comes_out(harness, &request.clone().ttl(64)).expect("forwarded").expect_frame(&translated);
        let reply = terms.answer(ITSELF, node).macs(Spot::Local.mac(), Device::Pod0.mac()).ttl(64);
        let translated = hop(&reply).source(terms.at(SERVICE)).destination(terms.at(POD));
        comes_out(harness, &reply).expect("replied").expect_frame(&translated);
    });
}

#[test]
fn foreign_sources_and_no_endpoint() {
    let nowhere = || Frontend::new(SERVICE.0, SERVICE.1).cluster_ip();
    everywhere(nowhere, |harness, terms| {
        comes_out(harness, &from_pod(terms, POD, SERVICE)).expect("rejected-no-endpoint");
        let foreign = from_pod(terms, (Spot::Client, CLIENT_PORT), SERVICE);
        comes_out(harness, &foreign).expect("dropped-martian-source");
    });
}
