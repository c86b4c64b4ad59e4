//! The endpoint's node: it knows connections of its own endpoints by whichever node they come, and
//! sends what it does not know on to a former owner.

use super::*;

/// The endpoint's node has entries of a connection by whichever node it came.
#[test]
fn a_connection_that_comes_by_another_node_is_known_at_home() {
    each(|harness, terms| {
        set_up_home(harness, by_table(VIP, &[LOCAL]));
        let syn = segment(terms, VIP, CLIENT_PORT, flag::SYN);
        harness.run(terms.hook, &arrives(&syn, FRONT, 0)).expect("delivered");
        let answer = terms.answer(LOCAL, (Spot::Client, CLIENT_PORT)).numbers(8999, 7001);
        harness.run(Hook::Egress, &answer).expect("replied-local");
        let next = segment(terms, VIP, CLIENT_PORT, flag::ACK).numbers(7001, 9000);
        let delivered = next.clone().destination(terms.at(LOCAL));
        for asked in 0..=FORMER {
            let ran = harness.run(terms.hook, &arrives(&next, OTHER_FRONT, asked));
            ran.expect("delivered").expect_frame(&delivered);
        }
        // The router sends it to this node itself.
        harness.run(terms.hook, &next).expect("delivered");
        harness.run(Hook::Xdp, &next).expect("delivered");
    });
}

/// A node port has another address at each node, and all of them have the same table. The node in
/// front has chosen otherwise, as one that has not heard of a change.
#[test]
fn the_owner_of_a_node_ports_connection_is_the_same_by_each_node() {
    each(|harness, terms| {
        for own in [NODE, (Spot::NodeEth1, PORT)] {
            let ports = || by_table(own, &[NEAR, OTHER]).node_port();
            let mut seen = std::collections::BTreeSet::new();
            for port in CLIENT_PORT..CLIENT_PORT + 20 {
                harness.set_up(&Setup::of(ports()));
                harness.run(terms.hook, &segment(terms, own, port, flag::SYN)).expect("forwarded-direct");
                let owner = harness.flows(terms.family)[0].new_to.ip();
                seen.insert(owner);
                set_up_home(harness, ports());
                let next = segment(terms, (FRONT, PORT), port, flag::ACK);
                harness.run(terms.hook, &arrives(&next, FRONT, 0)).expect("forwarded-to-owner");
                let sent_on = harness.flows(terms.family)[0].new_to.ip();
                assert_eq!(sent_on, owner, "port {port}, {terms:?}");
            }
            assert_eq!(seen.len(), 2);
        }
    });
}

/// A card, or the kernel, that cuts an aggregate gives each segment the next identification.
#[test]
fn each_segment_of_an_aggregate_goes_to_the_same_owner() {
    each(|harness, terms| {
        if !terms.v4() {
            return;
        }
        let owners = [OTHER, NEAR, OTHER];
        for (asked, owner) in (0..).zip(owners) {
            for place in [0, 1, 2, 3, 4, 44, 8191] {
                set_up_home(harness, by_table(VIP, &[LOCAL]).former(&owners));
                let next = segment(terms, VIP, CLIENT_PORT, flag::ACK);
                let comes = arrives(&next, FRONT, asked).with(|outer| outer.label += place);
                let ran = harness.run(terms.hook, &comes);
                ran.expect("forwarded-to-owner").expect_frame(&sent(&next, owner.0, asked + 1));
            }
        }
    });
}

#[test]
fn what_home_does_not_know_goes_to_the_former_owner() {
    each(|harness, terms| {
        let former = |owners: &[(Spot, u16)]| by_table(VIP, &[LOCAL]).former(owners);
        let first = |asked| if asked == 0 { "the table" } else { "a former owner" };
        for (owners, asked, expected) in [
            (&[NEAR][..], 0, Some((NEAR.0, 1))),
            (&[NEAR, OTHER], 0, Some((NEAR.0, 1))),
            (&[NEAR, OTHER], 1, Some((OTHER.0, 2))),
            (&[NEAR, OTHER, NEAR], 2, Some((NEAR.0, 3))),
            // This node has been asked: it is here.
            (&[LOCAL, OTHER], 0, Some((OTHER.0, 2))),
            (&[LOCAL, LOCAL, OTHER], 0, Some((OTHER.0, 3))),
            (&[], 0, None),
            (&[LOCAL], 0, None),
            (&[NEAR], 1, None),
            (&[NEAR, OTHER, NEAR], 3, None),
            // Replies are to come back: the bit beside the number goes on with it.
            (&[NEAR, OTHER, NEAR], 4, Some((NEAR.0, 5))),
            (&[NEAR, OTHER, NEAR], 7, None),
        ] {
            set_up_home(harness, former(owners));
            let next = segment(terms, VIP, CLIENT_PORT, flag::ACK);
            let ran = harness.run(terms.hook, &arrives(&next, FRONT, asked));
            let what = format!("{owners:?}, sent by {} ({asked})", first(asked));
            let Some((to, number)) = expected else {
                assert_eq!(ran.outcome, "reset-no-flow", "{what}");
                assert_eq!(harness.flows(terms.family), [], "{what}");
                continue;
            };
            assert_eq!(ran.outcome, "forwarded-to-owner", "{what}");
            ran.expect_frame(&sent(&next, to, number));
            // Packets after it take the same way, and each says that one more was asked.
            let ran = harness.run(terms.hook, &arrives(&next, FRONT, asked));
            ran.expect("forwarded-to-owner").expect_frame(&sent(&next, to, asked + 1));
            let ran = harness.run(terms.hook, &arrives(&next, FRONT, FORMER));
            assert_eq!(ran.outcome, "dropped-unknown-endpoint", "{what}: all were asked");
        }
    });
}

#[test]
fn former_owners_are_asked_for_some_time() {
    each(|harness, terms| {
        let next = segment(terms, VIP, CLIENT_PORT, flag::ACK);
        let mut frontend = by_table(VIP, &[LOCAL]).former(&[NEAR]);
        frontend.former_until = 1;
        set_up_home(harness, frontend);
        harness.run(terms.hook, &arrives(&next, FRONT, 0)).expect("reset-no-flow");
    });
}

/// A SYN is delivered to the endpoint that it was sent to; an RST of an unknown flow is dropped.
#[test]
fn only_segments_amid_a_connection_are_sent_on() {
    each(|harness, terms| {
        for (flags, outcome) in [
            (flag::SYN, "delivered"),
            (flag::RST, "dropped-unknown-endpoint"),
            (flag::RST | flag::ACK, "dropped-unknown-endpoint"),
            (SYN_ACK, "dropped-unknown-endpoint"),
        ] {
            set_up_home(harness, by_table(VIP, &[LOCAL]).former(&[NEAR]));
            let packet = segment(terms, VIP, CLIENT_PORT, flags);
            assert_eq!(harness.run(terms.hook, &arrives(&packet, FRONT, 0)).outcome, outcome, "{flags:x}");
        }
        let udp = Terms { tcp: false, ..terms };
        set_up_home(harness, by_table(VIP, &[LOCAL]).former(&[NEAR]));
        harness.run(udp.hook, &arrives(&udp.request(VIP), FRONT, 0)).expect("delivered");
    });
}

/// The count of an opened packet concerns no packet after it.
#[test]
fn what_this_node_sends_after_an_opened_packet_counts_anew() {
    each(|harness, terms| {
        let other = (Spot::OtherVip, PORT);
        harness.set_up(&Setup::of(by_table(VIP, &[LOCAL])).and(by_table(other, &[NEAR])));
        harness.let_send_directly(FRONT);
        harness.open_for(LOCAL.0, 1, LOCAL.1);
        let opened = |flags, number| {
            let packet = segment(terms, VIP, CLIENT_PORT, flags).numbers(number, 9000);
            arrives(&packet, FRONT, 2)
        };
        harness.run(terms.hook, &opened(flag::SYN, 6999)).expect("delivered");
        let answer = terms.answer(LOCAL, (Spot::Client, CLIENT_PORT)).numbers(8999, 7000);
        harness.run(Hook::Egress, &answer).expect("replied-local");
        harness.run(terms.hook, &opened(flag::ACK, 7000)).expect("delivered");
        harness.run(terms.hook, &opened(FIN_ACK, 7000)).expect("delivered");
        let next = segment(terms, other, CLIENT_PORT, flag::ACK);
        harness.run(terms.hook, &next).expect("forwarded-direct").expect_frame(&sent(&next, NEAR.0, 0));
    });
}

/// A node that was in front of a connection, and gets it from another one, knows the way.
#[test]
fn a_connection_goes_the_way_that_it_went_through_this_node() {
    each(|harness, terms| {
        set_up_home(harness, by_table(VIP, &[NEAR]));
        harness.run(terms.hook, &segment(terms, VIP, CLIENT_PORT, flag::SYN)).expect("forwarded-direct");
        for (flags, asked) in [(flag::ACK, 0), (flag::ACK, 2), (flag::RST | flag::ACK, 1)] {
            let next = segment(terms, VIP, CLIENT_PORT, flags).numbers(7001, 9000);
            let ran = harness.run(terms.hook, &arrives(&next, FRONT, asked));
            ran.expect("forwarded-to-owner").expect_frame(&sent(&next, NEAR.0, asked + 1));
        }
        let next = segment(terms, VIP, CLIENT_PORT, flag::ACK);
        harness.run(terms.hook, &arrives(&next, FRONT, FORMER)).expect("dropped-unknown-endpoint");
        // A SYN is for the endpoint here.
        let syn = segment(terms, VIP, CLIENT_PORT, flag::SYN).numbers(90_000, 0);
        harness.run(terms.hook, &arrives(&syn, FRONT, 0)).expect("delivered");
    });
}

/// A Service's own counts tell what this node has sent on for another one in front from what it
/// forwards itself.
#[test]
fn what_is_sent_on_is_counted_by_itself() {
    each(|harness, terms| {
        let next = segment(terms, VIP, CLIENT_PORT, flag::ACK);
        for (packet, [outcome, other]) in [
            (arrives(&next, FRONT, 0), [Outcome::ForwardedToOwner, Outcome::ForwardedDirect]),
            (next, [Outcome::ForwardedDirect, Outcome::ForwardedToOwner]),
        ] {
            set_up_home(harness, by_table(VIP, &[NEAR]));
            for _ in 0..3 {
                harness.run(terms.hook, &packet).expect(outcome.name());
            }
            let service = harness.flows(terms.family)[0].service;
            let counted = |harness: &Harness, outcome: Outcome| {
                let key = ServiceCountKey { service, outcome: outcome as u32 };
                harness.tables.service_counts.get(&key, 0).unwrap_or_default()
            };
            let before = [outcome, other].map(|outcome| counted(harness, outcome));
            // The client's new connection ends the flow.
            let syn = segment(terms, VIP, CLIENT_PORT, flag::SYN).numbers(90_000, 0);
            harness.run(terms.hook, &arrives(&syn, FRONT, 0)).expect("delivered");
            let after = [outcome, other].map(|outcome| counted(harness, outcome));
            assert_eq!((after[0].packets, after[0].flows), (before[0].packets + 3, before[0].flows + 1));
            assert_eq!(after[1], before[1], "{}", other.name());
        }
    });
}

/// The node in front may have heard of a change earlier than this one.
#[test]
fn home_knows_an_older_table() {
    each(|harness, terms| {
        set_up_home(harness, by_table(VIP, &[NEAR]));
        let next = segment(terms, VIP, CLIENT_PORT, flag::ACK);
        let ran = harness.run(terms.hook, &arrives(&next, FRONT, 0));
        ran.expect("forwarded-to-owner").expect_frame(&sent(&next, NEAR.0, 1));
        set_up_home(harness, by_table(VIP, &[NEAR]));
        harness.run(terms.hook, &arrives(&next, FRONT, 1)).expect("reset-no-flow");
    });
}
