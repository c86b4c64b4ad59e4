//! The report of this node's agent, by its health port.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context, Result};

use super::agent_request;
use crate::health::Report;

/// Time limit of the agent's answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// Requests the report of this node's agent.
pub(super) fn of(address: SocketAddr) -> Result<Report> {
    let body = agent_request::get(address, "/status", PATIENCE)?;
    serde_json::from_slice(&body).with_context(|| format!("{address} answers with something else"))
}
