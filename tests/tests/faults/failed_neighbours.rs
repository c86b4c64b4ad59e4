//! The kernel finds no answer of a neighbour that leads to endpoints (NUD_FAILED): the agent asks
//! the nodes behind it at once, though nobody connects by the packet path.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use traffic_policy_testing::lab::Family;
use traffic_policy_testing::pace::until;

use crate::watched::Watched;

const PATIENCE: Duration = Duration::from_secs(30);

impl Watched {
    /// Makes the kernel ask for a neighbour that it does not know, until it gives up: it asks three
    /// times, a second each.
    fn until_it_fails(&self, address: IpAddr) {
        self.cluster.lab.flush_neighbours().unwrap();
        self.send(address, Duration::from_secs(5));
    }

    /// Sends datagrams of the node itself.
    fn send(&self, address: IpAddr, time: Duration) {
        self.cluster.lab.node(1).netns().run(|| {
            let any: SocketAddr = if address.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }.parse().unwrap();
            let socket = UdpSocket::bind(any).unwrap();
            let until = Instant::now() + time;
            while Instant::now() < until {
                // The kernel may say that the host is not reached.
                let _ = socket.send_to(b"?", (address, 9));
                // Some datagrams, no flood.
                sleep(Duration::from_millis(50));
            }
        });
    }
}

#[test]
fn a_node_that_dies_without_a_connection_to_it_is_left_out_and_one_that_lives_stays() {
    let mut watched = Watched::start();
    for unused in ["172.18.0.99", "fd00:172:18::99"] {
        watched.until_it_fails(unused.parse().unwrap());
        assert_eq!(watched.found(), [0.0, 0.0], "the control: nothing is behind {unused}");
    }
    a_node_that_lives_is_asked_and_stays(&watched);
    for family in Family::BOTH {
        watched.begin_again();
        dies(&watched, family);
    }
}

fn dies(watched: &Watched, family: Family) {
    let far = watched.cluster.lab.node(3);
    watched.cluster.lab.cut(far).unwrap();
    watched.until_it_fails(far.address(family));
    until(&format!("{family:?}: it is left out"), PATIENCE, || watched.left_out() == [far.name.clone()]);
    // Nobody has connected: the packet path has seen no SYN to it.
    watched.cluster.lab.mend(far).unwrap();
    until(&format!("{family:?}: it is back"), PATIENCE, || watched.left_out().is_empty());
}

/// The entry alone is wrong: the node answers when it is asked.
fn a_node_that_lives_is_asked_and_stays(watched: &Watched) {
    let far = watched.cluster.lab.node(3);
    let address = far.address(Family::V4);
    let text = address.to_string();
    let fail = ["neighbour", "replace", &text, "dev", "eth0", "nud", "failed"];
    until("a node to be suspected", PATIENCE, || {
        // The kernel tells of a failure only where the entry was valid.
        watched.send(address, Duration::from_millis(100));
        let mut ip = Command::new("ip");
        ip.args(fail);
        assert!(watched.cluster.lab.node(1).netns().output(ip).unwrap().status.success());
        // A question takes 300 ms at most.
        sleep(Duration::from_millis(500));
        watched.found()[0] > 0.5
    });
    assert_eq!((watched.left_out(), watched.found()[1]), (vec![], 0.0), "{}", watched.agent.log());
}
