//! Direct delivery to pods of this node: how a request's entry learns the way from a reply, which
//! packets take it, and which are left to the stack.

use traffic_policy_ebpf::tcp::MARKED;
use traffic_policy_testing::harness::{self, Device, Frontend, HZ, Harness, Hook, Input, Ran, Setup, Spot};
use traffic_policy_testing::packet::{Packet, flag};

use crate::dialogue::Dialogue;
use crate::table::{ENDPOINT_PORT, PORT, Terms};

const NODE: (Spot, u16) = (Spot::Node, PORT);
const LOCAL: (Spot, u16) = (Spot::Local, ENDPOINT_PORT);
const MTU: u32 = 1500;

/// A flow that both sides have confirmed, to an endpoint of this node.
#[track_caller]
fn established(harness: &mut Harness, terms: Terms) -> Dialogue {
    harness.set_up(&Setup::of(Frontend::new(NODE.0, NODE.1).endpoints(&[LOCAL])));
    confirmed(harness, terms, NODE)
}

/// The same by this frontend, which is set up.
#[track_caller]
pub fn confirmed(harness: &mut Harness, terms: Terms, frontend: (Spot, u16)) -> Dialogue {
    harness.serve_pods(MTU);
    let talk = Dialogue::new(terms, frontend);
    talk.open(harness).expect("delivered");
    talk.answer(harness, flag::SYN | flag::ACK).expect("replied-local");
    if !terms.tcp {
        let (request, _) = talk.entries(harness);
        // Two seconds make a stream.
        harness.begin_earlier(&request, 3 * HZ);
    }
    talk.send(harness, flag::ACK).expect("delivered");
    talk
}

/// A packet of the pod, as it comes out of its device.
pub fn from_pod(harness: &Harness, talk: Dialogue) -> Packet {
    talk.answer_packet(harness, flag::ACK).macs(Spot::Local.mac(), Device::Pod0.mac()).ttl(64)
}

#[track_caller]
fn leaves_pod(harness: &Harness, packet: &Packet, device: Device) -> Ran {
    harness.input(&Input { device, ..Input::new(Hook::FromPod, packet.bytes()) })
}

/// The reply as it leaves for the client: translated, with one hop less to live.
fn replied(talk: Dialogue, reply: &Packet) -> Packet {
    let terms = talk.terms;
    reply.clone().source(terms.at(NODE)).macs(Device::Eth0.mac(), Spot::Router.mac()).ttl(63)
}

/// The request as it enters the pod: translated, with one hop less to live.
fn delivered(talk: Dialogue, request: &Packet) -> Packet {
    let terms = talk.terms;
    request.clone().destination(terms.at(LOCAL)).macs(Device::Pod0.mac(), Spot::Local.mac()).ttl(63)
}

/// Runs a test in all terms, each on an established flow.
fn everywhere(test: impl Fn(&mut Harness, Dialogue) + Sync) {
    harness::with(|harness| {
        for terms in Terms::all() {
            println!("{terms:?}");
            let talk = established(harness, terms);
            test(harness, talk);
        }
    });
}

/// XDP leaves a packet that takes this way to TC, which sees it unchanged.
#[track_caller]
fn request(harness: &Harness, talk: Dialogue, packet: &Packet) -> Ran {
    if talk.terms.xdp() {
        let ran = harness.run(Hook::Xdp, packet);
        if ran.outcome != "passed-to-tc" {
            return ran;
        }
    }
    harness.run(Hook::Ingress, packet)
}

#[test]
fn a_reply_teaches_the_way() {
    everywhere(|harness, talk| {
        let packet = talk.request(flag::ACK);
        request(harness, talk, &packet).expect("delivered");
        let reply = from_pod(harness, talk);
        for _ in 0..2 {
            let sent = leaves_pod(harness, &reply, Device::Pod0);
            sent.expect("replied-direct").expect_frame(&replied(talk, &reply));
            let sent = request(harness, talk, &packet);
            sent.expect("delivered-direct").expect_frame(&delivered(talk, &packet));
        }
        // Too long for the pod's device, or for the way to the client; at the end of its life.
        let long = packet.clone().payload(&vec![0; MTU as usize]);
        request(harness, talk, &long).expect("delivered");
        request(harness, talk, &packet.clone().ttl(1)).expect("delivered");
        let late = reply.clone().ttl(1);
        assert_eq!(leaves_pod(harness, &late, Device::Pod0).outcome, "");
        let long = reply.clone().payload(&vec![0; MTU as usize]);
        assert_eq!(leaves_pod(harness, &long, Device::Pod0).outcome, "");
    });
}

#[test]
fn what_was_learned_ends() {
    everywhere(|harness, talk| {
        let (packet, reply) = (talk.request(flag::ACK), from_pod(harness, talk));
        let learn = |harness: &Harness| {
            leaves_pod(harness, &reply, Device::Pod0).expect("replied-direct");
            request(harness, talk, &packet).expect("delivered-direct");
        };
        learn(harness);
        // A device of a pod is gone.
        harness.change_routes(|routes| routes.hop_epoch += 1);
        request(harness, talk, &packet).expect("delivered");
        learn(harness);
        // A route has changed.
        harness
            .change_routes(|routes| routes.route = routes.route & 0xffff_0000 | (routes.route + 1) & 0xffff);
        request(harness, talk, &packet).expect("delivered");
        learn(harness);
        // What the stack is to see now and then, for conntrack's sake.
        let (entry, _) = talk.entries(harness);
        harness.change(&entry, |entry| entry.last = entry.last.wrapping_sub(1 << 12));
        request(harness, talk, &packet).expect("delivered");
        request(harness, talk, &packet).expect("delivered-direct");
        // A sweep has found the flow idle.
        let (entry, _) = talk.entries(harness);
        harness.change(&entry, |entry| entry.state |= MARKED);
        request(harness, talk, &packet).expect("delivered");
    });
}

#[test]
fn the_beginning_and_the_end_take_the_stack() {
    everywhere(|harness, talk| {
        let reply = from_pod(harness, talk);
        leaves_pod(harness, &reply, Device::Pod0).expect("replied-direct");
        if talk.terms.tcp {
            for flags in [flag::SYN | flag::ACK, flag::FIN | flag::ACK, flag::RST] {
                let packet = reply.clone().with(|packet| packet.tcp_mut().flags = flags);
                assert_eq!(leaves_pod(harness, &packet, Device::Pod0).outcome, "", "{flags:#x}");
            }
            talk.send(harness, flag::FIN | flag::ACK).expect("delivered");
        }
        let other = Dialogue::new(talk.terms, NODE).with_port(41_000);
        other.open(harness).expect("delivered");
        let unconfirmed = from_pod(harness, other);
        assert_eq!(leaves_pod(harness, &unconfirmed, Device::Pod0).outcome, "");
    });
}

/// A packet with the right addresses that comes by another device, or by one that is not known to
/// be a pod's, teaches nothing.
#[test]
fn another_device_teaches_nothing() {
    everywhere(|harness, talk| {
        let (packet, reply) = (talk.request(flag::ACK), from_pod(harness, talk));
        assert_eq!(leaves_pod(harness, &reply, Device::Eth1).outcome, "");
        request(harness, talk, &packet).expect("delivered");
    });
}
