//! The share that each package has of the lines of Rust: of those outside of tests, and of all. A
//! reader of one package has less than the whole to know, and a change compiles less of it.

use std::{cmp::Reverse, collections::BTreeMap, path::Path};

use serde_json::Value;

use crate::{
    page,
    workspace::{metadata, own_packages, text},
};

/// The largest share of one package, in percent.
const LARGEST: usize = 20;

/// Lines by the name of a package.
type Lines<'m> = BTreeMap<&'m str, usize>;

/// The lines of each package. A file belongs to the nearest package around it; `count` gets its
/// path from the root, and its text.
fn lines_of_packages(metadata: &Value, count: impl Fn(&str, &str) -> usize) -> Lines<'_> {
    let root = Path::new(text(&metadata["workspace_root"]));
    let named = own_packages(metadata).map(|package| {
        let folder = Path::new(text(&package["manifest_path"])).parent().unwrap();
        (folder.strip_prefix(root).unwrap(), text(&package["name"]))
    });
    let folders: BTreeMap<&Path, &str> = named.collect();
    let mut lines = Lines::new();
    for path in page::files(&["rs"]) {
        let package = Path::new(&path).ancestors().find_map(|folder| folders.get(folder));
        let package = package.unwrap_or_else(|| panic!("{path} belongs to no package"));
        *lines.entry(package).or_default() += count(&path, &page::text(&path));
    }
    lines
}

/// The number of lines of a file outside of tests.
fn outside_of_tests(path: &str, text: &str) -> usize {
    if path.split('/').any(|part| ["tests", "tests.rs"].contains(&part)) {
        return 0;
    }
    let mut lines = text.lines().zip(text.lines().skip(1).chain([""]));
    let is_end = |line: &str, next: &str| line == "#[cfg(test)]" && next.contains("mod tests {");
    lines.position(|(line, next)| is_end(line, next)).unwrap_or_else(|| text.lines().count())
}

/// The packages with a larger share than [`LARGEST`], each with its share.
fn too_large(lines: &Lines<'_>) -> Vec<String> {
    let all: usize = lines.values().sum();
    let found = lines.iter().filter(|(_, own)| **own * 100 > all * LARGEST);
    found.map(|(name, own)| format!("{name} has {:.1} %, {own} of {all} lines", percent(*own, all))).collect()
}

fn percent(own: usize, all: usize) -> f64 {
    own as f64 * 100.0 / all as f64
}

/// Prints the shares, the largest first, and fails if one is too large.
#[track_caller]
fn compare(lines: &Lines<'_>) {
    let all: usize = lines.values().sum();
    let mut sorted: Vec<_> = lines.iter().collect();
    sorted.sort_by_key(|(_, own)| Reverse(**own));
    for (name, own) in sorted {
        println!("{:>5.1} %  {own:>6}  {name}", percent(*own, all));
    }
    assert!(lines.len() > 8 && all > 50_000, "files were not found: {lines:?}");
    let found = too_large(lines);
    assert!(found.is_empty(), "more than {LARGEST} % of the lines of Rust: {}", found.join("; "));
}

#[test]
fn no_package_is_most_of_the_code() {
    compare(&lines_of_packages(&metadata(), outside_of_tests));
}

#[test]
fn no_package_is_most_of_the_lines() {
    compare(&lines_of_packages(&metadata(), |_, text| text.lines().count()));
}

#[test]
fn a_package_that_is_too_large_is_named() {
    let fifths = ["a", "b", "c", "d", "e"].map(|name| (name, 200));
    assert_eq!(too_large(&Lines::from(fifths)), [""; 0]);
    let mut lines = Lines::from(fifths);
    lines.extend([("b", 202), ("e", 198)]);
    assert_eq!(too_large(&lines), ["b has 20.2 %, 202 of 1000 lines"]);
}

#[test]
fn lines_of_tests_are_not_counted() {
    let with_tests = "//! A file.\nfn one() {}\n\n#[cfg(test)]\nmod tests {\n    fn two() {}\n}\n";
    assert_eq!(outside_of_tests("src/one.rs", with_tests), 3);
    assert_eq!(outside_of_tests("src/one.rs", "#[cfg(test)]\nmod tests;\nfn one() {}\n"), 3);
    for path in ["tests/tests/one.rs", "src/one/tests.rs"] {
        assert_eq!(outside_of_tests(path, "fn one() {}\n"), 0, "{path}");
    }
}
