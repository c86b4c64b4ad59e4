//! Rules of the node: those about connections hold, since these begin and end in the stack.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use traffic_policy_testing::lab::{Cni, Family};
use traffic_policy_testing::pace::{scaled, until};

use super::{DIRECT, FEW, MOST, QUESTIONS, STACK, Scene, ask, is_answered, make_stream};

/// A firewall that forwards nothing but connections that it knows, or that a rule allows, and
/// counts what it sees.
const STRICT: &str = "table inet strict {\n\
      counter seen {}\n\
      chain forward {\n\
        type filter hook forward priority 0; policy drop;\n\
        counter name seen\n\
        ct state invalid drop\n\
        ct state established,related accept\n\
        iifname eth0 ct state new accept\n\
        icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert } accept\n\
      }\n\
    }\n";

/// The packets that the firewall has seen.
fn seen(scene: &Scene) -> u64 {
    counted(scene, "seen")
}

/// The packets of one of its counters.
fn counted(scene: &Scene, counter: &str) -> u64 {
    let mut command = std::process::Command::new("nft");
    command.args(["list", "counter", "inet", "strict", counter]);
    let output = scene.node().netns().output(command).unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let packets = text.split_once("packets ").unwrap().1;
    packets.split_whitespace().next().unwrap().parse().unwrap()
}

/// Half-closes, and reads until the end: both FINs have to come through.
#[track_caller]
fn close(stream: &mut BufReader<TcpStream>) {
    stream.get_mut().shutdown(Shutdown::Write).unwrap();
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).unwrap();
}

fn a_strict_firewall_lets_connections_end(scene: &Scene, flags: &[&str]) {
    scene.nft(STRICT);
    for family in [Family::V4, Family::V6] {
        let mut stream = scene.connect(scene.at(family));
        ask(&mut stream);
        let before = seen(scene);
        let [requests, replies] = scene.ask_often(&mut stream);
        let rules = seen(scene) - before;
        if flags == DIRECT {
            assert!(requests >= MOST && replies >= MOST, "{requests} requests, {replies} replies");
            assert!(rules < 2 * FEW, "the rules have seen {rules} packets");
        } else {
            assert!(rules >= 2 * QUESTIONS, "the rules have seen {rules} packets");
        }
        close(&mut stream);
    }
}

/// A network policy that is added: new connections are refused, and open ones go on.
fn a_policy_forbids_new_connections(scene: &Scene, flags: &[&str]) {
    scene.nft(STRICT);
    let to = scene.at(Family::V4);
    let mut stream = scene.connect(to);
    ask(&mut stream);
    let client = scene.cluster.lab.client().address(Family::V4);
    scene.nft(&format!("insert rule inet strict forward ip saddr {client} ct state new drop\n"));
    // A SYN and two more that are not answered.
    let attempt = || TcpStream::connect_timeout(&to, scaled(Duration::from_secs(4)));
    let refused = scene.cluster.lab.client().netns().run(attempt).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::TimedOut);
    // The rule does not concern a connection that exists.
    let [requests, _] = scene.ask_often(&mut stream);
    assert_eq!(requests >= MOST, flags == DIRECT, "{requests} requests");
    close(&mut stream);
}

fn firewall_and_policy(flags: &[&str]) {
    let Some(scene) = Scene::start(Cni::Kindnet, "tc", flags) else { return };
    a_strict_firewall_lets_connections_end(&scene, flags);
    scene.nft("delete table inet strict\n");
    a_policy_forbids_new_connections(&scene, flags);
}

#[test]
fn a_firewall_and_a_policy_meet_beginnings_and_ends() {
    firewall_and_policy(DIRECT);
}

#[test]
fn a_firewall_and_a_policy_meet_every_packet_by_the_stack() {
    firewall_and_policy(STACK);
}

/// A rule that is added in front of those that accept established connections, and drops whatever
/// the client sends.
fn cut_off(flags: &[&str]) {
    let Some(scene) = Scene::start(Cni::Kindnet, "tc", flags) else { return };
    scene.nft(STRICT);
    let to = scene.at(Family::V4);
    let mut stream = scene.connect(to);
    ask(&mut stream);
    let socket = scene.datagrams(to);
    make_stream(&socket);
    let client = scene.cluster.lab.client().address(Family::V4);
    scene.nft(&format!(
        "add counter inet strict dropped\n\
         insert rule inet strict forward ip saddr {client} counter name dropped drop\n"
    ));
    if flags == STACK {
        stream.get_ref().set_read_timeout(Some(scaled(Duration::from_secs(1)))).unwrap();
        let mut line = String::new();
        stream.get_mut().write_all(b"there?\n").unwrap();
        assert!(stream.read_line(&mut line).is_err() && !is_answered(&socket));
        assert!(counted(&scene, "dropped") > 0);
        return;
    }
    // In each period of 4,096 jiffies, 41 s where a jiffy is 10 ms, the first packet of the client
    // meets the rule. Where that is an acknowledgement, the connection goes on. Data is sent again
    // through the stack, since it does not continue what came last, and meets the rule each time; a
    // datagram is lost. Datagrams go on meanwhile: a flow that was idle goes through the stack,
    // where the rule would end it. So the wait for an answer is not scaled: the way to the pod is
    // forgotten after five seconds without a reply, and a lost datagram must not last that long on
    // a slow machine.
    socket.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    stream.get_ref().set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    until("a packet that meets the rule", Duration::from_secs(45), || {
        stream.get_mut().write_all(b"there?\n").unwrap();
        let answered = stream.read_line(&mut String::new()).is_ok();
        is_answered(&socket);
        let met = counted(&scene, "dropped") > 0;
        assert!(answered || met, "a request is lost that has met no rule");
        met
    });
    // Each one that is lost costs the whole time limit of an answer, so the third ends the test.
    let lost = (0..QUESTIONS).filter(|_| !is_answered(&socket)).take(3).count();
    assert!(lost < 3, "{lost} datagrams of at most {QUESTIONS} were lost");
}

#[test]
fn a_rule_for_all_packets_meets_one_in_each_period() {
    cut_off(DIRECT);
}

#[test]
fn a_rule_for_all_packets_ends_connections_at_once_by_the_stack() {
    cut_off(STACK);
}

/// conntrack does not see all packets: the agent tells it so, and `cleanup` sets that back.
#[test]
fn conntrack_is_told_and_set_back() {
    let Some(mut scene) = Scene::start(Cni::Kindnet, "tc", DIRECT) else { return };
    let [liberal, unacknowledged, established] = [
        "nf_conntrack_tcp_be_liberal",
        "nf_conntrack_tcp_timeout_unacknowledged",
        "nf_conntrack_tcp_timeout_established",
    ];
    assert_eq!(scene.sysctl(liberal), "1");
    assert_eq!(scene.sysctl(unacknowledged), scene.sysctl(established));
    let device = scene.pod_device();
    assert_eq!(scene.node().netns().attached(&device).unwrap().ingress, 1);
    scene.agent.stop().unwrap();
    assert_eq!(scene.sysctl(liberal), "1", "the programs stay, and so does this");
    assert!(scene.agent.command(&["cleanup"]).unwrap().status.success());
    assert_eq!((scene.sysctl(liberal), scene.sysctl(unacknowledged)), ("0".into(), "300".into()));
    assert_eq!(scene.node().netns().attached(&device).unwrap().ingress, 0);
}
