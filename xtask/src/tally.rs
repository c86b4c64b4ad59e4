//! Sums of the closing lines of test programs.

use std::{
    fmt,
    io::{BufRead, BufReader, Read, Write},
    process::{Command, Stdio},
    thread,
};

use anyhow::{Context, Result};

use crate::test::Cost;

/// Sums over all test programs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    /// Tests that lacked their prerequisites and reported so (`SKIPPED name: why`). Tests marked
    /// `ignore` are not counted: here they are parts of other tests, which start them.
    pub(crate) skipped: u64,
    /// Tests of the same programs that were not selected.
    pub(crate) left_out: u64,
    pub(crate) failures: Vec<String>,
    /// The cost of each test, where it is known for single tests.
    pub(crate) costs: Vec<Cost>,
    /// Whether a test program has printed its result.
    concluded: bool,
}

impl Tally {
    /// Runs a command, shows its output, and counts its tests. Returns whether it succeeded.
    pub(crate) fn run(&mut self, command: &mut Command) -> Result<bool> {
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("{} cannot be started", command.get_program().display()))?;
        let (output, errors) = (child.stdout.take(), child.stderr.take());
        let before = self.failed;
        let mut from_errors = Self::default();
        thread::scope(|scope| {
            scope.spawn(|| from_errors.follow(errors, std::io::stderr()));
            self.follow(output, std::io::stdout());
        });
        self.skip(from_errors.skipped);
        let status = child.wait().context("waiting for the tests failed")?;
        if !status.success() && self.failed == before {
            // A program that was killed, or could not be built, has no result line.
            self.failed += 1;
            self.failures.push(format!("a test program ended with {status}"));
        }
        Ok(status.success())
    }

    fn follow(&mut self, from: Option<impl Read>, mut to: impl Write) {
        let Some(from) = from else { return };
        let mut reader = BufReader::new(from);
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line).is_ok_and(|length| length > 0) {
            // The output may have no reader any more.
            let _ = to.write_all(&line).and_then(|()| to.flush());
            self.note(String::from_utf8_lossy(&line).trim_end());
            line.clear();
        }
    }

    fn skip(&mut self, number: u64) {
        self.skipped += number;
        self.passed = self.passed.saturating_sub(number);
    }

    /// Adds the counts of another tally.
    pub(crate) fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
        self.left_out += other.left_out;
        self.failures.extend(other.failures);
        self.costs.extend(other.costs);
    }

    /// The number of tests that were run or skipped.
    pub(crate) fn counted(&self) -> u64 {
        self.passed + self.failed + self.skipped
    }

    /// Handles the end of a program. A program that failed without reporting it, or reported
    /// nothing, counts as one test.
    pub(crate) fn close(&mut self, program: &str, code: i32) {
        if code != 0 && self.failed == 0 {
            self.failed += 1;
            self.failures.push(format!("{program} ended with exit code {code}"));
        } else if code == 0 && !self.concluded {
            self.passed += 1;
        }
    }

    /// Counts a failure unless every test that was selected by name exists: a test may have been
    /// renamed.
    pub(crate) fn expect(&mut self, program: &str, selected: Option<u64>) {
        if let Some(selected) = selected.filter(|selected| self.counted() < *selected) {
            self.failures
                .push(format!("{program} has only {} of {selected} tests that were named", self.counted()));
            self.failed += 1;
        }
    }

    /// Counts the results in a line of a test program.
    pub(crate) fn note(&mut self, line: &str) {
        if let Some(result) = line.strip_prefix("test result: ") {
            let number = |what: &str| -> u64 {
                let found = result.split(['.', ';']).find_map(|part| part.trim().strip_suffix(what));
                found.and_then(|number| number.trim().parse().ok()).unwrap_or(0)
            };
            self.concluded = true;
            self.passed += number("passed");
            self.failed += number("failed");
            self.left_out += number("filtered out");
        } else if line.starts_with("SKIPPED ") {
            self.skip(1);
        } else if let Some(test) = line.strip_prefix("test ")
            && let Some(name) = test.strip_suffix(" ... FAILED")
        {
            self.failures.push(name.to_owned());
        }
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed", self.passed, self.failed)?;
        if self.skipped > 0 {
            write!(f, ", {} skipped", self.skipped)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(lines: &[&str]) -> Tally {
        let mut tally = Tally::default();
        for line in lines {
            tally.note(line);
        }
        tally
    }

    #[test]
    fn results_add_up() {
        let tally = tally(&[
            "test a ... ok",
            "test result: ok. 7 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s",
            "test b::c ... FAILED",
            "test result: FAILED. 3 passed; 1 failed; 2 ignored; 0 measured; 5 filtered out; finished in 1.20s",
        ]);
        assert_eq!(tally.to_string(), "10 passed, 1 failed");
        assert_eq!(tally.failures, ["b::c"]);
    }

    #[test]
    fn a_test_that_was_named_must_be_there() {
        let said =
            "test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 73 filtered out; finished in 9s";
        let mut tally = tally(&[said]);
        assert_eq!(tally.left_out, 73);
        tally.expect("policy", None);
        tally.expect("policy", Some(2));
        assert_eq!(tally.failed, 0);
        tally.expect("policy", Some(3));
        assert_eq!((tally.failed, tally.failures.len()), (1, 1));
    }

    #[test]
    fn a_skipped_test_has_not_passed() {
        let tally = tally(&["test result: ok. 7 passed; 0 failed; 0 ignored", "SKIPPED x: no means"]);
        assert_eq!(tally.to_string(), "6 passed, 0 failed, 1 skipped");
    }

    #[test]
    fn a_program_that_says_nothing_has_failed() {
        let mut tally = Tally::default();
        assert!(!tally.run(Command::new("sh").args(["-c", "exit 3"])).unwrap());
        assert_eq!(tally.failed, 1);
    }
}
