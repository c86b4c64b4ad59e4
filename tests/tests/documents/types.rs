//! Names of types that many modules have, in the glossary: a name stands for one part.

use std::collections::{BTreeMap, BTreeSet};

use crate::page;

const PAGE: &str = "docs/glossary.md";
const SECTION: &str = "## Names of types";
/// The number of modules from which on a name has to be explained.
const MANY: usize = 5;
/// The code that users run; tests and tools have names of their own.
const CODE: [&str; 5] = [
    "crates/cluster/src",
    "crates/dataplane/src",
    "crates/lb/src",
    "traffic-policy-agent/src",
    "traffic-policy-ebpf/src",
];

#[test]
fn names_that_many_modules_have_are_explained() {
    let mut modules: BTreeMap<String, usize> = BTreeMap::new();
    let files = page::files(&["rs"]);
    for path in files.iter().filter(|path| CODE.iter().any(|folder| path.starts_with(folder))) {
        for name in types(&page::text(path)) {
            *modules.entry(name).or_default() += 1;
        }
    }
    let many: BTreeSet<String> =
        modules.into_iter().filter(|(_, count)| *count >= MANY).map(|(name, _)| name).collect();
    let page = page::text(PAGE);
    let (_, section) = page.split_once(SECTION).unwrap();
    let explained = section.lines().filter(|line| line.starts_with("| `"));
    let explained: BTreeSet<String> =
        explained.filter_map(|line| Some(line.split('`').nth(1)?.to_owned())).collect();
    assert_eq!(many, explained);
}

/// The types that a module defines, but for those of its tests, which are indented.
fn types(source: &str) -> BTreeSet<String> {
    let defined = source.lines().filter_map(|line| {
        let line = line.strip_prefix("pub").map_or(line, |rest| {
            rest.strip_prefix('(')
                .and_then(|rest| rest.split_once(')'))
                .map_or(rest, |(_, rest)| rest)
                .trim_start()
        });
        let (word, rest) = line.split_once(' ')?;
        let name = rest.split(|c: char| !c.is_ascii_alphanumeric()).next()?;
        ["struct", "enum", "trait", "union"].contains(&word).then(|| name.to_owned())
    });
    defined.collect()
}

#[test]
fn types_are_found_whatever_their_visibility() {
    let source = "struct A;\npub enum B<T> {\npub(super) trait C: Sized {\n    struct OfATest;\n// struct No\nunion D {";
    assert_eq!(types(source), ["A", "B", "C", "D"].map(str::to_owned).into());
}
