//! A finding: something that a person should know, and the remedy.

use serde::Serialize;

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Requests are lost now.
    Error,
    /// Requests will be lost in an ordinary event, or are spread badly.
    Warning,
    Note,
}

impl Level {
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warning => "warning",
            Self::Note => "note",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub level: Level,
    /// The name of the finding for programs.
    pub code: &'static str,
    /// One sentence.
    pub what: String,
    /// The remedy; empty where there is nothing to do.
    pub fix: String,
    /// A piece of YAML to copy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub yaml: Option<String>,
}

impl Finding {
    pub(super) fn new(level: Level, code: &'static str, what: String, fix: impl Into<String>) -> Self {
        Self { level, code, what, fix: fix.into(), yaml: None }
    }

    pub(super) fn with_yaml(mut self, yaml: String) -> Self {
        self.yaml = Some(yaml);
        self
    }
}
