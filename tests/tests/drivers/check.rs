//! `check` on nodes with the network cards of this suite.

use std::process::Command;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::fixture::CardTestbed;

#[derive(Debug)]
pub struct CheckOutput {
    pub code: Option<i32>,
    findings: Vec<Value>,
}

impl CardTestbed {
    /// Runs `check` for these devices.
    pub fn check(&self, attach: &str, devices: &[&str]) -> Result<CheckOutput> {
        let mut command = Command::new(self.program()?);
        command.args([
            "check",
            "--output",
            "json",
            "--cgroup",
            "none",
            "--attach",
            attach,
            "--node-name",
            "node-1",
        ]);
        command.arg("--manifests").arg(self.folder()?.manifests());
        command.arg("--pin-dir").arg(self.folder()?.bpffs().join("check"));
        devices.iter().for_each(|device| {
            command.args(["--device", device]);
        });
        let output = self.node.output(command)?;
        let errors = String::from_utf8_lossy(&output.stderr);
        let findings = serde_json::from_slice(&output.stdout).with_context(|| errors.into_owned())?;
        Ok(CheckOutput { code: output.status.code(), findings })
    }
}

impl CheckOutput {
    /// Checks that there is a finding with all these words in its text and in its fix.
    #[track_caller]
    pub fn has(&self, severity: &str, found: &[&str], fix: &str) {
        let is_it = |finding: &&Value| {
            let text = |field: &str| finding[field].as_str().unwrap_or_default();
            finding["severity"] == severity
                && found.iter().all(|word| text("found").contains(word))
                && text("fix").contains(fix)
        };
        let it = self.findings.iter().find(is_it);
        let it = it.unwrap_or_else(|| panic!("no {severity} {found:?} → {fix:?} in {self:#?}"));
        println!("check: {severity}: {} → {}", it["found"], it["fix"]);
    }
}
