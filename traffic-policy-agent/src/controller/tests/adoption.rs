//! Adoption of many connections: in pieces, with signs of life.

use std::sync::atomic::{AtomicUsize, Ordering};

use traffic_policy_cluster::model::Protocol;
use traffic_policy_dataplane::{ConnectionAdoption, node::conntrack::Connection};

use super::{super::adoption::finish, *};

fn connections(count: usize) -> Vec<Connection> {
    let [client, frontend, endpoint] = [1, 2, 3].map(|port| ([192, 0, 2, 1], port).into());
    let source = client;
    vec![Connection { protocol: Protocol::Tcp, client, frontend, endpoint, source, over: false }; count]
}

/// The run loop has other work to do meanwhile.
#[test]
fn many_connections_are_followed_in_pieces() {
    let (mut adoption, mut path) = (Adoption::new(false), Fake::default());
    adoption.follow(Some((Ok(connections(100)), Duration::ZERO)), &mut path);
    assert_eq!(path.calls().connections, 100, "nothing yet");
    let mut pieces = 0;
    while adoption.is_following() {
        let before = path.calls().connections;
        adoption.follow_on(&mut path);
        // A connection takes the fake a tenth of a millisecond.
        assert!(before - path.calls().connections <= 10, "{before}");
        pieces += 1;
    }
    assert!(pieces >= 10 && path.calls().connections == 0, "{pieces}");
}

/// /livez and systemd learn in this manner that the agent lives.
#[tokio::test]
async fn a_long_adoption_gives_signs_of_life() {
    let (beats, mut path) = (AtomicUsize::new(0), Fake::default());
    path.adopt_connections(connections(50));
    let count = || {
        beats.fetch_add(1, Ordering::Relaxed);
    };
    let adopted = finish(&mut path, &count).await.unwrap();
    assert_eq!((adopted.tcp, beats.into_inner()), (1, 50));
}
