//! Tests that the pages name as evidence: they exist.

use std::{collections::BTreeMap, fs, path::Path};

use crate::page;

const SUITES: [&str; 2] = ["crates/packets/tests", "tests/tests"];
/// Modules of the packet path, some of which are called as suites are.
const MODULES: &str = "traffic-policy-ebpf/src/datapath";

#[test]
fn tests_that_pages_name_exist() {
    let suites = suites();
    let (mut named, mut missing) = (0, Vec::new());
    for path in page::all() {
        let text = page::text(&path);
        for (number, line, _) in page::lines(&text).filter(|(_, _, is_fenced)| !is_fenced) {
            for span in page::code_spans(line) {
                let Some((suite, test)) = span.split_once("::") else { continue };
                let is_name =
                    span.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "_:…".contains(c));
                let Some(modules) = suites.get(suite).filter(|_| is_name && !is_module(span)) else {
                    continue;
                };
                named += 1;
                if !has(modules, test) {
                    missing.push(format!("{path}:{number}: {span}"));
                }
            }
        }
    }
    assert!(named > 50, "only {named} tests were found");
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}

#[test]
fn wrong_names_of_tests_are_found() {
    let suite = BTreeMap::from([("limits".to_owned(), "fn ports_are_tried() {".to_owned())]);
    for (name, found) in [
        ("limits", true),
        ("limits::ports_are_tried", true),
        ("ports_are_tried", true),
        ("limits::ports_…", true),
        ("limits::ports", false),
        ("limit", false),
        ("other::ports_are_tried", false),
    ] {
        assert_eq!(has(&suite, name), found, "{name}");
    }
}

fn is_module(span: &str) -> bool {
    page::root().join(MODULES).join(span.replace("::", "/")).with_extension("rs").exists()
}

/// Whether a suite has a module or a test of this name; `…` stands for the end of names that begin
/// alike.
fn has(modules: &BTreeMap<String, String>, name: &str) -> bool {
    if modules.keys().any(|module| module == name) {
        return true;
    }
    let (module, test) = name.rsplit_once("::").unwrap_or(("", name));
    let declared = match test.strip_suffix('…') {
        Some(beginning) => format!("fn {beginning}"),
        None => format!("fn {test}("),
    };
    // `cargo xtask test SUITE::WORD` takes any part of a name.
    modules.iter().any(|(own, text)| (module.is_empty() || own == module) && text.contains(&declared))
}

/// Suites by name, with their modules and the text of each.
fn suites() -> BTreeMap<String, BTreeMap<String, String>> {
    let entries = SUITES.into_iter().flat_map(|folder| fs::read_dir(page::root().join(folder)).unwrap());
    let paths = entries.map(|entry| entry.unwrap().path());
    paths
        .map(|path| {
            let mut modules = BTreeMap::new();
            collect(&path, &path, &mut modules);
            (path.file_stem().unwrap().to_string_lossy().into_owned(), modules)
        })
        .collect()
}

fn collect(suite: &Path, path: &Path, modules: &mut BTreeMap<String, String>) {
    if path.is_dir() {
        for entry in fs::read_dir(path).unwrap() {
            collect(suite, &entry.unwrap().path(), modules);
        }
    } else if path.extension().is_some_and(|extension| extension == "rs") {
        let below = path.strip_prefix(suite).unwrap().with_extension("");
        let name = below.iter().map(|part| part.to_string_lossy()).collect::<Vec<_>>().join("::");
        modules.insert(name, fs::read_to_string(path).unwrap());
    }
}
