//! Segments that do not belong to the conversation whose addresses and ports they have: an off-path
//! attacker cannot know its sequence numbers. RFC 5961, and conntrack's windows.

use traffic_policy_ebpf::tcp::{ANSWERED, ASSURED, FIN, REMOVED, RST};
use traffic_policy_testing::harness::{Device, Frontend, Harness, Hook, Ran, Setup, Spot};
use traffic_policy_testing::packet::{Packet, flag};

use crate::dialogue::{ANSWER_NUMBER, Dialogue, SYN_NUMBER, everywhere, everywhere_tcp, everywhere_udp};
use crate::sweeping::{SLACK, TIMEOUTS, idle, sweeper};
use crate::table::{CLIENT_PORT, ENDPOINT_PORT, PORT, Terms};

const VIP: (Spot, u16) = (Spot::Vip, PORT);
const NODE: (Spot, u16) = (Spot::Node, PORT);
const ACK: u8 = flag::ACK;
const FIN_ACK: u8 = flag::FIN | flag::ACK;
const RST_ACK: u8 = flag::RST | flag::ACK;
const SYN_ACK: u8 = flag::SYN | flag::ACK;
/// Offsets of an attacker's numbers from the right ones: beyond any window, before it, and half a
/// circle away.
const GUESSES: [u32; 6] = [1 << 18, 1 << 24, 1 << 30, 1 << 31, 0xc000_0000, 0_u32.wrapping_sub(1 << 18)];

/// Runs a test with TCP, with an endpoint on this node and with one on another.
fn each(work: impl Fn(&mut Harness, Terms, Dialogue) + Sync) {
    everywhere(|harness, terms| {
        for endpoint in [Spot::Near, Spot::Local] {
            if terms.tcp {
                let frontend = Frontend::new(VIP.0, VIP.1).endpoints(&[(endpoint, ENDPOINT_PORT)]);
                harness.set_up(&Setup::of(frontend).snat_ports(5000..5100));
                work(harness, terms, Dialogue::new(terms, VIP));
            }
        }
    });
}

/// Sends a segment of the client or of the endpoint whose numbers are this far from the right ones.
fn spoof(harness: &Harness, dialogue: Dialogue, reply: bool, flags: u8, (sequence, ack): (u32, u32)) -> Ran {
    let packet = if reply { dialogue.answer_packet(harness, flags) } else { dialogue.request(flags) };
    let packet = packet.with(|packet| {
        let tcp = packet.tcp_mut();
        tcp.sequence = tcp.sequence.wrapping_add(sequence);
        if flags & flag::ACK != 0 {
            tcp.acknowledgement = tcp.acknowledgement.wrapping_add(ack);
        }
    });
    if reply { dialogue.answered(harness, &packet) } else { harness.run(dialogue.terms.hook, &packet) }
}

fn states(harness: &Harness, dialogue: Dialogue) -> (u8, u8) {
    let (request, reply) = dialogue.entries(harness);
    (request.state, reply.state)
}

const OPEN: (u8, u8) = (ASSURED, ASSURED | ANSWERED);

/// Checks that the connection goes on with the same entries, in both directions, in the entry
/// programs alone.
#[track_caller]
fn lives(harness: &mut Harness, dialogue: Dialogue, before: std::net::SocketAddr) {
    assert_eq!(states(harness, dialogue), OPEN);
    assert_eq!(dialogue.entries(harness).0.new_from, before, "the mapping was changed");
    dialogue.answer(harness, ACK);
    harness.without_jumps(|harness| {
        let (there, back) = (dialogue.send(harness, ACK).outcome, dialogue.answer(harness, ACK).outcome);
        assert!(matches!(there, "forwarded" | "delivered"), "{there}");
        assert!(matches!(back, "replied" | "replied-local"), "{back}");
    });
}

/// An attacker's segment, in either direction, is forwarded, so that the host decides, and changes
/// nothing.
#[test]
fn segments_without_the_right_numbers_change_nothing() {
    each(|harness, _, dialogue| {
        dialogue.establish(harness);
        let mapping = dialogue.entries(harness).0.new_from;
        for reply in [false, true] {
            for flags in [flag::RST, RST_ACK, FIN_ACK, SYN_ACK, flag::FIN, flag::FIN | RST_ACK] {
                for guess in GUESSES {
                    for (sequence, ack) in [(guess, guess), (guess, 7), (guess, 0_u32.wrapping_sub(guess))] {
                        let outcome = spoof(harness, dialogue, reply, flags, (sequence, ack)).outcome;
                        let sent = ["forwarded", "delivered", "replied", "replied-local"];
                        assert!(sent.contains(&outcome), "{outcome}");
                        assert_eq!(
                            states(harness, dialogue),
                            OPEN,
                            "flags {flags:#x}, {guess:#x}, reply {reply}"
                        );
                    }
                }
            }
        }
        lives(harness, dialogue, mapping);
    });
}

/// A spoofed reset and a SYN keep the flow: the endpoint answers the SYN with a challenge ACK (RFC
/// 5961 section 4), as without a proxy in between.
#[test]
fn a_spoofed_reset_and_a_syn_keep_the_mapping() {
    each(|harness, _, dialogue| {
        dialogue.establish(harness);
        let mapping = dialogue.entries(harness).0.new_from;
        for guess in GUESSES {
            spoof(harness, dialogue, false, flag::RST, (guess, 0));
            spoof(harness, dialogue, true, flag::RST, (guess, 0));
            let syn = dialogue.opening().numbers(SYN_NUMBER.wrapping_add(guess), 0);
            let outcome = harness.run(dialogue.terms.hook, &syn).outcome;
            assert!(matches!(outcome, "forwarded" | "delivered"), "{outcome}");
        }
        lives(harness, dialogue, mapping);
    });
}

/// An idle flow ends in time, whatever an attacker sends. (conntrack: INVALID does not refresh.)
#[test]
fn segments_without_the_right_numbers_do_not_keep_a_flow_alive() {
    each(|harness, _, dialogue| {
        dialogue.establish(harness);
        dialogue.idle(harness, 50);
        let before = dialogue.entries(harness);
        for reply in [false, true] {
            for flags in [ACK, FIN_ACK, SYN_ACK, RST_ACK] {
                spoof(harness, dialogue, reply, flags, (1 << 20, 1 << 20));
            }
        }
        let syn = dialogue.opening().numbers(SYN_NUMBER.wrapping_add(1 << 20), 0);
        harness.run(dialogue.terms.hook, &syn);
        let after = dialogue.entries(harness);
        assert_eq!((after.0.last, after.1.last), (before.0.last, before.1.last));
    });
}

/// A spoofed reset leaves the time-out of an established connection unchanged.
#[test]
fn a_spoofed_reset_does_not_shorten_the_idle_time() {
    each(|harness, terms, dialogue| {
        for reply in [false, true] {
            dialogue.establish(harness);
            spoof(harness, dialogue, reply, flag::RST, (1 << 20, 0));
            spoof(harness, dialogue, reply, RST_ACK, (1 << 20, 1 << 20));
            let mut sweeper = sweeper();
            idle(harness, dialogue.entries(harness), TIMEOUTS.established - SLACK);
            for _ in 0..3 {
                let found = harness.sweep(&mut sweeper, false)[terms.family as usize];
                assert_eq!((found.entries, found.deleted), (2, 0));
            }
        }
    });
}

/// Connections of a Service whose endpoints were replaced.
#[test]
fn a_syn_does_not_move_a_connection_whose_endpoint_was_replaced() {
    each(|harness, _, dialogue| {
        dialogue.establish(harness);
        let (old, _) = dialogue.entries(harness);
        harness.change(&old, |entry| entry.state |= REMOVED);
        harness.put(1, &Frontend::new(VIP.0, VIP.1).endpoints(&[(Spot::OtherNear, ENDPOINT_PORT)]));
        spoof(harness, dialogue, false, FIN_ACK, (1 << 20, 1 << 20));
        spoof(harness, dialogue, false, RST_ACK, (1 << 20, 1 << 20));
        harness.run(dialogue.terms.hook, &dialogue.opening().numbers(77_777, 0));
        let (request, reply) = dialogue.entries(harness);
        assert_eq!((request.new_to, request.new_from), (old.new_to, old.new_from));
        assert_eq!((request.state, reply.state), (ASSURED | REMOVED, ASSURED | ANSWERED));
        let outcome = dialogue.answer(harness, ACK).outcome;
        assert!(matches!(outcome, "replied" | "replied-local"), "{outcome}");
    });
}

/// A segment sent before a FIN may arrive after it.
#[test]
fn a_retransmission_behind_a_fin_does_not_open_the_connection_again() {
    each(|harness, _, dialogue| {
        dialogue.establish(harness);
        let lost = dialogue.request(ACK).payload(&[7; 100]);
        let fin = dialogue.request(FIN_ACK).with(|packet| packet.tcp_mut().sequence += 100);
        harness.run(dialogue.terms.hook, &fin);
        assert_eq!(dialogue.entries(harness).0.state, ASSURED | FIN);
        harness.run(dialogue.terms.hook, &lost);
        assert_eq!(dialogue.entries(harness).0.state, ASSURED | FIN, "the retransmission");
        dialogue.answer(harness, ACK);
        dialogue.answer(harness, FIN_ACK);
        harness.run(dialogue.terms.hook, &lost);
        assert_eq!(states(harness, dialogue), (ASSURED | FIN, ASSURED | ANSWERED | FIN));
        // Data beyond it, in the window: it does not belong to this connection.
        let beyond = dialogue.request(ACK).with(|packet| packet.tcp_mut().sequence += 101).payload(&[7; 100]);
        harness.run(dialogue.terms.hook, &beyond);
        assert_eq!(dialogue.entries(harness).0.state, ASSURED);
    });
}

/// A reset by the client or the endpoint ends both entries.
#[test]
fn a_reset_with_the_right_number_ends_the_connection() {
    type Reset = fn(&Harness, Dialogue);
    let resets: [(&str, Reset); 6] = [
        ("the client's, at the acknowledged number", |harness, dialogue| {
            drop(dialogue.send(harness, flag::RST));
        }),
        ("the client's, behind data in flight", |harness, dialogue| {
            harness.run(dialogue.terms.hook, &dialogue.request(ACK).payload(&[7; 1000]));
            drop(spoof(harness, dialogue, false, RST_ACK, (1000, 0)));
        }),
        ("the endpoint's", |harness, dialogue| drop(dialogue.answer(harness, flag::RST))),
        ("the endpoint's, with unread data", |harness, dialogue| {
            harness.run(dialogue.terms.hook, &dialogue.request(ACK).payload(&[7; 1000]));
            drop(spoof(harness, dialogue, true, RST_ACK, (0, 1000)));
        }),
        ("the answer to a challenge", |harness, dialogue| {
            // The client has forgotten the connection and opens another one from the same port.
            harness.run(dialogue.terms.hook, &dialogue.opening().numbers(77_777, 0));
            dialogue.answer(harness, ACK);
            harness.run(dialogue.terms.hook, &dialogue.request(flag::RST));
        }),
        ("the client's, in the window's middle, answered by a challenge", |harness, dialogue| {
            spoof(harness, dialogue, false, flag::RST, (30_000, 0));
            assert_eq!(states(harness, dialogue), OPEN, "no ACK, not the number");
            dialogue.answer(harness, ACK);
            dialogue.send(harness, flag::RST);
        }),
    ];
    each(|harness, _, dialogue| {
        for (what, reset) in resets {
            dialogue.establish(harness);
            reset(harness, dialogue);
            let (request, reply) = states(harness, dialogue);
            assert_eq!((request | reply) & RST, RST, "{what}");
            dialogue.open(harness);
            assert_eq!(states(harness, dialogue), (0, 0), "{what}");
        }
    });
}

/// A SYN with the address of another peer creates an entry that matches what the endpoint sends to
/// that peer directly. An endpoint of this node sees the client's own port, so the direct
/// connection has the very same tuple.
#[test]
fn a_spoofed_request_does_not_touch_a_direct_connection() {
    everywhere_tcp(|harness, terms| {
        let local = (Spot::Local, ENDPOINT_PORT);
        harness.set_up(&Setup::of(Frontend::new(NODE.0, NODE.1).endpoints(&[local])));
        let peer = (Spot::OtherNear, CLIENT_PORT);
        let direct = |flags: u8, sequence: u32, ack: u32| {
            Packet::tcp(terms.at(local), terms.at(peer), flags)
                .numbers(sequence, ack)
                .macs(Device::Eth0.mac(), Spot::RouterNear.mac())
        };
        let syn = terms.packet(peer, NODE).macs(Spot::RouterNear.mac(), Device::Eth0.mac());
        harness.run(terms.hook, &syn).expect("delivered");
        for reply in [
            direct(ACK, 700_000, 900_000).payload(b"of the direct connection"),
            direct(SYN_ACK, 700_000, 900_000),
            direct(FIN_ACK, 700_000, 900_000),
            direct(flag::RST, 700_000, 0),
            direct(RST_ACK, 0, 900_000),
            direct(ACK, ANSWER_NUMBER + 1, SYN_NUMBER + 1),
        ] {
            harness.run(Hook::Egress, &reply).expect("passed-out-of-window");
        }
        let (request, reply) = harness.flow(terms.family);
        assert_eq!((request.state, reply.state), (0, 0));
        // The answer to that very SYN is a reply: it goes to the peer whose address the SYN had,
        // which resets it.
        harness.run(Hook::Egress, &direct(SYN_ACK, ANSWER_NUMBER, SYN_NUMBER + 1)).expect("replied-local");
        harness.run(Hook::Egress, &direct(ACK, 700_000, 900_000)).expect("passed-out-of-window");
        harness.run(terms.hook, &syn.with(|syn| syn.tcp_mut().flags = flag::RST).numbers(SYN_NUMBER + 1, 0));
        harness.run(Hook::Egress, &direct(SYN_ACK, 700_000, 900_000)).expect("passed-out-of-window");
        harness.run(Hook::Egress, &direct(ACK, 700_001, 900_000)).expect("passed-out-of-window");
    });
}

/// The same with UDP. Datagrams have no numbers, so nothing distinguishes the endpoint's answers to
/// the forged one from what it sends to that peer directly. The test records what is conceded, and
/// its bounds.
#[test]
fn a_datagram_in_anothers_name_diverts_one_tuple_until_its_flow_is_over() {
    everywhere_udp(|harness, terms| {
        let local = (Spot::Local, ENDPOINT_PORT);
        harness.set_up(&Setup::of(Frontend::new(NODE.0, NODE.1).endpoints(&[local])));
        let to = |port| (Spot::OtherNear, port);
        let direct = |port| {
            let packet = Packet::udp(terms.at(local), terms.at(to(port))).payload(b"direct");
            packet.macs(Device::Eth0.mac(), Spot::RouterNear.mac())
        };
        let (diverted, other) = (direct(CLIENT_PORT), direct(CLIENT_PORT + 1));
        // The control: without the forged datagram nothing is diverted.
        harness.run(Hook::Egress, &diverted).expect("passed");
        let forged = terms.packet(to(CLIENT_PORT), NODE).macs(Spot::RouterNear.mac(), Device::Eth0.mac());
        harness.run(terms.hook, &forged).expect("delivered");
        let from_node = diverted.clone().source(terms.at(NODE));
        harness.run(Hook::Egress, &diverted).expect("replied-local").expect_frame(&from_node);
        harness.run(Hook::Egress, &other).expect("passed-not-service");
        // Datagrams of the peer itself still reach the endpoint.
        let asks = Packet::udp(terms.at(to(CLIENT_PORT)), terms.at(local));
        harness.run(terms.hook, &asks.macs(Spot::RouterNear.mac(), Device::Eth0.mac())).expect("passed");
        // The flow is over when both have been silent for the time-out of answered datagrams.
        let (request, reply) = harness.flow(terms.family);
        idle(harness, (request, reply), TIMEOUTS.udp_answered + SLACK);
        let mut sweeper = sweeper();
        // The first sweep marks, the second deletes.
        harness.sweep(&mut sweeper, false);
        harness.sweep(&mut sweeper, false);
        harness.run(Hook::Egress, &diverted).expect("passed-not-service");
    });
}

/// The benign form: first through the Service, then directly to the same endpoint, from the same
/// port.
#[test]
fn a_direct_connection_may_follow_one_through_the_service() {
    each(|harness, _, dialogue| {
        dialogue.establish(harness);
        dialogue.close(harness);
        spoof(harness, dialogue, true, SYN_ACK, (1 << 20, 1 << 25)).expect("passed-out-of-window");
        spoof(harness, dialogue, true, ACK, (1 << 20, 1 << 25)).expect("passed-out-of-window");
        // Segments of the old connection are still handled as such.
        let outcome = dialogue.answer(harness, FIN_ACK).outcome;
        assert!(matches!(outcome, "replied" | "replied-local"), "{outcome}");
    });
}

/// One client port, at once through a Service and directly to the same endpoint of this node: the
/// first connection goes on, as the packet path does not see the direct one before its answers
/// leave. conntrack gives the later one another port.
#[test]
fn a_direct_connection_beside_one_through_the_service() {
    everywhere_tcp(|harness, terms| {
        harness.set_up(&Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&[(Spot::Local, ENDPOINT_PORT)])));
        let dialogue = Dialogue::new(terms, VIP);
        dialogue.establish(harness);
        // The answer to the direct SYN leaves with the Service's address, and the client resets the
        // unknown connection.
        spoof(harness, dialogue, true, SYN_ACK, (1 << 20, 1 << 25)).expect("replied-local");
        assert_eq!(states(harness, dialogue), OPEN);
        dialogue.answer(harness, ACK).expect("replied-local");
        // The other order: the endpoint's answers within the direct connection fit no SYN of the
        // Service's.
        harness.set_up(&Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&[(Spot::Local, ENDPOINT_PORT)])));
        dialogue.open(harness).expect("delivered");
        spoof(harness, dialogue, true, ACK, (1 << 20, 1 << 25)).expect("passed-out-of-window");
        assert_eq!(states(harness, dialogue), (0, 0));
    });
}

/// The endpoint has no such socket: it resets what the SYN began, and nothing else does.
#[test]
fn a_refused_connection_ends() {
    each(|harness, _, dialogue| {
        dialogue.open(harness);
        for (flags, sequence, ack) in [(flag::RST, 5, 0), (RST_ACK, 5, 1 << 20), (RST_ACK, 0, 0)] {
            let packet = dialogue.answer_packet(harness, flags).numbers(sequence, ack);
            dialogue.answered(harness, &packet).expect("passed-out-of-window");
            assert_eq!(states(harness, dialogue), (0, 0));
        }
        let refusal = dialogue.answer_packet(harness, RST_ACK).numbers(0, SYN_NUMBER + 1);
        let outcome = dialogue.answered(harness, &refusal).outcome;
        assert!(matches!(outcome, "replied" | "replied-local"), "{outcome}");
        assert_eq!(states(harness, dialogue), (0, RST));
    });
}

/// TCP fast open (RFC 7413): the SYN carries data, the SYN-ACK acknowledges it, and the endpoint's
/// answer follows at once.
#[test]
fn tcp_fast_open_is_assured() {
    each(|harness, _, dialogue| {
        for (acknowledged, data) in [(1, 0), (11, 0), (11, 500)] {
            harness.run(dialogue.terms.hook, &dialogue.opening().payload(&[7; 10]));
            let answer = dialogue.answer_packet(harness, SYN_ACK);
            for wrong in [0, 12] {
                let answer = answer.clone().numbers(ANSWER_NUMBER, SYN_NUMBER + wrong);
                dialogue.answered(harness, &answer).expect("passed-out-of-window");
            }
            dialogue.answered(harness, &answer.numbers(ANSWER_NUMBER, SYN_NUMBER + acknowledged));
            assert_eq!(states(harness, dialogue), (0, ANSWERED));
            if data != 0 {
                let early = dialogue.answer_packet(harness, ACK).payload(&vec![7; data as usize]);
                let outcome = dialogue.answered(harness, &early).outcome;
                assert!(matches!(outcome, "replied" | "replied-local"), "{outcome}");
            }
            let ack = |beyond: u32| {
                dialogue.request(ACK).numbers(SYN_NUMBER + acknowledged, ANSWER_NUMBER + 1 + beyond)
            };
            harness.run(dialogue.terms.hook, &ack(data + 1));
            assert_eq!(states(harness, dialogue), (0, ANSWERED), "nobody has sent that");
            harness.run(dialogue.terms.hook, &ack(data));
            assert_eq!(states(harness, dialogue), OPEN);
            harness
                .run(dialogue.terms.hook, &dialogue.request(flag::RST).numbers(SYN_NUMBER + acknowledged, 0));
            dialogue.open(harness);
            let reset = dialogue.request(flag::RST).numbers(SYN_NUMBER + 1, 0);
            harness.run(dialogue.terms.hook, &reset);
        }
    });
}
