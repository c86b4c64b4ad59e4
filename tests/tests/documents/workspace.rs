//! The workspace as cargo sees it.

use std::{env, process::Command};

use serde_json::Value;

use crate::page;

/// Returns the output of `cargo metadata`.
pub fn metadata() -> Value {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    // Dependencies for other machines were never fetched here.
    let platform = format!("{}-unknown-linux-gnu", env::consts::ARCH);
    let mut command = Command::new(cargo);
    command.args(["metadata", "--format-version", "1", "--offline", "--filter-platform", &platform]);
    let output = command.current_dir(page::root()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Returns the packages of this workspace.
pub fn own_packages(metadata: &Value) -> impl Iterator<Item = &Value> {
    metadata["packages"].as_array().unwrap().iter().filter(|package| package["source"].is_null())
}

pub fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}
