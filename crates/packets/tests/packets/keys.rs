//! Two IPv6 flows with the same key: neither gets the translation of the other.

use std::net::{IpAddr, Ipv6Addr};

use traffic_policy_dataplane::{FromWire as _, ToWire as _};
use traffic_policy_ebpf::abi::{Address6, Fold as _, Multipliers, kind};
use traffic_policy_testing::harness::{self, Frontend, Harness, Hook, Setup, SourceCheck, Spot};
use traffic_policy_testing::lab::Family;
use traffic_policy_testing::packet::{Packet, flag};

use crate::{
    dialogue::{Dialogue, everywhere},
    sweeping::{SLACK, TIMEOUTS, sweeper},
    table::{CLIENT_PORT, ENDPOINT_PORT, PORT, Terms},
};

fn set_up(harness: &mut Harness, terms: Terms, endpoint: Spot) -> Dialogue {
    let frontend = Frontend::new(Spot::Node, PORT).endpoints(&[(endpoint, ENDPOINT_PORT)]);
    harness.set_up(&Setup::of(frontend).snat_ports(1024..5120));
    let dialogue = Dialogue::new(terms, (Spot::Node, PORT));
    dialogue.establish(harness);
    dialogue
}

fn ipv6(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V6(address) => address,
        IpAddr::V4(address) => panic!("{address} is not IPv6"),
    }
}

fn elsewhere(was: Ipv6Addr) -> Ipv6Addr {
    let other = ipv6(Spot::Vip.of(Family::V6));
    assert_ne!(was, other);
    other
}

fn only_ipv6(work: impl Fn(&mut Harness, Terms, Spot) + Sync) {
    everywhere(|harness, terms| {
        for endpoint in [Spot::Near, Spot::Local].into_iter().filter(|_| !terms.v4()) {
            work(harness, terms, endpoint);
        }
    });
}

/// Checks that `packet` is not translated by another flow's entry.
#[track_caller]
fn untranslated(harness: &Harness, hook: Hook, packet: &Packet, outcome: &str) {
    let ran = harness.run(hook, packet);
    assert_eq!(ran.outcome, outcome);
    if outcome.starts_with("passed") {
        assert_eq!(ran.frame, packet.bytes());
    }
}

#[test]
fn a_request_whose_key_is_taken_has_no_flow() {
    only_ipv6(|harness, terms, endpoint| {
        let dialogue = set_up(harness, terms, endpoint);
        let (request, _) = dialogue.entries(harness);
        let to = ipv6(request.to.ip());
        let taken = harness.exchange(&request, elsewhere(to));
        assert_eq!(taken.to.ip(), elsewhere(to));
        assert_ne!(taken.from.ip(), request.from.ip(), "the key is the same");

        let known = if terms.tcp { "passed-no-flow" } else { "dropped-table-full" };
        untranslated(harness, terms.hook, &dialogue.request(flag::ACK), known);
        untranslated(harness, terms.hook, &dialogue.opening(), "dropped-table-full");
        let entries = harness.flows(terms.family);
        assert!(entries.contains(&taken), "the other's flow is as it was: {entries:#?}");

        let back = harness.exchange(&taken, to);
        assert_eq!(back, request);
        let local = request.kind == kind::DELIVER;
        assert_eq!(dialogue.send(harness, flag::ACK).outcome, if local { "delivered" } else { "forwarded" });
        let entries = harness.flows(terms.family);
        // If the endpoint is local, the remaining reply entry was used for the flow that could not
        // be created.
        assert_eq!(entries.len(), if local { 1 } else { 2 }, "what was tried is gone: {entries:#?}");
    });
}

/// The most that an attacker with such an address can do: block one port of one client until the
/// attacker's own flow is over.
#[test]
fn no_more_than_one_port_is_kept_out() {
    only_ipv6(|harness, terms, endpoint| {
        let dialogue = set_up(harness, terms, endpoint);
        let (request, reply) = dialogue.entries(harness);
        let served = harness.run(terms.hook, &dialogue.request(flag::ACK)).outcome;
        harness.evict(&reply);
        let taken = harness.exchange(&request, elsewhere(ipv6(request.to.ip())));
        untranslated(harness, terms.hook, &dialogue.opening(), "dropped-table-full");
        dialogue.with_port(dialogue.client.1 + 1).establish(harness);
        untranslated(harness, terms.hook, &dialogue.opening(), "dropped-table-full");
        assert!(harness.flows(terms.family).contains(&taken), "the other's flow is as it was");
        harness.change(&taken, |entry| entry.go_back(TIMEOUTS.established + SLACK));
        let mut sweeper = sweeper();
        // The first sweep marks, the second deletes.
        harness.sweep(&mut sweeper, false);
        harness.sweep(&mut sweeper, false);
        dialogue.open(harness).expect(served);
    });
}

#[test]
fn a_reply_whose_key_is_taken_stays_as_it_is() {
    only_ipv6(|harness, terms, endpoint| {
        let dialogue = set_up(harness, terms, endpoint);
        let (request, reply) = dialogue.entries(harness);
        let local = request.kind == kind::DELIVER;
        let hook = if local { Hook::Egress } else { terms.hook };
        let answer = dialogue.answer_packet(harness, flag::ACK);
        let to = ipv6(reply.to.ip());
        let taken = harness.exchange(&reply, elsewhere(to));
        let passed = harness.run(hook, &answer);
        assert!(passed.outcome.starts_with("passed"), "{}", passed.outcome);
        assert_eq!(passed.frame, answer.bytes());
        assert!(harness.flows(terms.family).contains(&taken), "the other's flow is as it was");

        assert_eq!(harness.exchange(&taken, to), reply);
        assert_eq!(harness.run(hook, &answer).outcome, if local { "replied-local" } else { "replied" });
    });
}

/// An attacker who knew a node's seed could choose a source whose key towards one frontend is that
/// of a client's flow to another one.
#[test]
fn a_source_chosen_for_one_seed_shares_no_key_under_another() {
    let [client, node, vip] =
        [Spot::Client, Spot::Node, Spot::Vip].map(|spot| ipv6(spot.of(Family::V6)).to_wire());
    let by = Multipliers::UNSEEDED;
    let (source, _) = Address6::unfold(Address6::fold(client, node, by), vip.wire(), by);
    for (seed, outcome) in [(0, "dropped-table-full"), (7, "forwarded")] {
        harness::with_seed(seed, |harness| {
            for terms in Terms::all().filter(|terms| !terms.v4()) {
                let endpoints = [(Spot::Near, ENDPOINT_PORT)];
                let [one, other] =
                    [Spot::Node, Spot::Vip].map(|spot| Frontend::new(spot, PORT).endpoints(&endpoints));
                let setup = Setup::of(one).and(other).snat_ports(1024..5120);
                harness.set_up(&setup.with(|setup| setup.source_check = SourceCheck::Off));
                harness.run(terms.hook, &terms.request((Spot::Node, PORT))).expect("forwarded");
                let chosen = terms.request((Spot::Vip, PORT)).source((source.to_ip(), CLIENT_PORT));
                harness.run(terms.hook, &chosen).expect(outcome);
            }
        });
    }
}
