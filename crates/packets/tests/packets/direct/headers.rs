//! Outer headers: what fits beside them, fragments in them, and marks of congestion on them.

use traffic_policy_testing::harness::{self, Frontend, Hook, Setup};
use traffic_policy_testing::packet::Packet;

use super::{FRONT, LOCAL, NEAR, VIP, arrives, each_ingress, sent, set_up_home, terms};

/// Congestion experienced, and a sender that knows it: RFC 3168 section 5.
const CE: u8 = 3;
const ECT: u8 = 2;
/// The first of three fragments comes before the others, which follow in either order.
pub(super) const ANY_ORDER: [usize; 6] = [0, 1, 2, 0, 2, 1];

/// The MTU less the outer header has to be 1,280 bytes at least (RFC 8200 section 5): hosts ignore
/// a smaller limit.
#[test]
fn a_way_too_narrow_for_ipv6_within_ipv6_is_not_taken() {
    each_ingress(|harness, terms| {
        for (mtu, outcome) in [(1319, "forwarded"), (1320, "forwarded-direct")] {
            let mut setup = Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&[NEAR]).direct());
            setup.route_mtus = vec![(NEAR.0, mtu)];
            harness.set_up(&setup);
            let outcome = if terms.v4() { "forwarded-direct" } else { outcome };
            for _ in 0..2 {
                harness.run(terms.hook, &terms.request(VIP)).expect(outcome);
            }
        }
    });
}

/// Each fragment travels in a packet of its own, in any order once the first has told the ports;
/// what overtakes it is left to the stack, as it is.
#[test]
fn fragments_leave_as_whole_packets_do() {
    each_ingress(|harness, terms| {
        harness.set_up(&Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&[NEAR]).direct()));
        let whole = terms.request(VIP).payload(&[7; 100]).with(|packet| {
            (packet.dont_fragment, packet.label) = (false, 77);
        });
        let fragments = whole.fragments(48);
        assert_eq!(fragments.len(), 3);
        harness.run(terms.hook, &fragments[1]).expect("passed-fragment").expect_frame(&fragments[1]);
        for at in ANY_ORDER {
            let fragment = &fragments[at];
            harness.run(terms.hook, fragment).expect("forwarded-direct").expect_frame(&sent(fragment));
        }
    });
}

/// A router between the nodes that was congested: the mark reaches the endpoint (RFC 6040), unless
/// its packet says that it does not know such marks.
#[test]
fn congestion_between_the_nodes_is_told_to_the_endpoint() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress) {
            for (inside, outside, delivered) in [(ECT, CE, CE), (0, CE, 0), (ECT, ECT, ECT), (CE, ECT, CE)] {
                set_up_home(harness, VIP);
                let request = terms.request(VIP).with(|packet| packet.traffic_class = 0x28 | inside);
                let outer = arrives(&request, FRONT, LOCAL.0).with(|outer| outer.traffic_class = outside);
                let expected = request.clone().destination(terms.at(LOCAL));
                let expected = expected.with(|packet| packet.traffic_class = 0x28 | delivered);
                harness.run(terms.hook, &outer).expect("delivered").expect_frame(&expected);
            }
        }
    });
}

/// One that overtakes the first cannot be told from those of other Services: no untranslated packet
/// reaches the stack.
#[test]
fn fragments_are_opened_as_whole_packets_are() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress) {
            set_up_home(harness, VIP);
            let whole = terms.request(VIP).payload(&[7; 100]).with(|packet| {
                (packet.dont_fragment, packet.label) = (false, 78);
            });
            let delivered = whole.clone().destination(terms.at(LOCAL)).fragments(48);
            let fragments = whole.fragments(48);
            let arrives = |fragment: &Packet| arrives(fragment, FRONT, LOCAL.0);
            harness.run(terms.hook, &arrives(&fragments[1])).expect("dropped-unknown-endpoint");
            for at in ANY_ORDER {
                let ran = harness.run(terms.hook, &arrives(&fragments[at]));
                ran.expect("delivered").expect_frame(&delivered[at]);
            }
        }
    });
}
