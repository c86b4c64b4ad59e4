//! A finding of `check`: severity, sentence, fix.

use serde::Serialize;

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// As it should be.
    Ok,
    /// Works, but a person may want to know.
    Note,
    /// Some traffic may not work.
    Warning,
    /// `run` would refuse, or no traffic work.
    Error,
}

impl Severity {
    /// As people and JSON read it.
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

/// One thing that was looked at.
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
    /// All is well.
    pub fn ok(probe: &'static str, found: impl Into<String>) -> Self {
        Self { severity: Severity::Ok, probe, found: found.into(), fix: None }
    }

    /// Worth knowing; `fix` for those whom it bothers.
    pub fn note(probe: &'static str, found: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { severity: Severity::Note, ..Self::warning(probe, found, fix) }
    }

    /// Some traffic may not work.
    pub fn warning(probe: &'static str, found: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { severity: Severity::Warning, probe, found: found.into(), fix: Some(fix.into()) }
    }

    /// `run` would refuse, or no traffic work.
    pub fn error(probe: &'static str, found: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { severity: Severity::Error, ..Self::warning(probe, found, fix) }
    }
}
