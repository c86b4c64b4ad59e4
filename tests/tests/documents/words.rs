//! Names that the pages mention: outcomes, metrics and flags that the code does not have (any
//! more).

use std::collections::BTreeSet;

use traffic_policy_ebpf::outcome::Outcome;

use crate::{cli, metrics, page};

/// The changelog mentions former names.
const PAST: &str = "CHANGELOG.md";

/// Flags of other programs.
const OTHERS: [&str; 25] = [
    "--register-with-taints",
    "--arch",
    "--attach",
    "--compare",
    "--full",
    "--help",
    "--kernel",
    "--list",
    "--name",
    "--seed",
    "--json",
    "--output",
    "--random-fully",
    // kube-proxy
    "--cleanup",
    "--target",
    "--tests",
    "--debug",
    "--nodes",
    "--pods",
    "--overlay",
    "--offloads",
    "--verify",
    "--cni",
    "--pauses",
    // deploy/kind/up.sh
    "--xdp",
];

#[test]
fn outcomes_that_pages_name_exist() {
    let verbs = ["forwarded-", "replied-", "delivered-", "rejected-", "reset-", "dropped-", "passed-"];
    let unknown = spans(|span| {
        verbs.iter().any(|verb| span.starts_with(verb))
            && span.chars().all(|c| c.is_ascii_lowercase() || c == '-')
            && Outcome::ALL.iter().all(|outcome| outcome.name() != span)
    });
    assert!(unknown.is_empty(), "{}", unknown.join("\n"));
}

#[test]
fn metrics_that_pages_name_exist() {
    let names: BTreeSet<String> = metrics::exported().into_iter().map(|family| family.name).collect();
    let unknown = spans(|span| {
        let name = span.split(['{', ' ']).next().unwrap_or(span);
        let prefixed = ["traffic_policy_", "kubeproxy_"].iter().any(|prefix| name.starts_with(prefix));
        // Crates have names of the same form.
        let is_crate = ["agent", "bench", "cluster", "dataplane", "ebpf", "lb", "testing"]
            .iter()
            .any(|name| span.split([':', '=']).next() == Some(&format!("traffic_policy_{name}")));
        let pattern = name.ends_with('…') || name.ends_with('*');
        let stem = name.trim_end_matches(['…', '*']);
        let known = names.iter().any(|own| if pattern { own.starts_with(stem) } else { own == name });
        prefixed && !is_crate && !known
    });
    assert!(unknown.is_empty(), "{}", unknown.join("\n"));
}

#[test]
fn flags_that_pages_name_exist() {
    let (command, plugin) = (cli::command(), cli::plugin());
    let mut flags: BTreeSet<String> = BTreeSet::new();
    for (_, command) in cli::named("", &command).into_iter().chain(cli::named("", &plugin)) {
        flags.extend(
            cli::arguments(command).iter().filter_map(|arg| arg.get_long()).map(|long| format!("--{long}")),
        );
    }
    flags.extend(OTHERS.map(str::to_owned));
    let unknown = spans(|span| {
        let words = span.split(|c: char| c.is_whitespace() || "=[|".contains(c));
        let mut named = words.filter(|word| word.starts_with("--") && word.len() > 2);
        named.any(|word| !flags.contains(word))
    });
    assert!(unknown.is_empty(), "{}", unknown.join("\n"));
}

/// The code spans of all pages for which `is_wrong` returns true, with their places.
fn spans(is_wrong: impl Fn(&str) -> bool) -> Vec<String> {
    let mut found = Vec::new();
    for path in page::all().into_iter().filter(|path| path != PAST) {
        let text = page::text(&path);
        for (number, line, _) in page::lines(&text).filter(|(_, _, fenced)| !fenced) {
            let wrong = page::code_spans(line).filter(|span| is_wrong(span));
            found.extend(wrong.map(|span| format!("{path}:{number}: `{span}`")));
        }
    }
    found
}
