//! Boundaries between the crates, from `cargo metadata`: the permitted dependencies, and the order
//! of the crates.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::{
    page,
    workspace::{metadata, own_packages, text},
};

/// Crates of this workspace from bottom to top: each depends only on those before it.
const ORDER: [&str; 14] = [
    "traffic-policy-toolchain",
    "traffic-policy-ebpf",
    "traffic-policy-bench-ebpf",
    "traffic-policy-cluster",
    "traffic-policy-dataplane",
    "traffic-policy-lb",
    "traffic-policy-agent",
    "traffic-policy-testing",
    "traffic-policy-lab",
    "traffic-policy-fuzz",
    "traffic-policy-bench",
    "traffic-policy-packets",
    "traffic-policy-tests",
    "xtask",
];

/// The programs for users, each with exactly the crates on which it depends.
const BELOW: [(&str, &[&str]); 4] = [
    ("traffic-policy-cluster", &[]),
    (
        "traffic-policy-dataplane",
        &["traffic-policy-cluster", "traffic-policy-ebpf", "traffic-policy-toolchain"],
    ),
    ("traffic-policy-lb", &["traffic-policy-cluster"]),
    ("traffic-policy-agent", &["traffic-policy-cluster", "traffic-policy-dataplane", "traffic-policy-ebpf"]),
];

/// The prefix of a library's name, and the crates that may depend on it.
const KNOW: [(&str, &[&str]); 5] = [
    (
        "aya",
        &[
            "traffic-policy-ebpf",
            "traffic-policy-bench-ebpf",
            "traffic-policy-dataplane",
            "traffic-policy-testing",
            "traffic-policy-bench",
            "traffic-policy-packets",
            "traffic-policy-tests",
        ],
    ),
    ("rtnetlink", &["traffic-policy-dataplane", "traffic-policy-testing"]),
    ("netlink-", &["traffic-policy-dataplane", "traffic-policy-testing"]),
    ("kube", &["traffic-policy-cluster", "traffic-policy-testing", "traffic-policy-tests"]),
    ("k8s-openapi", &["traffic-policy-cluster", "traffic-policy-testing", "traffic-policy-tests"]),
];

/// The crates of this workspace, and the names of their dependencies of any kind.
fn crates(metadata: &Value) -> BTreeMap<&str, BTreeSet<&str>> {
    let named = own_packages(metadata).map(|package| {
        let on = package["dependencies"].as_array().unwrap().iter().map(|on| text(&on["name"]));
        (text(&package["name"]), on.collect())
    });
    named.collect()
}

/// Dependencies that [`ORDER`], [`BELOW`] and [`KNOW`] do not allow.
fn holes(crates: &BTreeMap<&str, BTreeSet<&str>>) -> Vec<String> {
    let place = |name: &str| ORDER.iter().position(|own| *own == name);
    let mut holes = Vec::new();
    for (name, on) in crates {
        let Some(own) = place(name) else {
            holes.push(format!("{name} has no place in the order"));
            continue;
        };
        let upwards = on.iter().filter(|on| place(on).is_some_and(|place| place >= own));
        holes.extend(upwards.map(|on| format!("{name} depends on {on}, which is above it")));
        for (library, who) in KNOW {
            let known = on.iter().filter(|on| on.starts_with(library)).filter(|_| !who.contains(name));
            holes.extend(known.map(|on| format!("{name} depends on {on}")));
        }
    }
    for (name, below) in BELOW {
        let on: BTreeSet<_> = crates[name].iter().copied().filter(|on| place(on).is_some()).collect();
        if on != below.iter().copied().collect() {
            holes.push(format!("{name} depends on {on:?}, not on {below:?}"));
        }
    }
    holes
}

#[test]
fn crates_know_what_is_below_them_only() {
    let metadata = metadata();
    let crates = crates(&metadata);
    assert_eq!(crates.len(), ORDER.len(), "{:?}", crates.keys());
    assert_eq!(holes(&crates), Vec::<String>::new());
    // Each kind of violation is detected.
    for (name, on) in [
        ("traffic-policy-cluster", "traffic-policy-lb"),
        ("traffic-policy-lb", "traffic-policy-dataplane"),
        ("traffic-policy-agent", "aya-obj"),
        ("traffic-policy-lb", "netlink-sys"),
        ("traffic-policy-dataplane", "kube"),
    ] {
        let mut broken = crates.clone();
        broken.get_mut(name).unwrap().insert(on);
        assert!(!holes(&broken).is_empty(), "{name} may depend on {on}");
    }
}

/// The agent asks the data plane for what the kernel says by netlink, and reads no message of it.
#[test]
fn the_agent_reads_no_netlink() {
    let mut sources = page::files(&["rs"]);
    sources.retain(|path| path.starts_with("traffic-policy-agent/src"));
    assert!(!sources.is_empty());
    sources.retain(|path| page::text(path).contains("netlink::"));
    assert_eq!(sources, Vec::<String>::new());
}

/// Indirect dependencies count, too: users build the plugin where neither BPF nor netlink exists.
#[test]
fn the_plugin_is_built_without_bpf_and_netlink() {
    let metadata = metadata();
    let packages = metadata["packages"].as_array().unwrap().iter();
    let names: BTreeMap<_, _> =
        packages.map(|package| (text(&package["id"]), text(&package["name"]))).collect();
    let nodes = metadata["resolve"]["nodes"].as_array().unwrap().iter();
    let nodes: BTreeMap<_, _> = nodes.map(|node| (text(&node["id"]), node)).collect();
    let mut open: Vec<_> =
        names.iter().filter(|(_, name)| **name == "traffic-policy-lb").map(|(id, _)| *id).collect();
    let mut found = BTreeSet::new();
    while let Some(id) = open.pop() {
        if !found.insert(id) {
            continue;
        }
        let on = nodes[id]["deps"].as_array().unwrap().iter();
        // Tests may need more.
        let on = on.filter(|on| on["dep_kinds"].as_array().unwrap().iter().any(|kind| kind["kind"] != "dev"));
        open.extend(on.map(|on| text(&on["pkg"])));
    }
    let found: BTreeSet<_> = found.iter().map(|id| names[id]).collect();
    assert!(found.contains("kube") && found.contains("traffic-policy-cluster"), "{found:?}");
    let linux = ["aya", "netlink", "rtnetlink", "traffic-policy-ebpf", "traffic-policy-dataplane"];
    let wrong: Vec<_> =
        found.iter().filter(|name| linux.iter().any(|linux| name.starts_with(linux))).collect();
    assert!(wrong.is_empty(), "{wrong:?}");
}

/// Returns the lines of a source of the plugin that only Unix compiles, and that do not say so.
fn of_unix_alone(path: &str, source: &str) -> Vec<String> {
    if path.ends_with("/unix.rs") || path.contains("/tests/") || path.ends_with("/tests.rs") {
        return Vec::new();
    }
    let code = source.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let lines: Vec<_> = code.lines().map(str::trim).collect();
    let unix = |line: &str| {
        let names = ["os::unix", "os::fd", "nix::", "libc::", "signal::unix"];
        names.iter().any(|name| line.contains(name)) && !line.starts_with("//")
    };
    let said = |at: usize| {
        at.checked_sub(1).is_some_and(|before| {
            ["#[cfg(unix)]", "#[cfg(target_os"].iter().any(|cfg| lines[before].starts_with(cfg))
        })
    };
    let wrong = (0..lines.len()).filter(|at| unix(lines[*at]) && !said(*at));
    wrong.map(|at| format!("{path}: {}", lines[at])).collect()
}

/// The plugin runs on Windows, too.
#[test]
fn the_plugin_says_what_unix_alone_compiles() {
    let sources = page::files(&["rs"]);
    let sources = sources.iter().filter(|path| {
        ["crates/cluster/src/", "crates/lb/src/"].iter().any(|folder| path.starts_with(folder))
    });
    let wrong: Vec<_> = sources.flat_map(|path| of_unix_alone(path, &page::text(path))).collect();
    assert!(wrong.is_empty(), "not within #[cfg(unix)] nor a file unix.rs:\n{}", wrong.join("\n"));
    assert_eq!(of_unix_alone("a.rs", "use std::os::unix::fs::MetadataExt;").len(), 1);
    assert_eq!(of_unix_alone("a.rs", "#[cfg(unix)]\noptions.custom_flags(libc::O_NONBLOCK);").len(), 0);
}

/// The data plane alone may use `unsafe`, among the crates of the programs for users.
#[test]
fn unsafe_is_forbidden_elsewhere() {
    for root in ["crates/cluster/src/lib.rs", "crates/lb/src/lib.rs", "traffic-policy-agent/src/lib.rs"] {
        assert!(page::text(root).contains("#![forbid(unsafe_code)]"), "{root}");
    }
}
