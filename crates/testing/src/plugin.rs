//! The plugin of kubectl.

use std::path::PathBuf;

use anyhow::{Result, ensure};

use crate::agent;

/// The path of the plugin's binary, next to that of the agent.
pub fn program() -> Result<PathBuf> {
    let path = agent::program()?.with_file_name("kubectl-traffic_policy");
    ensure!(path.is_file(), "no {}: build it (`cargo build -p traffic-policy-lb`)", path.display());
    Ok(path)
}
