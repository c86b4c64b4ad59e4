//! `sessionAffinity: ClientIP`: the endpoint of a client's next connection.

use std::net::SocketAddr;

use traffic_policy_testing::harness::{Frontend, Harness, Setup, Spot};

use crate::dialogue::{Dialogue, everywhere};
use crate::table::{ENDPOINT_PORT, PORT};

const NODE: (Spot, u16) = (Spot::Node, PORT);
const NEAR: (Spot, u16) = (Spot::Near, ENDPOINT_PORT);
const OTHER_NEAR: (Spot, u16) = (Spot::OtherNear, ENDPOINT_PORT);
const FAR: (Spot, u16) = (Spot::Far, ENDPOINT_PORT);
const LOCAL: (Spot, u16) = (Spot::Local, ENDPOINT_PORT);
const ALL: [(Spot, u16); 4] = [NEAR, OTHER_NEAR, FAR, LOCAL];
/// The number of the only frontend.
const FIRST: u32 = 1;
/// The number of connections, more than chance explains: with 4 endpoints, all get the same one
/// once in 10^9 runs.
const MANY: u16 = 16;

fn sticky(endpoints: &[(Spot, u16)]) -> Frontend {
    Frontend::new(NODE.0, NODE.1).endpoints(endpoints).affinity(60)
}

fn setup(frontend: Frontend) -> Setup {
    Setup::of(frontend).snat_ports(5000..5100)
}

/// The endpoint of one more connection.
#[track_caller]
fn endpoint(harness: &Harness, dialogue: Dialogue) -> SocketAddr {
    let outcome = dialogue.open(harness).outcome;
    assert!(matches!(outcome, "forwarded" | "delivered"), "{outcome}");
    dialogue.request_entry(harness).unwrap().new_to
}

/// The endpoint of many connections from the ports after `first`; all must have the same one.
#[track_caller]
fn only_endpoint(harness: &Harness, dialogue: Dialogue, first: u16) -> SocketAddr {
    let had = endpoint(harness, dialogue.with_port(first));
    for port in first + 1..first + MANY {
        assert_eq!(endpoint(harness, dialogue.with_port(port)), had, "port {port}");
    }
    had
}

/// Some of the endpoints, without that of a client, in another order than before.
fn others(terms: crate::table::Terms, had: SocketAddr) -> Vec<(Spot, u16)> {
    ALL.into_iter().rev().filter(|endpoint| SocketAddr::from(terms.at(*endpoint)) != had).collect()
}

#[test]
fn a_client_stays() {
    everywhere(|harness, terms| {
        harness.set_up(&setup(sticky(&ALL)));
        let dialogue = Dialogue::new(terms, NODE);
        let had = only_endpoint(harness, dialogue, 40000);

        // The list is rewritten in another order, with more and with fewer endpoints.
        let mut list = others(terms, had);
        let own = *ALL.iter().find(|endpoint| SocketAddr::from(terms.at(**endpoint)) == had).unwrap();
        list.push(own);
        harness.put(FIRST, &sticky(&list));
        assert_eq!(only_endpoint(harness, dialogue, 41000), had);
        harness.put(FIRST, &sticky(&[list[0], own]));
        assert_eq!(only_endpoint(harness, dialogue, 42000), had);
    });
}

#[test]
fn without_affinity_each_connection_chooses() {
    everywhere(|harness, terms| {
        harness.set_up(&setup(Frontend::new(NODE.0, NODE.1).endpoints(&ALL)));
        let dialogue = Dialogue::new(terms, NODE);
        let first = endpoint(harness, dialogue.with_port(40000));
        assert!((40001..40000 + 3 * MANY).any(|port| endpoint(harness, dialogue.with_port(port)) != first));
    });
}

#[test]
fn clients_are_told_apart() {
    everywhere(|harness, terms| {
        // Two clients get two endpoints by chance: one of these seeds does it.
        let apart = (1..MANY.into()).any(|seed| {
            harness.set_up(&setup(sticky(&ALL)).with(|setup| setup.seed = seed));
            let one = Dialogue::new(terms, NODE);
            let other = Dialogue { client: (Spot::OtherClient, 40000), ..one };
            let (one, other) = (only_endpoint(harness, one, 40000), only_endpoint(harness, other, 40000));
            one != other
        });
        assert!(apart, "two clients always share their endpoint");
    });
}

#[test]
fn an_endpoint_that_leaves_is_left() {
    everywhere(|harness, terms| {
        harness.set_up(&setup(sticky(&ALL)));
        let dialogue = Dialogue::new(terms, NODE);
        let had = only_endpoint(harness, dialogue, 40000);
        harness.put(FIRST, &sticky(&others(terms, had)));
        let next = only_endpoint(harness, dialogue, 41000);
        assert_ne!(next, had);
        // The return of the endpoint does not bring the client back.
        harness.put(FIRST, &sticky(&ALL));
        assert_eq!(only_endpoint(harness, dialogue, 42000), next);
    });
}

#[test]
fn it_ends_after_its_time() {
    everywhere(|harness, terms| {
        let fresh = |harness: &mut Harness, age: u32| {
            harness.set_up(&setup(sticky(&ALL)));
            let dialogue = Dialogue::new(terms, NODE);
            let had = only_endpoint(harness, dialogue, 40000);
            harness.age_affinity(age);
            (dialogue, had)
        };
        let (dialogue, had) = fresh(harness, 55);
        assert_eq!(endpoint(harness, dialogue.with_port(41000)), had);
        // That connection counted: another 60 s start here.
        harness.age_affinity(55);
        assert_eq!(endpoint(harness, dialogue.with_port(41001)), had);

        let (dialogue, had) = fresh(harness, 61);
        // The choice is made anew, which may give the same endpoint.
        let changed = (41000..41000 + 3 * MANY).any(|port| {
            let now = endpoint(harness, dialogue.with_port(port));
            harness.age_affinity(61);
            now != had
        });
        assert!(changed, "the client never leaves its endpoint");
    });
}

#[test]
fn policies_have_lists_of_their_own() {
    everywhere(|harness, terms| {
        // Policy Local leaves only one endpoint.
        harness.set_up(&setup(sticky(&ALL).local()));
        let dialogue = Dialogue::new(terms, NODE);
        let local = SocketAddr::from(terms.at(LOCAL));
        assert_eq!(only_endpoint(harness, dialogue, 40000), local);
        // The policy is Cluster again: the endpoint is in that list too, so the client stays.
        harness.put(FIRST, &sticky(&ALL));
        assert_eq!(only_endpoint(harness, dialogue, 41000), local);
    });
}
