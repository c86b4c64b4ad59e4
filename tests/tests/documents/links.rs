//! Links of the pages: the files and headings to which they lead; and files that pages and code
//! name without a link.

use std::{collections::BTreeMap, path::Path};

use crate::page::{self, code_spans};

/// Folders whose files are named by their path from the root.
const FOLDERS: [&str; 8] = [
    "crates/",
    "deploy/",
    "docs/",
    "tests/",
    "xtask/",
    "traffic-policy-ebpf/",
    "traffic-policy-agent/",
    ".ci/",
];

#[test]
fn links_lead_to_files_and_headings() {
    let pages = page::all();
    let headings: BTreeMap<_, _> =
        pages.iter().map(|path| (path.as_str(), anchors(&page::text(path)))).collect();
    let mut links = 0;
    let mut broken = Vec::new();
    for path in &pages {
        for (number, target) in targets(&page::text(path)) {
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            links += 1;
            if let Some(what) = fault(path, &target, &headings) {
                broken.push(format!("{path}:{number}: {target}: {what}"));
            }
        }
    }
    assert!(links > 50, "only {links} links were found");
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

/// Checks files that are named in code spans, without a link.
#[test]
fn files_that_pages_name_are_there() {
    let mut missing = Vec::new();
    for path in page::all() {
        let text = page::text(&path);
        for (number, line, _) in page::lines(&text).filter(|(_, _, fenced)| !fenced) {
            for name in code_spans(line).filter(|name| is_path(name)) {
                if !page::root().join(name).exists() {
                    missing.push(format!("{path}:{number}: {name}"));
                }
            }
        }
    }
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}

#[test]
fn pages_that_code_names_are_there() {
    let mut named = 0;
    let mut missing = Vec::new();
    for path in page::files(&["rs", "toml", "sh"]) {
        if path.starts_with("tests/tests/documents/") {
            continue;
        }
        for (number, line) in (1..).zip(page::text(&path).lines()) {
            for name in pages_named(line) {
                named += 1;
                if !page::root().join(name).exists() {
                    missing.push(format!("{path}:{number}: {name}"));
                }
            }
        }
    }
    assert!(named > 0, "no file names a page");
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}

#[test]
fn headings_become_anchors_as_on_github() {
    let text =
        "# `explain`: what, and why?\n## A_b – c\n```\n# none\n```\n### The `--drain` flag\n## A_b – c\n";
    assert_eq!(anchors(text), ["explain-what-and-why", "a_b--c", "the---drain-flag", "a_b--c-1"]);
}

/// The fault of a link of the page `from`; `None` if its target exists.
fn fault(from: &str, target: &str, headings: &BTreeMap<&str, Vec<String>>) -> Option<&'static str> {
    let (file, anchor) = target.split_once('#').map_or((target, None), |(file, anchor)| (file, Some(anchor)));
    let path = if file.is_empty() { from.to_owned() } else { resolved(from, file) };
    if !page::root().join(&path).exists() {
        return Some("no such file");
    }
    let anchor = anchor?;
    match headings.get(path.as_str()) {
        Some(anchors) if anchors.iter().any(|own| own == anchor) => None,
        Some(_) => Some("no such heading"),
        None => Some("only pages have headings"),
    }
}

/// The path from the root of a file that is named relative to the page.
fn resolved(from: &str, file: &str) -> String {
    let mut parts: Vec<&str> = from.split('/').collect();
    parts.pop();
    for part in Path::new(file).iter().map(|part| part.to_str().unwrap()) {
        match part {
            "." => {}
            ".." => drop(parts.pop()),
            name => parts.push(name),
        }
    }
    parts.join("/")
}

/// The targets of links: `[text](target)`, `[name]: target`.
fn targets(text: &str) -> Vec<(usize, String)> {
    let mut targets = Vec::new();
    for (number, line, _) in page::lines(text).filter(|(_, _, fenced)| !fenced) {
        // Code is not a link, but may be the text of one.
        let plain: String =
            (0..).zip(line.split('`')).map(|(at, part)| if at % 2 == 1 { "" } else { part }).collect();
        let mut rest = plain.as_str();
        while let Some(at) = rest.find("](") {
            rest = &rest[at + 2..];
            let Some(end) = rest.find(')') else { break };
            targets.push((number, rest[..end].to_owned()));
        }
        if let Some((_, target)) = plain.strip_prefix('[').and_then(|line| line.split_once("]: ")) {
            targets.push((number, target.trim().to_owned()));
        }
    }
    targets
}

/// The anchors of the headings, as GitHub makes them.
fn anchors(text: &str) -> Vec<String> {
    let mut anchors: Vec<String> = Vec::new();
    for (_, line, _) in page::lines(text).filter(|(_, _, fenced)| !fenced) {
        let heading = line.trim_start_matches('#');
        if heading.len() == line.len() || !heading.starts_with(' ') {
            continue;
        }
        let slug: String = heading
            .trim()
            .to_lowercase()
            .chars()
            .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'))
            .map(|c| if c == ' ' { '-' } else { c })
            .collect();
        let taken = |name: &str| anchors.iter().any(|own| own == name);
        let anchor = if taken(&slug) {
            (1..).map(|n| format!("{slug}-{n}")).find(|name| !taken(name)).unwrap()
        } else {
            slug
        };
        anchors.push(anchor);
    }
    anchors
}

fn is_path(span: &str) -> bool {
    FOLDERS.iter().any(|folder| span.starts_with(folder))
        && span.chars().all(|c| c.is_ascii_alphanumeric() || "/._-".contains(c))
}

/// Names of the form `docs/NAME.md`, and of the pages next to the README.
fn pages_named(line: &str) -> impl Iterator<Item = &str> {
    let words = line.split(|c: char| !(c.is_ascii_alphanumeric() || "/._-".contains(c)));
    words.map(|word| word.trim_end_matches('.')).filter(|word| {
        word.starts_with("docs/") && word.ends_with(".md") || ["README.md", "CONTRIBUTING.md"].contains(word)
    })
}
