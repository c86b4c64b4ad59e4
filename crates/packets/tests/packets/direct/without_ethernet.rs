//! Direct forwarding by devices without Ethernet: which packets that come by one are opened, and
//! which way replies leave by one.
//!
//! A test run takes the first bytes of a packet without an Ethernet header for one, so the kernel
//! makes and removes room for outer headers 14 bytes too far behind. What becomes of such packets
//! is a matter of `policy::tunnels`, on real devices.

use traffic_policy_testing::harness::{self, Device, Frontend, Harness, Hook, Input, Ran, Setup, Spot};
use traffic_policy_testing::packet::Packet;

use super::tunnel::through_front;
use super::way::Way;
use super::{NEAR, VIP, addresses, octets, outer, terms};
use crate::table::{CLIENT_PORT, ENDPOINT_PORT, Terms};

const CLIENT: (Spot, u16) = (Spot::Client, CLIENT_PORT);
const LOCAL: (Spot, u16) = (Spot::LocalTyped, ENDPOINT_PORT);
/// A node in front, at an address with which a test run knows the family of a packet without an
/// Ethernet header.
const FRONT: Spot = Spot::ClientTyped;
const ETHERNET: usize = 14;
const NO_MACS: [u8; 6] = [0; 6];

fn set_up_home(harness: &mut Harness, front: Spot) {
    let setup = Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&[NEAR]));
    harness.set_up(&setup.with(|setup| setup.devices.push((Device::Tun0, false))));
    harness.let_send_directly(front);
    harness.open_for(LOCAL.0, 1, LOCAL.1);
}

/// A packet at tun0, without its Ethernet header where the hook is one of such devices.
#[track_caller]
fn at_tunnel(harness: &Harness, hook: Hook, packet: &Packet) -> Ran {
    let mut frame = packet.clone().macs(NO_MACS, NO_MACS).bytes();
    if matches!(hook, Hook::IngressL3 | Hook::EgressL3) {
        frame.drain(..ETHERNET);
    }
    harness.input(&Input { device: Device::Tun0, ..Input::new(hook, frame) })
}

fn each(mut work: impl FnMut(&mut Harness, Terms, Way) + Send) {
    harness::with(|harness| {
        for (terms, way) in terms(Hook::Ingress).flat_map(|terms| Way::ALL.map(|way| (terms, way))) {
            work(harness, terms, way);
        }
    });
}

#[test]
fn what_another_node_sends_reaches_the_program_that_opens_it() {
    each(|harness, terms, way| {
        set_up_home(harness, FRONT);
        let request = terms.request(VIP);
        let outer = way.within(&request, FRONT, LOCAL.0);
        let delivered = request.clone().destination(terms.at(LOCAL)).macs(NO_MACS, NO_MACS);
        at_tunnel(harness, Hook::Ingress, &outer).expect("delivered").expect_frame(&delivered);
        let ran = at_tunnel(harness, Hook::IngressL3, &outer);
        assert!(!ran.outcome.starts_with("passed"), "{}, {terms:?} {way:?}", ran.outcome);
    });
}

/// Packets of network plugins' tunnels, and datagrams to the same port, get no Ethernet header.
#[test]
fn what_no_node_sends_stays_as_it_was() {
    each(|harness, terms, way| {
        set_up_home(harness, Spot::Router);
        let outer = way.within(&terms.request(VIP), FRONT, LOCAL.0);
        let ran = at_tunnel(harness, Hook::IngressL3, &outer);
        ran.expect(if way.is_udp() { "passed" } else { "passed-unsupported-protocol" });
        assert_eq!(ran.frame, outer.bytes()[ETHERNET..], "{terms:?}");
    });
}

/// The answer of the endpoint as the pod sends it, and with the frontend's address.
fn answer(terms: Terms) -> [Packet; 2] {
    let answer = terms.answer(LOCAL, CLIENT).ttl(63);
    [answer.clone(), answer.source(terms.at(VIP))]
}

#[test]
fn replies_leave_for_the_client() {
    each(|harness, terms, way| {
        set_up_home(harness, FRONT);
        let request = terms.request(VIP);
        at_tunnel(harness, Hook::Ingress, &way.within(&request, FRONT, LOCAL.0)).expect("delivered");
        let [answer, answered] = answer(terms);
        let ran = at_tunnel(harness, Hook::EgressL3, &answer);
        ran.expect("replied-local");
        assert_eq!(ran.frame, answered.bytes()[ETHERNET..], "{terms:?}");
    });
}

/// The kernel's route to the client leads to a device without Ethernet, and that to the node in
/// front to the same one, or to one with Ethernet.
#[test]
fn replies_leave_through_the_node_in_front() {
    each(|harness, terms, way| {
        for (front, mtu) in [(Spot::RouterTun, 1400), (Spot::RouterNear, 1500)] {
            set_up_home(harness, front);
            let asks = way.within(&terms.request(VIP), front, LOCAL.0);
            let asks = asks.with(through_front);
            at_tunnel(harness, Hook::Ingress, &asks).expect("delivered");
            let [answer, _] = answer(terms);
            let longest = mtu - way.bytes(terms);
            let header = outer(terms) + if terms.tcp { 20 } else { 8 };
            let of_length = |length: usize| answer.clone().payload(&vec![7; length - header]);
            at_tunnel(harness, Hook::EgressL3, &of_length(longest)).expect("replied-to-front");
            let ran = at_tunnel(harness, Hook::EgressL3, &of_length(longest + 1));
            ran.expect("rejected-mtu-exceeded");
            let icmp = &ran.frame[ETHERNET + outer(terms)..];
            assert_eq!(icmp[6..8], u16::try_from(longest).unwrap().to_be_bytes(), "{terms:?}");
            let [source, to] = addresses(&ran.frame, terms);
            assert_eq!((source, to), (octets(terms, CLIENT.0), octets(terms, LOCAL.0)), "{terms:?}");
        }
    });
}
