//! UDP sockets of removed endpoints: how often the controller walks through them.

use std::{collections::BTreeSet, net::SocketAddr, process::Command};

use traffic_policy_cluster::model::Protocol;
use traffic_policy_dataplane::{RemovedEndpoint, node::socket_ender::SocketEnder};

use super::{
    super::{
        sockets::{EndingSockets, end_sockets},
        *,
    },
    fake::Fake,
    timeout,
};

const LONG: Duration = Duration::from_secs(20);

/// Writes may come twenty times a second, and a walk through the processes of all pods may take
/// longer than the pause between them.
#[tokio::test]
async fn writes_during_a_walk_ask_for_one_more_together() {
    let removed = |last: u8| RemovedEndpoint {
        service: 1,
        endpoint: SocketAddr::from(([10, 1, 0, last], 53)),
        protocol: Protocol::Udp,
    };
    let fake = Fake::default();
    let ender = SocketEnder::of(&mut Command::new("true")).unwrap();
    let ending = EndingSockets::default();
    fake.calls().walks_slowly = true;
    for last in 0..=20 {
        fake.calls().removed = BTreeSet::from([removed(last)]);
        end_sockets(&fake, &ender, &ending);
    }
    fake.calls().walks_slowly = false;
    let all: BTreeSet<_> = (0..=20).map(removed).collect();
    let walked = async {
        while fake.calls().walks.iter().flatten().copied().collect::<BTreeSet<_>>() != all {
            // The walks run on other threads and report nowhere else.
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let arrived = timeout(LONG, walked).await;
    let walks: Vec<_> = fake.calls().walks.iter().map(BTreeSet::len).collect();
    assert!(arrived.is_ok(), "endpoints were forgotten: {walks:?}");
    assert_eq!(walks, [1, 20], "endpoints of each walk");
}
