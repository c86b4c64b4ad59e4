//! The static cost of the packet path, so that growth is noticed when it happens: instructions that
//! the verifier walks, bytes of the maps and of the stack, calls that should have been inlined.
//! `UPDATE_BUDGETS=1` rewrites the records of the object and of the running kernel.

#![expect(clippy::unwrap_used, reason = "a test fails with the error as it is")]

mod code;
mod layout;
mod loaded;
mod once;
mod recorded;

use std::collections::BTreeSet;

use traffic_policy_dataplane::{self as dataplane, Kernel};

use crate::code::Code;
use crate::recorded::{OBJECT, Recorded};

/// The most instructions that the verifier may walk, far below the limit of the kernel (1,000,000),
/// so that older kernels that prune less have room: the largest program takes Linux 6.1 twice
/// as many as 6.18.
const MOST_VERIFIED: u64 = 150_000;
/// The programs that a hardened kernel refuses, while it loads all others.
const ITERATORS: [&str; 3] = ["tp_gc_flows4", "tp_gc_flows6", "tp_gc_sockets"];
/// MAX_BPF_STACK: the stack that a chain of calls may use together.
const MOST_STACK: u64 = 512;

#[test]
fn budgets_of_the_object_hold() {
    Recorded::of(OBJECT).compare(&code().figures());
}

#[test]
fn budgets_of_the_kernel_hold() {
    let Kernel { major, minor } = Kernel::running().unwrap();
    let recorded = Recorded::of(&format!("{major}.{minor}"));
    // Those of iterators alone may be missing: see `loaded`.
    let is_missing = |name: &str| {
        let program = name.split_once(' ').map_or(name, |(_, program)| program);
        ITERATORS.contains(&program) && !loaded::figures().contains_key(name)
    };
    if ITERATORS.iter().any(|name| is_missing(&format!("verified {name}"))) {
        recorded::say(&format!("SKIPPED budgets of {}: the kernel refuses iterators", ITERATORS.join(", ")));
    }
    recorded.compare_without(loaded::figures(), is_missing);
}

#[test]
fn far_from_what_the_verifier_walks_at_most() {
    let verified = loaded::figures().iter().filter(|(name, _)| name.starts_with("verified "));
    let too_many: Vec<_> = verified.filter(|(_, figure)| **figure > MOST_VERIFIED).collect();
    assert!(too_many.is_empty(), "more than {MOST_VERIFIED}: {too_many:?}");
}

#[test]
fn every_chain_of_calls_fits_into_the_stack() {
    let chains = code().chains();
    assert!(chains.iter().any(|chain| chain.functions.len() > 1), "no program calls a function");
    let too_deep: Vec<_> =
        chains.iter().filter(|chain| chain.bytes > MOST_STACK).map(ToString::to_string).collect();
    assert!(too_deep.is_empty(), "more than {MOST_STACK} bytes:\n{}", too_deep.join("\n"));
}

#[test]
fn nothing_is_copied_by_a_call() {
    let code = code();
    let copies = code.copies();
    assert!(copies.is_empty(), "{copies:?}");
    assert!(code.has("tp_xdp_ingress"), "this is another object");
}

/// A route is accepted if its hash matches the words that were read. The programs that create flows
/// are four in each family: fixed and variable headers, XDP and TC.
#[test]
fn each_word_of_a_slots_route_is_read_once() {
    for (map, bytes) in [("tp_ep_routes4", 12), ("tp_ep_routes6", 24)] {
        let all = once::reads(dataplane::object_bytes(), map);
        assert!(all.len() >= 4, "{map}: {all:?}");
        for reads in all {
            assert_eq!(reads.read, (0..bytes).collect(), "{map} {}", reads.at);
            assert!(reads.again.is_empty(), "{map} {}: bytes {:?} are read again", reads.at, reads.again);
        }
    }
}

/// `bpftool` shows 15 bytes of a name (BPF_OBJ_NAME_LEN, less the zero), and not its owner.
#[test]
fn names_are_told_apart_in_bpftool() {
    let object = aya_obj::Object::parse(dataplane::object_bytes()).unwrap();
    // aya names globals (.rodata) after their section.
    let maps = object.maps.keys().filter(|name| !name.starts_with('.'));
    let names: Vec<_> = object.programs.keys().chain(maps).collect();
    assert!(names.len() > 60, "{names:?}");
    let unfit: Vec<_> = names.iter().filter(|name| !name.starts_with("tp_") || name.len() > 15).collect();
    assert!(unfit.is_empty(), "without `tp_`, or longer than 15 bytes: {unfit:?}");
    let different: BTreeSet<_> = names.iter().collect();
    assert_eq!(different.len(), names.len(), "a program and a map have the same name: {names:?}");
}

fn code() -> Code {
    Code::of(dataplane::object_bytes())
}
