//! IPv4 packets that would be too long within an outer packet and may be fragmented (RFC 791
//! section 3.2): each of two pieces travels in a packet of its own, and the endpoint's host puts
//! them together.

use traffic_policy_testing::harness::{self, Harness, Hook, Ran, Setup};
use traffic_policy_testing::packet::Packet;

use super::l2::{by_table, know_home};
use super::{NEAR, VIP, terms, way::Way};
use crate::sctp::{CLIENT_TAG, ENDPOINT_TAG, data, init, sctp};
use crate::table::{ENDPOINT_PORT, Terms};

/// The bytes of an IPv4 header.
const HEADER: usize = 20;
const MTU: usize = 1500;

/// The payload of the first piece: its length is a multiple of eight bytes.
fn first(terms: Terms, way: Way) -> usize {
    (MTU - way.bytes(terms) - HEADER) / 8 * 8
}

/// The second piece; the harness sees the last packet alone that the program sends.
fn second(fragment: &Packet, first: usize) -> Packet {
    let rest = fragment.payload[first..].to_vec();
    fragment.clone().payload(&rest).with(|piece| piece.fragment_offset += u16::try_from(first / 8).unwrap())
}

fn each_way(mut work: impl FnMut(&mut Harness, Terms, Way) + Send) {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress).filter(|terms| terms.v4()) {
            for way in Way::ALL {
                harness.set_up(&Setup::of(way.frontend(VIP)));
                work(harness, terms, way);
            }
        }
    });
}

fn expect(ran: &Ran, terms: Terms, way: Way, piece: &Packet) {
    let way = way.of(ran, terms);
    ran.expect("forwarded-direct").expect_frame(&way.sent(piece));
}

/// A request of the longest packet that fits the client's link.
fn long(terms: Terms) -> Packet {
    let header = if terms.tcp { 20 } else { 8 };
    terms.request(VIP).payload(&vec![7; MTU - HEADER - header]).with(|packet| packet.dont_fragment = false)
}

#[test]
fn a_packet_is_sent_in_two_pieces() {
    each_way(|harness, terms, way| {
        let whole = long(terms);
        let piece = second(&whole.fragments(MTU)[0], first(terms, way));
        // As the first one of a flow, and as one of an established flow.
        for _ in 0..3 {
            expect(&harness.run(terms.hook, &whole), terms, way, &piece);
        }
        let denied = whole.with(|packet| packet.dont_fragment = true);
        harness.run(terms.hook, &denied).expect("rejected-mtu-exceeded");
    });
}

#[test]
fn each_fragment_is_sent_in_two_pieces() {
    each_way(|harness, terms, way| {
        let whole = terms.request(VIP).payload(&vec![7; 4000]).with(|packet| packet.dont_fragment = false);
        let fragments = whole.fragments(MTU - HEADER);
        for fragment in &fragments[..2] {
            let piece = second(fragment, first(terms, way));
            expect(&harness.run(terms.hook, fragment), terms, way, &piece);
        }
        expect(&harness.run(terms.hook, &fragments[2]), terms, way, &fragments[2]);
    });
}

#[test]
fn a_packet_of_an_association_is_sent_in_two_pieces() {
    each_way(|harness, terms, way| {
        // With another port than its endpoint's it would travel translated.
        let to = (VIP.0, ENDPOINT_PORT);
        harness.set_up(&Setup::of(way.frontend(to)));
        let request = terms.request(to).with(|packet| packet.dont_fragment = false);
        harness.run(terms.hook, &sctp(&request, 0, &init(CLIENT_TAG))).expect("forwarded-direct");
        let whole = sctp(&request, ENDPOINT_TAG, &data(1444));
        let piece = second(&whole.fragments(MTU)[0], first(terms, way));
        expect(&harness.run(terms.hook, &whole), terms, way, &piece);
    });
}

/// The flow counts each packet once, as the sender has sent it.
#[test]
fn a_packet_in_pieces_is_counted_once() {
    each_way(|harness, terms, way| {
        let whole = long(terms);
        expect(
            &harness.run(terms.hook, &whole),
            terms,
            way,
            &second(&whole.fragments(MTU)[0], first(terms, way)),
        );
        let flows = harness.flows(terms.family);
        assert_eq!((flows[0].packets, flows[0].bytes), (1, MTU as u64), "{terms:?}, {way:?}");
    });
}

/// Pieces travel within IP where packets that fit travel by MAC address.
#[test]
fn by_mac_address_no_pieces_are_sent() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress).filter(|terms| terms.v4()) {
            let mut setup = Setup::of(by_table(VIP, &[NEAR]));
            setup.route_mtus = vec![(NEAR.0, 1400)];
            harness.set_up(&setup);
            know_home(harness);
            let whole = long(terms);
            let piece = second(&whole.fragments(MTU)[0], (1400 - 2 * HEADER) / 8 * 8);
            for _ in 0..2 {
                expect(&harness.run(terms.hook, &whole), terms, Way::Ip, &piece);
            }
        }
    });
}
