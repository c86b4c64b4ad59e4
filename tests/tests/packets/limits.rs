//! What runs out: room in the table, source ports, tuples. Other flows go on.

use traffic_policy_testing::harness::{Frontend, Hook, Setup, Spot};
use traffic_policy_testing::packet::flag;

use crate::dialogue::{Dialogue, everywhere};
use crate::table::{CLIENT_PORT, ENDPOINT_PORT, PORT};

const VIP: (Spot, u16) = (Spot::Vip, PORT);
const NODE: (Spot, u16) = (Spot::Node, PORT);
const ACK: u8 = flag::ACK;
const SYN_ACK: u8 = flag::SYN | flag::ACK;

fn setup(endpoint: Spot) -> Setup {
    Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&[(endpoint, ENDPOINT_PORT)])).pool(5000..6000)
}

#[test]
fn a_full_table_drops_new_flows_only() {
    everywhere(|harness, terms| {
        for endpoint in [Spot::Near, Spot::Local] {
            harness.set_up(&setup(endpoint));
            let flows = (1..).map(|port| Dialogue::new(terms, VIP).with_port(port));
            let opened = flows
                .clone()
                .take_while(|dialogue| match dialogue.open(harness).outcome {
                    "forwarded" | "delivered" => true,
                    outcome => {
                        assert_eq!(outcome, "dropped-table-full");
                        false
                    }
                })
                .count();
            assert_eq!(opened, 128, "two halves a flow in a table of 256");
            assert_eq!(harness.flows(terms.family).len(), 256, "no half is left behind");
            for dialogue in [Dialogue::new(terms, VIP).with_port(1), Dialogue::new(terms, VIP).with_port(128)]
            {
                dialogue.establish(harness);
            }
            // Gone are the halves of one flow, but one is enough for half a flow only.
            let (request, reply) = Dialogue::new(terms, VIP).with_port(5).halves(harness);
            harness.evict(&request);
            Dialogue::new(terms, VIP).with_port(500).open(harness).expect("dropped-table-full");
            assert_eq!(harness.flows(terms.family).len(), 255, "the claimed reply half is given back");
            harness.evict(&reply);
            let outcome = Dialogue::new(terms, VIP).with_port(500).open(harness).outcome;
            assert!(matches!(outcome, "forwarded" | "delivered"), "{outcome}");
        }
    });
}

#[test]
fn an_exhausted_pool_drops_new_flows_to_this_endpoint_only() {
    everywhere(|harness, terms| {
        harness.set_up(&setup(Spot::Near).pool(5000..5020));
        for port in 1..=20 {
            Dialogue::new(terms, VIP).with_port(port).open(harness).expect("forwarded");
        }
        let ports: std::collections::BTreeSet<_> = (1..=20)
            .map(|port| Dialogue::new(terms, VIP).with_port(port).halves(harness).0.new_from.port())
            .collect();
        assert_eq!(ports, (5000..5020).collect(), "each port once");
        let late = Dialogue::new(terms, VIP).with_port(21);
        late.open(harness).expect("dropped-no-snat-port");
        assert_eq!(late.request_half(harness), None);
        Dialogue::new(terms, VIP).with_port(1).establish(harness);
        let other = Frontend::new(Spot::OtherVip, PORT).endpoints(&[(Spot::OtherNear, ENDPOINT_PORT)]);
        harness.put(2, &other);
        Dialogue::new(terms, (Spot::OtherVip, PORT)).with_port(21).open(harness).expect("forwarded");
    });
}

#[test]
fn an_empty_pool_hurts_no_endpoint_of_this_node() {
    everywhere(|harness, terms| {
        harness.set_up(&setup(Spot::Local).pool([]));
        Dialogue::new(terms, VIP).establish(harness);
    });
}

/// One client port, two frontends, one endpoint of this node: what the endpoint sees must differ.
#[test]
fn two_frontends_that_meet_in_one_tuple() {
    everywhere(|harness, terms| {
        let endpoints = [(Spot::Local, ENDPOINT_PORT)];
        let both = setup(Spot::Local).and(Frontend::new(NODE.0, NODE.1).endpoints(&endpoints));
        harness.set_up(&both);
        let (first, second) = (Dialogue::new(terms, VIP), Dialogue::new(terms, NODE));
        first.open(harness).expect("delivered");
        let ran = second.open(harness);
        ran.expect("delivered");
        let (request, _) = second.halves(harness);
        assert_eq!(request.new_from.ip(), request.from.ip(), "the endpoint still sees the client");
        assert!((5000..6000).contains(&request.new_from.port()), "{}", request.new_from);
        let expected = second.opening().source((request.new_from.ip(), request.new_from.port()));
        ran.expect_frame(&expected.destination(terms.at(endpoints[0])));
        for dialogue in [first, second] {
            let answer = dialogue.answer_packet(harness, SYN_ACK);
            let expected =
                answer.clone().source(terms.at(dialogue.frontend)).destination(terms.at(dialogue.client));
            harness.run(Hook::Egress, &answer).expect("replied-local").expect_frame(&expected);
            dialogue.send(harness, ACK).expect("delivered");
            dialogue.establish(harness);
        }
        for pool in [vec![CLIENT_PORT], vec![]] {
            harness.set_up(&both.clone().pool(pool));
            first.open(harness).expect("delivered");
            second.open(harness).expect("dropped-no-snat-port");
        }
    });
}
