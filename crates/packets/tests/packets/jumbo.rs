//! Jumbo frames. In XDP a frame of more than a page lies in several buffers, with the headers in
//! the first; the programs declare their support of such frames (`xdp.frags`). A test run puts
//! about 3,520 bytes into the first buffer, as drivers do.

use traffic_policy_testing::harness::{self, Device, Frontend, Harness, Setup, Spot};
use traffic_policy_testing::packet::{Packet, flag};

use crate::answers::{port_unreachable, too_long};
use crate::table::{self, Case, ENDPOINT_PORT, PORT, Step, Terms};

const VIP: (Spot, u16) = (Spot::Vip, PORT);
const NEAR: (Spot, u16) = (Spot::Near, ENDPOINT_PORT);
const FAR: (Spot, u16) = (Spot::Far, ENDPOINT_PORT);
const SLIM: (Spot, u16) = (Spot::Slim, ENDPOINT_PORT);
const LOCAL: (Spot, u16) = (Spot::Local, ENDPOINT_PORT);
const MTU: usize = 9000;
/// The bytes of an IP packet that fits one buffer.
const ONE: usize = 3000;

/// Lengths of IP packets in bytes, from one buffer to several. A test run of TC takes one page
/// only: `policy::jumbo` sends more by TC with real sockets.
fn lengths(terms: Terms) -> impl Iterator<Item = usize> {
    [ONE, 4000, MTU].into_iter().take(if terms.xdp() { 3 } else { 1 })
}

fn setup(endpoint: (Spot, u16)) -> Setup {
    Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&[endpoint]))
}

/// Fills the packet with payload up to this length of the IP packet. Rows about the fast path give
/// TCP other flags than SYN, with which a packet takes the slow path whatever its length.
fn long(packet: Packet, terms: Terms, length: usize) -> Packet {
    let header = if terms.v4() { 20 } else { 40 } + if terms.tcp { 20 } else { 8 };
    let payload: Vec<u8> = (0..length - header).map(|at| (at * 7) as u8).collect();
    packet.payload(&payload)
}

/// Runs rows on a node whose eth0 and eth1 have the MTU of jumbo frames.
fn run(rows: impl Fn(&mut Harness, Terms) -> Vec<Case> + Sync) {
    harness::with(|harness| {
        let widened = harness.namespace().netlink(async |net| {
            net.set_mtu(Device::Eth0.name(), MTU as u32).await?;
            net.set_mtu(Device::Eth1.name(), MTU as u32).await
        });
        widened.unwrap();
        table::run_on(harness, &rows);
    });
}

/// Opens a connection, or exchanges a datagram and its answer: what follows is established.
fn opened(
    terms: Terms,
    endpoint: (Spot, u16),
    device: Device,
    router: Spot,
) -> (Vec<Step>, impl Fn(usize) -> [Step; 2]) {
    let segment = move |packet: Packet, numbers: (u32, u32)| {
        if terms.tcp {
            packet.numbers(numbers.0, numbers.1).with(|packet| packet.tcp_mut().flags = flag::ACK)
        } else {
            packet
        }
    };
    let (request, reply) = (terms.request(VIP), terms.reply(endpoint, device, router));
    let (forwarded, replied) = (terms.forwarded(VIP, endpoint, device, router), terms.replied(VIP));
    let opening = vec![
        Step::new(&request, "forwarded", &forwarded),
        Step::new(&reply, "replied", &replied).by(device),
        Step::new(
            &segment(request.clone(), (1001, 5001)),
            "forwarded",
            &segment(forwarded.clone(), (1001, 5001)),
        ),
    ];
    let both = move |length| {
        let there = |packet: &Packet| long(segment(packet.clone(), (1001, 5001)), terms, length);
        let back = |packet: &Packet| long(segment(packet.clone(), (5001, 1001)), terms, length);
        [
            Step::new(&there(&request), "forwarded", &there(&forwarded)),
            Step::new(&back(&reply), "replied", &back(&replied)).by(device),
        ]
    };
    (opening, both)
}

#[test]
fn both_ways_by_one_device() {
    run(|_, terms| {
        lengths(terms)
            .map(|length| {
                let (mut steps, both) = opened(terms, NEAR, Device::Eth0, Spot::RouterNear);
                steps.extend(both(length));
                steps.extend(both(100));
                steps.extend(both(length));
                Case::new("forwarded", setup(NEAR), steps)
            })
            .collect()
    });
}

/// TC sends these frames, as not every driver sends frames of several buffers that XDP redirects to
/// it.
#[test]
fn by_another_device() {
    run(|_, terms| {
        let (mut steps, both) = opened(terms, FAR, Device::Eth1, Spot::RouterFar);
        steps.extend(both(ONE));
        for length in lengths(terms) {
            if length > ONE {
                for (packet, device) in [
                    (terms.request(VIP), Device::Eth0),
                    (terms.reply(FAR, Device::Eth1, Spot::RouterFar), Device::Eth1),
                ] {
                    let packet = long(packet, terms, length);
                    let packet = if terms.tcp {
                        packet.with(|packet| packet.tcp_mut().flags = flag::ACK)
                    } else {
                        packet
                    };
                    steps.push(Step::passed(&packet, "passed-to-tc").by(device));
                }
            }
        }
        vec![Case::new("forwarded", setup(FAR), steps)]
    });
}

#[test]
fn to_an_endpoint_here() {
    run(|_, terms| {
        let steps = lengths(terms).map(|length| {
            let request = long(terms.request(VIP), terms, length);
            let delivered = request.clone().destination(terms.at(LOCAL));
            Step::new(&request, "delivered", &delivered)
        });
        vec![Case::new("delivered", setup(LOCAL), steps)]
    });
}

/// XDP leaves fragments of several buffers to TC, like all rare frames of that kind.
#[test]
fn fragments() {
    run(|_, terms| {
        let both = |packet: Packet, size: usize| {
            long(packet, terms, 3 * size).with(|packet| packet.label = 7).fragments(size)
        };
        let forwarded = terms.forwarded(VIP, NEAR, Device::Eth0, Spot::RouterNear);
        let pairs = both(terms.request(VIP), ONE).into_iter().zip(both(forwarded, ONE));
        let mut steps: Vec<_> = pairs.map(|(from, to)| Step::new(&from, "forwarded", &to)).collect();
        assert_eq!(steps.len(), 3);
        if terms.xdp() {
            let long = both(terms.request(VIP), 4000);
            steps.extend(long.iter().take(2).map(|fragment| Step::passed(fragment, "passed-to-tc")));
        }
        vec![Case::new("in order", setup(NEAR), steps)]
    });
}

/// TC generates the answers to such frames, as it can reach the bytes in further buffers.
#[test]
fn answers() {
    run(|_, terms| {
        let answered = |length, outcome, answer: fn(&Packet) -> Packet| {
            let request = long(terms.request(VIP), terms, length);
            if length > ONE {
                Step::passed(&request, "passed-to-tc")
            } else {
                Step::new(&request, outcome, &answer(&request))
            }
        };
        let none = lengths(terms).map(|length| answered(length, "rejected-no-endpoint", port_unreachable));
        let mut cases = vec![Case::new("no endpoint", Setup::of(Frontend::new(VIP.0, VIP.1)), none)];
        let narrow = lengths(terms).map(|length| {
            let request = long(terms.request(VIP), terms, length);
            if terms.xdp() {
                Step::passed(&request, "passed-to-tc")
            } else {
                Step::new(&request, "rejected-mtu-exceeded", &too_long(&request, 1400))
            }
        });
        cases.push(Case::new("too long for the way out", setup(SLIM), narrow));
        cases
    });
}

#[test]
fn lengths_that_lie_and_packets_of_others() {
    run(|_, terms| {
        let mut steps = Vec::new();
        for length in lengths(terms) {
            let request = long(terms.request(VIP), terms, length);
            let mut cut = request.bytes();
            cut.pop();
            steps.push(Step::frame(cut, "passed-malformed"));
            let forwarded = long(terms.forwarded(VIP, NEAR, Device::Eth0, Spot::RouterNear), terms, length);
            steps.push(Step::with_trailer(&request, "forwarded", &forwarded, &[9; 5]));
            steps.push(Step::passed(&long(terms.request((Spot::Node, 22)), terms, length), "passed"));
        }
        vec![Case::new("beside a Service", setup(NEAR), steps)]
    });
}
