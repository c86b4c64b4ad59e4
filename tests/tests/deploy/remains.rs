//! The state of a node in the kernel, for comparison: devices with their programs, queueing
//! disciplines and filters, addresses, routes and rules, neighbours that the kernel keeps resolved,
//! netfilter rules, network sysctls.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{self, Command};

use traffic_policy_testing::lab::Cni;
use traffic_policy_testing::netlink::VethEnd;
use traffic_policy_testing::netns::Namespace;

/// Lines by their subject, so that a difference names it.
pub type State = BTreeMap<String, String>;

/// Commands of `ip`, `tc` and `nft` whose output is compared; the last may be missing.
const PRINTED: [&[&str]; 9] = [
    &["ip", "-oneline", "link"],
    &["ip", "-oneline", "address"],
    &["ip", "-4", "route", "show", "table", "all"],
    &["ip", "-6", "route", "show", "table", "all"],
    &["ip", "-4", "rule"],
    &["ip", "-6", "rule"],
    &["tc", "qdisc"],
    &["nft", "list", "ruleset"],
    &["iptables-save"],
];
/// Sysctls that show a current count.
const COUNTS: [&str; 1] = ["nf_conntrack_count"];

/// Reads the state of a node.
pub fn of(node: &Namespace) -> State {
    let mut state = State::new();
    for words in PRINTED {
        state.insert(words.join(" "), printed(node, words));
    }
    for device in node.run(devices) {
        for place in ["ingress", "egress"] {
            let words = ["tc", "filter", "show", "dev", &device, place];
            state.insert(words.join(" "), printed(node, &words));
        }
    }
    let kept = node.netlink(async |net| net.managed_neighbours().await).unwrap();
    state.insert("neighbours that are kept resolved".to_owned(), kept.to_string());
    node.run(|| sysctls(Path::new("/proc/sys/net"), &mut state));
    state
}

/// Checks that both are equal; otherwise names the differences.
#[track_caller]
pub fn assert_same(what: &str, before: &State, after: &State) {
    let differing: Vec<_> = differing(before, after)
        .into_iter()
        .map(|key| format!("{key}:\n- {:?}\n+ {:?}", before.get(key), after.get(key)))
        .collect();
    assert!(differing.is_empty(), "{what} is not as before:\n{}", differing.join("\n"));
}

/// The lines that differ.
fn differing<'a>(before: &'a State, after: &'a State) -> Vec<&'a str> {
    let keys = before.keys().chain(after.keys().filter(|key| !before.contains_key(*key)));
    keys.filter(|key| before.get(*key) != after.get(*key)).map(String::as_str).collect()
}

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

/// The output of a program; empty if the program is not installed.
fn printed(node: &Namespace, words: &[&str]) -> String {
    let mut command = Command::new(words[0]);
    command.args(&words[1..]);
    let Ok(output) = node.output(command) else { return String::new() };
    let text = String::from_utf8_lossy(&output.stdout);
    // Comments contain the time at which iptables-save was run.
    text.lines().filter(|line| !line.starts_with('#')).collect::<Vec<_>>().join("\n")
}

fn devices() -> Vec<String> {
    // This file is that of the thread's namespace, unlike /sys/class/net and /proc/net.
    let text = fs::read_to_string("/proc/thread-self/net/dev").unwrap();
    text.lines().filter_map(|line| Some(line.split_once(':')?.0.trim().to_owned())).collect()
}

fn sysctls(folder: &Path, state: &mut State) {
    for entry in fs::read_dir(folder).unwrap().flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        if path.is_dir() {
            sysctls(&path, state);
        } else if !COUNTS.iter().any(|count| name == *count) {
            // Some sysctls are write-only.
            state.insert(path.display().to_string(), fs::read_to_string(&path).unwrap_or_default());
        }
    }
}
