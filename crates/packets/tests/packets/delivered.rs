//! Two flows of one client port whose packets look alike once XDP has delivered those of one: the
//! endpoint of one Service, on this node, has the address and port of another Service's frontend.

use traffic_policy_testing::harness::{Action, Device, Frontend, Harness, Hook, Setup, Spot};
use traffic_policy_testing::packet::{Packet, flag};

use crate::dialogue::{Dialogue, everywhere, everywhere_xdp};
use crate::table::{ENDPOINT_PORT, PORT, Terms};

const NODE: (Spot, u16) = (Spot::Node, PORT);
const LOCAL: (Spot, u16) = (Spot::Local, ENDPOINT_PORT);
const NEAR: (Spot, u16) = (Spot::Near, ENDPOINT_PORT);

/// The frontend at the endpoint's address and port.
fn other() -> Frontend {
    Frontend::new(LOCAL.0, LOCAL.1).endpoints(&[NEAR])
}

fn setup(terms: Terms) -> Setup {
    Setup::of(Frontend::new(NODE.0, NODE.1).endpoints(&[LOCAL])).with(|setup| {
        // With TC alone, no XDP program has seen a packet before.
        setup.devices = Device::ALL[..3].iter().map(|device| (*device, terms.xdp())).collect();
    })
}

/// The frame that the stack gets, or that is sent, after the programs of all ingress hooks have
/// seen a packet.
#[track_caller]
fn becomes(harness: &Harness, terms: Terms, packet: &Packet) -> (Action, Vec<u8>) {
    let mut ran = harness.run(terms.hook, packet);
    if terms.xdp() && ran.action == Action::Pass {
        let passed = traffic_policy_testing::harness::Input::new(Hook::Ingress, ran.frame.clone());
        ran = harness.input(&passed);
    }
    (ran.action, ran.frame)
}

/// Sends a packet of each flow in turn; each must reach its own endpoint.
#[track_caller]
fn each_reaches_its_own(harness: &Harness, terms: Terms, flags: u8, what: &str) {
    let (host, frontend) = (Dialogue::new(terms, NODE), Dialogue::new(terms, LOCAL));
    for turn in 0..3 {
        let request = if flags & flag::SYN == 0 { host.request(flags) } else { host.opening() };
        let delivered = request.clone().destination(terms.at(LOCAL)).bytes();
        assert_eq!(
            becomes(harness, terms, &request),
            (Action::Pass, delivered),
            "{what}, to the endpoint, {turn}"
        );
        let request = if flags & flag::SYN == 0 { frontend.request(flags) } else { frontend.opening() };
        let (action, frame) = becomes(harness, terms, &request);
        assert!(
            matches!(action, Action::Back | Action::Redirect),
            "{what}, to the frontend, {turn}: {action:?}"
        );
        assert_ne!(frame, request.bytes(), "{what}, to the frontend, {turn}");
    }
}

#[track_caller]
fn meet(harness: &Harness, terms: Terms, first: (Spot, u16), second: (Spot, u16)) {
    for to in [first, second] {
        becomes(harness, terms, &Dialogue::new(terms, to).opening());
    }
    each_reaches_its_own(harness, terms, flag::SYN, "opening");
    for to in [NODE, LOCAL] {
        let dialogue = Dialogue::new(terms, to);
        dialogue.answer(harness, flag::SYN | flag::ACK);
        dialogue.let_stream(harness);
    }
    each_reaches_its_own(harness, terms, flag::ACK, "assured");
    for to in [NODE, LOCAL] {
        let answered = Dialogue::new(terms, to).answer(harness, flag::ACK);
        assert!(answered.outcome.starts_with("replied"), "{}", answered.outcome);
    }
}

#[test]
fn whichever_is_first() {
    everywhere(|harness, terms| {
        for [first, second] in [[LOCAL, NODE], [NODE, LOCAL]] {
            harness.set_up(&setup(terms).and(other()));
            meet(harness, terms, first, second);
        }
    });
}

#[test]
fn a_frontend_that_comes_later() {
    everywhere(|harness, terms| {
        harness.set_up(&setup(terms));
        let host = Dialogue::new(terms, NODE);
        host.establish(harness);
        harness.put(2, &other());
        meet(harness, terms, NODE, LOCAL);
    });
}

/// A packet that XDP has delivered goes on to the endpoint unchanged, whether its destination is a
/// frontend or not.
#[test]
fn what_xdp_has_delivered_is_left_alone() {
    everywhere_xdp(|harness, terms| {
        harness.set_up(&setup(terms).and(other()));
        let opening = Dialogue::new(terms, NODE).opening();
        let delivered = harness.run(Hook::Xdp, &opening).expect("delivered").frame.clone();
        let passed = traffic_policy_testing::harness::Input::new(Hook::Ingress, delivered);
        harness.input(&passed).expect("passed-delivered");
    });
}

/// A Service at its own endpoint's address and port: nothing is translated, and XDP alone delivers
/// it.
#[test]
fn a_frontend_that_is_its_own_endpoint() {
    everywhere(|harness, terms| {
        let own = Frontend::new(LOCAL.0, LOCAL.1).endpoints(&[LOCAL]);
        harness.set_up(&Setup::of(own));
        let dialogue = Dialogue::new(terms, LOCAL);
        dialogue.establish(harness);
        dialogue.send(harness, flag::ACK).expect("delivered").expect_frame(&dialogue.request(flag::ACK));
    });
}
