//! SCTP: whole packets in and out, with checksums that the tests compute in full. The state in the
//! flow table is tested in [`crate::associations`].

use traffic_policy_testing::harness::{Device, Frontend, Setup, Spot};
use traffic_policy_testing::packet::chunk::{
    ABORT, COOKIE_ACK, COOKIE_ECHO, DATA, INIT, INIT_ACK, SHUTDOWN, SHUTDOWN_ACK, SHUTDOWN_COMPLETE,
};
use traffic_policy_testing::packet::{Extension, Packet, Transport};

use crate::answers::{port_unreachable, time_exceeded, too_long};
use crate::errors::{self, WHOLE};
use crate::table::{self, CLIENT_PORT, Case, ENDPOINT_PORT, PORT, Step, Terms};

const NODE: (Spot, u16) = (Spot::Node, PORT);
pub(crate) const VIP: (Spot, u16) = (Spot::Vip, PORT);
const NEAR: (Spot, u16) = (Spot::Near, ENDPOINT_PORT);
const FAR: (Spot, u16) = (Spot::Far, ENDPOINT_PORT);
const LOCAL: (Spot, u16) = (Spot::Local, ENDPOINT_PORT);
/// An endpoint on this node whose port is that of the Service: only the addresses of a packet
/// change.
const SAME: (Spot, u16) = (Spot::Local, PORT);
pub(crate) const CLIENT: (Spot, u16) = (Spot::Client, CLIENT_PORT);

/// Initiate tags of the client and of the endpoint.
pub(crate) const CLIENT_TAG: u32 = 0xc11e_4711;
pub(crate) const ENDPOINT_TAG: u32 = 0x0e0d_0042;

/// Builds a chunk, padded to four bytes.
pub(crate) fn chunk(kind: u8, flags: u8, value: &[u8]) -> Vec<u8> {
    let length = u16::try_from(4 + value.len()).unwrap().to_be_bytes();
    let mut chunk = [&[kind, flags], &length[..], value].concat();
    chunk.resize(chunk.len().next_multiple_of(4), 0);
    chunk
}

fn opening(kind: u8, tag: u32) -> Vec<u8> {
    // The window, ten streams each way, the first number.
    let rest = [0, 1, 0, 0, 0, 10, 0, 10, 1, 2, 3, 4];
    chunk(kind, 0, &[&tag.to_be_bytes()[..], &rest].concat())
}

pub(crate) fn init(tag: u32) -> Vec<u8> {
    opening(INIT, tag)
}

pub(crate) fn init_ack(tag: u32) -> Vec<u8> {
    opening(INIT_ACK, tag)
}

pub(crate) fn data(length: usize) -> Vec<u8> {
    let value: Vec<u8> = (0..12 + length).map(|at| (at * 11 % 253) as u8).collect();
    chunk(DATA, 3, &value)
}

/// A packet of the tables as an SCTP packet with the same addresses and ports.
pub(crate) fn sctp(packet: &Packet, tag: u32, chunk: &[u8]) -> Packet {
    let (source, destination) = match &packet.transport {
        Transport::Tcp(tcp) => (tcp.source, tcp.destination),
        Transport::Udp { source, destination, .. } => (*source, *destination),
        other => panic!("no ports: {other:?}"),
    };
    let transport = Transport::Sctp { source, destination, tag, checksum: true };
    Packet { transport, ..packet.clone() }.payload(chunk)
}

/// Runs rows once for each hook and family: the columns of UDP are left out.
fn run(rows: impl Fn(Terms) -> Vec<Case> + Sync) {
    table::run(|terms| if terms.tcp { rows(terms) } else { Vec::new() });
}

fn setup((spot, port): (Spot, u16), endpoint: (Spot, u16)) -> Setup {
    Setup::of(Frontend::new(spot, port).endpoints(&[endpoint]))
}

/// Packets of both sides of an association, the client's first: whether the client sends it, the
/// tag and the chunk.
fn conversation() -> Vec<(bool, u32, Vec<u8>)> {
    let mut said = vec![
        (true, 0, init(CLIENT_TAG)),
        (false, CLIENT_TAG, init_ack(ENDPOINT_TAG)),
        (true, ENDPOINT_TAG, chunk(COOKIE_ECHO, 0, &[7; 200])),
        (false, CLIENT_TAG, chunk(COOKIE_ACK, 0, &[])),
    ];
    for length in [1, 2, 3, 4, 100, 239, 240, 255, 256, 1000, 1400] {
        said.push((true, ENDPOINT_TAG, data(length)));
        said.push((false, CLIENT_TAG, data(length + 1)));
    }
    said.extend([
        (true, ENDPOINT_TAG, chunk(SHUTDOWN, 0, &[0; 4])),
        (false, CLIENT_TAG, chunk(SHUTDOWN_ACK, 0, &[])),
        (true, ENDPOINT_TAG, chunk(SHUTDOWN_COMPLETE, 0, &[])),
    ]);
    said
}

#[test]
fn a_conversation_with_another_node() {
    run(|terms| {
        let mut cases = Vec::new();
        for to in [NODE, VIP] {
            for (endpoint, device, router) in
                [(NEAR, Device::Eth0, Spot::RouterNear), (FAR, Device::Eth1, Spot::RouterFar)]
            {
                let steps = conversation().into_iter().map(|(request, tag, chunk)| {
                    if request {
                        let (from, to) = (terms.request(to), terms.forwarded(to, endpoint, device, router));
                        return Step::new(&sctp(&from, tag, &chunk), "forwarded", &sctp(&to, tag, &chunk));
                    }
                    let (from, to) = (terms.reply(endpoint, device, router), terms.replied(to));
                    Step::new(&sctp(&from, tag, &chunk), "replied", &sctp(&to, tag, &chunk)).by(device)
                });
                cases.push(Case::new("endpoint on another node", setup(to, endpoint), steps));
            }
        }
        cases
    });
}

#[test]
fn a_conversation_with_this_node() {
    run(|terms| {
        let mut cases = Vec::new();
        for (endpoint, local) in [(LOCAL, false), (LOCAL, true), (SAME, false)] {
            let steps = conversation().into_iter().map(|(request, tag, chunk)| {
                if request {
                    let to = terms.request(NODE).destination(terms.at(endpoint));
                    return Step::new(
                        &sctp(&terms.request(NODE), tag, &chunk),
                        "delivered",
                        &sctp(&to, tag, &chunk),
                    );
                }
                let from = terms.answer(endpoint, CLIENT);
                let to = from.clone().source(terms.at(NODE));
                Step::new(&sctp(&from, tag, &chunk), "replied-local", &sctp(&to, tag, &chunk)).leaving()
            });
            let frontend = Frontend::new(NODE.0, NODE.1).endpoints(&[endpoint]);
            let setup = Setup::of(if local { frontend.local() } else { frontend });
            cases.push(Case::new("endpoint on this node", setup, steps));
        }
        cases
    });
}

/// A socket of this machine leaves the checksum 0 where a device computes it: it has to stay 0.
#[test]
fn an_unfinished_checksum_stays() {
    run(|terms| {
        let unfinished = |packet: &Packet| {
            sctp(packet, 0, &init(CLIENT_TAG)).with(|packet| {
                if let Transport::Sctp { checksum, .. } = &mut packet.transport {
                    *checksum = false;
                }
            })
        };
        let forwarded = terms.forwarded(NODE, NEAR, Device::Eth0, Spot::RouterNear);
        let step = Step::new(&unfinished(&terms.request(NODE)), "forwarded", &unfinished(&forwarded));
        vec![Case::new("unfinished", setup(NODE, NEAR), [step])]
    });
}

#[test]
fn options_and_extension_headers() {
    run(|terms| {
        let with = |packet: &Packet| {
            sctp(packet, 0, &init(CLIENT_TAG)).with(|packet| {
                if terms.v4() {
                    packet.options = vec![1, 1, 1, 1, 7, 7, 4, 0, 0, 0, 0, 0];
                } else {
                    packet.extensions = vec![Extension::padding(60, 2)];
                }
            })
        };
        let forwarded = terms.forwarded(NODE, NEAR, Device::Eth0, Spot::RouterNear);
        let step = Step::new(&with(&terms.request(NODE)), "forwarded", &with(&forwarded));
        vec![Case::new("behind them", setup(NODE, NEAR), [step])]
    });
}

/// The packets of an SCTP aggregate are as long as their sender has cut them. The number in place
/// of a segment size (GSO_BY_FRAGS, 65,535) is not taken for their length.
#[test]
fn an_aggregate_of_whole_packets_is_sent_on() {
    run(|terms| {
        let forwarded = terms.forwarded(NODE, NEAR, Device::Eth0, Spot::RouterNear);
        let open = |packet: &Packet| sctp(packet, 0, &init(CLIENT_TAG));
        let steps = [
            Step::new(&open(&terms.request(NODE)), "forwarded", &open(&forwarded)),
            Step::new(
                &sctp(&terms.request(NODE), ENDPOINT_TAG, &data(1000)),
                "forwarded",
                &sctp(&forwarded, ENDPOINT_TAG, &data(1000)),
            )
            .segments(0xffff),
        ];
        vec![Case::new("GSO_BY_FRAGS", setup(NODE, NEAR), steps)]
    });
}

/// `bpf_skb_change_tail` linearizes the aggregate into one packet before it is cut.
#[test]
fn an_aggregate_whose_ttl_ends_is_answered() {
    run(|terms| {
        let forwarded = terms.forwarded(NODE, NEAR, Device::Eth0, Spot::RouterNear);
        let open = |packet: &Packet| sctp(packet, 0, &init(CLIENT_TAG));
        let last = sctp(&terms.request(NODE), ENDPOINT_TAG, &data(3000)).ttl(1);
        let steps = [
            Step::new(&open(&terms.request(NODE)), "forwarded", &open(&forwarded)),
            Step::new(&last, "rejected-ttl-exceeded", &time_exceeded(&last)).segments(0xffff),
        ];
        vec![Case::new("GSO_BY_FRAGS", setup(NODE, NEAR), steps)]
    });
}

/// Only an INIT that is alone in its packet, with tag 0, creates a flow. The stack answers packets
/// to the node itself.
#[test]
fn what_opens_nothing_is_left_to_the_stack() {
    run(|terms| {
        let mut steps = Vec::new();
        for to in [NODE, VIP] {
            let of = |tag, chunk: &[u8]| sctp(&terms.request(to), tag, chunk);
            for packet in [
                of(ENDPOINT_TAG, &data(100)),
                of(ENDPOINT_TAG, &chunk(COOKIE_ECHO, 0, &[7; 100])),
                of(ENDPOINT_TAG, &chunk(ABORT, 0, &[])),
                of(ENDPOINT_TAG, &init(CLIENT_TAG)),
                of(0, &[init(CLIENT_TAG), data(4)].concat()),
                of(0, &init_ack(CLIENT_TAG)),
            ] {
                steps.push(Step::passed(&packet, "passed-no-flow"));
            }
            steps.push(Step::passed(&of(0, &[1, 0]), "passed-malformed"));
        }
        let frontends = setup(NODE, NEAR).and(Frontend::new(VIP.0, VIP.1).endpoints(&[NEAR]));
        let other = sctp(&terms.request((Spot::Stranger, PORT)), 0, &init(CLIENT_TAG));
        steps.push(Step::passed(&other, "passed"));
        vec![Case::new("no INIT", frontends, steps)]
    });
}

#[test]
fn nobody_there() {
    run(|terms| {
        let request = sctp(&terms.request(NODE), 0, &init(CLIENT_TAG));
        let elsewhere = Frontend::new(NODE.0, NODE.1).endpoints(&[NEAR]);
        vec![
            Case::new(
                "policy Local, endpoints elsewhere",
                Setup::of(elsewhere.local()),
                [Step::dropped(&request, "dropped-no-local-endpoint")],
            ),
            Case::new(
                "no endpoint anywhere",
                Setup::of(Frontend::new(NODE.0, NODE.1)),
                [
                    Step::new(&request, "rejected-no-endpoint", &port_unreachable(&request)),
                    Step::passed(&sctp(&terms.request(NODE), ENDPOINT_TAG, &data(8)), "passed-no-flow"),
                ],
            ),
        ]
    });
}

/// A changed port changes the checksum by a number that depends on its distance from the packet's
/// end, which a first fragment does not show.
#[test]
fn fragments() {
    const SIZE: usize = 1448;
    run(|terms| {
        let long = |packet: &Packet| sctp(packet, ENDPOINT_TAG, &data(4000)).with(|packet| packet.label = 9);
        let open = |packet: &Packet| sctp(packet, 0, &init(CLIENT_TAG));
        let (from, here) = (terms.request(NODE), terms.request(NODE).destination(terms.at(SAME)));
        let mut kept = vec![Step::new(&open(&from), "delivered", &open(&here))];
        let pairs = long(&from).fragments(SIZE).into_iter().zip(long(&here).fragments(SIZE));
        kept.extend(pairs.map(|(from, to)| Step::new(&from, "delivered", &to)));

        let there = terms.forwarded(NODE, NEAR, Device::Eth0, Spot::RouterNear);
        let reply = terms.reply(NEAR, Device::Eth0, Spot::RouterNear);
        let first = |packet: &Packet| long(packet).fragments(SIZE).remove(0);
        let second = |packet: &Packet| long(packet).fragments(SIZE).remove(1);
        let answer = |packet: &Packet| {
            let long = sctp(packet, CLIENT_TAG, &data(4000)).with(|packet| packet.label = 9);
            long.fragments(SIZE).remove(0)
        };
        let changed = [
            Step::new(&open(&from), "forwarded", &open(&there)),
            Step::dropped(&first(&from), "dropped-sctp-fragment"),
            Step::passed(&second(&from), "passed-fragment"),
            Step::dropped(&answer(&reply), "dropped-sctp-fragment"),
        ];
        let there = terms.request(NODE).destination(terms.at(LOCAL));
        let leaving = [
            Step::new(&open(&from), "delivered", &open(&there)),
            Step::dropped(&answer(&terms.answer(LOCAL, CLIENT)), "dropped-sctp-fragment").leaving(),
        ];
        vec![
            Case::new("ports that stay", setup(NODE, SAME), kept),
            Case::new("ports that change", setup(NODE, NEAR), changed),
            Case::new("of an endpoint here", setup(NODE, LOCAL), leaving),
        ]
    });
}

/// A packet without DF leaves in two pieces, of which the second is seen here.
#[test]
fn too_long_for_the_way_out() {
    run(|terms| {
        let (from, there) =
            (terms.request(NODE), terms.forwarded(NODE, NEAR, Device::Eth0, Spot::RouterNear));
        let open = |packet: &Packet| sctp(packet, 0, &init(CLIENT_TAG));
        let long = |packet: &Packet| sctp(packet, ENDPOINT_TAG, &data(1300));
        let mut steps = vec![Step::new(&open(&from), "forwarded", &open(&there))];
        if terms.xdp() {
            steps.push(Step::passed(&long(&from), "passed-to-tc"));
        } else {
            let answer = too_long(&long(&from), 1300);
            steps.push(Step::new(&long(&from), "rejected-mtu-exceeded", &answer));
        }
        if !terms.xdp() && terms.v4() {
            let may = |packet: Packet| packet.with(|packet| packet.dont_fragment = false);
            let second = may(long(&there)).fragments(1280).remove(1);
            steps.push(Step::new(&may(long(&from)), "forwarded", &second));
        }
        vec![Case::new("longer than the route's MTU", setup(NODE, NEAR).route_mtu(Spot::Near, 1300), steps)]
    });
}

/// An ICMP error quotes at least ports and tag. A quoted checksum stays unchanged.
#[test]
fn icmp_errors() {
    run(|terms| {
        let mut cases = Vec::new();
        for quoted in [if terms.v4() { 28 } else { 48 }, WHOLE] {
            let open = |packet: &Packet| sctp(packet, 0, &init(CLIENT_TAG));
            let there = terms.forwarded(NODE, NEAR, Device::Eth0, Spot::RouterNear);
            let seen = open(&there).ttl(7);
            let mut known = open(&terms.request(NODE)).ttl(7).bytes();
            let at = 14 + if terms.v4() { 20 } else { 40 } + 8;
            let as_sent = seen.bytes();
            known[at..at + 4].copy_from_slice(&as_sent[at..at + 4]);
            let comes = errors::error(terms, errors::port_unreachable(terms), Spot::Near, &seen, quoted)
                .macs(Spot::RouterNear.mac(), Device::Eth0.mac());
            let goes = errors::error(terms, errors::port_unreachable(terms), NODE.0, &terms.request(NODE), 0)
                .payload(&known[14..][..quoted.min(known.len() - 14)])
                .macs(Device::Eth0.mac(), Spot::Router.mac())
                .ttl(63);
            cases.push(Case::new(
                "about a request",
                setup(NODE, NEAR),
                [
                    Step::new(&open(&terms.request(NODE)), "forwarded", &open(&there)),
                    Step::new(&comes, "replied-icmp-error", &goes),
                ],
            ));
        }
        cases
    });
}
