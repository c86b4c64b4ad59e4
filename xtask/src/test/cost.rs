//! The cost of stages, suites and tests, which is printed beside that of earlier runs and kept for
//! later ones.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result};

use crate::{build, cargo};

/// The file, in cargo's target folder, with a line for each stage and suite of each run.
const HISTORY: &str = "test-costs.tsv";
/// The file beside it with a line for each test: its time in the last run that included it.
const TESTS: &str = "test-times.tsv";
/// The longest tests, as such lines of one run: a run on a new machine begins with them.
const LONGEST: &str = include_str!("longest.tsv");
/// The number of the slowest tests that are listed.
const SLOWEST: usize = 20;
/// The number of earlier runs that are shown, together with their median.
const RUNS: usize = 5;

/// The cost of one test.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Cost {
    pub(crate) suite: String,
    pub(crate) test: String,
    pub(crate) took: Duration,
    pub(crate) passed: bool,
}

/// Returns the name of a test as `cargo xtask test` takes it.
pub(super) fn test_name(suite: &str, test: &str) -> String {
    format!("{suite}::{test}")
}

/// The times of tests in earlier runs, in seconds.
#[derive(Clone, Debug, Default)]
pub(super) struct Known(BTreeMap<String, f64>);

impl Known {
    /// Reads the times that earlier runs have left, and those of the repository for tests that have
    /// not run here yet.
    pub(super) fn read() -> Self {
        let here = file(TESTS).and_then(|path| Ok(fs::read_to_string(path)?)).unwrap_or_default();
        let mut known = Self::parse(LONGEST);
        known.0.extend(Self::parse(&here).0);
        known
    }

    fn parse(text: &str) -> Self {
        let lines = text.lines().filter_map(|line| line.split_once('\t'));
        Self(lines.filter_map(|(name, seconds)| Some((name.to_owned(), seconds.parse().ok()?))).collect())
    }

    pub(super) fn seconds(&self, name: &str) -> Option<f64> {
        self.0.get(name).copied()
    }

    fn write(&self, path: &Path) -> Result<()> {
        let lines: String = self.0.iter().map(|(name, seconds)| format!("{name}\t{seconds:.2}\n")).collect();
        Ok(fs::write(path, lines)?)
    }

    #[cfg(test)]
    pub(super) fn of(tests: &[(&str, f64)]) -> Self {
        Self(tests.iter().map(|(name, seconds)| ((*name).to_owned(), *seconds)).collect())
    }
}

/// The cost of a stage or a suite in one run.
#[derive(Clone, Debug, PartialEq)]
struct Row {
    /// The time at which the run ended, in UTC.
    time: String,
    commit: String,
    name: String,
    seconds: f64,
    /// The number of tests that passed; of a stage, 1 if it succeeded.
    passed: u64,
}

impl Row {
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split('\t').map(str::to_owned);
        let (time, commit, name) = (words.next()?, words.next()?, words.next()?);
        Some(Self {
            time,
            commit,
            name,
            seconds: words.next()?.parse().ok()?,
            passed: words.next()?.parse().ok()?,
        })
    }

    fn line(&self) -> String {
        format!("{}\t{}\t{}\t{:.1}\t{}\n", self.time, self.commit, self.name, self.seconds, self.passed)
    }
}

/// Prints the cost of a run beside that of the last ones, and keeps it. Each stage has a name, its
/// success and its duration.
///
/// # Errors
/// The files below the target folder cannot be written.
pub(super) fn conclude(stages: &[(String, bool, Duration)], tests: &[Cost]) -> Result<()> {
    let say = |command: &mut Command| cargo::output(command).map(|said| said.trim().to_owned());
    let time =
        say(Command::new("date").args(["-u", "+%Y-%m-%dT%H:%M:%SZ"])).unwrap_or_else(|| "-".to_owned());
    let commit =
        say(Command::new("git").args(["describe", "--always", "--dirty"]).current_dir(cargo::root()));
    let commit = commit.unwrap_or_else(|| "-".to_owned());
    let rows = rows(&time, &commit, stages, tests);
    let history = file(HISTORY)?;
    let before: Vec<Row> =
        fs::read_to_string(&history).unwrap_or_default().lines().filter_map(Row::parse).collect();
    print!("{}", table(&rows, &before));
    print!("{}", slowest(tests));
    println!("Kept in {}", history.display());
    let mut file = fs::OpenOptions::new().create(true).append(true).open(&history)?;
    file.write_all(rows.iter().map(Row::line).collect::<String>().as_bytes())?;
    let mut known = Known::read();
    let passed = tests.iter().filter(|cost| cost.passed);
    known.0.extend(passed.map(|cost| (test_name(&cost.suite, &cost.test), cost.took.as_secs_f64())));
    known.write(&self::file(TESTS)?)
}

fn file(name: &str) -> Result<PathBuf> {
    Ok(build::target_folder().context("where the target folder is")?.join(name))
}

/// Returns a row for each stage, and one for each suite with the sum of its tests.
fn rows(time: &str, commit: &str, stages: &[(String, bool, Duration)], tests: &[Cost]) -> Vec<Row> {
    let row = |name: &str, seconds: f64, passed: u64| Row {
        time: time.to_owned(),
        commit: commit.to_owned(),
        name: name.to_owned(),
        seconds,
        passed,
    };
    let mut rows: Vec<Row> = stages
        .iter()
        .map(|(name, passed, took)| row(&format!("stage: {name}"), took.as_secs_f64(), (*passed).into()))
        .collect();
    let mut suites: BTreeMap<&str, (f64, u64)> = BTreeMap::new();
    for cost in tests {
        let (seconds, passed) = suites.entry(&cost.suite).or_default();
        *seconds += cost.took.as_secs_f64();
        *passed += u64::from(cost.passed);
    }
    let mut suites: Vec<_> = suites.into_iter().collect();
    suites.sort_by(|(_, (a, _)), (_, (b, _))| b.total_cmp(a));
    rows.extend(suites.into_iter().map(|(name, (seconds, passed))| row(name, seconds, passed)));
    rows
}

/// Formats the rows of this run, each beside those of the same name in the last runs. A run of
/// another number of tests is no measure.
fn table(rows: &[Row], before: &[Row]) -> String {
    let mut text = "\n=== cost, in seconds: now, the median of the last runs, and those (of a suite the sum of its tests)\n"
        .to_owned();
    for row in rows {
        let like = before.iter().rev().filter(|old| old.name == row.name && old.passed == row.passed);
        let earlier: Vec<f64> = like.map(|old| old.seconds).take(RUNS).collect();
        let median = median(&earlier).map_or_else(|| "-".to_owned(), |median| format!("{median:.1}"));
        let earlier: Vec<String> = earlier.iter().map(|seconds| format!("{seconds:.1}")).collect();
        let Row { name, seconds, passed, .. } = row;
        let tests = if name.starts_with("stage: ") { String::new() } else { format!(", {passed} passed") };
        writeln!(text, "{seconds:>7.1} {median:>7}  {name}{tests}  [{}]", earlier.join(" "))
            .unwrap_or_default();
    }
    text
}

fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len().checked_sub(1)? / 2).copied()
}

fn slowest(tests: &[Cost]) -> String {
    let mut sorted: Vec<_> = tests.iter().collect();
    sorted.sort_by_key(|cost| std::cmp::Reverse(cost.took));
    let mut text = format!("=== the {} slowest tests\n", sorted.len().min(SLOWEST));
    for cost in sorted.into_iter().take(SLOWEST) {
        let seconds = cost.took.as_secs_f64();
        writeln!(text, "{seconds:>7.1}  {}", test_name(&cost.suite, &cost.test)).unwrap_or_default();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost(suite: &str, test: &str, seconds: u64, passed: bool) -> Cost {
        Cost { suite: suite.to_owned(), test: test.to_owned(), took: Duration::from_secs(seconds), passed }
    }

    #[test]
    fn suites_are_sums_and_stand_beside_runs_of_as_many_tests() {
        let stages = [("build".to_owned(), true, Duration::from_secs(7))];
        let tests = [cost("a", "x", 1, true), cost("b", "y", 5, true), cost("b", "z", 2, false)];
        let rows = rows("2026-11-24T08:00:00Z", "0123abc", &stages, &tests);
        let lines: Vec<String> = rows.iter().map(Row::line).collect();
        let expected = ["stage: build\t7.0\t1\n", "b\t7.0\t1\n", "a\t1.0\t1\n"];
        assert_eq!(lines, expected.map(|line| format!("2026-11-24T08:00:00Z\t0123abc\t{line}")));
        let parsed: Vec<Row> = lines.iter().filter_map(|line| Row::parse(line.trim_end())).collect();
        assert_eq!(parsed, rows);
        let old = |seconds, passed| Row { seconds, passed, ..rows[1].clone() };
        let text = table(&rows[1..2], &[old(4.0, 1), old(100.0, 2), old(9.0, 1), old(6.0, 1)]);
        assert!(text.ends_with("    7.0     6.0  b, 1 passed  [6.0 9.0 4.0]\n"), "{text}");
    }

    #[test]
    fn the_slowest_tests_by_the_names_that_start_them() {
        let tests: Vec<Cost> = (0..30).map(|number| cost("a", &format!("t{number}"), number, true)).collect();
        let text = slowest(&tests);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 1 + SLOWEST);
        assert_eq!(lines[1], "   29.0  a::t29");
    }

    #[test]
    fn times_of_tests_are_read_again() {
        let known = Known::parse("a::b\t1.50\nbroken\n");
        assert_eq!(known.seconds("a::b"), Some(1.5));
        assert_eq!(known.seconds("broken"), None);
    }
}
