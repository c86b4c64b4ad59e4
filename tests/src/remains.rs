//! The state of a node in the kernel, for comparison: devices with their programs, queueing
//! disciplines and filters, addresses, routes and rules, neighbours that the kernel keeps resolved,
//! netfilter rules, network sysctls.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

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

/// Returns the subjects of the lines that differ.
pub fn differing<'a>(before: &'a State, after: &'a State) -> Vec<&'a str> {
    let keys = before.keys().chain(after.keys().filter(|key| !before.contains_key(*key)));
    keys.filter(|key| before.get(*key) != after.get(*key)).map(String::as_str).collect()
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
