//! A client's connection through this node to another one, whose endpoint knows it with this node's
//! address, and what arrives for it within outer packets meanwhile.

use traffic_policy_ebpf::tcp;
use traffic_policy_testing::harness::{self, Frontend, Harness, Hook, Setup, Spot};
use traffic_policy_testing::packet::{Packet, flag};

use super::{
    FRONT, LOCAL, NEAR, VIP, addresses, arrives, headers::ANY_ORDER, octets, outer, set_up_home, terms,
    tunnel,
};
use crate::dialogue::Dialogue;
use crate::table::Terms;

/// Begins a connection to another node's endpoint here, which also has one of the Service itself.
fn begun(harness: &mut Harness, terms: Terms, establish: bool) -> Dialogue {
    set_up_home(harness, VIP);
    let dialogue = Dialogue::new(terms, VIP);
    if establish {
        dialogue.establish(harness);
    } else {
        dialogue.open(harness);
    }
    dialogue
}

/// The router has moved a connection whose endpoint knows it with this node's address to another
/// node, which cannot go on with it. A segment that a stranger has made does not end it.
#[test]
fn the_client_of_a_connection_by_snat_through_this_node_is_told() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress).filter(|terms| terms.tcp) {
            for (establish, through_front) in [(false, false), (true, false), (true, true)] {
                let dialogue = begun(harness, terms, establish);
                let known = harness.flows(terms.family);
                let segment = |flags, beyond: u32| {
                    dialogue.opening().with(|packet| {
                        let tcp = packet.tcp_mut();
                        tcp.flags = flags;
                        tcp.sequence = tcp.sequence.wrapping_add(beyond);
                        tcp.acknowledgement = 4711;
                    })
                };
                let arrives = |inner: &Packet| {
                    let outer = arrives(inner, FRONT, LOCAL.0);
                    if through_front { outer.with(tunnel::through_front) } else { outer }
                };
                for (flags, beyond, outcome) in [
                    (flag::ACK, 1 << 30, "dropped-out-of-window"),
                    (flag::RST | flag::ACK, 1, "dropped-unknown-endpoint"),
                    (flag::SYN | flag::ACK, 1, "dropped-unknown-endpoint"),
                ] {
                    harness.run(terms.hook, &arrives(&segment(flags, beyond))).expect(outcome);
                }
                let ran = harness.run(terms.hook, &arrives(&segment(flag::ACK | flag::PSH, 1)));
                ran.expect("reset-no-flow");
                let mut answer = ran.frame.clone();
                if through_front {
                    let expected = [octets(terms, Spot::Node), octets(terms, FRONT)];
                    assert_eq!(addresses(&answer, terms), expected, "{terms:?}");
                    answer.drain(14..14 + outer(terms));
                }
                let expected = [octets(terms, Spot::Vip), octets(terms, Spot::Client)];
                assert_eq!(addresses(&answer, terms), expected, "{terms:?}");
                let tcp = &answer[14 + outer(terms)..];
                assert_eq!((&tcp[4..8], tcp[13]), (&4711_u32.to_be_bytes()[..], flag::RST), "{terms:?}");
                let kept = harness.flows(terms.family);
                assert_eq!(kept.len(), known.len(), "{terms:?}: the flow goes on");
                assert!(kept.iter().all(|flow| flow.state & tcp::RST == 0), "{terms:?}: {kept:?}");
            }
        }
    });
}

/// A client whose datagrams all come in fragments, through this node to another one before: none of
/// them is whole, so none but these can end that flow, and begin one to the given endpoint.
#[test]
fn fragmented_datagrams_that_come_by_another_node_reach_their_endpoint() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress).filter(|terms| !terms.tcp) {
            for (direct, outcome) in [(false, "forwarded"), (true, "forwarded-direct")] {
                let frontend = Frontend::new(VIP.0, VIP.1).endpoints(&[NEAR]);
                harness.set_up(&Setup::of(if direct { frontend.direct() } else { frontend }));
                harness.let_send_directly(FRONT);
                harness.open_for(LOCAL.0, 1, LOCAL.1);
                let whole = terms.request(VIP).payload(&[7; 100]).with(|packet| {
                    (packet.dont_fragment, packet.label) = (false, 83);
                });
                let fragments = whole.fragments(48);
                for at in ANY_ORDER {
                    harness.run(terms.hook, &fragments[at]).expect(outcome);
                }
                let delivered = whole.destination(terms.at(LOCAL)).fragments(48);
                for at in ANY_ORDER {
                    let ran = harness.run(terms.hook, &arrives(&fragments[at], FRONT, LOCAL.0));
                    ran.expect("delivered").expect_frame(&delivered[at]);
                }
            }
        }
    });
}

/// A flow of the same client through this node to another one is not taken for it: a segment is not
/// sent on, but reset, and a SYN or datagram begins a flow to the given endpoint.
#[test]
fn nothing_is_sent_to_a_third_node() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress) {
            for establish in [false, true] {
                let dialogue = begun(harness, terms, establish);
                let request = dialogue.opening();
                if terms.tcp {
                    let segment = request.clone().with(|packet| packet.tcp_mut().flags = flag::ACK);
                    let ran = harness.run(terms.hook, &arrives(&segment, FRONT, LOCAL.0));
                    ran.expect("reset-no-flow");
                }
                let delivered = request.clone().destination(terms.at(LOCAL));
                for _ in 0..2 {
                    let ran = harness.run(terms.hook, &arrives(&request, FRONT, LOCAL.0));
                    ran.expect("delivered").expect_frame(&delivered);
                }
            }
        }
    });
}
