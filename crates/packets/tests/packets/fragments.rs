//! Fragments: the first has the ports, the others get them from its record.

use traffic_policy_ebpf::abi::ServiceCountKey;
use traffic_policy_ebpf::outcome::Outcome;
use traffic_policy_testing::harness::{Device, Frontend, Harness, Hook, Setup, Spot};
use traffic_policy_testing::packet::{Extension, Packet, Transport, flag};

use crate::dialogue::{Dialogue, everywhere, everywhere_xdp};
use crate::table::{self, CLIENT_PORT, Case, ENDPOINT_PORT, PORT, Step};

const NODE: (Spot, u16) = (Spot::Node, PORT);
const VIP: (Spot, u16) = (Spot::Vip, PORT);
const NEAR: (Spot, u16) = (Spot::Near, ENDPOINT_PORT);
const FAR: (Spot, u16) = (Spot::Far, ENDPOINT_PORT);
const SLIM: (Spot, u16) = (Spot::Slim, ENDPOINT_PORT);
const LOCAL: (Spot, u16) = (Spot::Local, ENDPOINT_PORT);
const CLIENT: (Spot, u16) = (Spot::Client, CLIENT_PORT);
/// The largest payload that fits a packet of 1500 bytes in both families.
const SIZE: usize = 1448;

fn setup((spot, port): (Spot, u16), endpoint: (Spot, u16)) -> Setup {
    Setup::of(Frontend::new(spot, port).endpoints(&[endpoint]))
}

/// A packet of four fragments, the last one short.
fn long(packet: Packet, identification: u16) -> Packet {
    let payload: Vec<u8> = (0..4500u32).map(|at| (at * 7) as u8).collect();
    packet.payload(&payload).with(|p| p.label = identification)
}

/// Steps in which each fragment of one packet becomes the fragment of the other.
fn steps(from: &Packet, outcome: &'static str, to: &Packet) -> Vec<Step> {
    let pairs = from.fragments(SIZE).into_iter().zip(to.fragments(SIZE));
    pairs.map(|(from, to)| Step::new(&from, outcome, &to)).collect()
}

#[test]
fn both_ways_to_another_node() {
    table::run(|terms| {
        let mut cases = Vec::new();
        for to in [NODE, VIP] {
            let forwarded = terms.forwarded(to, NEAR, Device::Eth0, Spot::RouterNear);
            let reply = terms.reply(NEAR, Device::Eth0, Spot::RouterNear);
            let mut all = steps(&long(terms.request(to), 1), "forwarded", &long(forwarded.clone(), 1));
            all.extend(steps(&long(reply.clone(), 2), "replied", &long(terms.replied(to), 2)));
            // The same identification in the other direction, with a flow that exists.
            all.extend(steps(&long(terms.request(to), 2), "forwarded", &long(forwarded, 2)));
            cases.push(Case::new("four fragments", setup(to, NEAR), all));
        }
        cases
    });
}

#[test]
fn by_another_device() {
    table::run(|terms| {
        let forwarded = terms.forwarded(NODE, FAR, Device::Eth1, Spot::RouterFar);
        let reply = terms.reply(FAR, Device::Eth1, Spot::RouterFar);
        let mut all = steps(&long(terms.request(NODE), 1), "forwarded", &long(forwarded, 1));
        let back = steps(&long(reply, 2), "replied", &long(terms.replied(NODE), 2));
        all.extend(back.into_iter().map(|step| step.by(Device::Eth1)));
        vec![Case::new("endpoint behind eth1", setup(NODE, FAR), all)]
    });
}

#[test]
fn both_ways_to_this_node() {
    table::run(|terms| {
        let mut cases = Vec::new();
        for local in [false, true] {
            let frontend = Frontend::new(NODE.0, NODE.1).endpoints(&[NEAR, LOCAL]);
            let setup = if local { Setup::of(frontend.local()) } else { setup(NODE, LOCAL) };
            let delivered = terms.request(NODE).destination(terms.at(LOCAL));
            let answer = terms.answer(LOCAL, CLIENT);
            let answered = answer.clone().source(terms.at(NODE));
            let mut all = steps(&long(terms.request(NODE), 1), "delivered", &long(delivered, 1));
            let back = steps(&long(answer, 2), "replied-local", &long(answered, 2));
            all.extend(back.into_iter().map(Step::leaving));
            cases.push(Case::new("endpoint on this node", setup, all));
        }
        cases
    });
}

/// The last fragment may be shorter than a header, and the first no longer than one.
#[test]
fn short_fragments() {
    table::run(|terms| {
        let header: usize = if terms.tcp { 24 } else { 8 };
        let mut cases = Vec::new();
        for length in 1..=20 {
            let with =
                |packet: Packet| packet.payload(&vec![9; header - if terms.tcp { 20 } else { 8 } + length]);
            let forwarded = terms.forwarded(NODE, NEAR, Device::Eth0, Spot::RouterNear);
            let from = with(terms.request(NODE)).fragments(header);
            let to = with(forwarded).fragments(header);
            assert!(from.len() > 1, "{length}");
            let steps = from.iter().zip(&to).map(|(from, to)| Step::new(from, "forwarded", to));
            cases.push(Case::new("short", setup(NODE, NEAR), steps));
        }
        cases
    });
}

/// A later fragment cannot be handled before the first has arrived; after it, the order is free.
#[test]
fn any_order_after_the_first() {
    table::run(|terms| {
        let forwarded = terms.forwarded(NODE, NEAR, Device::Eth0, Spot::RouterNear);
        let (from, to) = (long(terms.request(NODE), 1).fragments(SIZE), long(forwarded, 1).fragments(SIZE));
        let step = |at: usize| Step::new(&from[at], "forwarded", &to[at]);
        let early = Step::passed(&from[2], "passed-fragment");
        vec![Case::new("shuffled", setup(NODE, NEAR), [early, step(0), step(3), step(1), step(2), step(0)])]
    });
}

#[test]
fn fragments_of_other_datagrams() {
    table::run(|terms| {
        let forwarded = terms.forwarded(NODE, NEAR, Device::Eth0, Spot::RouterNear);
        let from = long(terms.request(NODE), 1);
        let later = |change: &dyn Fn(&mut Packet)| {
            let mut packet = from.fragments(SIZE).remove(1);
            change(&mut packet);
            Step::passed(&packet, "passed-fragment")
        };
        let mut all = steps(&from, "forwarded", &long(forwarded, 1));
        if terms.v4() {
            all.push(later(&|p| p.label = 2));
            all.push(later(&|p| p.transport = Transport::Other(1)));
            let other = if terms.tcp { 17 } else { 6 };
            all.push(later(&|p| p.transport = Transport::Other(other)));
        } else {
            all.push(later(&|p| p.extensions = vec![Extension::fragment(SIZE as u16, true, 2)]));
        }
        all.push(later(&|p| p.source = Spot::OtherClient.of(terms.family)));
        all.push(later(&|p| p.destination = Spot::Vip.of(terms.family)));
        vec![Case::new("others", setup(NODE, NEAR), all)]
    });
}

#[test]
fn none_of_ours() {
    table::run(|terms| {
        let pass = |packet: Packet, first: &'static str| {
            let fragments = long(packet, 1).fragments(SIZE).into_iter().enumerate();
            fragments.map(move |(at, f)| Step::passed(&f, if at == 0 { first } else { "passed-fragment" }))
        };
        let all = pass(terms.request((Spot::Node, 22)), "passed")
            .chain(pass(terms.request((Spot::Client, PORT)), "passed"))
            .chain(pass(terms.answer((Spot::Local, 9), CLIENT), "passed").map(Step::leaving))
            .chain(pass(terms.answer(LOCAL, CLIENT), "passed").map(Step::leaving));
        let endpoints = [NEAR, LOCAL];
        let setup = Setup::of(Frontend::new(NODE.0, NODE.1).endpoints(&endpoints));
        vec![Case::new("other ports and addresses", setup, all)]
    });
}

/// An untranslated first fragment leaves no record.
#[test]
fn dropped_first_fragments() {
    table::run(|terms| {
        let fragments = long(terms.request(NODE), 1).fragments(SIZE);
        let first = Step::dropped(&fragments[0], "dropped-no-local-endpoint");
        let later = Step::passed(&fragments[1], "passed-fragment");
        let setup = Setup::of(Frontend::new(NODE.0, NODE.1).endpoints(&[NEAR]).local());
        vec![Case::new("policy Local without an endpoint here", setup, [first, later])]
    });
}

/// Only the first fragment is answered (RFC 1122 section 3.2.2).
#[test]
fn time_to_live_ends() {
    table::run(|terms| {
        let forwarded = terms.forwarded(NODE, NEAR, Device::Eth0, Spot::RouterNear);
        let mut all = steps(&long(terms.request(NODE), 1), "forwarded", &long(forwarded, 1));
        let last = long(terms.request(NODE), 1).ttl(1).fragments(SIZE);
        all.push(Step::dropped(&last[1], "dropped-ttl-exceeded"));
        vec![Case::new("TTL", setup(NODE, NEAR), all)]
    });
}

/// A dropped later fragment belongs to a datagram that the Service has refused.
#[test]
fn dropped_fragments_are_counted_for_the_service() {
    everywhere(|harness, terms| {
        harness.set_up(&setup(NODE, NEAR));
        harness.run(terms.hook, &long(terms.request(NODE), 1).fragments(SIZE)[0]).expect("forwarded");
        let service = harness.flow(terms.family).0.service;
        let key = ServiceCountKey { service, outcome: Outcome::DroppedTtlExceeded as u32 };
        let counted = |harness: &Harness| harness.tables.service_counts.get(&key, 0).unwrap_or_default();
        let before = counted(harness).packets;
        let last = &long(terms.request(NODE), 1).ttl(1).fragments(SIZE)[1];
        harness.run(terms.hook, last).expect("dropped-ttl-exceeded");
        assert_eq!(counted(harness).packets, before + 1);
    });
}

/// The MTU of the egress device is 1400 bytes. XDP leaves the packet to TC.
#[test]
fn too_long_for_the_way_out() {
    everywhere(|harness, terms| {
        harness.set_up(&setup(NODE, SLIM));
        let short = terms.forwarded(NODE, SLIM, Device::Slim0, Spot::RouterSlim);
        let (from, to) = (long(terms.request(NODE), 1), long(short, 1));
        for (from, to) in from.fragments(1200).iter().zip(to.fragments(1200)) {
            harness.run(terms.hook, from).expect("forwarded").expect_frame(&to);
        }
        let (fragments, whole) = (from.fragments(SIZE), to.fragments(SIZE));
        let outcomes = match (terms.xdp(), terms.v4()) {
            (true, _) => ["passed-to-tc"; 2],
            (false, true) => ["forwarded", "forwarded"],
            (false, false) => ["rejected-mtu-exceeded", "dropped-mtu-exceeded"],
        };
        for ((fragment, whole), outcome) in fragments.iter().zip(whole).zip(outcomes) {
            let ran = harness.run(terms.hook, fragment);
            ran.expect(outcome);
            if outcome == "forwarded" {
                // The second of two pieces.
                let rest = whole.payload[1376..].to_vec();
                ran.expect_frame(&whole.payload(&rest).with(|p| p.fragment_offset += 1376 / 8));
            }
        }
        // With DF the packet is not split.
        if terms.v4() && !terms.xdp() {
            let first = fragments[0].clone().with(|p| p.dont_fragment = true);
            harness.run(terms.hook, &first).expect("rejected-mtu-exceeded");
        }
    });
}

/// The later fragments arrive before TC has handled the first.
#[test]
fn what_xdp_leaves_to_tc() {
    everywhere_xdp(|harness, terms| {
        harness.set_up(&setup(NODE, FAR).with(|setup| setup.devices[1].1 = false));
        let forwarded = terms.forwarded(NODE, FAR, Device::Eth1, Spot::RouterFar);
        let (from, to) = (long(terms.request(NODE), 1), long(forwarded, 1));
        let (from, to) = (from.fragments(SIZE), to.fragments(SIZE));
        harness.run(Hook::Xdp, &from[0]).expect("passed-to-tc");
        for (from, to) in from.iter().zip(&to) {
            harness.run(Hook::Ingress, from).expect("forwarded").expect_frame(to);
            harness.run(Hook::Xdp, from).expect("passed-to-tc");
        }
    });
}

/// Fragments that XDP has delivered are not translated again by TC.
#[test]
fn delivered_by_xdp() {
    everywhere_xdp(|harness, terms| {
        let local = (Spot::Local, PORT);
        harness.set_up(&setup(NODE, local));
        let delivered = long(terms.request(NODE), 1).destination(terms.at(local)).fragments(SIZE);
        for (at, from) in long(terms.request(NODE), 1).fragments(SIZE).iter().enumerate() {
            harness.run(Hook::Xdp, from).expect("delivered").expect_frame(&delivered[at]);
            let again = if at == 0 { "passed" } else { "passed-fragment" };
            harness.run(Hook::Ingress, &delivered[at]).expect(again);
        }
    });
}

/// All fragments count, and keep the flow alive.
#[test]
fn every_fragment_is_counted() {
    everywhere(|harness, terms| {
        harness.set_up(&setup(NODE, NEAR));
        let fragments = long(terms.request(NODE), 1).fragments(SIZE);
        let mut bytes = 0;
        for fragment in &fragments {
            harness.run(terms.hook, fragment).expect("forwarded");
            bytes += fragment.bytes().len() as u64 - 14;
        }
        let (request, _) = harness.flow(terms.family);
        assert_eq!((request.packets, request.bytes), (fragments.len() as u64, bytes));
    });
}

/// A segment that does not belong to the conversation does not keep it alive, nor does any fragment
/// of it.
#[test]
fn fragments_of_what_the_flow_ignores() {
    everywhere(|harness, terms| {
        for endpoint in [NEAR, LOCAL] {
            if !terms.tcp {
                return;
            }
            harness.set_up(&setup(NODE, endpoint));
            let dialogue = Dialogue::new(terms, NODE);
            dialogue.establish(harness);
            dialogue.idle(harness, 50);
            let before = dialogue.entries(harness);
            let stray = |packet: Packet, identification: u16| {
                let packet = packet.with(|p| {
                    let tcp = p.tcp_mut();
                    tcp.sequence = tcp.sequence.wrapping_add(1 << 30);
                    tcp.acknowledgement = tcp.acknowledgement.wrapping_add(1 << 30);
                });
                long(packet, identification).fragments(SIZE)
            };
            let mut sent = 0;
            for fragment in stray(dialogue.request(flag::ACK), 1) {
                let outcome = harness.run(terms.hook, &fragment).outcome;
                sent += u64::from(matches!(outcome, "forwarded" | "delivered"));
            }
            for fragment in stray(dialogue.answer_packet(harness, flag::ACK), 2) {
                let outcome = dialogue.answered(harness, &fragment).outcome;
                sent += u64::from(matches!(outcome, "replied" | "replied-local"));
            }
            let after = dialogue.entries(harness);
            assert_eq!(sent, 8, "{terms:?}: what is in doubt goes on all the same");
            assert_eq!((after.0.last, after.1.last), (before.0.last, before.1.last), "{terms:?}");
        }
    });
}

/// The flow of a datagram was removed while its fragments arrived.
#[test]
fn a_record_without_a_flow() {
    everywhere(|harness, terms| {
        harness.set_up(&setup(NODE, NEAR));
        let fragments = long(terms.request(NODE), 1).fragments(SIZE);
        harness.run(terms.hook, &fragments[0]).expect("forwarded");
        let (request, reply) = harness.flow(terms.family);
        harness.evict(&request);
        harness.evict(&reply);
        harness.run(terms.hook, &fragments[1]).expect("passed-fragment");
    });
}

/// A later fragment uses the record of an earlier flow with the same source port. Until its first
/// packet, the entry that it finds holds the sequence numbers of the SYN in the field where bytes
/// are counted.
#[test]
fn the_record_of_an_earlier_flow() {
    everywhere(|harness, terms| {
        harness.set_up(&setup(NODE, NEAR).snat_ports([5000]));
        let [first, second] = [1, 2].map(|port| Dialogue::new(terms, NODE).with_port(port));
        first.establish(harness);
        let fragments = long(first.answer_packet(harness, flag::ACK), 7).fragments(SIZE);
        harness.run(terms.hook, &fragments[0]).expect("replied");
        for entry in harness.flows(terms.family) {
            harness.evict(&entry);
        }
        second.open(harness).expect("forwarded");
        assert_eq!(second.entries(harness).1.bytes, 0, "nothing was counted");
        harness.run(terms.hook, &fragments[1]).expect("replied");
        let (_, reply) = second.entries(harness);
        assert_eq!((reply.packets, reply.bytes), (1, fragments[1].bytes().len() as u64 - 14));
    });
}

/// RFC 6946: a whole packet with a fragment header.
#[test]
fn atomic_fragments() {
    table::run(|terms| {
        if terms.v4() {
            return Vec::new();
        }
        let whole = |packet: Packet| packet.with(|p| p.extensions.push(Extension::fragment(0, false, 7)));
        let forwarded = terms.forwarded(NODE, NEAR, Device::Eth0, Spot::RouterNear);
        let later = terms.request(NODE).with(|p| p.extensions.push(Extension::fragment(1448, false, 7)));
        vec![Case::new(
            "atomic",
            setup(NODE, NEAR),
            [
                Step::new(&whole(terms.request(NODE)), "forwarded", &whole(forwarded)),
                Step::passed(&later, "passed-fragment"),
            ],
        )]
    });
}
