//! Associations that are forwarded directly: whole packets in front and at the endpoint's node, and
//! the state that the client's packets alone show.

use traffic_policy_ebpf::tcp::{ASSURED, FIN, RST};
use traffic_policy_testing::harness::{self, Frontend, HZ, Harness, Hook, Input, Setup, Spot};
use traffic_policy_testing::packet::Packet;
use traffic_policy_testing::packet::chunk::{
    ABORT, COOKIE_ACK, COOKIE_ECHO, HEARTBEAT, SHUTDOWN, SHUTDOWN_ACK, SHUTDOWN_COMPLETE,
};

use super::way::Way;
use super::{FRONT, LOCAL, NEAR, NODE, VIP, each_ingress, set_up_home, terms};
use crate::errors::{WHOLE, error, port_unreachable};
use crate::sctp::{CLIENT, CLIENT_TAG, ENDPOINT_TAG, chunk, data, init, init_ack, sctp};
use crate::sweeping::{SLACK, TIMEOUTS, sweeper};
use crate::table::{ENDPOINT_PORT, PORT, Terms};

const OTHER_TAG: u32 = 0x7777_1234;
/// A frontend with the port of its endpoint.
pub(super) const SAME_PORT: (Spot, u16) = (Spot::Vip, ENDPOINT_PORT);

fn each_ingress_of_sctp(mut work: impl FnMut(&mut Harness, Terms, Way) + Send) {
    each_ingress(|harness, terms| {
        for way in Way::ALL {
            if terms.tcp {
                work(harness, terms, way);
            }
        }
    });
}

fn each_home(mut work: impl FnMut(&mut Harness, Terms, Way) + Send) {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress).filter(|terms| terms.tcp) {
            Way::ALL.into_iter().for_each(|way| work(harness, terms, way));
        }
    });
}

/// The client's packets from INIT to SHUTDOWN COMPLETE: tag and chunk.
pub(super) fn requests() -> Vec<(u32, Vec<u8>)> {
    let data = [1, 2, 3, 4, 100, 255, 256, 1000].map(|length| (ENDPOINT_TAG, data(length)));
    let mut said = vec![(0, init(CLIENT_TAG)), (ENDPOINT_TAG, chunk(COOKIE_ECHO, 0, &[7; 200]))];
    said.extend(data);
    said.extend([
        (ENDPOINT_TAG, chunk(SHUTDOWN, 0, &[0; 4])),
        (ENDPOINT_TAG, chunk(SHUTDOWN_COMPLETE, 0, &[])),
    ]);
    said
}

#[test]
fn an_association_leaves_as_it_came() {
    each_ingress_of_sctp(|harness, terms, way| {
        for to in [NODE, VIP] {
            harness.set_up(&Setup::of(way.frontend(to)));
            let mut first = None;
            for (tag, chunk) in requests() {
                let request = sctp(&terms.request(to), tag, &chunk);
                let ran = harness.run(terms.hook, &request);
                let way = *first.get_or_insert_with(|| way.of(&ran, terms));
                ran.expect("forwarded-direct").expect_frame(&way.sent(&request));
            }
            assert_eq!(harness.flows(terms.family).len(), 1, "no entry for replies, {terms:?}");
        }
    });
}

/// The endpoint's port is another one than the frontend's, so each checksum changes.
#[test]
fn the_endpoint_sees_the_client_and_answers_as_the_frontend() {
    each_home(|harness, terms, way| {
        set_up_home(harness, VIP);
        let answers = [
            init_ack(ENDPOINT_TAG),
            chunk(COOKIE_ACK, 0, &[]),
            data(300),
            chunk(SHUTDOWN_ACK, 0, &[]),
            chunk(ABORT, 0, &[]),
        ];
        for (tag, chunk) in requests() {
            let of = |packet: &Packet| sctp(packet, tag, &chunk);
            let ran = harness.run(terms.hook, &way.arrives(&of(&terms.request(VIP)), FRONT, LOCAL.0));
            let delivered = terms.request(VIP).destination(terms.at(LOCAL));
            ran.expect("delivered").expect_frame(&of(&delivered));
            for answer in &answers {
                let of = |packet: &Packet| sctp(packet, CLIENT_TAG, answer);
                let leaves = terms.answer(LOCAL, CLIENT);
                let ran = harness.run(Hook::Egress, &of(&leaves));
                ran.expect("replied-local").expect_frame(&of(&leaves.source(terms.at(VIP))));
            }
        }
    });
}

/// A packet that leaves no room for an outer one would be cut by its sender, and the checksum of
/// fragments cannot be updated where the port changes.
#[test]
fn what_leaves_no_room_for_an_outer_packet_travels_translated_where_the_port_changes() {
    each_home(|harness, terms, way| {
        let header = if terms.v4() { 20 } else { 40 } + 12 + 16;
        // The longest chunk that fits an outer packet, and the longest that fits the device.
        let (fits, longest) = (1500 - way.bytes(terms) - header, 1500 - header);
        for (to, length, outcome) in [
            (VIP, fits, "forwarded-direct"),
            (VIP, fits + 4, "forwarded"),
            (VIP, longest, "forwarded"),
            (VIP, longest + 4, "rejected-mtu-exceeded"),
            (SAME_PORT, fits, "forwarded-direct"),
            (SAME_PORT, fits + 4, "rejected-mtu-exceeded"),
        ] {
            let what = format!("{to:?}, {length} bytes, {terms:?}, {way:?}");
            harness.set_up(&Setup::of(way.frontend(to)));
            let open = harness.run(terms.hook, &sctp(&terms.request(to), 0, &init(CLIENT_TAG)));
            let sent_in = way.of(&open, terms);
            let of = |packet: &Packet| sctp(packet, ENDPOINT_TAG, &data(length));
            let request = of(&terms.request(to));
            let ran = harness.run(terms.hook, &request);
            assert_eq!(ran.outcome, outcome, "{what}");
            if outcome == "forwarded-direct" {
                ran.expect_frame(&sent_in.sent(&request));
            } else if outcome == "forwarded" {
                let translated = terms.request(to).destination(terms.at(NEAR));
                let macs = (harness::Device::Eth0.mac(), Spot::RouterNear.mac());
                ran.expect_frame(&of(&translated.macs(macs.0, macs.1).ttl(63)));
            }
            let [flow] = harness.flows(terms.family)[..] else { panic!("one entry: {what}") };
            assert_eq!(flow.packets, if outcome.starts_with("forwarded") { 2 } else { 1 }, "{what}");
        }
    });
}

/// The stack answers for the node in front, as it does under `snat`; an opened packet never reaches
/// it.
#[test]
fn nobody_answers_for_an_association_that_nobody_knows() {
    let said = [(ENDPOINT_TAG, data(100)), (ENDPOINT_TAG, chunk(COOKIE_ECHO, 0, &[7; 100]))];
    each_ingress_of_sctp(|harness, terms, way| {
        let frontend = way.frontend(VIP).maglev("251".parse().unwrap());
        harness.set_up(&Setup::of(frontend));
        for (tag, chunk) in &said {
            harness.run(terms.hook, &sctp(&terms.request(VIP), *tag, chunk)).expect("passed-no-flow");
        }
        assert_eq!(harness.flows(terms.family), []);
    });
    each_home(|harness, terms, way| {
        set_up_home(harness, VIP);
        for (tag, chunk) in &said {
            let arrives = way.arrives(&sctp(&terms.request(VIP), *tag, chunk), FRONT, LOCAL.0);
            harness.run(terms.hook, &arrives).expect("dropped-unknown-endpoint");
        }
        let unknown = terms.request((Spot::Vip, PORT + 1));
        let ran = harness.run(terms.hook, &Way::Ip.arrives(&sctp(&unknown, 0, &init(1)), FRONT, LOCAL.0));
        ran.expect("dropped-unknown-endpoint");
        assert_eq!(harness.flows(terms.family), []);
    });
}

/// An INIT that comes by another node begins a flow to the given endpoint; another packet of a flow
/// through this node is not sent on.
#[test]
fn nothing_is_sent_to_a_third_node() {
    each_home(|harness, terms, way| {
        for direct in [false, true] {
            let frontend = Frontend::new(VIP.0, VIP.1).endpoints(&[NEAR]);
            harness.set_up(&Setup::of(if direct { frontend.direct() } else { frontend }));
            harness.let_send_directly(FRONT);
            harness.open_for(LOCAL.0, 1, LOCAL.1);
            let open = sctp(&terms.request(VIP), 0, &init(CLIENT_TAG));
            harness.run(terms.hook, &open).expect(if direct { "forwarded-direct" } else { "forwarded" });
            let later = sctp(&terms.request(VIP), ENDPOINT_TAG, &data(8));
            let ran = harness.run(terms.hook, &way.arrives(&later, FRONT, LOCAL.0));
            ran.expect("dropped-unknown-endpoint");
            let to = terms.request(VIP).destination(terms.at(LOCAL));
            let delivered = sctp(&to, 0, &init(CLIENT_TAG));
            for _ in 0..2 {
                let ran = harness.run(terms.hook, &way.arrives(&open, FRONT, LOCAL.0));
                ran.expect("delivered").expect_frame(&delivered);
            }
        }
    });
}

/// The node in front changes no port, so a fragment travels. At the endpoint's node the checksum
/// cannot be updated, as for an endpoint of the node in front.
#[test]
fn fragments_travel_and_are_not_translated() {
    let fragments = |packet: &Packet| {
        let whole = sctp(packet, ENDPOINT_TAG, &data(400));
        whole.with(|packet| (packet.dont_fragment, packet.label) = (false, 76)).fragments(200)
    };
    each_ingress_of_sctp(|harness, terms, way| {
        harness.set_up(&Setup::of(way.frontend(VIP)));
        let open = harness.run(terms.hook, &sctp(&terms.request(VIP), 0, &init(CLIENT_TAG)));
        let way = way.of(&open, terms);
        for fragment in fragments(&terms.request(VIP)) {
            harness.run(terms.hook, &fragment).expect("forwarded-direct").expect_frame(&way.sent(&fragment));
        }
    });
    each_home(|harness, terms, way| {
        for (port, outcome) in [(LOCAL.1, "dropped-sctp-fragment"), (PORT, "delivered")] {
            harness.set_up(&Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&[NEAR])));
            harness.let_send_directly(FRONT);
            harness.open_for(LOCAL.0, 1, port);
            let open = sctp(&terms.request(VIP), 0, &init(CLIENT_TAG));
            harness.run(terms.hook, &way.arrives(&open, FRONT, LOCAL.0)).expect("delivered");
            let delivered = fragments(&terms.request(VIP).destination(terms.at((LOCAL.0, port))));
            for (fragment, delivered) in fragments(&terms.request(VIP)).iter().zip(delivered) {
                let ran = harness.run(terms.hook, &way.arrives(fragment, FRONT, LOCAL.0));
                if port == PORT {
                    ran.expect("delivered").expect_frame(&delivered);
                } else {
                    assert!(ran.outcome.starts_with("dropped-"), "{}", ran.outcome);
                    if delivered.fragment_offset == 0 && delivered.more_fragments {
                        assert_eq!(ran.outcome, outcome);
                    }
                }
            }
        }
    });
}

/// An opened packet leaves no mark for the next one, also where no program of SCTP is loaded.
#[test]
fn without_its_programs_an_opened_packet_is_dropped() {
    each_home(|harness, terms, way| {
        let setup = Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&[NEAR]));
        harness.set_up(&setup.with(|setup| setup.sctp = false));
        harness.let_send_directly(FRONT);
        harness.open_for(LOCAL.0, 1, LOCAL.1);
        let open = sctp(&terms.request(VIP), 0, &init(CLIENT_TAG));
        // Within UDP it is a datagram to a pod, since no Service has its packet.
        let outcome = if way.is_udp() { "passed" } else { "dropped-unknown-endpoint" };
        harness.run(terms.hook, &way.arrives(&open, FRONT, LOCAL.0)).expect(outcome);
        harness.run(terms.hook, &terms.request(VIP)).expect("forwarded");
    });
}

struct Association {
    terms: Terms,
}

impl Association {
    fn says(&self, harness: &Harness, tag: u32, chunk: &[u8]) {
        let packet = sctp(&self.terms.request(VIP), tag, chunk);
        harness.run(self.terms.hook, &packet).expect("forwarded-direct");
    }

    fn begin(&self, harness: &mut Harness) {
        harness.set_up(&Setup::of(Way::Ip.frontend(VIP)));
        self.says(harness, 0, &init(CLIENT_TAG));
    }

    fn establish(&self, harness: &mut Harness) {
        self.begin(harness);
        self.says(harness, ENDPOINT_TAG, &chunk(COOKIE_ECHO, 0, &[7; 100]));
        assert_eq!(self.state(harness), ASSURED);
    }

    fn state(&self, harness: &Harness) -> u8 {
        harness.flows(self.terms.family)[0].state
    }

    fn idle(&self, harness: &mut Harness, seconds: u32) {
        let [flow] = harness.flows(self.terms.family)[..] else { panic!("one entry") };
        harness.change(&flow, |entry| entry.go_back(seconds * HZ));
    }
}

fn each_association(work: impl Fn(&mut Harness, &Association) + Sync) {
    each_ingress(|harness, terms| {
        if terms.tcp {
            work(harness, &Association { terms });
        }
    });
}

#[test]
fn an_association_lasts_as_its_requests_show() {
    let established = 210 * HZ;
    let said: [(&[(u8, u32)], u32); 6] = [
        (&[], TIMEOUTS.unassured),
        (&[(HEARTBEAT, ENDPOINT_TAG)], TIMEOUTS.unassured),
        (&[(COOKIE_ECHO, ENDPOINT_TAG)], established),
        (&[(COOKIE_ECHO, ENDPOINT_TAG), (SHUTDOWN, ENDPOINT_TAG)], TIMEOUTS.finished),
        (&[(COOKIE_ECHO, ENDPOINT_TAG), (SHUTDOWN_ACK, ENDPOINT_TAG)], TIMEOUTS.finished),
        (&[(COOKIE_ECHO, ENDPOINT_TAG), (ABORT, ENDPOINT_TAG)], TIMEOUTS.reset),
    ];
    each_association(|harness, with| {
        for (chunks, timeout) in said {
            with.begin(harness);
            for (kind, tag) in chunks {
                with.says(harness, *tag, &chunk(*kind, 0, &[]));
            }
            let mut sweeper = sweeper();
            for (idle, deleted) in [(timeout - SLACK, 0), (timeout + SLACK, 1)] {
                let last = harness.now().wrapping_sub(idle);
                let [flow] = harness.flows(with.terms.family)[..] else { panic!("one entry") };
                harness.change(&flow, |entry| entry.last = last);
                harness.sweep(&mut sweeper, false);
                let found = harness.sweep(&mut sweeper, false)[with.terms.family as usize];
                assert_eq!(found.deleted, deleted, "{chunks:?} idle for {idle}, {:?}", with.terms);
            }
        }
    });
}

/// The kernel puts no outer packet around what a host on the same machine has not cut yet: it goes
/// to the endpoint as that would see it, without the opening node.
#[test]
fn an_aggregate_of_whole_packets_travels_translated() {
    each_home(|harness, terms, way| {
        harness.set_up(&Setup::of(way.frontend(VIP)));
        let of = |packet: &Packet| sctp(packet, ENDPOINT_TAG, &data(1000));
        let open = harness.run(terms.hook, &sctp(&terms.request(VIP), 0, &init(CLIENT_TAG)));
        let way = way.of(&open, terms);
        let single = harness.run(terms.hook, &of(&terms.request(VIP)));
        single.expect("forwarded-direct").expect_frame(&way.sent(&of(&terms.request(VIP))));
        let translated = terms
            .request(VIP)
            .destination(terms.at(NEAR))
            .macs(harness::Device::Eth0.mac(), Spot::RouterNear.mac())
            .ttl(63);
        let aggregate = Input { segment: 0xffff, ..Input::new(terms.hook, of(&terms.request(VIP)).bytes()) };
        let ran = harness.input(&aggregate);
        ran.expect("forwarded").expect_frame(&of(&translated));
        let [flow] = harness.flows(terms.family)[..] else { panic!("one entry") };
        assert_eq!(flow.packets, 3, "the aggregate is counted");
    });
}

/// Whoever does not see its packets does not know its tags.
#[test]
fn a_forged_packet_ends_no_association() {
    each_association(|harness, with| {
        with.establish(harness);
        for tag in [0, CLIENT_TAG, OTHER_TAG] {
            with.says(harness, tag, &chunk(COOKIE_ECHO, 0, &[7; 100]));
            for kind in [ABORT, SHUTDOWN, SHUTDOWN_ACK, SHUTDOWN_COMPLETE] {
                with.says(harness, tag, &chunk(kind, 0, &[]));
                assert_eq!(with.state(harness), ASSURED, "{kind} with {tag:x}");
            }
        }
        with.says(harness, ENDPOINT_TAG, &chunk(SHUTDOWN, 0, &[0; 4]));
        assert_eq!(with.state(harness), ASSURED | FIN);
        with.says(harness, ENDPOINT_TAG, &chunk(SHUTDOWN_COMPLETE, 0, &[]));
        assert_eq!(with.state(harness), ASSURED | FIN | RST);
    });
}

/// An INIT on an association that goes on is left to the endpoint, which knows more.
#[test]
fn an_init_begins_anew_what_is_over_or_silent() {
    each_association(|harness, with| {
        let anew = |harness: &Harness| {
            with.says(harness, 0, &init(OTHER_TAG));
            with.state(harness) == 0
        };
        for (seconds, begins) in [(0, false), (44, false), (46, true)] {
            with.establish(harness);
            with.idle(harness, seconds);
            assert_eq!(anew(harness), begins, "silent for {seconds} s");
        }
        for kind in [ABORT, SHUTDOWN_ACK, SHUTDOWN_COMPLETE] {
            with.establish(harness);
            with.says(harness, ENDPOINT_TAG, &chunk(kind, 0, &[]));
            assert!(anew(harness), "{kind}");
        }
    });
}

#[test]
fn an_error_about_a_reply_follows_the_association() {
    each_ingress_of_sctp(|harness, terms, way| {
        harness.set_up(&Setup::of(way.frontend(VIP)));
        let open = harness.run(terms.hook, &sctp(&terms.request(VIP), 0, &init(CLIENT_TAG)));
        let reply = sctp(&terms.answer(VIP, CLIENT), CLIENT_TAG, &init_ack(ENDPOINT_TAG));
        let error = error(terms, port_unreachable(terms), Spot::RouterFar, &reply, WHOLE);
        let error = error.macs(Spot::Router.mac(), harness::Device::Eth0.mac());
        let ran = harness.run(terms.hook, &error);
        ran.expect("forwarded-icmp-error").expect_frame(&way.of(&open, terms).sent(&error));
    });
    each_home(|harness, terms, way| {
        set_up_home(harness, VIP);
        let open = sctp(&terms.request(VIP), 0, &init(CLIENT_TAG));
        harness.run(terms.hook, &way.arrives(&open, FRONT, LOCAL.0)).expect("delivered");
        let of = |from| {
            let reply = sctp(&terms.answer(from, CLIENT), CLIENT_TAG, &init_ack(ENDPOINT_TAG));
            error(terms, port_unreachable(terms), Spot::RouterFar, &reply, WHOLE)
        };
        let ran = harness.run(terms.hook, &way.arrives(&of(VIP), FRONT, LOCAL.0));
        ran.expect("delivered-icmp-error");
    });
}
