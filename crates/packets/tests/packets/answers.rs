//! Packets that the programs generate themselves: ICMP errors and RST.

use traffic_policy_testing::harness::{self, Device, Frontend, Hook, Input, Setup, Spot};
use traffic_policy_testing::lab::Family;
use traffic_policy_testing::packet::{Extension, Packet, Transport, flag};

use crate::dialogue::everywhere;
use crate::table::{self, CLIENT_PORT, Case, ENDPOINT_PORT, PORT, Step, Terms};

const NODE: (Spot, u16) = (Spot::Node, PORT);
const VIP: (Spot, u16) = (Spot::Vip, PORT);
const NEAR: (Spot, u16) = (Spot::Near, ENDPOINT_PORT);
const SLIM: (Spot, u16) = (Spot::Slim, ENDPOINT_PORT);

/// The error about a packet: it comes from the packet's destination, and quotes its IP header and
/// eight more bytes.
fn error(about: &Packet, v4: (u8, u8), v6: (u8, u8), rest: [u8; 4]) -> Packet {
    let is_v4 = about.source.is_ipv4();
    let extensions: usize = about.extensions.iter().map(|extension| extension.rest.len() + 1).sum();
    let quoted = if is_v4 { 20 + about.options.len() + 8 } else { 40 + extensions + 8 };
    let (kind, code) = if is_v4 { v4 } else { v6 };
    Packet::new(about.destination, about.source, Transport::Icmp { kind, code, rest })
        .macs(about.to, about.from)
        .payload(&about.bytes()[14..14 + quoted])
}

pub(crate) fn port_unreachable(about: &Packet) -> Packet {
    error(about, (3, 3), (1, 4), [0; 4])
}

pub(crate) fn time_exceeded(about: &Packet) -> Packet {
    error(about, (11, 0), (3, 0), [0; 4])
}

pub(crate) fn too_long(about: &Packet, mtu: u16) -> Packet {
    let [high, low] = mtu.to_be_bytes();
    error(about, (3, 4), (2, 0), [0, 0, high, low])
}

#[test]
fn no_endpoint_anywhere() {
    table::run(|terms| {
        let request = terms.request(NODE).payload(&[7; 100]);
        let short = terms.request(NODE).payload(&[]);
        let mut cases = Vec::new();
        for (what, frontend) in [
            ("policy Cluster", Frontend::new(NODE.0, NODE.1)),
            ("policy Local", Frontend::new(NODE.0, NODE.1).local()),
        ] {
            cases.push(Case::new(
                what,
                Setup::of(frontend),
                [&request, &short]
                    .map(|request| Step::new(request, "rejected-no-endpoint", &port_unreachable(request))),
            ));
        }
        if terms.v4() {
            let steps = (0..=10).map(|words| {
                let request = request.clone().with(|p| p.options = vec![1; words * 4]);
                let answer = port_unreachable(&request);
                Step::new(&request, "rejected-no-endpoint", &answer)
            });
            cases.push(Case::new(
                "IPv4 options are repeated",
                Setup::of(Frontend::new(NODE.0, NODE.1)),
                steps,
            ));
        }
        cases
    });
}

/// No packet to a ClusterIP is left to the stack, which does not know the address.
#[test]
fn ports_and_addresses_that_nobody_has() {
    table::run(|terms| {
        let unknown = terms.request((Spot::Vip, PORT + 1)).payload(&[7; 100]);
        let unallocated = terms.request((Spot::OtherVip, PORT));
        let own_port = terms.request((Spot::Stranger, PORT));
        let web = || Setup::of(Frontend::new(VIP.0, VIP.1).cluster_ip().endpoints(&[NEAR]));
        let mut cases = vec![
            Case::new(
                "a ClusterIP of a range that is known",
                web().service_cidr(Spot::Vip),
                [
                    Step::new(&unknown, "rejected-unknown-port", &port_unreachable(&unknown)),
                    Step::dropped(&unallocated, "dropped-unallocated-cluster-ip"),
                    Step::new(
                        &terms.request(VIP),
                        "forwarded",
                        &terms.forwarded(VIP, NEAR, Device::Eth0, Spot::RouterNear),
                    ),
                    Step::passed(&own_port, "passed"),
                ],
            ),
            Case::new(
                "of one that is not",
                web(),
                [
                    Step::new(&unknown, "rejected-unknown-port", &port_unreachable(&unknown)),
                    Step::passed(&unallocated, "passed"),
                ],
            ),
            Case::new(
                "an address with other kinds of frontends only",
                Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&[NEAR])),
                [Step::passed(&unknown, "passed-not-service")],
            ),
            Case::new(
                "no Service at all",
                Setup::default().service_cidr(Spot::Vip),
                [
                    Step::dropped(&unallocated, "dropped-unallocated-cluster-ip"),
                    Step::dropped(&unknown, "dropped-unallocated-cluster-ip"),
                ],
            ),
        ];
        if terms.tcp {
            // The packet is in the middle of an unknown connection: no port of a Service is opened.
            let with = |packet: &Packet, flags| packet.clone().with(|packet| packet.tcp_mut().flags = flags);
            cases.push(Case::new(
                "a segment",
                web().service_cidr(Spot::Vip),
                [
                    Step::passed(&with(&unknown, flag::ACK), "passed-no-flow"),
                    Step::passed(&with(&unknown, flag::RST), "passed-no-flow"),
                    Step::passed(&with(&unknown, flag::FIN | flag::ACK), "passed-no-flow"),
                    Step::dropped(&with(&unallocated, flag::ACK), "dropped-unallocated-cluster-ip"),
                ],
            ));
        }
        cases
    });
}

/// Extension headers are quoted up to the ports, including the fragment header of a first fragment.
#[test]
fn behind_extension_headers() {
    table::run(|terms| {
        if terms.v4() {
            return Vec::new();
        }
        let chains = [
            vec![Extension::padding(0, 1)],
            vec![Extension::padding(0, 2), Extension::padding(43, 1), Extension::padding(60, 29)],
            vec![Extension::fragment(0, true, 7)],
        ];
        let of = |chain: &Vec<Extension>| {
            terms.request(VIP).payload(&[7; 96]).with(|p| p.extensions = chain.clone())
        };
        let mut cases = Vec::new();
        for chain in &chains {
            let (request, last) = (of(chain), of(chain).ttl(1));
            let answer = port_unreachable(&request);
            cases.push(Case::new(
                "no endpoint",
                Setup::of(Frontend::new(VIP.0, VIP.1)),
                [Step::new(&request, "rejected-no-endpoint", &answer)],
            ));
            cases.push(Case::new(
                "TTL",
                Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&[NEAR])),
                [Step::new(&last, "rejected-ttl-exceeded", &time_exceeded(&last))],
            ));
            if terms.tcp {
                let segment = request.clone().with(|p| p.tcp_mut().flags = flag::ACK).numbers(1, 77);
                let reset = Packet::tcp(terms.at(VIP), (segment.source, CLIENT_PORT), flag::RST)
                    .numbers(77, 0)
                    .with(|p| p.tcp_mut().window = 0)
                    .macs(segment.to, segment.from);
                cases.push(Case::new(
                    "segment without a flow",
                    Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&[NEAR])),
                    [Step::new(&segment, "reset-no-flow", &reset)],
                ));
            }
        }
        cases
    });
}

#[test]
fn answers_are_few() {
    harness::with(|harness| {
        for family in Family::BOTH {
            for hook in Hook::INGRESS {
                let terms = Terms { hook, family, tcp: false };
                harness.set_up(&Setup::of(Frontend::new(NODE.0, NODE.1)));
                let request = terms.request(NODE);
                harness.run(hook, &request).expect("rejected-no-endpoint");
                harness.empty_buckets();
                harness.run(hook, &request).expect("dropped-rate-limited");
            }
        }
    });
}

#[test]
fn time_to_live_ends() {
    table::run(|terms| {
        let request = terms.request(NODE).ttl(1);
        let alive = terms.request(NODE);
        let forwarded = terms.forwarded(NODE, NEAR, Device::Eth0, Spot::RouterNear);
        let reply = terms.reply(NEAR, Device::Eth0, Spot::RouterNear);
        vec![
            Case::new(
                "of the first packet",
                Setup::of(Frontend::new(NODE.0, NODE.1).endpoints(&[NEAR])),
                [Step::new(&request, "rejected-ttl-exceeded", &time_exceeded(&request))],
            ),
            Case::new(
                "of a later one",
                Setup::of(Frontend::new(NODE.0, NODE.1).endpoints(&[NEAR])),
                [
                    Step::new(&alive, "forwarded", &forwarded),
                    Step::new(&request, "rejected-ttl-exceeded", &time_exceeded(&request)),
                    Step::new(&reply, "replied", &terms.replied(NODE)),
                    Step::new(
                        &reply.clone().ttl(1),
                        "rejected-ttl-exceeded",
                        &time_exceeded(&reply.clone().ttl(1)),
                    ),
                ],
            ),
        ]
    });
}

#[test]
fn longer_than_the_way_out() {
    table::run(|terms| {
        let header = if terms.v4() { 20 } else { 40 } + if terms.tcp { 20 } else { 8 };
        let request = |length: usize| {
            let filler = vec![7; length - header];
            terms.request(VIP).payload(&filler).with(|p| {
                if let Transport::Tcp(tcp) = &mut p.transport {
                    tcp.flags = flag::SYN;
                }
            })
        };
        let forwarded = |length: usize| {
            let filler = vec![7; length - header];
            terms.forwarded(VIP, SLIM, Device::Slim0, Spot::RouterSlim).payload(&filler)
        };
        let setup = || Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&[SLIM]));
        let long = request(1401);
        let fits = || Step::new(&request(1400), "forwarded", &forwarded(1400));
        let mut cases = Vec::new();
        if terms.xdp() {
            cases.push(Case::new(
                "TC tells the sender",
                setup(),
                [Step::passed(&long, "passed-to-tc"), fits(), Step::passed(&long, "passed-to-tc")],
            ));
            return cases;
        }
        let told = || Step::new(&long, "rejected-mtu-exceeded", &too_long(&long, 1400));
        cases.push(Case::new("the sender is told", setup(), [told(), fits(), told()]));
        if terms.v4() {
            let may = |packet: Packet| packet.with(|p| p.dont_fragment = false);
            // The first piece leaves as a copy, which a test run does not show: `policy::fragments`
            // covers it with real sockets.
            let second = |length: usize| {
                let whole = may(forwarded(length)).fragments(length).remove(0);
                let rest = whole.payload[1376..].to_vec();
                whole.payload(&rest).with(|p| p.fragment_offset = 1376 / 8)
            };
            let most = 1376 + 1380;
            let step = |length: usize| Step::new(&may(request(length)), "forwarded", &second(length));
            cases.push(Case::new(
                "may be fragmented: into two pieces",
                setup(),
                [
                    step(1401),
                    step(20 + most),
                    Step::dropped(&may(request(21 + most)), "dropped-mtu-exceeded"),
                ],
            ));
            let options = may(request(1401)).with(|p| p.options = vec![1; 4]);
            cases.push(Case::new(
                "may be fragmented, with options",
                setup(),
                [Step::dropped(&options, "dropped-mtu-exceeded")],
            ));
        }
        // Only the segments are sent, so only their length counts.
        let aggregate = request(3000);
        let largest = (1400 - header) as u32;
        cases.push(Case::new(
            "aggregate of segments",
            setup(),
            [
                Step::new(&aggregate, "forwarded", &forwarded(3000)).segments(largest),
                Step::new(&aggregate, "rejected-mtu-exceeded", &too_long(&aggregate, 1400))
                    .segments(largest + 1),
            ],
        ));
        cases
    });
}

/// RFC 2675: the kernel puts a hop-by-hop header before an IPv6 aggregate of more than 65,535
/// bytes. Its segments have none.
#[test]
fn aggregates_with_a_jumbo_header() {
    everywhere(|harness, terms| {
        if terms.v4() || terms.xdp() || !terms.tcp {
            return;
        }
        harness.set_up(&Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&[SLIM])));
        // A jumbo payload option; its length is for the kernel.
        let jumbo = Extension { number: 0, rest: vec![0, 0xc2, 4, 0, 1, 0x11, 0x70] };
        let aggregate = terms.request(VIP).payload(&[7; 3000]).with(|p| p.extensions.push(jumbo));
        let mut frame = aggregate.bytes();
        frame[18..20].fill(0);
        let largest = 1400 - 40 - 20;
        for (segment, outcome) in [(largest, "forwarded"), (largest + 1, "rejected-mtu-exceeded")] {
            let input = Input { segment, ..Input::new(terms.hook, frame.clone()) };
            harness.input(&input).expect(outcome);
        }
    });
}

#[test]
fn segments_of_unknown_connections() {
    table::run(|terms| {
        if !terms.tcp {
            return Vec::new();
        }
        let segment = |to, flags| {
            let payload: &[u8] = if flags & flag::PSH != 0 { b"some data" } else { b"" };
            terms.request(to).with(|p| p.tcp_mut().flags = flags).numbers(1, 0xdead_beef).payload(payload)
        };
        let reset = |about: &Packet| {
            let (to, from) = ((about.source, 40000), (about.destination, PORT));
            Packet::tcp(from, to, flag::RST)
                .numbers(0xdead_beef, 0)
                .macs(about.to, about.from)
                .with(|p| p.tcp_mut().window = 0)
        };
        let setup = |to: (Spot, u16)| Setup::of(Frontend::new(to.0, to.1).endpoints(&[NEAR]));
        let flags = [flag::ACK, flag::ACK | flag::PSH, flag::ACK | flag::FIN, flag::ACK | flag::SYN];
        let mut cases = vec![Case::new(
            "to the node's own address: the stack's business",
            setup(NODE),
            flags.map(|flags| Step::passed(&segment(NODE, flags), "passed-no-flow")),
        )];
        let steps = flags.map(|flags| {
            let segment = segment(VIP, flags);
            Step::new(&segment, "reset-no-flow", &reset(&segment))
        });
        cases.push(Case::new("to a VIP: RST with the number that they acknowledge", setup(VIP), steps));
        let resets = [flag::RST, flag::RST | flag::ACK];
        cases.push(Case::new(
            "RST is never answered",
            setup(VIP),
            resets.map(|flags| Step::passed(&segment(VIP, flags), "passed-no-flow")),
        ));
        if terms.v4() {
            let with_options = segment(VIP, flag::ACK).with(|p| {
                p.options = vec![1; 40];
                p.tcp_mut().options = vec![1; 40];
            });
            cases.push(Case::new(
                "options of both headers are left out",
                setup(VIP),
                [Step::new(&with_options, "reset-no-flow", &reset(&with_options))],
            ));
        }
        cases
    });
}
