//! The rules that kube-proxy would write for the same Services.

pub(crate) mod iptables;
pub(crate) mod nftables;

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result, bail, ensure};
use traffic_policy_testing::netns::Namespace;

/// Returns the version of a program, or an error with what is missing.
pub(crate) fn version(program: &str) -> Result<String> {
    let output = Command::new(program).arg("--version").output();
    let output = output.with_context(|| format!("the program {program} is not installed"))?;
    ensure!(output.status.success(), "{program} --version: {}", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Makes a program read rules from a file, inside a namespace.
pub(crate) fn load(namespace: &Namespace, program: &[&str], rules: &str, file: &Path) -> Result<()> {
    fs::write(file, rules).with_context(|| format!("writing {}", file.display()))?;
    let mut command = Command::new(program[0]);
    command.args(&program[1..]).arg(file);
    let output = namespace.output(command)?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let lines: Vec<_> = said.lines().take(5).collect();
        bail!("{}: {}: {}", program[0], output.status, lines.join("\n"));
    }
    Ok(())
}
