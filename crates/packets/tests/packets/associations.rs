//! SCTP associations in the flow table: tags, states, shutdown, restarts, times.

use traffic_policy_ebpf::tcp::{ANSWERED, ASSURED, FIN, RST};
use traffic_policy_testing::harness::{Device, FlowEntry, Frontend, HZ, Harness, Hook, Ran, Setup, Spot};
use traffic_policy_testing::packet::Packet;
use traffic_policy_testing::packet::chunk::{
    ABORT, COOKIE_ACK, COOKIE_ECHO, HEARTBEAT, SHUTDOWN, SHUTDOWN_ACK, SHUTDOWN_COMPLETE,
};

use crate::dialogue::everywhere_tcp;
use crate::sctp::{CLIENT, CLIENT_TAG, ENDPOINT_TAG, VIP, chunk, data, init, init_ack, sctp};
use crate::sweeping::{self, TIMEOUTS};
use crate::table::{ENDPOINT_PORT, Terms};

const OTHER_TAG: u32 = 0x7777_1234;

/// The flag T of ABORT and SHUTDOWN COMPLETE: the tag is that of the sender (RFC 9260 section
/// 8.5.1).
const REFLECTED: u8 = 1;

/// An association whose packets run through the programs, for tests of the state in the flow table.
#[derive(Clone, Copy)]
struct Association {
    terms: Terms,
}

impl Association {
    fn request(self, harness: &Harness, tag: u32, chunk: &[u8]) -> Ran {
        harness.run(self.terms.hook, &sctp(&self.terms.request(VIP), tag, chunk))
    }

    fn reply(self, harness: &Harness, tag: u32, chunk: &[u8]) -> Ran {
        let (request, _) = self.entries(harness);
        let end = |socket: std::net::SocketAddr| (socket.ip(), socket.port());
        let packet = Packet::sctp(end(request.new_to), end(request.new_from), tag, chunk)
            .macs(Spot::RouterNear.mac(), Device::Eth0.mac());
        let local = request.kind == traffic_policy_ebpf::abi::kind::DELIVER;
        harness.run(if local { Hook::Egress } else { self.terms.hook }, &packet)
    }

    fn entries(self, harness: &Harness) -> (FlowEntry, FlowEntry) {
        let flows = harness.flows(self.terms.family);
        let client = self.terms.at(CLIENT).into();
        let request =
            *flows.iter().find(|entry| entry.is_request() && entry.from == client).expect("no request entry");
        let mut replies = flows.iter().filter(|entry| {
            !entry.is_request() && (entry.from, entry.to) == (request.new_to, request.new_from)
        });
        (request, *replies.next().expect("no reply entry"))
    }

    fn states(self, harness: &Harness) -> (u8, u8) {
        let (request, reply) = self.entries(harness);
        (request.state, reply.state)
    }

    fn idle(self, harness: &mut Harness, seconds: u32) {
        let (request, reply) = self.entries(harness);
        for entry in [request, reply] {
            harness.change(&entry, |entry| entry.go_back(seconds * HZ));
        }
    }

    fn establish(self, harness: &Harness, client: u32, endpoint: u32) {
        self.request(harness, 0, &init(client));
        self.reply(harness, client, &init_ack(endpoint));
        self.request(harness, endpoint, &chunk(COOKIE_ECHO, 0, &[7; 100]));
        self.reply(harness, client, &chunk(COOKIE_ACK, 0, &[]));
    }
}

fn set_up(harness: &mut Harness, endpoints: &[Spot]) {
    let endpoints: Vec<_> = endpoints.iter().map(|spot| (*spot, ENDPOINT_PORT)).collect();
    harness.set_up(&Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&endpoints)).snat_ports(5000..5100));
}

/// Runs a test with an endpoint on another node, and with one on this node: both must behave the
/// same.
fn each(work: impl Fn(&mut Harness, Association) + Sync) {
    everywhere_tcp(|harness, terms| {
        for endpoint in [Spot::Near, Spot::Local] {
            set_up(harness, &[endpoint]);
            work(harness, Association { terms });
        }
    });
}

#[test]
fn assured_by_the_endpoints_tag_and_ended_by_shutdown() {
    each(|harness, with| {
        with.request(harness, 0, &init(CLIENT_TAG));
        assert_eq!(with.states(harness), (0, 0));
        let (request, reply) = with.entries(harness);
        assert_eq!((request.tags, reply.tags), ((CLIENT_TAG, 0), (0, CLIENT_TAG)));
        for tag in [0, CLIENT_TAG, ENDPOINT_TAG] {
            with.request(harness, tag, &chunk(COOKIE_ECHO, 0, &[7; 100]));
            assert_eq!(with.states(harness), (0, 0), "the endpoint has not answered");
        }
        with.reply(harness, OTHER_TAG, &init_ack(ENDPOINT_TAG)).expect("passed-out-of-window");
        with.reply(harness, CLIENT_TAG, &init_ack(ENDPOINT_TAG));
        assert_eq!(with.states(harness), (0, ANSWERED));
        with.request(harness, OTHER_TAG, &chunk(COOKIE_ECHO, 0, &[7; 100]));
        assert_eq!(with.states(harness), (0, ANSWERED), "another tag");
        with.request(harness, ENDPOINT_TAG, &chunk(COOKIE_ECHO, 0, &[7; 100]));
        assert_eq!(with.states(harness), (ASSURED, ASSURED | ANSWERED));
        let (request, reply) = with.entries(harness);
        assert_eq!((request.tags, reply.tags), ((CLIENT_TAG, ENDPOINT_TAG), (ENDPOINT_TAG, CLIENT_TAG)));

        with.request(harness, ENDPOINT_TAG, &chunk(SHUTDOWN, 0, &[0; 4]));
        assert_eq!(with.states(harness), (ASSURED | FIN, ASSURED | ANSWERED));
        with.reply(harness, CLIENT_TAG, &chunk(SHUTDOWN_ACK, 0, &[]));
        assert_eq!(with.states(harness), (ASSURED | FIN, ASSURED | ANSWERED | FIN));
        with.request(harness, ENDPOINT_TAG, &chunk(SHUTDOWN_COMPLETE, 0, &[]));
        assert_eq!(with.states(harness), (ASSURED | FIN | RST, ASSURED | ANSWERED | FIN));
        // A new association is an ordinary new flow, in place of the old one.
        with.request(harness, 0, &init(OTHER_TAG));
        let (request, reply) = with.entries(harness);
        assert_eq!((request.state, request.tags, reply.tags), (0, (OTHER_TAG, 0), (0, OTHER_TAG)));
    });
}

/// A packet with another tag than its receiver's is forwarded, so that the receiver decides, and
/// neither changes nor renews the flow.
#[test]
fn another_tag_changes_nothing() {
    each(|harness, with| {
        with.establish(harness, CLIENT_TAG, ENDPOINT_TAG);
        with.idle(harness, 10);
        let before = with.entries(harness);
        let abort = |flags| chunk(ABORT, flags, &[]);
        for (tag, chunk) in [
            (OTHER_TAG, abort(0)),
            (0, abort(0)),
            (CLIENT_TAG, abort(0)),
            (ENDPOINT_TAG, abort(REFLECTED)),
            (OTHER_TAG, chunk(SHUTDOWN_COMPLETE, 0, &[])),
            (OTHER_TAG, chunk(HEARTBEAT, 0, &[1; 8])),
            (0, init(OTHER_TAG)),
        ] {
            let outcome = with.request(harness, tag, &chunk).outcome;
            assert!(matches!(outcome, "forwarded" | "delivered"), "{outcome}");
        }
        for (tag, chunk) in [(ENDPOINT_TAG, abort(0)), (OTHER_TAG, abort(REFLECTED)), (0, data(8))] {
            let outcome = with.reply(harness, tag, &chunk).outcome;
            assert!(outcome.starts_with("replied"), "{outcome}");
        }
        let after = with.entries(harness);
        for (before, after) in [(before.0, after.0), (before.1, after.1)] {
            assert_eq!((before.state, before.tags, before.last), (after.state, after.tags, after.last));
        }
        with.request(harness, ENDPOINT_TAG, &chunk(HEARTBEAT, 0, &[1; 8]));
        assert_ne!(with.entries(harness).0.last, before.0.last, "its own heartbeat renews it");
    });
}

#[test]
fn an_abort_of_either_side_ends_it() {
    each(|harness, with| {
        for (of_client, tag, flags) in [
            (true, ENDPOINT_TAG, 0),
            (true, CLIENT_TAG, REFLECTED),
            (false, CLIENT_TAG, 0),
            (false, ENDPOINT_TAG, REFLECTED),
        ] {
            with.establish(harness, CLIENT_TAG, ENDPOINT_TAG);
            assert_eq!(with.states(harness), (ASSURED, ASSURED | ANSWERED), "opened again");
            let abort = chunk(ABORT, flags, &[]);
            if of_client {
                with.request(harness, tag, &abort);
                assert_eq!(with.entries(harness).0.state & RST, RST);
            } else {
                with.reply(harness, tag, &abort);
                assert_eq!(with.entries(harness).1.state & RST, RST);
            }
        }
        // The endpoint does not listen.
        with.request(harness, 0, &init(OTHER_TAG));
        with.reply(harness, OTHER_TAG, &chunk(ABORT, 0, &[]));
        assert_eq!(with.states(harness), (0, RST));
    });
}

/// Each retransmitted INIT gets an INIT ACK with another tag, and the client accepts either.
#[test]
fn an_init_that_is_sent_again() {
    each(|harness, with| {
        with.request(harness, 0, &init(CLIENT_TAG));
        with.request(harness, 0, &init(CLIENT_TAG));
        with.reply(harness, CLIENT_TAG, &init_ack(ENDPOINT_TAG));
        with.reply(harness, CLIENT_TAG, &init_ack(OTHER_TAG));
        with.request(harness, ENDPOINT_TAG, &chunk(COOKIE_ECHO, 0, &[7; 100]));
        with.reply(harness, CLIENT_TAG, &chunk(COOKIE_ACK, 0, &[]));
        assert_eq!(with.states(harness), (ASSURED, ASSURED | ANSWERED));
        with.request(harness, ENDPOINT_TAG, &data(8));
        let (request, reply) = with.entries(harness);
        assert_eq!((request.tags, reply.tags), ((CLIENT_TAG, ENDPOINT_TAG), (ENDPOINT_TAG, CLIENT_TAG)));
    });
}

/// A round trip may take longer than the quarter of a second after which an unanswered INIT is
/// given up.
#[test]
fn an_init_between_answer_and_cookie_changes_nothing() {
    each(|harness, with| {
        with.request(harness, 0, &init(CLIENT_TAG));
        with.reply(harness, CLIENT_TAG, &init_ack(ENDPOINT_TAG));
        with.idle(harness, 2);
        with.request(harness, 0, &init(OTHER_TAG));
        with.request(harness, ENDPOINT_TAG, &chunk(COOKIE_ECHO, 0, &[7; 100]));
        assert_eq!(with.states(harness), (ASSURED, ASSURED | ANSWERED));

        with.request(harness, ENDPOINT_TAG, &chunk(ABORT, 0, &[]));
        with.request(harness, 0, &init(CLIENT_TAG));
        with.reply(harness, CLIENT_TAG, &init_ack(ENDPOINT_TAG));
        with.idle(harness, 3);
        with.request(harness, 0, &init(OTHER_TAG));
        let (request, reply) = with.entries(harness);
        assert_eq!((request.tags, reply.tags), ((OTHER_TAG, 0), (0, OTHER_TAG)), "it has waited long enough");
        assert_eq!(with.states(harness), (0, 0));
    });
}

/// The endpoint's tag is learned from the client's next packet, but not from one that would end the
/// flow with it.
#[test]
fn a_tag_is_not_learnt_from_an_end() {
    each(|harness, with| {
        for end in [ABORT, SHUTDOWN_COMPLETE] {
            with.request(harness, 0, &init(CLIENT_TAG));
            with.reply(harness, CLIENT_TAG, &init_ack(ENDPOINT_TAG));
            with.reply(harness, CLIENT_TAG, &chunk(COOKIE_ACK, 0, &[]));
            assert_eq!(with.entries(harness).0.tags, (CLIENT_TAG, 0));
            for flags in [0, REFLECTED] {
                with.request(harness, OTHER_TAG, &chunk(end, flags, &[]));
                assert_eq!(with.states(harness), (ASSURED, ASSURED | ANSWERED));
                assert_eq!(with.entries(harness).0.tags, (CLIENT_TAG, 0));
            }
            with.request(harness, ENDPOINT_TAG, &data(8));
            let (request, reply) = with.entries(harness);
            assert_eq!((request.tags, reply.tags), ((CLIENT_TAG, ENDPOINT_TAG), (ENDPOINT_TAG, CLIENT_TAG)));
            with.request(harness, ENDPOINT_TAG, &chunk(end, 0, &[]));
            assert_eq!(with.entries(harness).0.state & RST, RST);
        }
    });
}

/// An entry that another CPU is removing or overwriting stays claimed.
#[test]
fn a_claim_is_not_written_over() {
    const CLAIMED: (u32, u32) = (u32::MAX, u32::MAX);
    each(|harness, with| {
        with.request(harness, 0, &init(CLIENT_TAG));
        with.reply(harness, CLIENT_TAG, &init_ack(ENDPOINT_TAG));
        with.reply(harness, CLIENT_TAG, &chunk(COOKIE_ACK, 0, &[]));
        let (_, reply) = with.entries(harness);
        harness.change(&reply, |entry| entry.tags = CLAIMED);
        with.request(harness, ENDPOINT_TAG, &data(8));
        assert_eq!(with.entries(harness).1.tags, CLAIMED);
    });
}

/// A restarted client uses its port again: the endpoint accepts that on the existing association
/// (RFC 9260 section 5.2).
#[test]
fn a_restart_goes_on_with_the_same_endpoint() {
    each(|harness, with| {
        with.establish(harness, CLIENT_TAG, ENDPOINT_TAG);
        let endpoint = with.entries(harness).0.new_to;
        harness.put(1, &Frontend::new(VIP.0, VIP.1).endpoints(&[(Spot::OtherNear, ENDPOINT_PORT)]));
        let (client, anew) = (OTHER_TAG, ENDPOINT_TAG + 1);
        with.establish(harness, client, anew);
        with.request(harness, anew, &data(8));
        let (request, reply) = with.entries(harness);
        assert_eq!(request.new_to, endpoint);
        assert_eq!((request.tags, reply.tags), ((client, anew), (anew, client)));
        assert_eq!(with.states(harness), (ASSURED, ASSURED | ANSWERED));
        // A living side sends a HEARTBEAT every 30 s: after 45 s of silence an INIT begins another
        // association.
        with.idle(harness, 44);
        with.request(harness, 0, &init(CLIENT_TAG));
        assert_eq!(with.entries(harness).0.new_to, endpoint);
        with.idle(harness, 2);
        with.request(harness, 0, &init(CLIENT_TAG));
        assert_ne!(with.entries(harness).0.new_to, endpoint);
    });
}

/// Packets that bring an association into a state.
type Reach = fn(Association, &Harness);

#[test]
fn each_state_has_its_time() {
    let states: [(Reach, u32); 4] = [
        (|with, harness| drop(with.request(harness, 0, &init(CLIENT_TAG))), TIMEOUTS.unassured),
        (|with, harness| with.establish(harness, CLIENT_TAG, ENDPOINT_TAG), 210 * HZ),
        (
            |with, harness| {
                with.establish(harness, CLIENT_TAG, ENDPOINT_TAG);
                with.request(harness, ENDPOINT_TAG, &chunk(SHUTDOWN, 0, &[0; 4]));
            },
            TIMEOUTS.finished,
        ),
        (
            |with, harness| {
                with.establish(harness, CLIENT_TAG, ENDPOINT_TAG);
                with.reply(harness, CLIENT_TAG, &chunk(ABORT, 0, &[]));
            },
            TIMEOUTS.reset,
        ),
    ];
    everywhere_tcp(|harness, terms| {
        let with = Association { terms };
        for (reach, timeout) in states {
            set_up(harness, &[Spot::Near]);
            reach(with, harness);
            let mut sweeper = sweeping::sweeper();
            let mut swept = |harness: &mut Harness, idle| {
                sweeping::idle(harness, with.entries(harness), idle);
                let twice = [0; 2].map(|_| harness.sweep(&mut sweeper, false)[terms.family as usize].deleted);
                twice.iter().sum::<u32>()
            };
            assert_eq!(swept(harness, timeout - sweeping::SLACK), 0, "{timeout}");
            assert_eq!(swept(harness, timeout + sweeping::SLACK), 1, "{timeout}");
        }
    });
}
