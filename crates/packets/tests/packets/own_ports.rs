//! SNAT ports that the node itself uses: a process has bound one, or a masquerade has given
//! one to a pod's connection.

use std::thread::sleep;
use std::time::Duration;

use traffic_policy_testing::harness::{Device, Frontend, Harness, Hook, Setup, Spot};
use traffic_policy_testing::pace::until;
use traffic_policy_testing::packet::{Packet, flag};

use crate::dialogue::{Dialogue, everywhere, everywhere_tcp, everywhere_udp};
use crate::table::{ENDPOINT_PORT, PORT, Terms};

const VIP: (Spot, u16) = (Spot::Vip, PORT);
const NEAR: (Spot, u16) = (Spot::Near, ENDPOINT_PORT);
const OWN: u16 = 5000;
const FREE: u16 = 5001;

fn setup(ports: &[u16]) -> Setup {
    Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&[NEAR])).snat_ports(ports.iter().copied())
}

/// The node's own SYN or datagram from a SNAT port, as it leaves.
fn own(terms: Terms, to: (Spot, u16)) -> Packet {
    terms.packet((Spot::Node, OWN), to).macs(Device::Eth0.mac(), Spot::RouterNear.mac())
}

fn leaves(harness: &Harness, packet: &Packet) {
    harness.run(Hook::Egress, packet).expect("passed");
}

#[test]
fn a_new_flow_towards_the_same_endpoint_gets_another() {
    everywhere(|harness, terms| {
        // The start of the search depends on the time.
        for client in 1..8 {
            harness.set_up(&setup(&[OWN, FREE]));
            leaves(harness, &own(terms, NEAR));
            let flow = Dialogue::new(terms, VIP).with_port(client);
            flow.open(harness).expect("forwarded");
            assert_eq!(flow.entries(harness).0.new_from.port(), FREE);
            let other = Dialogue::new(terms, VIP).with_port(client + 100);
            other.open(harness).expect("dropped-no-snat-port");
            let answer =
                terms.answer(NEAR, (Spot::Node, OWN)).macs(Spot::RouterNear.mac(), Device::Eth0.mac());
            let outcome = harness.run(terms.hook, &answer).outcome;
            assert!(outcome.starts_with("passed"), "{outcome}: the node's answer");
        }
    });
}

/// A port that is in use towards one endpoint is as free as ever towards others, and so is one that
/// the node uses outside of the SNAT port range or towards other destinations.
#[test]
fn no_other_port_is_held() {
    everywhere(|harness, terms| {
        let elsewhere = [(Spot::Far, ENDPOINT_PORT), (Spot::OtherNear, ENDPOINT_PORT), (Spot::Near, 53)];
        for to in elsewhere {
            harness.set_up(&setup(&[OWN]));
            leaves(harness, &own(terms, to));
            Dialogue::new(terms, VIP).open(harness).expect("forwarded");
        }
    });
}

/// The node's own connection goes on after another port has been found: neither disturbs the other.
#[test]
fn both_go_on() {
    everywhere(|harness, terms| {
        harness.set_up(&setup(&[OWN, FREE]));
        leaves(harness, &own(terms, NEAR));
        let flow = Dialogue::new(terms, VIP);
        flow.establish(harness);
        leaves(
            harness,
            &own(terms, NEAR).with(|packet| {
                if terms.tcp {
                    packet.tcp_mut().flags = flag::ACK;
                }
            }),
        );
        flow.answer(harness, flag::ACK).expect("replied");
    });
}

/// A port that a flow already has stays with the flow: answers to a process of the node that binds
/// it later go to the flow's client.
#[test]
fn a_flow_that_was_first_keeps_its_port() {
    everywhere(|harness, terms| {
        harness.set_up(&setup(&[OWN]));
        let flow = Dialogue::new(terms, VIP);
        flow.establish(harness);
        leaves(harness, &own(terms, NEAR));
        flow.answer(harness, flag::ACK).expect("replied");
        flow.send(harness, flag::ACK).expect("forwarded");
        let to_own = terms.answer(NEAR, (Spot::Node, OWN)).macs(Spot::RouterNear.mac(), Device::Eth0.mac());
        harness.run(terms.hook, &to_own).expect("replied");
        flow.answer(harness, flag::ACK).expect("replied");
    });
}

/// A setup in which a second is one jiffy.
fn hurried() -> Setup {
    setup(&[OWN]).with(|setup| setup.hz = 1)
}

fn is_usable(harness: &Harness, terms: Terms) -> bool {
    Dialogue::new(terms, VIP).open(harness).outcome == "forwarded"
}

fn wait_until_usable(harness: &Harness, terms: Terms) {
    let what = format!("the port to be given back: {terms:?}");
    until(&what, Duration::from_secs(30), || is_usable(harness, terms));
}

#[test]
fn a_connection_holds_its_port_until_it_ends() {
    everywhere_tcp(|harness, terms| {
        for end in [flag::FIN | flag::ACK, flag::RST] {
            harness.set_up(&hurried());
            leaves(harness, &own(terms, NEAR));
            let start = harness.now();
            // Longer than a port is held after the end of a flow.
            while harness.now().wrapping_sub(start) < 40 {
                sleep(Duration::from_millis(10));
            }
            assert!(!is_usable(harness, terms), "it has not ended");
            leaves(harness, &own(terms, NEAR).with(|packet| packet.tcp_mut().flags = end));
            wait_until_usable(harness, terms);
        }
    });
}

#[test]
fn a_datagram_holds_its_port_for_a_while() {
    everywhere_udp(|harness, terms| {
        harness.set_up(&setup(&[OWN]));
        leaves(harness, &own(terms, NEAR));
        assert!(!is_usable(harness, terms));
        harness.set_up(&hurried());
        leaves(harness, &own(terms, NEAR));
        wait_until_usable(harness, terms);
    });
}
