//! The programs compared with the reference model, on random packets from fixed seeds: `cargo xtask
//! fuzz` continues where this ends. Sequences that it has found are repeated here.

use std::thread;

use fastrand::Rng;
use traffic_policy_fuzz::action::{Point, Sender};
use traffic_policy_fuzz::damage::Damage;
use traffic_policy_fuzz::segment::{Chunk, Flags, Number, Protocol, Segment, Tag};
use traffic_policy_fuzz::{Action, Path, Totals, check, concurrent, fuzz, row, shrink};
use traffic_policy_testing::harness::{self, Harness, Hook};
use traffic_policy_testing::lab::Family;
use traffic_policy_testing::rows;

/// The number of packets for each of XDP and TC, IPv4 and IPv6.
const PACKETS: u64 = 60_000;

fn no_difference(path: Path, packets: u64, pauses: bool) {
    let mut totals = Totals::default();
    let found = harness::with(|harness| {
        let mut rng = Rng::with_seed(1);
        let ran = fuzz(harness, path, &mut rng, &mut totals, pauses, |totals| totals.packets >= packets);
        ran.err().map(|found| {
            let (actions, difference) = *found;
            let (actions, difference) = shrink(harness, path, &actions, &difference);
            row::describe(path, &actions, &difference)
        })
    });
    if let Some(text) = found {
        panic!("{text}");
    }
    // A generator that reaches no interesting states finds nothing.
    let Totals { packets, translated, flows, unchanged, associations, restarts } = totals;
    assert!(translated > packets / 3 && flows > packets / 50 && unchanged > packets / 50, "{totals:?}");
    // With pauses there are too few packets for these.
    assert!(pauses || associations > packets / 300 && restarts > packets / 5000, "{totals:?}");
}

rows! {
    fn xdp_ipv4() = no_difference(Path { hook: Hook::Xdp, family: Family::V4 }, PACKETS, false);
    fn xdp_ipv6() = no_difference(Path { hook: Hook::Xdp, family: Family::V6 }, PACKETS, false);
    fn tc_ipv4() = no_difference(Path { hook: Hook::Ingress, family: Family::V4 }, PACKETS, false);
    fn tc_ipv6() = no_difference(Path { hook: Hook::Ingress, family: Family::V6 }, PACKETS, false);
}

/// The number of packets for each with pauses, which take nearly all of the time.
const WITH_PAUSES: u64 = 2_000;

/// A machine that does other work meanwhile, or stands still for seconds.
#[test]
fn pauses() {
    thread::scope(|scope| {
        for path in Path::all() {
            scope.spawn(move || no_difference(path, WITH_PAUSES, true));
        }
    });
}

/// The number of packets for each on both CPUs together.
const AT_ONCE: u64 = 40_000;

/// Packets of the same flows on two CPUs at the same time.
#[test]
fn two_cpus_at_once() {
    harness::with(|harness| {
        for path in Path::all() {
            let (mut rng, mut totals) = (Rng::with_seed(1), Totals::default());
            let enough = |totals: &Totals| totals.packets >= AT_ONCE;
            match concurrent::fuzz(harness, path, &mut rng, &mut totals, enough) {
                Ok(true) => assert!(totals.translated > totals.packets / 4, "{path:?}: {totals:?}"),
                Ok(false) => eprintln!("one CPU: nothing is at once"),
                Err(what) => panic!("{path:?}: {what}"),
            }
        }
    });
}

/// No flow is created without the slow path: the comparison must notice, and shrink the sequence to
/// one packet.
#[test]
fn a_broken_program_is_found_and_shrunk() {
    let path = Path { hook: Hook::Xdp, family: Family::V4 };
    harness::with(|harness| {
        harness.without_jumps(|harness| {
            let found = fuzz(harness, path, &mut Rng::with_seed(1), &mut Totals::default(), false, |_| false);
            let Err(found) = found else { panic!("nothing was found") };
            let (actions, difference) = shrink(harness, path, &found.0, &found.1);
            assert_eq!(actions.len(), 1, "{actions:?}");
            let text = row::describe(path, &actions, &difference);
            assert!(text.contains("repeat(") && text.contains("Action::Request {"), "{text}");
        });
    });
}

const SYN: Segment = Segment {
    protocol: Protocol::Tcp,
    flags: Flags::Syn,
    sequence: Number::Right,
    acknowledgement: Number::Right,
    chunk: Chunk::Init,
    tag: Tag::Right,
    payload: 0,
};

/// Repeats a sequence in all columns.
fn repeat(actions: &[Action]) {
    harness::with(|harness| repeat_with(harness, actions, 1));
}

/// Repeats a sequence in all columns; the whole table is compared after every `every` actions.
fn repeat_with(harness: &mut Harness, actions: &[Action], every: usize) {
    for path in Path::all() {
        if let Err(difference) = check(harness, path, actions, every, &mut Totals::default()) {
            panic!("{}", row::describe(path, actions, &difference));
        }
    }
}

/// A segment of another connection with the same tuple: the endpoint of this flow has not answered.
#[test]
fn an_unanswered_flow_translates_no_reply_but_a_syn_ack() {
    let stray = Segment { flags: Flags::Ack, payload: 1, ..SYN };
    for service in [0, 1, 2] {
        repeat(&[
            Action::Request { client: 0, port: 0, service, segment: SYN },
            Action::Reply { flow: 0, segment: stray },
        ]);
    }
}

/// The reply entry of a flow that was reset and begun anew is left behind with its port; a flow
/// that takes the port must not affect the new flow of the same client.
#[test]
fn a_port_left_behind_is_taken_from_nobody() {
    let segment = |flags| Segment { flags, ..SYN };
    let to_vip = |client, port, flags| Action::Request { client, port, service: 2, segment: segment(flags) };
    let answer = |flags| Action::Reply { flow: 0, segment: segment(flags) };
    let handshake = [to_vip(0, 0, Flags::Syn), answer(Flags::SynAck), to_vip(0, 0, Flags::Ack)];
    let others =
        [(0, 1), (0, 2), (0, 3), (1, 0), (1, 1)].map(|(client, port)| to_vip(client, port, Flags::Syn));
    let after = [answer(Flags::RstAck)];
    let wait = [Action::Wait { jiffies: 30_000 }];
    repeat(&[&handshake[..], &after, &handshake, &wait, &others, &[to_vip(0, 0, Flags::Ack)]].concat());
}

/// nf_conntrack calls it invalid (`tcp_error`), and so does `passed-malformed`.
#[test]
fn a_tcp_header_longer_than_its_segment_is_malformed() {
    for words in [6, 13, 15] {
        let sender = Sender::Client { client: 0, port: 0, service: 0 };
        repeat(&[Action::Malformed { damage: Damage::DataOffset(words), sender, segment: SYN }]);
    }
}

/// A forged RST, then a SYN: the flow stays.
#[test]
fn a_reset_out_of_the_window_does_not_end_a_flow() {
    let segment = |flags| Segment { flags, ..SYN };
    let forged = Segment { sequence: Number::Far(57_083), ..segment(Flags::RstAck) };
    for service in [0, 1, 2] {
        let from_client = |segment| Action::Request { client: 0, port: 3, service, segment };
        let established = [
            from_client(SYN),
            Action::Reply { flow: 0, segment: segment(Flags::SynAck) },
            from_client(segment(Flags::Ack)),
        ];
        let resets = [from_client(forged), Action::Reply { flow: 0, segment: forged }];
        for reset in resets {
            repeat(
                &[&established[..], &[reset, from_client(SYN), from_client(segment(Flags::Ack))]].concat(),
            );
        }
    }
}

/// If an endpoint answers a SYN twice, with different numbers, the client's ACK may or may not
/// establish the connection; a SYN to an endpoint that is removed meanwhile goes to it, or to
/// another one.
#[test]
fn a_flow_of_two_answers_may_be_established_or_not() {
    let segment = |flags| Segment { flags, ..SYN };
    let other = Segment { sequence: Number::Far(61_756), ..segment(Flags::SynAck) };
    let from_client = |segment| Action::Request { client: 0, port: 4, service: 2, segment };
    repeat(&[
        from_client(SYN),
        Action::Reply { flow: 0, segment: segment(Flags::SynAck) },
        Action::Reply { flow: 0, segment: other },
        from_client(segment(Flags::Ack)),
        Action::Retire { service: 2, endpoint: 0 },
        from_client(SYN),
    ]);
}

/// The reply entry of an unassured connection holds a length in the field of the acknowledgement
/// number. A third connection with the tuple sends an ACK whose acknowledgement number is close to
/// that length: it must not be translated.
#[test]
fn a_length_is_not_taken_for_an_acknowledgement() {
    let segment = |flags| Segment { flags, ..SYN };
    let from_client = |segment| Action::Request { client: 0, port: 0, service: 1, segment };
    let answer = |flags| Action::Reply { flow: 0, segment: segment(flags) };
    let refused = [from_client(SYN), answer(Flags::SynAck), answer(Flags::RstAck)];
    let far = Segment { sequence: Number::Far(0), ..SYN };
    for flags in [Flags::Ack, Flags::FinAck] {
        repeat(&[&refused[..], &refused, &[from_client(far), answer(flags)]].concat());
    }
}

const POINTS: [Point; 3] = [Point::Before, Point::Given, Point::Seen];

/// A SYN on an established connection that remains unanswered for three seconds, at the tests' 100
/// jiffies per second: the next one begins anew, even in real time.
#[test]
fn a_silence_of_the_machine_is_a_silence() {
    let segment = |flags| Segment { flags, ..SYN };
    let from_client = |segment| Action::Request { client: 0, port: 0, service: 1, segment };
    let established = [
        from_client(SYN),
        Action::Reply { flow: 0, segment: segment(Flags::SynAck) },
        from_client(segment(Flags::Ack)),
        from_client(SYN),
    ];
    // Debian's kernels have 250 jiffies per second.
    for point in POINTS {
        let pause = Action::Pause { milliseconds: 1_300, point };
        repeat(&[&established[..], &[pause, from_client(SYN), from_client(segment(Flags::Ack))]].concat());
    }
}

/// The ports of SYNs that remain unanswered for ten seconds are given to other flows.
#[test]
fn a_port_is_given_up_in_real_time() {
    let to_vip = |client, port| Action::Request { client, port, service: 2, segment: SYN };
    let all = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)].map(|(client, port)| to_vip(client, port));
    let pause = Action::Pause { milliseconds: 4_300, point: Point::Given };
    repeat(&[&all[..], &[pause, to_vip(1, 2)]].concat());
}

/// Both have sent their FIN, and the endpoint retransmits old data with an acknowledgement of the
/// client's FIN: the connection is over for a host that accepts that segment, and goes on for one
/// that does not.
#[test]
fn a_segment_sent_again_may_acknowledge_the_fin() {
    let segment = |flags| Segment { flags, ..SYN };
    let from_client = |flags| Action::Request { client: 0, port: 0, service: 0, segment: segment(flags) };
    let from_endpoint = |segment| Action::Reply { flow: 0, segment };
    let again = Segment { sequence: Number::Near(-4887), payload: 11, ..segment(Flags::Ack) };
    repeat(&[
        from_client(Flags::Syn),
        from_endpoint(segment(Flags::SynAck)),
        from_client(Flags::Ack),
        from_endpoint(segment(Flags::FinAck)),
        from_client(Flags::FinAck),
        from_endpoint(again),
        from_client(Flags::Syn),
    ]);
}

/// A packet of an association without any deviation.
fn sctp(chunk: Chunk) -> Segment {
    Segment { protocol: Protocol::Sctp, chunk, ..SYN }
}

/// An association of a sequence: the `number`th, of at most [`TOGETHER`].
#[derive(Clone, Copy)]
struct Nth(u8);

/// Ten with an endpoint on this node, and five with one on another node, whose SNAT ports leave one
/// for an association that begins anew.
const TOGETHER: usize = 15;

impl Nth {
    fn client(self, segment: Segment) -> Action {
        let (of_service, service) = if self.0 < 10 { (self.0, 1) } else { (self.0 - 10, 2) };
        Action::Request { client: of_service % 2, port: of_service / 2, service, segment }
    }

    fn endpoint(self, segment: Segment) -> Action {
        Action::Reply { flow: self.0, segment }
    }

    /// Returns packets that lead to each state: not answered, answered, assured, being shut down,
    /// over, asked to restart, restarted.
    fn states(self) -> [Vec<Action>; 7] {
        let client = |chunk| self.client(sctp(chunk));
        let endpoint = |chunk| self.endpoint(sctp(chunk));
        let open = [
            client(Chunk::Init),
            endpoint(Chunk::InitAck),
            client(Chunk::CookieEcho),
            endpoint(Chunk::CookieAck),
        ];
        let with = |more: &[Action]| [&open[..], more].concat();
        [
            open[..1].to_vec(),
            open[..2].to_vec(),
            open.to_vec(),
            with(&[client(Chunk::Shutdown)]),
            with(&[endpoint(Chunk::Abort)]),
            with(&[client(Chunk::Init)]),
            with(&[client(Chunk::Init), endpoint(Chunk::CookieAck)]),
        ]
    }
}

const TAGS: [Tag; 6] = [Tag::Right, Tag::Other, Tag::Zero, Tag::Own, Tag::Reflected, Tag::Flagged];
const CHUNKS: [Chunk; 13] = [
    Chunk::Init,
    Chunk::BundledInit,
    Chunk::InitAck,
    Chunk::CookieEcho,
    Chunk::CookieAck,
    Chunk::Data,
    Chunk::Sack,
    Chunk::Heartbeat,
    Chunk::HeartbeatAck,
    Chunk::Shutdown,
    Chunk::ShutdownAck,
    Chunk::ShutdownComplete,
    Chunk::Abort,
];

/// Each chunk with each tag, of either side, in each state of an association. What it has changed
/// shows in the table, and in the fate of the next packets.
#[test]
fn every_tag_in_every_state_of_an_association() {
    let segments = CHUNKS.iter().flat_map(|chunk| TAGS.map(|tag| Segment { tag, ..sctp(*chunk) }));
    let cases: Vec<_> = segments
        .flat_map(|segment| [(true, segment), (false, segment)])
        .flat_map(|case| (0..7).map(move |state| (state, case)))
        .collect();
    let sequences = cases.chunks(TOGETHER).map(|together| {
        let sequence = together.iter().zip(0..).flat_map(|((state, (of_client, segment)), number)| {
            let nth = Nth(number);
            let packet = if *of_client { nth.client(*segment) } else { nth.endpoint(*segment) };
            let after = [packet, nth.client(sctp(Chunk::Data)), nth.endpoint(sctp(Chunk::Data))];
            [&nth.states()[*state][..], &after].concat()
        });
        sequence.collect::<Vec<_>>()
    });
    harness::with(|harness| {
        for sequence in sequences {
            repeat_with(harness, &sequence, 8);
        }
    });
}
