//! The end of the command: a signal, or a reader that has gone.

#[cfg(not(unix))]
mod other;
#[cfg(unix)]
mod unix;

use std::io;

#[cfg(not(unix))]
use self::other as system;
#[cfg(unix)]
use self::unix as system;

pub(super) use system::{Stop, nobody_reads};

/// Whether the reader has gone: a closed pipe, or a terminal that no longer exists.
pub(super) fn is_gone(error: &anyhow::Error) -> bool {
    let mut causes = error.chain().filter_map(|cause| cause.downcast_ref::<io::Error>());
    causes.any(|error| error.kind() == io::ErrorKind::BrokenPipe || system::is_terminal_lost(error))
}
