//! The plugin of kubectl.

use std::path::PathBuf;

use anyhow::{Result, ensure};

use crate::agent;

/// The plugin's binary, beside the agent's.
///
/// # Errors
/// It was not built.
pub fn program() -> Result<PathBuf> {
    let path = agent::program()?.with_file_name("kubectl-traffic_policy");
    ensure!(path.is_file(), "no {}: build it (`cargo build -p traffic-policy-lb`)", path.display());
    Ok(path)
}
