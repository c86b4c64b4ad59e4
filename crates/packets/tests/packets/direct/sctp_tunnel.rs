//! Associations whose replies go back through the node in front, and what pods send as one or too
//! long for that way.

use traffic_policy_testing::harness::{self, Frontend, Hook, Input, Setup, Spot};

use super::sctp::{SAME_PORT, requests};
use super::tunnel::{asks, comes_back, through_front, to_front};
use super::way::Way;
use super::{FRONT, LOCAL, NEAR, VIP, addresses, each_ingress, octets, outer, sent, set_up_home, terms};
use crate::sctp::{CLIENT, CLIENT_TAG, ENDPOINT_TAG, data, init, init_ack, sctp};
use crate::table::PORT;

/// Each packet of the association, with the endpoint's port as its source until then.
#[test]
fn replies_go_back_through_the_node_in_front() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress).filter(|terms| terms.tcp) {
            set_up_home(harness, VIP);
            for (tag, chunk) in requests() {
                let request = sctp(&terms.request(VIP), tag, &chunk);
                let ran = harness.run(terms.hook, &asks(&request, FRONT));
                let delivered = terms.request(VIP).destination(terms.at(LOCAL));
                ran.expect("delivered").expect_frame(&sctp(&delivered, tag, &chunk));
                for answer in [init_ack(ENDPOINT_TAG), data(300), data(3)] {
                    let leaves = terms.answer(LOCAL, CLIENT).ttl(63);
                    let ran = harness.run(Hook::Egress, &sctp(&leaves, CLIENT_TAG, &answer));
                    let answered = sctp(&leaves.source(terms.at(VIP)), CLIENT_TAG, &answer);
                    ran.expect("replied-to-front").expect_frame(&to_front(&answered, FRONT));
                }
            }
        }
    });
}

/// It asks for replies, and opens them: the flow is the endpoint's node's.
#[test]
fn the_node_in_front_asks_for_replies_and_opens_them() {
    each_ingress(|harness, terms| {
        if !terms.tcp {
            return;
        }
        harness.set_up(&Setup::of(Frontend::new(SAME_PORT.0, SAME_PORT.1).endpoints(&[NEAR]).tunnel()));
        harness.let_send_directly(Spot::RouterNear);
        for (tag, chunk) in requests() {
            let request = sctp(&terms.request(SAME_PORT), tag, &chunk);
            let ran = harness.run(terms.hook, &request);
            ran.expect("forwarded-direct").expect_frame(&sent(&request).with(through_front));
        }
        let reply = sctp(&terms.answer(SAME_PORT, CLIENT).ttl(63), CLIENT_TAG, &data(500));
        let ran = harness.run(terms.hook, &comes_back(&reply, Spot::RouterNear, Spot::Node));
        let leaves = reply.clone().ttl(62).macs(harness::Device::Eth0.mac(), Spot::Router.mac());
        ran.expect("replied-opened").expect_frame(&leaves);
        // To another port there is no frontend.
        let other = sctp(&terms.answer((Spot::Vip, PORT + 1), CLIENT).ttl(63), CLIENT_TAG, &data(500));
        let ran = harness.run(terms.hook, &comes_back(&other, Spot::RouterNear, Spot::Node));
        ran.expect("passed-unsupported-protocol");
    });
}

/// The kernel completes its checksum on that way, and would write it into an answer otherwise.
#[test]
fn a_reply_that_is_too_long_is_answered_where_it_has_its_checksum() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress).filter(|terms| terms.tcp) {
            set_up_home(harness, VIP);
            let open = sctp(&terms.request(VIP), 0, &init(CLIENT_TAG));
            harness.run(terms.hook, &asks(&open, FRONT)).expect("delivered");
            let leaves = terms.answer(LOCAL, CLIENT).ttl(63);
            harness.run(Hook::Egress, &sctp(&leaves, CLIENT_TAG, &init_ack(ENDPOINT_TAG)));
            let longest = 1500 - 2 * outer(terms) - 12 - 16;
            for (length, is_divided, outcome) in [
                (longest, false, "replied-to-front"),
                (longest + 4, false, "replied-to-front"),
                (longest + 4, true, "rejected-mtu-exceeded"),
            ] {
                let here = harness.ifindex(harness::Device::Eth0);
                harness.change_config(|config| {
                    config.sctp_divider = 77;
                    config.sctp_divided = if is_divided { here } else { 78 };
                });
                let reply = sctp(&leaves, CLIENT_TAG, &data(length));
                let ran = harness.run(Hook::Egress, &reply);
                ran.expect(outcome);
                if is_divided {
                    assert_eq!(addresses(&ran.frame, terms)[1], octets(terms, Spot::Local), "to the pod");
                } else if length > longest {
                    // To the device, as it is.
                    ran.expect_frame(&reply);
                } else {
                    let answered = sctp(&leaves.clone().source(terms.at(VIP)), CLIENT_TAG, &data(length));
                    ran.expect_frame(&to_front(&answered, FRONT));
                }
            }
        }
    });
}

/// Nothing but the endpoint's node sees that the client's packets may pass, with `tunnel`.
#[test]
fn replies_come_back_through_the_node_in_front_only_where_the_port_stays() {
    each_ingress(|harness, terms| {
        if terms.tcp {
            harness.set_up(&Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&[NEAR]).tunnel()));
            let ran = harness.run(terms.hook, &sctp(&terms.request(VIP), 0, &init(CLIENT_TAG)));
            ran.expect("forwarded");
            assert_eq!(harness.flows(terms.family).len(), 2, "SNAT, {terms:?}");
        }
    });
}

/// The kernel puts no outer packet around what a pod sends as one: it leaves unchanged for the
/// device that divides it, and its flow is tracked there.
#[test]
fn an_aggregate_of_replies_is_divided_before_it_goes_back() {
    const DIVIDER: u32 = 77;
    harness::with(|harness| {
        for terms in terms(Hook::Ingress).filter(|terms| terms.tcp) {
            for divider in [0, DIVIDER] {
                set_up_home(harness, VIP);
                harness.change_config(|config| config.sctp_divider = divider);
                let open = sctp(&terms.request(VIP), 0, &init(CLIENT_TAG));
                harness.run(terms.hook, &asks(&open, FRONT)).expect("delivered");
                let leaves = terms.answer(LOCAL, CLIENT).ttl(63);
                harness.run(Hook::Egress, &sctp(&leaves, CLIENT_TAG, &init_ack(ENDPOINT_TAG)));
                let before = harness.flows(terms.family);
                let whole = sctp(&leaves, CLIENT_TAG, &data(1000));
                let aggregate = Input { segment: 0xffff, ..Input::new(Hook::Egress, whole.bytes()) };
                let ran = harness.input(&aggregate);
                if divider == 0 {
                    ran.expect("dropped-no-route");
                } else {
                    ran.expect("replied-to-front").expect_frame(&whole);
                }
                assert_eq!(harness.flows(terms.family), before, "{terms:?}");
                // One that comes back from there as it was goes there no second time.
                let here = harness.ifindex(harness::Device::Eth0);
                for [divider, divided] in [[DIVIDER, here], [here, DIVIDER]] {
                    harness.change_config(|config| {
                        (config.sctp_divider, config.sctp_divided) = (divider, divided);
                    });
                    harness.input(&aggregate).expect("dropped-no-route");
                }
                // Without a way through the node in front it leaves as it is.
                harness.run(terms.hook, &Way::Ip.arrives(&open, FRONT, LOCAL.0)).expect("delivered");
                let translated = sctp(&leaves.source(terms.at(VIP)), CLIENT_TAG, &data(1000));
                harness.input(&aggregate).expect("replied-local").expect_frame(&translated);
            }
        }
    });
}
