//! The unit of `deploy/systemd` under systemd itself, installed by the commands of
//! docs/operating.md.
//!
//! The tests run in a machine that `cargo xtask vm test systemd` boots, whose first process is
//! systemd; elsewhere each test reports that it is skipped.

#![expect(clippy::unwrap_used, reason = "a test fails with the error as it is")]

mod installed;
mod unit;
