//! Connections of an earlier proxy: conntrack handles their packets, whatever a flow of the packet
//! path would make of them.

use traffic_policy_ebpf::abi::{frontend::ADOPTING, kind};
use traffic_policy_testing::harness::{Frontend, Harness, Hook, Setup, Spot};
use traffic_policy_testing::packet::{Packet, flag};

use crate::dialogue::{Dialogue, everywhere};
use crate::sweeping::{idle, sweeper};
use crate::table::{ENDPOINT_PORT, PORT, Terms};

const VIP: (Spot, u16) = (Spot::Vip, PORT);

fn set_up(harness: &mut Harness, terms: Terms, endpoint: Spot) -> Dialogue {
    let frontend = Frontend::new(VIP.0, VIP.1).endpoints(&[(endpoint, ENDPOINT_PORT)]);
    harness.set_up(&Setup::of(frontend).snat_ports(1024..5120));
    Dialogue::new(terms, VIP)
}

#[track_caller]
fn untouched(harness: &Harness, hook: Hook, packet: &Packet, outcome: &str) {
    let ran = harness.run(hook, packet);
    assert_eq!(ran.outcome, outcome);
    assert_eq!(ran.frame, packet.bytes());
}

/// The entries of the flow are those that the agent writes for a flow of kube-proxy.
#[test]
fn packets_of_an_adopted_connection_are_left_alone_and_no_sweep_removes_it() {
    everywhere(|harness, terms| {
        for endpoint in [Spot::Near, Spot::Local] {
            let dialogue = set_up(harness, terms, endpoint);
            dialogue.establish(harness);
            let (request, reply) = dialogue.entries(harness);
            let answer = dialogue.answer_packet(harness, flag::ACK);
            let hook = terms.hook;
            harness.change(&request, |entry| entry.kind = kind::LEFT);
            harness.change(&reply, |entry| entry.kind = kind::LEFT_REPLY);
            untouched(harness, hook, &dialogue.request(flag::ACK), "passed-to-conntrack");
            // A packet of an endpoint on this node leaves with the address of its frontend already.
            match endpoint {
                Spot::Local => untouched(harness, Hook::Egress, &answer, "passed-stale-flow"),
                _ => untouched(harness, hook, &answer, "passed-to-conntrack"),
            }
            if terms.tcp {
                for flags in [flag::FIN | flag::ACK, flag::RST, flag::SYN] {
                    untouched(harness, hook, &dialogue.request(flags), "passed-to-conntrack");
                }
            }
            let entries = harness.flows(terms.family);
            let [request, reply] = entries.as_slice() else { panic!("{entries:#?}") };
            idle(harness, (*request, *reply), 2_000_000);
            let mut sweeper = sweeper();
            for _ in 0..3 {
                harness.sweep(&mut sweeper, true);
            }
            assert_eq!(harness.flows(terms.family).len(), 2, "the agent alone removes them");
        }
    });
}

/// A packet without a flow may belong to an old connection, unless it opens one, until conntrack
/// has been read.
#[test]
fn what_has_no_flow_passes_until_connections_are_adopted() {
    everywhere(|harness, terms| {
        let dialogue = set_up(harness, terms, Spot::Near);
        let mut frontend = Frontend::new(VIP.0, VIP.1).endpoints(&[(Spot::Near, ENDPOINT_PORT)]);
        frontend.flags |= ADOPTING;
        harness.set_up(&Setup::of(frontend).snat_ports(1024..5120));
        if terms.tcp {
            untouched(harness, terms.hook, &dialogue.request(flag::ACK), "passed-no-flow");
            assert_eq!(dialogue.open(harness).outcome, "forwarded");
        } else {
            untouched(harness, terms.hook, &dialogue.opening(), "passed-no-flow");
        }
        let dialogue = set_up(harness, terms, Spot::Near);
        let later = if terms.tcp { "reset-no-flow" } else { "forwarded" };
        assert_eq!(dialogue.send(harness, flag::ACK).outcome, later);
    });
}
