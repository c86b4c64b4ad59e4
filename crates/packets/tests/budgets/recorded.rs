//! Recorded figures: one file for the object, and one for each kernel series that was measured.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::io::{ErrorKind, Write as _};
use std::path::PathBuf;

/// The subject that is not a kernel, and always has a file.
pub const OBJECT: &str = "object";

/// Figures by name, one in each line of the file.
pub type Figures = BTreeMap<String, u64>;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/testdata/budgets");

/// The tolerance in percent: releases of a kernel series and compilers differ a little.
const TOLERANCE_PERCENT: u64 = 5;
/// The smallest tolerance, in instructions or bytes, for a program of a few hundred: the verifier
/// may visit a state once more.
const TOLERANCE_LEAST: u64 = 16;

/// A file of figures, which need not exist.
pub struct Recorded {
    /// [`OBJECT`], or a kernel series such as `6.18`.
    subject: String,
    path: PathBuf,
}

impl Recorded {
    pub fn of(subject: &str) -> Self {
        Self { subject: subject.to_owned(), path: PathBuf::from(FOLDER).join(format!("{subject}.txt")) }
    }

    /// Fails if the figures differ from the record, or records them.
    pub fn compare(&self, found: &Figures) {
        self.compare_without(found, |_| false);
    }

    /// Compares like [`Self::compare`]; figures that could not be found here stay as they are
    /// recorded.
    pub fn compare_without(&self, found: &Figures, is_missing: impl Fn(&str) -> bool) {
        if std::env::var_os("UPDATE_BUDGETS").is_some() {
            let recorded = fs::read_to_string(&self.path).map(|text| parse(&text)).unwrap_or_default();
            let mut found = found.clone();
            found.extend(recorded.into_iter().filter(|(name, _)| is_missing(name)));
            return self.record(&found);
        }
        let text = match fs::read_to_string(&self.path) {
            Err(error) if error.kind() == ErrorKind::NotFound && self.subject != OBJECT => {
                return say(&format!(
                    "SKIPPED budgets of {}: none recorded; UPDATE_BUDGETS=1 records them",
                    self.name()
                ));
            }
            text => text.unwrap_or_else(|error| panic!("{}: {error}", self.path.display())),
        };
        let budgets = parse(&text);
        let names: BTreeSet<_> =
            budgets.keys().chain(found.keys()).filter(|name| !is_missing(name)).collect();
        let wrong: Vec<_> = names
            .into_iter()
            .map(|name| (name, budgets.get(name).copied(), found.get(name).copied()))
            .filter(|(_, budget, figure)| !fits(*budget, *figure))
            .map(|(name, budget, figure)| format!("{name}: budget {budget:?}, found {figure:?}"))
            .collect();
        assert!(
            wrong.is_empty(),
            "{}:\n{}\nIf this is meant, run again with UPDATE_BUDGETS=1 and commit {}.",
            self.name(),
            wrong.join("\n"),
            self.path.display()
        );
    }

    /// Writes the file, and prints it between two lines, as files on an emulated machine are lost.
    fn record(&self, found: &Figures) {
        let mut text = String::from("# Written by `UPDATE_BUDGETS=1 cargo xtask test budgets`.\n");
        for (name, figure) in found {
            writeln!(text, "{name} {figure}").unwrap();
        }
        let file = format!("crates/packets/testdata/budgets/{}.txt", self.subject);
        say(&format!("--- BEGIN {file}\n{text}--- END {file}"));
        if let Err(error) = fs::write(&self.path, text) {
            say(&format!("{file} is only printed, for it cannot be written: {error}"));
        }
    }

    fn name(&self) -> String {
        if self.subject == OBJECT { self.subject.clone() } else { format!("kernel {}", self.subject) }
    }
}

fn fits(budget: Option<u64>, figure: Option<u64>) -> bool {
    match (budget, figure) {
        (Some(0), figure) => figure == Some(0),
        (Some(budget), Some(figure)) => {
            figure.abs_diff(budget) <= TOLERANCE_LEAST.max(budget * TOLERANCE_PERCENT / 100)
        }
        _ => false,
    }
}

fn parse(text: &str) -> Figures {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| {
            let (name, figure) = line.rsplit_once(' ').unwrap();
            (name.to_owned(), figure.parse().unwrap())
        })
        .collect()
}

/// Prints to stderr directly: the test harness would capture it otherwise.
pub fn say(text: &str) {
    std::io::stderr().write_all(format!("{text}\n").as_bytes()).unwrap();
}

#[test]
fn what_differs_by_more_than_the_tolerance_does_not_fit() {
    assert!(fits(Some(1000), Some(1050)) && fits(Some(1000), Some(950)) && fits(Some(0), Some(0)));
    assert!(!fits(Some(1000), Some(1051)) && !fits(Some(1000), Some(949)) && !fits(Some(0), Some(1)));
    assert!(fits(Some(208), Some(224)) && !fits(Some(208), Some(225)) && !fits(Some(208), Some(191)));
    assert!(!fits(None, Some(1)) && !fits(Some(1), None));
}
