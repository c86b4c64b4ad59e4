//! A finding of `check`: severity, sentence, fix.

use serde::Serialize;

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The node is as it should be.
    Ok,
    /// All works, but an operator may want to know.
    Note,
    /// Some traffic may not work.
    Warning,
    /// `run` would refuse to start, or no traffic would work.
    Error,
}

impl Severity {
    /// Returns the name that users and JSON read.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub severity: Severity,
    /// Short, stable name of the check.
    pub probe: &'static str,
    /// The finding, in one sentence.
    pub found: String,
    /// The remedy; `None` if nothing needs to be done.
    pub fix: Option<String>,
}

impl Finding {
    /// Makes a finding that reports success.
    pub fn ok(probe: &'static str, found: impl Into<String>) -> Self {
        Self { severity: Severity::Ok, probe, found: found.into(), fix: None }
    }

    /// Makes a finding that is worth knowing; `fix` is for operators whom it concerns.
    pub fn note(probe: &'static str, found: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { severity: Severity::Note, ..Self::warning(probe, found, fix) }
    }

    /// Makes a finding that some traffic may not work.
    pub fn warning(probe: &'static str, found: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { severity: Severity::Warning, probe, found: found.into(), fix: Some(fix.into()) }
    }

    /// Makes a finding that `run` would refuse to start, or that no traffic would work.
    pub fn error(probe: &'static str, found: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { severity: Severity::Error, ..Self::warning(probe, found, fix) }
    }
}
