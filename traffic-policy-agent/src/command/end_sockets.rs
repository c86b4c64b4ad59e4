//! `end-sockets`: the process beside `run` that ends UDP sockets in the network namespaces of pods.

use std::io;

use anyhow::Result;

use crate::{dataplane::privileges::drop_privileges_to_end_sockets, node::socket_ender};

/// Answers what `run` asks of its standard input.
pub(super) fn execute() -> Result<()> {
    drop_privileges_to_end_sockets()?;
    socket_ender::block_signals()?;
    socket_ender::serve(io::stdin().lock(), io::stdout().lock())
}
