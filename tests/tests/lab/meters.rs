//! The meters count nothing on a healthy path, and exactly what is missing on a faulty one.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::thread::{self, sleep};
use std::time::Duration;

use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::skipped;
use traffic_policy_testing::traffic::balancer::Timing;
use traffic_policy_testing::traffic::server::Identity;
use traffic_policy_testing::traffic::transfer::transfer;
use traffic_policy_testing::traffic::{
    Balancer, Datagrams, Faults, HeldConnections, Ledger, NewConnections, Server, Target, retransmissions,
};

const PORT: u16 = 8080;

/// A lab with a pod on node-1 whose server makes the given mistakes; the meters run on node-2.
fn lab_with(faults: Faults) -> (Lab, Ledger, Server) {
    let lab = Lab::builder().nodes(2).build().unwrap();
    let ledger = Ledger::default();
    let pod = lab.node(1).pod(1);
    let identity = Identity { pod: pod.name.clone(), node: pod.node.clone() };
    let server = Server::start_in(pod.netns(), PORT, identity, faults, &ledger).unwrap();
    (lab, ledger, server)
}

fn target(lab: &Lab, family: Family) -> SocketAddr {
    SocketAddr::new(lab.node(1).pod(1).address(family), PORT)
}

#[test]
fn a_good_path_loses_nothing() {
    let (lab, ledger, _server) = lab_with(Faults::default());
    let from = lab.node(2).netns();
    for family in Family::BOTH {
        let target = target(&lab, family);
        let datagrams = Datagrams::start(from, target, 20, 5000, &ledger).unwrap();
        let held = HeldConnections::start(from, &[target], 20, Duration::from_millis(20)).unwrap();
        let new = NewConnections::start(from, 100, move |_| Some(target));
        // The duration of the measurement.
        sleep(Duration::from_secs(1));
        let datagrams = datagrams.finish().unwrap();
        println!("{datagrams}");
        assert!(datagrams.is_clean(), "{datagrams}");
        assert!(datagrams.sent > 2000, "{datagrams}");
        assert_eq!((datagrams.at_server, datagrams.back), (datagrams.sent, datagrams.sent));
        let held = held.finish();
        assert!(held.is_clean() && held.connections == 20, "{held}");
        let new = new.finish();
        assert!(new.failed == 0 && new.ok > 50, "{new}");
    }
    assert_eq!(retransmissions::lost_in_namespace(from).unwrap(), 0);
    assert_eq!(retransmissions::lost_in_namespace(lab.node(1).pod(1).netns()).unwrap(), 0);
}

/// A connection that was opened before keeps its own time-out, and one that is accepted has its
/// listener's.
#[test]
fn a_late_acknowledgement_is_waited_for() {
    let (lab, _ledger, _server) = lab_with(Faults::default());
    let (from, pod) = (lab.node(2).netns(), lab.node(1).pod(1));
    let listen = || pod.netns().run(|| TcpListener::bind((pod.address(Family::V4), 0))).unwrap();
    let timeouts = |listener: &TcpListener| {
        let to = listener.local_addr().unwrap();
        let stream = from.run(|| TcpStream::connect(to)).unwrap();
        let (mut accepted, _) = listener.accept().unwrap();
        // The time-out of a connection that has not been acknowledged anything is another one.
        accepted.write_all(b"-").unwrap();
        (&stream).read_exact(&mut [0]).unwrap();
        [&stream, &accepted].map(|end| retransmissions::state(end).unwrap().timeout)
    };
    let least = Duration::from_secs(2);
    let earlier = listen();
    assert!(timeouts(&earlier).iter().all(|timeout| *timeout < least));
    for netns in [from, pod.netns()] {
        retransmissions::wait_before_sending_again(netns, least).unwrap();
    }
    if from.run(|| Path::new("/proc/sys/net/ipv4/tcp_rto_min_us").exists()) {
        let [client, accepted] = timeouts(&earlier);
        assert!(client >= least && accepted < least, "{client:?} {accepted:?}");
        assert!(timeouts(&listen()).iter().all(|timeout| *timeout >= least));
    } else {
        skipped("a_late_acknowledgement_is_waited_for", "this kernel has no tcp_rto_min_us (Linux 6.11)");
    }
}

#[test]
fn datagrams_lost_or_doubled_are_counted() {
    let run = |faults| {
        let (lab, ledger, _server) = lab_with(faults);
        let meter =
            Datagrams::start(lab.node(2).netns(), target(&lab, Family::V4), 3, 2000, &ledger).unwrap();
        // The duration of the measurement.
        sleep(Duration::from_millis(500));
        let report = meter.finish().unwrap();
        assert!(report.sent > 100 && !report.is_clean(), "{report}");
        report
    };
    let report = run(Faults { lose_request: Some(10), ..Faults::default() });
    assert_eq!((report.lost_there, report.lost_back), (report.sent / 10, 0), "{report}");
    let report = run(Faults { lose_reply: Some(10), ..Faults::default() });
    assert_eq!((report.lost_there, report.lost_back), (0, report.sent / 10), "{report}");
    let report = run(Faults { repeat_reply: Some(10), ..Faults::default() });
    assert_eq!((report.doubled_there, report.doubled_back), (0, report.sent / 10), "{report}");
}

#[test]
fn a_silent_port_is_seen_as_loss_and_error() {
    let (lab, ledger, server) = lab_with(Faults::default());
    drop(server);
    let meter = Datagrams::start(lab.node(2).netns(), target(&lab, Family::V4), 1, 100, &ledger).unwrap();
    // The duration of the measurement.
    sleep(Duration::from_millis(200));
    let report = meter.finish().unwrap();
    assert_eq!((report.lost_there, report.back), (report.sent, 0), "{report}");
    assert!(report.errors.keys().any(|error| error.contains("refused")), "{report}");
}

#[test]
fn failed_connections_and_lost_packets_are_counted() {
    let (lab, _, _server) = lab_with(Faults { cut_connection: Some(10), ..Faults::default() });
    let target = target(&lab, Family::V6);
    let meter = NewConnections::start_bounded(lab.node(2).netns(), 500, 100, move |_| Some(target));
    let report = meter.wait();
    assert_eq!((report.ok, report.failed), (90, 10), "{report}");
    assert_eq!(report.failures.len(), 10);

    // A wire that is cut for a while makes the kernel retransmit: nothing fails, but it is counted.
    let held = HeldConnections::start(lab.node(2).netns(), &[target], 5, Duration::from_millis(10)).unwrap();
    let meter = NewConnections::start(lab.node(2).netns(), 100, move |_| Some(target));
    // Load before the cut, a cut longer than the 200 ms after which TCP retransmits, and time for
    // that.
    sleep(Duration::from_millis(100));
    lab.router().netlink(async |net| net.down("node-1").await).unwrap();
    sleep(Duration::from_millis(400));
    lab.router().netlink(async |net| net.up("node-1").await).unwrap();
    sleep(Duration::from_millis(1500));
    let (report, held) = (meter.finish(), held.finish());
    println!("{report}\n{held}");
    assert!(report.resent > 0 && !report.is_clean(), "{report}");
    assert!(held.lost_of_client > 0 && !held.is_clean(), "{held}");
}

/// Both meters of connections end when the other ends have closed: a client that closes alone may
/// lose the other's FIN.
#[test]
fn the_other_end_closes_first() {
    let lingers = Duration::from_millis(300);
    let (lab, _, _server) = lab_with(Faults { lingers, ..Faults::default() });
    let (from, target) = (lab.node(2).netns(), target(&lab, Family::V4));
    let held = HeldConnections::start(from, &[target], 5, Duration::from_millis(10)).unwrap();
    let report = NewConnections::start_bounded(from, 100, 20, move |_| Some(target)).wait();
    assert!(report.is_clean(), "{report}");
    assert!(held.finish().is_clean());
    let sockets = from.run(|| fs::read_to_string("/proc/thread-self/net/tcp")).unwrap();
    // Local address, remote address, state: TIME_WAIT is 06, FIN_WAIT2 is 05.
    let states: Vec<_> = sockets.lines().skip(1).filter_map(|line| line.split_whitespace().nth(3)).collect();
    assert_eq!(states, ["06"; 25], "{sockets}");
}

/// A busy machine answers late; only retransmitted segments count as lost.
#[test]
fn late_answers_are_no_loss() {
    let late = Duration::from_millis(400);
    let (lab, _, _server) = lab_with(Faults { late, ..Faults::default() });
    for family in Family::BOTH {
        let target = target(&lab, family);
        let report = NewConnections::start_bounded(lab.node(2).netns(), 50, 20, move |_| Some(target)).wait();
        assert!(report.is_clean() && report.slowest >= late, "{report}");
    }
}

#[test]
fn a_balancer_believes_the_health_port() {
    let lab = Lab::builder().nodes(2).build().unwrap();
    let ledger = Ledger::default();
    let mut servers: Vec<_> = lab
        .nodes()
        .iter()
        .map(|node| {
            let identity = Identity { pod: "host".to_owned(), node: node.name.clone() };
            Server::start_in(node.netns(), PORT, identity, Faults::default(), &ledger).unwrap()
        })
        .collect();
    let targets = lab.nodes().iter().map(|node| {
        let traffic = SocketAddr::new(node.address(Family::V4), PORT);
        Target { node: node.name.clone(), traffic, health: traffic, path: "/healthz".to_owned() }
    });
    let timing = Timing { interval: Duration::from_millis(100), failures: 3 };
    let balancer = Balancer::start(lab.client().netns(), targets.collect(), timing);
    let chooser = balancer.chooser();
    assert!(balancer.wait_for(&["node-1", "node-2"], Duration::from_secs(3)), "{:?}", balancer.changes());

    let choose = chooser.clone();
    let report =
        NewConnections::start_bounded(lab.client().netns(), 500, 50, move |n| choose.choose(n)).wait();
    assert_eq!(report.ok, 50, "{report}");
    assert_eq!(report.by_target.values().collect::<Vec<_>>(), [&25, &25]);

    let checks = balancer.checks();
    drop(servers.remove(0));
    assert!(balancer.wait_for(&["node-2"], Duration::from_secs(3)), "{:?}", balancer.changes());
    assert!(balancer.checks() >= checks + 3, "out before the third failure");
    let last = balancer.changes().pop().unwrap();
    assert!(!last.healthy && last.node == "node-1" && last.answer.contains("refused"), "{last:?}");
    let report =
        NewConnections::start_bounded(lab.client().netns(), 500, 20, move |n| chooser.choose(n)).wait();
    assert!(report.is_clean() && report.by_target.len() == 1, "{report}");
}

#[test]
fn broken_held_connections_are_counted() {
    let (lab, _, server) = lab_with(Faults::default());
    let target = target(&lab, Family::V4);
    let held = HeldConnections::start(lab.node(2).netns(), &[target], 5, Duration::from_millis(10)).unwrap();
    // Load before the server stops, and after.
    sleep(Duration::from_millis(100));
    drop(server);
    sleep(Duration::from_millis(100));
    let report = held.finish();
    assert_eq!(report.broken.len(), 5, "{report}");
    assert!(HeldConnections::start(lab.node(2).netns(), &[target], 5, Duration::ZERO).is_err());
}

#[test]
fn a_hundred_megabytes_arrive_intact_both_ways() {
    let (lab, _, _server) = lab_with(Faults::default());
    for family in Family::BOTH {
        let report = transfer(lab.node(2).netns(), target(&lab, family), 100_000_000).unwrap();
        println!("{report:?}");
    }
}

/// A transfer that breaks off says how far it has come in each direction.
#[test]
fn a_broken_transfer_says_how_far_it_came() {
    let lab = Lab::builder().nodes(2).build().unwrap();
    let listener = lab.node(1).pod(1).netns().run(|| TcpListener::bind(("0.0.0.0", PORT))).unwrap();
    let server = thread::spawn(move || listener.accept().unwrap().0.read_exact(&mut [0; 1000]));
    let error = transfer(lab.node(2).netns(), target(&lab, Family::V4), 1 << 20).unwrap_err();
    server.join().unwrap().unwrap();
    let said = format!("{error:#}");
    let acknowledged = said.split(" bytes acknowledged, 0 received").next().unwrap_or_default();
    let acknowledged: u64 = acknowledged.rsplit(' ').next().unwrap_or_default().parse().expect(&said);
    assert!(acknowledged >= 1000 && said.contains("path MTU 1500"), "{said}");
}
