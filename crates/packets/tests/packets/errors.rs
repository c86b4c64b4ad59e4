//! ICMP errors about packets of flows: the outer header and the quote are translated to what the
//! receiver of the error knows.

use traffic_policy_testing::harness::{Device, FlowEntry, Frontend, Harness, Hook, Setup, Spot};
use traffic_policy_testing::packet::{Packet, Transport, flag};

use crate::dialogue::{Dialogue, everywhere, everywhere_xdp};
use crate::table::{self, CLIENT_PORT, Case, ENDPOINT_PORT, PORT, Step, Terms};

pub(crate) const NODE: (Spot, u16) = (Spot::Node, PORT);
const VIP: (Spot, u16) = (Spot::Vip, PORT);
pub(crate) const NEAR: (Spot, u16) = (Spot::Near, ENDPOINT_PORT);
const FAR: (Spot, u16) = (Spot::Far, ENDPOINT_PORT);
const LOCAL: (Spot, u16) = (Spot::Local, ENDPOINT_PORT);
const CLIENT: (Spot, u16) = (Spot::Client, CLIENT_PORT);

/// More bytes than any quote has.
pub(crate) const WHOLE: usize = 1000;

pub(crate) fn setup((spot, port): (Spot, u16), endpoint: (Spot, u16)) -> Setup {
    Setup::of(Frontend::new(spot, port).endpoints(&[endpoint]))
}

/// The type, the code and the last word of the header of one error of each kind.
pub(crate) fn kinds(terms: Terms) -> Vec<(u8, u8, [u8; 4])> {
    if terms.v4() {
        // Fragmentation needed with an MTU, the unreachables, time exceeded twice, parameter
        // problem.
        vec![
            (3, 4, [0, 0, 5, 0x14]),
            (3, 0, [0; 4]),
            (3, 3, [0; 4]),
            (11, 0, [0; 4]),
            (11, 1, [0; 4]),
            (12, 0, [9, 0, 0, 0]),
        ]
    } else {
        vec![
            (2, 0, [0, 0, 5, 0x14]),
            (1, 0, [0; 4]),
            (1, 4, [0; 4]),
            (3, 0, [0; 4]),
            (3, 1, [0; 4]),
            (4, 1, [0, 0, 0, 6]),
        ]
    }
}

pub(crate) fn port_unreachable(terms: Terms) -> (u8, u8, [u8; 4]) {
    if terms.v4() { (3, 3, [0; 4]) } else { (1, 4, [0; 4]) }
}

/// An error of `from`, sent to the source of `about`, with a quote of up to `quoted` bytes of it.
pub(crate) fn error(
    terms: Terms,
    (kind, code, rest): (u8, u8, [u8; 4]),
    from: Spot,
    about: &Packet,
    quoted: usize,
) -> Packet {
    let quote = &about.bytes()[14..];
    Packet::new(from.of(terms.family), about.source, Transport::Icmp { kind, code, rest })
        .payload(&quote[..quote.len().min(quoted)])
}

/// A SYN or datagram with data, so that a quote may end anywhere.
fn long(packet: Packet) -> Packet {
    packet.payload(&[0x5a; 100])
}

pub(crate) struct Quoted {
    /// The packet as the sender of the error saw it, and as its receiver knows it.
    pub(crate) seen: Packet,
    pub(crate) known: Packet,
}

/// A request to an endpoint on another node.
pub(crate) fn request(terms: Terms, to: (Spot, u16)) -> Quoted {
    let forwarded = terms.forwarded(to, NEAR, Device::Eth0, Spot::RouterNear);
    Quoted { seen: long(forwarded).ttl(7), known: long(terms.request(to)).ttl(7) }
}

/// A reply of that endpoint.
pub(crate) fn reply(terms: Terms, to: (Spot, u16)) -> Quoted {
    let known = long(terms.reply(NEAR, Device::Eth0, Spot::RouterNear)).ttl(7);
    Quoted { seen: long(terms.replied(to)).ttl(7), known }
}

/// Creates the flow, with a reply.
pub(crate) fn dialogue(terms: Terms, to: (Spot, u16)) -> [Step; 2] {
    let forwarded = terms.forwarded(to, NEAR, Device::Eth0, Spot::RouterNear);
    [
        Step::new(&terms.request(to), "forwarded", &forwarded),
        Step::new(&terms.reply(NEAR, Device::Eth0, Spot::RouterNear), "replied", &terms.replied(to)),
    ]
}

/// Errors of `from` about requests, as they arrive and as the client receives them.
pub(crate) fn to_client(
    terms: Terms,
    kind: (u8, u8, [u8; 4]),
    from: Spot,
    to: (Spot, u16),
    quoted: usize,
) -> Step {
    let Quoted { seen, known } = request(terms, to);
    let comes = error(terms, kind, from, &seen, quoted).macs(Spot::RouterNear.mac(), Device::Eth0.mac());
    let goes = error(terms, kind, to.0, &known, quoted).macs(Device::Eth0.mac(), Spot::Router.mac()).ttl(63);
    Step::new(&comes, "replied-icmp-error", &goes)
}

/// Errors about replies, as they arrive and as the endpoint on another node receives them: from
/// this node, whose packets it answers.
pub(crate) fn to_endpoint(
    terms: Terms,
    kind: (u8, u8, [u8; 4]),
    from: Spot,
    to: (Spot, u16),
    quoted: usize,
) -> Step {
    let Quoted { seen, known } = reply(terms, to);
    let comes = error(terms, kind, from, &seen, quoted).macs(Spot::Router.mac(), Device::Eth0.mac());
    let goes = error(terms, kind, Spot::Node, &known, quoted)
        .macs(Device::Eth0.mac(), Spot::RouterNear.mac())
        .ttl(63);
    Step::new(&comes, "forwarded-icmp-error", &goes)
}

#[test]
fn about_flows_to_other_nodes() {
    table::run(|terms| {
        let mut cases = Vec::new();
        for to in [NODE, VIP] {
            let mut steps = Vec::from(dialogue(terms, to));
            for kind in kinds(terms) {
                for from in [Spot::RouterNear, Spot::Near] {
                    steps.push(to_client(terms, kind, from, to, WHOLE));
                }
                for from in [Spot::Router, Spot::Client] {
                    steps.push(to_endpoint(terms, kind, from, to, WHOLE));
                }
            }
            cases.push(Case::new("endpoint on another node", setup(to, NEAR), steps));
        }
        cases
    });
}

/// Errors that arrive on one device and leave by another.
#[test]
fn by_another_device() {
    table::run(|terms| {
        let forwarded = terms.forwarded(NODE, FAR, Device::Eth1, Spot::RouterFar);
        let kind = port_unreachable(terms);
        let comes =
            error(terms, kind, Spot::Far, &forwarded, WHOLE).macs(Spot::RouterFar.mac(), Device::Eth1.mac());
        let known = terms.request(NODE).ttl(63);
        let goes = error(terms, kind, Spot::Node, &known, WHOLE)
            .macs(Device::Eth0.mac(), Spot::Router.mac())
            .ttl(63);
        vec![Case::new(
            "endpoint behind eth1",
            setup(NODE, FAR),
            [
                Step::new(&terms.request(NODE), "forwarded", &forwarded),
                Step::new(&comes, "replied-icmp-error", &goes).by(Device::Eth1),
            ],
        )]
    });
}

#[test]
fn about_flows_to_endpoints_on_this_node() {
    table::run(|terms| {
        let mut cases = Vec::new();
        for to in [NODE, VIP] {
            let delivered = long(terms.request(to).destination(terms.at(LOCAL)));
            let answer = long(terms.answer(LOCAL, CLIENT));
            let answered = answer.clone().source(terms.at(to));
            let mut steps = vec![
                Step::new(&long(terms.request(to)), "delivered", &delivered),
                Step::new(&answer, "replied-local", &answered).leaving(),
            ];
            for kind in kinds(terms) {
                // The sender is the endpoint, or the stack of this node.
                for from in [Spot::Local, Spot::Node, Spot::NodePod0] {
                    let leaves = error(terms, kind, from, &delivered, WHOLE);
                    let known = error(terms, kind, to.0, &long(terms.request(to)), WHOLE);
                    steps.push(Step::new(&leaves, "replied-local-icmp-error", &known).leaving());
                }
                // The sender is a router on the path to the client, which the endpoint may know.
                for from in [Spot::Router, Spot::Client] {
                    let comes = error(terms, kind, from, &answered, WHOLE);
                    let known = error(terms, kind, from, &answer, WHOLE);
                    steps.push(Step::new(&comes, "delivered-icmp-error", &known));
                }
                // The wrong hook sees the error.
                let leaves = error(terms, kind, Spot::Local, &delivered, WHOLE);
                steps.push(Step::passed(&leaves, "passed-stale-flow"));
                let comes = error(terms, kind, Spot::Client, &answered, WHOLE);
                steps.push(Step::passed(&comes, "passed-stale-flow").leaving());
            }
            cases.push(Case::new("endpoint on this node", setup(to, LOCAL), steps));
        }
        cases
    });
}

#[test]
fn errors_that_pass() {
    table::run(|terms| {
        let (kind, Quoted { seen, .. }) = (port_unreachable(terms), request(terms, NODE));
        let of = |packet: &Packet| error(terms, kind, Spot::Near, packet, WHOLE);
        let mut steps = Vec::from(dialogue(terms, NODE));
        let mut pass = |packet: Packet, outcome| {
            steps.push(Step::passed(&packet, outcome));
            steps.push(Step::passed(&packet, outcome).leaving());
        };
        pass(of(&seen.clone().source(terms.at((Spot::Node, 5556)))), "passed-icmp-no-flow");
        pass(
            of(&seen.clone().destination(terms.at((Spot::OtherNear, ENDPOINT_PORT)))),
            "passed-icmp-no-flow",
        );
        // Anybody can quote anything; only the source of the quoted packet gets the error.
        pass(of(&seen).with(|p| p.destination = Spot::NodeEth1.of(terms.family)), "passed-icmp-no-flow");
        let quote = seen.bytes()[14..].to_vec();
        let of_bytes = |change: fn(&mut Vec<u8>)| {
            let mut quote = quote.clone();
            change(&mut quote);
            of(&seen).payload(&quote)
        };
        pass(of_bytes(|quote| quote[0] ^= 0x20), "passed-icmp-no-flow");
        if terms.v4() {
            pass(of_bytes(|quote| quote[0] = 0x44), "passed-icmp-no-flow");
            pass(of_bytes(|quote| quote[9] = 1), "passed-icmp-no-flow");
            pass(of_bytes(|quote| quote[7] = 1), "passed-icmp-no-flow");
            pass(of_bytes(|quote| quote[9] = 132), "passed-icmp-no-flow");
            pass(of_bytes(|quote| quote[9] = 33), "passed-icmp-no-flow");
        } else {
            pass(of_bytes(|quote| quote[6] = 58), "passed-icmp-no-flow");
            pass(of_bytes(|quote| quote[6] = 50), "passed-icmp-no-flow");
            pass(of_bytes(|quote| quote[6] = 44), "passed-icmp-no-flow");
        }
        let others: &[u8] =
            if terms.v4() { &[0, 4, 5, 8, 13, 17] } else { &[0, 5, 100, 128, 129, 133, 135, 137] };
        for number in others {
            pass(error(terms, (*number, 0, [0; 4]), Spot::Near, &seen, WHOLE), "passed-unsupported-protocol");
        }
        // An error in fragments has its quote in pieces.
        pass(
            of(&seen).fragments(64).remove(0),
            if terms.v4() { "passed-fragment" } else { "passed-unsupported-protocol" },
        );
        vec![Case::new("not about a flow", setup(NODE, NEAR), steps)]
    });
}

/// No error is sent about an error.
#[test]
fn errors_that_cannot_go_on() {
    table::run(|terms| {
        let kind = port_unreachable(terms);
        let comes = error(terms, kind, Spot::Near, &request(terms, NODE).seen, WHOLE);
        let mut steps = Vec::from(dialogue(terms, NODE));
        steps.push(Step::dropped(&comes.clone().ttl(1), "dropped-ttl-exceeded"));
        steps.push(Step::dropped(&comes.ttl(0), "dropped-ttl-exceeded"));
        vec![Case::new("TTL", setup(NODE, NEAR), steps)]
    });
}

/// A packet that XDP cannot finish is left unchanged.
#[test]
fn what_xdp_leaves_to_tc() {
    everywhere_xdp(|harness, terms| {
        harness.set_up(&setup(NODE, FAR).with(|setup| setup.devices[1].1 = false));
        let forwarded = terms.forwarded(NODE, FAR, Device::Eth1, Spot::RouterFar);
        harness.run(Hook::Ingress, &terms.request(NODE)).expect("forwarded").expect_frame(&forwarded);
        let reply = terms.reply(FAR, Device::Eth1, Spot::RouterFar);
        harness.run(Hook::Ingress, &reply).expect("replied");
        let kind = port_unreachable(terms);
        let comes = error(terms, kind, Spot::Client, &long(terms.replied(NODE)), WHOLE)
            .macs(Spot::Router.mac(), Device::Eth0.mac());
        let known = long(terms.reply(FAR, Device::Eth1, Spot::RouterFar)).ttl(63);
        let goes = error(terms, kind, Spot::NodeEth1, &known, WHOLE)
            .macs(Device::Eth1.mac(), Spot::RouterFar.mac())
            .ttl(63);
        harness.run(Hook::Xdp, &comes).expect("passed-to-tc");
        harness.run(Hook::Ingress, &comes).expect("forwarded-icmp-error").expect_frame(&goes);
    });
}

/// Packets that XDP has delivered go on to the endpoint.
#[test]
fn delivered_by_xdp() {
    everywhere_xdp(|harness, terms| {
        harness.set_up(&setup(NODE, LOCAL));
        harness.run(Hook::Xdp, &terms.request(NODE)).expect("delivered");
        let answered = terms.answer(NODE, CLIENT);
        let comes = error(terms, port_unreachable(terms), Spot::Client, &answered, WHOLE);
        let known = error(terms, port_unreachable(terms), Spot::Client, &terms.answer(LOCAL, CLIENT), WHOLE);
        harness.run(Hook::Xdp, &comes).expect("delivered-icmp-error").expect_frame(&known);
        harness.run(Hook::Ingress, &known).expect("passed-icmp-no-flow");
    });
}

/// An error can come from any host: the flow stays as it was, whether it is assured or not.
#[test]
fn the_flow_stays_as_it_is() {
    everywhere(|harness, terms| {
        for endpoint in [NEAR, LOCAL] {
            for established in [false, true] {
                harness.set_up(&setup(NODE, endpoint));
                let dialogue = Dialogue::new(terms, NODE);
                if established {
                    dialogue.establish(harness);
                } else {
                    dialogue.open(harness);
                }
                // The next hop is not part of the state: the first packet that needs it resolves
                // it.
                let flows = |harness: &Harness| -> Vec<FlowEntry> {
                    let entries = harness.flows(terms.family).into_iter();
                    entries.map(|entry| FlowEntry { hop: 0, epoch: 0, ..entry }).collect()
                };
                let before = flows(harness);
                let (entry, _) = dialogue.entries(harness);
                let seen = dialogue
                    .opening()
                    .source((entry.new_from.ip(), entry.new_from.port()))
                    .destination(terms.at(endpoint));
                let comes = error(terms, port_unreachable(terms), endpoint.0, &seen, WHOLE);
                if endpoint == NEAR {
                    harness.run(terms.hook, &comes).expect("replied-icmp-error");
                } else {
                    harness.run(Hook::Egress, &comes).expect("replied-local-icmp-error");
                }
                let answer = dialogue.answer_packet(harness, flag::ACK);
                let answered = answer.source(terms.at(NODE)).destination(terms.at(CLIENT));
                let comes = error(terms, port_unreachable(terms), Spot::Client, &answered, WHOLE);
                let outcome = if endpoint == NEAR { "forwarded-icmp-error" } else { "delivered-icmp-error" };
                harness.run(terms.hook, &comes).expect(outcome);
                assert_eq!(flows(harness), before);
            }
        }
    });
}
