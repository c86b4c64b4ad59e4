//! The documents: links have targets, the README stays short, and the lists in a page match the
//! code. `UPDATE_DOCS=1` rewrites the parts that are generated from the code. Needs neither root
//! nor a kernel.

#![expect(clippy::unwrap_used, reason = "a test fails with the error as it is")]

mod balancers;
mod circles;
mod cli;
mod docstrings;
mod glossary;
mod journeys;
mod limits;
mod links;
mod maglev;
mod maps;
mod metrics;
mod monitoring;
mod names;
mod outcomes;
mod page;
mod roles;
mod shares;
mod skips;
mod types;
mod walls;
mod width;
mod words;
mod workspace;

/// The largest number of lines of the README.
const README_LINES: usize = 150;

#[test]
fn the_readme_is_short() {
    let lines = page::text("README.md").lines().count();
    assert!(lines <= README_LINES, "README.md has {lines} lines; what is more belongs into docs/");
}
