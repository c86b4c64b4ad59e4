//! `end-sockets`: the process next to `run` that ends UDP sockets in the network namespaces of
//! pods.

use std::io;

use anyhow::Result;
use traffic_policy_dataplane::{node::socket_ender, privileges::drop_privileges_to_end_sockets};

/// Answers the requests of `run` on standard input.
pub(super) fn execute() -> Result<()> {
    drop_privileges_to_end_sockets()?;
    socket_ender::block_signals()?;
    socket_ender::serve(io::stdin().lock(), io::stdout().lock())
}
