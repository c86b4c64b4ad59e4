//! A node as the kernel has it, to be compared: devices with their programs, queueing disciplines and filters, addresses, routes and
//! rules, neighbours that the kernel keeps resolved, netfilter's rules, sysctls of the network.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use traffic_policy_testing::netns::Namespace;

/// By what each is about, so that a difference names it.
pub type State = BTreeMap<String, String>;

/// What `ip`, `tc` and `nft` print; the last may be missing.
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
/// Files of sysctls whose content is a count of now.
const COUNTS: [&str; 1] = ["nf_conntrack_count"];

/// The state of a node.
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

/// Both are the same; else what differs is named.
#[track_caller]
pub fn assert_same(what: &str, before: &State, after: &State) {
    let keys = before.keys().chain(after.keys().filter(|key| !before.contains_key(*key)));
    let differing: Vec<_> = keys
        .filter(|key| before.get(*key) != after.get(*key))
        .map(|key| format!("{key}:\n- {:?}\n+ {:?}", before.get(key), after.get(key)))
        .collect();
    assert!(differing.is_empty(), "{what} is not as before:\n{}", differing.join("\n"));
}

/// What a program prints; empty if there is no such program.
fn printed(node: &Namespace, words: &[&str]) -> String {
    let mut command = Command::new(words[0]);
    command.args(&words[1..]);
    let Ok(output) = node.output(command) else { return String::new() };
    let text = String::from_utf8_lossy(&output.stdout);
    // When iptables-save was run.
    text.lines().filter(|line| !line.starts_with('#')).collect::<Vec<_>>().join("\n")
}

fn devices() -> Vec<String> {
    // Of this thread's namespace, unlike /sys/class/net and /proc/net.
    let text = fs::read_to_string("/proc/thread-self/net/dev").unwrap();
    text.lines().filter_map(|line| Some(line.split_once(':')?.0.trim().to_owned())).collect()
}

fn sysctls(folder: &Path, state: &mut State) {
    for entry in fs::read_dir(folder).unwrap().flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        if path.is_dir() {
            sysctls(&path, state);
        } else if !COUNTS.iter().any(|count| name == *count) {
            // Some can only be written.
            state.insert(path.display().to_string(), fs::read_to_string(&path).unwrap_or_default());
        }
    }
}
