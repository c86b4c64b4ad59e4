//! Reports of tests that are skipped because something that they need is missing.

use std::fmt::Display;
use std::io::Write;

/// Prints that a test, or a part of one, is skipped, and why. The line goes to stderr directly, as
/// the test harness captures the output of tests that pass. `cargo xtask test` counts these lines.
pub fn skipped(test: impl Display, why: impl Display) {
    // There is nowhere else to report a failed write.
    writeln!(std::io::stderr(), "SKIPPED {test}: {why}").ok();
}
