//! The documents: links have targets, the README stays short, and the lists in a page match the
//! code. `UPDATE_DOCS=1` rewrites the parts that are generated from the code. Needs neither root
//! nor a kernel.

#![expect(clippy::unwrap_used, reason = "a test fails with the error as it is")]

mod balancers;
mod cli;
mod limits;
mod links;
mod maps;
mod metrics;
mod monitoring;
mod outcomes;
mod page;
mod skips;
mod walls;
mod words;

/// The largest number of lines of the README.
const README_LINES: usize = 150;

#[test]
fn the_readme_is_short() {
    let lines = page::text("README.md").lines().count();
    assert!(lines <= README_LINES, "README.md has {lines} lines; what is more belongs into docs/");
}

#[test]
fn every_page_is_reached_from_the_readme() {
    let readme = page::text("README.md");
    let missing: Vec<_> = page::all().into_iter().filter(|path| path != "README.md").collect();
    let missing: Vec<_> = missing.iter().filter(|path| !readme.contains(&format!("({path})"))).collect();
    assert!(missing.is_empty(), "README.md does not link to {missing:?}");
}
