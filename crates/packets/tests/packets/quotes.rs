//! The packet that an ICMP error quotes: packets of any shape, cut anywhere.

use traffic_policy_testing::harness::{Device, Spot};
use traffic_policy_testing::packet::{Extension, Packet, Transport};

use crate::errors::{
    NEAR, NODE, Quoted, WHOLE, dialogue, error, kinds, port_unreachable, reply, request, setup, to_client,
    to_endpoint,
};
use crate::table::{self, Case, Step};

/// Quotes with and without the TCP checksum, and cut at every byte: RFC 792 demands at least eight
/// bytes of the transport header.
#[test]
fn quotes_of_any_length() {
    table::run(|terms| {
        let ip = if terms.v4() { 20 } else { 40 };
        let mut steps = Vec::from(dialogue(terms, NODE));
        for quoted in 0..ip + 40 {
            if terms.tcp && quoted == ip + 17 {
                // Half a checksum stays unchanged.
                continue;
            }
            if quoted >= ip + 8 {
                steps.push(to_client(terms, port_unreachable(terms), Spot::Near, NODE, quoted));
                steps.push(to_endpoint(terms, port_unreachable(terms), Spot::Client, NODE, quoted));
                continue;
            }
            let short = error(terms, port_unreachable(terms), Spot::Near, &request(terms, NODE).seen, quoted);
            steps.push(Step::passed(&short, "passed-malformed"));
            let short = error(terms, port_unreachable(terms), Spot::Client, &reply(terms, NODE).seen, quoted);
            steps.push(Step::passed(&short, "passed-malformed").leaving());
        }
        vec![Case::new("quote", setup(NODE, NEAR), steps)]
    });
}

/// Bytes after the packet are not part of the quote.
#[test]
fn padding_is_no_quote() {
    table::run(|terms| {
        let ip = if terms.v4() { 20 } else { 40 };
        let Quoted { seen, known } = request(terms, NODE);
        let kind = port_unreachable(terms);
        let about = |packet: &Packet, from| error(terms, kind, from, packet, ip + 8);
        let comes = about(&seen, Spot::Near).macs(Spot::RouterNear.mac(), Device::Eth0.mac());
        let goes = about(&known, Spot::Node).macs(Device::Eth0.mac(), Spot::Router.mac()).ttl(63);
        let mut steps = Vec::from(dialogue(terms, NODE));
        steps.push(Step::with_trailer(&comes, "replied-icmp-error", &goes, &[0xee; 30]));
        vec![Case::new("padded error", setup(NODE, NEAR), steps)]
    });
}

#[test]
fn longer_headers_outside_and_inside() {
    table::run(|terms| {
        let kind = port_unreachable(terms);
        let mut steps = Vec::from(dialogue(terms, NODE));
        let longer = |packet: Packet, words: usize| {
            packet.with(|p| {
                if terms.v4() {
                    p.options = vec![1; words * 4];
                } else if words > 0 {
                    p.extensions = vec![
                        Extension::padding(0, 1),
                        Extension::padding(60, words as u8),
                        Extension::padding(43, 2),
                    ];
                }
            })
        };
        for (outside, inside) in [(0, 1), (0, 10), (5, 0), (10, 10)] {
            let Quoted { seen, known } = request(terms, NODE);
            let outer = |packet: Packet| if terms.v4() { longer(packet, outside) } else { packet };
            let comes = outer(error(terms, kind, Spot::Near, &longer(seen, inside), WHOLE))
                .macs(Spot::RouterNear.mac(), Device::Eth0.mac());
            let goes = outer(error(terms, kind, Spot::Node, &longer(known, inside), WHOLE))
                .macs(Device::Eth0.mac(), Spot::Router.mac())
                .ttl(63);
            steps.push(Step::new(&comes, "replied-icmp-error", &goes));
        }
        vec![Case::new("options", setup(NODE, NEAR), steps)]
    });
}

/// The quoted fragment is the first, which has the ports.
#[test]
fn about_fragments() {
    table::run(|terms| {
        let kind = kinds(terms)[0];
        let quoted = request(terms, NODE);
        let [seen, known] = [quoted.seen, quoted.known].map(|packet| packet.fragments(64));
        let comes = |at: usize| {
            error(terms, kind, Spot::Near, &seen[at], WHOLE).macs(Spot::RouterNear.mac(), Device::Eth0.mac())
        };
        let goes = error(terms, kind, Spot::Node, &known[0], WHOLE)
            .macs(Device::Eth0.mac(), Spot::Router.mac())
            .ttl(63);
        let mut steps = Vec::from(dialogue(terms, NODE));
        steps.push(Step::new(&comes(0), "replied-icmp-error", &goes));
        steps.push(Step::passed(&comes(1), "passed-icmp-no-flow"));
        vec![Case::new("fragments", setup(NODE, NEAR), steps)]
    });
}

#[test]
fn about_datagrams_without_a_checksum() {
    table::run(|terms| {
        if terms.tcp {
            return Vec::new();
        }
        let without = |mut packet: Packet| {
            if let Transport::Udp { checksum, .. } = &mut packet.transport {
                *checksum = false;
            }
            packet
        };
        let kind = port_unreachable(terms);
        let Quoted { seen, known } = request(terms, NODE);
        let comes = error(terms, kind, Spot::Near, &without(seen), WHOLE)
            .macs(Spot::RouterNear.mac(), Device::Eth0.mac());
        let goes = error(terms, kind, Spot::Node, &without(known), WHOLE)
            .macs(Device::Eth0.mac(), Spot::Router.mac())
            .ttl(63);
        let mut steps = Vec::from(dialogue(terms, NODE));
        steps.push(Step::new(&comes, "replied-icmp-error", &goes));
        vec![Case::new("no checksum", setup(NODE, NEAR), steps)]
    });
}
