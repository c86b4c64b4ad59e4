//! The comparison of a node's state before and after.

use std::process::{self, Command};

use traffic_policy_testing::lab::Cni;
use traffic_policy_testing::netlink::VethEnd;
use traffic_policy_testing::netns::Namespace;
use traffic_policy_tests::remains::{assert_same, differing, of};

/// The comparison detects a leftover of each kind.
#[test]
fn whatever_is_left_is_named() {
    if let Some(program) = Cni::missing_program() {
        let why = format!("there is no {program} (nftables, iptables, iproute2)");
        traffic_policy_testing::skipped("whatever_is_left_is_named", why);
        return;
    }
    let node = Namespace::create(&format!("tp-remains-{}", process::id())).unwrap();
    let wire = Namespace::create(&format!("tp-remains-{}-wire", process::id())).unwrap();
    let end = VethEnd { name: "eth0", ..VethEnd::default() };
    node.netlink(async |net| net.veth(&end, None, &end, &wire).await).unwrap();
    let mut before = of(&node);
    assert_same("a node that nobody has touched", &before, &of(&node));
    let left = [
        ("ip -oneline link", "ip link add left0 type veth peer name left1"),
        ("ip -oneline address", "ip address add 192.0.2.1/24 dev eth0"),
        ("ip -4 route show table all", "ip route add 198.51.100.0/24 via 192.0.2.2 table 7"),
        ("ip -6 route show table all", "ip -6 route add unreachable 2001:db8::/32"),
        ("ip -4 rule", "ip rule add from 192.0.2.1 lookup 7"),
        ("ip -6 rule", "ip -6 rule add from 2001:db8::1 lookup 7"),
        ("tc qdisc", "tc qdisc add dev eth0 clsact"),
        ("tc filter show dev eth0 egress", "tc filter add dev eth0 egress bpf bytecode '1,6 0 0 0'"),
        ("nft list ruleset", "nft add table inet left"),
        ("neighbours that are kept resolved", "ip neighbour add 192.0.2.9 dev eth0 managed"),
        ("/proc/sys/net/ipv4/ip_forward", "echo 1 > /proc/sys/net/ipv4/ip_forward"),
    ];
    for (what, command) in left {
        let mut shell = Command::new("sh");
        shell.args(["-c", command]);
        let output = node.output(shell).unwrap();
        assert!(output.status.success(), "{command}: {output:?}");
        let after = of(&node);
        assert!(differing(&before, &after).contains(&what), "{command}: {:?}", differing(&before, &after));
        before = after;
    }
}
