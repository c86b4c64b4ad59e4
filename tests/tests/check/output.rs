//! The findings of `check`, parsed and compared.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use traffic_policy_testing::agent;
use traffic_policy_testing::lab::{Lab, LabBuilder};
use traffic_policy_testing::netns::Namespace;

/// The output of `check` on a node.
#[derive(Debug)]
pub struct CheckOutput {
    pub code: Option<i32>,
    pub findings: Vec<Value>,
}

impl CheckOutput {
    /// Parses the output of `check`, which is JSON.
    pub fn of(output: &Output) -> Self {
        let findings: Vec<Value> = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
        Self { code: output.status.code(), findings }
    }

    /// The findings that require an action.
    pub fn complaints(&self) -> Vec<&Value> {
        self.findings.iter().filter(|finding| finding["severity"] != "ok").collect()
    }

    /// Checks that this is the only complaint, and that the exit code matches it.
    #[track_caller]
    pub fn only(&self, severity: &str, probe: &str, found: &str, fix: &str) {
        let complaints = self.complaints();
        assert_eq!(complaints.len(), 1, "{complaints:#?}");
        self.has(severity, probe, found, fix);
        assert_eq!(self.code, Some(i32::from(severity == "error")), "{self:#?}");
    }

    #[track_caller]
    pub fn has(&self, severity: &str, probe: &str, found: &str, fix: &str) {
        let contains = |finding: &Value, field: &str, text| {
            finding[field].as_str().is_some_and(|words| words.contains(text))
        };
        let is_it = |finding: &&Value| {
            finding["severity"] == severity
                && finding["probe"] == probe
                && contains(finding, "found", found)
                && contains(finding, "fix", fix)
        };
        assert!(
            self.findings.iter().any(|finding| is_it(&finding)),
            "no {severity} {probe} {found:?} → {fix:?} in {self:#?}"
        );
    }

    /// The severities of the findings of a check, in their order.
    pub fn all(&self, probe: &str) -> Vec<&str> {
        let findings = self.findings.iter().filter(|finding| finding["probe"] == probe);
        findings.map(|finding| finding["severity"].as_str().unwrap()).collect()
    }

    #[track_caller]
    pub fn is_well(&self) {
        assert_eq!(self.complaints(), [&Value::Null; 0]);
        assert_eq!(self.code, Some(0));
    }
}

pub fn check_in(namespace: &Namespace, pins: &Path, flags: &[&str]) -> CheckOutput {
    let mut command = Command::new(agent::program().unwrap());
    command.args(["check", "--output", "json", "--pin-dir"]).arg(pins).args(flags).env_clear();
    CheckOutput::of(&namespace.output(command).unwrap())
}

/// Runs `check` on the first node.
pub fn check(lab: &Lab, flags: &[&str]) -> CheckOutput {
    check_in(lab.node(1).netns(), &lab.bpffs().join("node-1"), flags)
}

pub fn one_node(builder: LabBuilder) -> Lab {
    builder.pods(&[1]).build().unwrap()
}
