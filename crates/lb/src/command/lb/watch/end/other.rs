//! The end where there are no signals of Unix (Windows): Ctrl-C, or a write that fails.

use std::io;

use tokio::signal::ctrl_c;

/// Ctrl-C, which stops the command.
pub(in super::super) struct Stop(());

impl Stop {
    pub(in super::super) fn new(_screen: bool) -> io::Result<Self> {
        Ok(Self(()))
    }

    pub(in super::super) async fn wait(&mut self) {
        // Without a way to hear of it, the system's own handling of Ctrl-C ends the process.
        if ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

/// Whether nobody reads: not known before a write fails.
pub(in super::super) fn nobody_reads() -> bool {
    false
}

/// Whether a write has failed because the terminal no longer exists: such writes fail as those to
/// a closed pipe do.
pub(super) fn is_terminal_lost(_error: &io::Error) -> bool {
    false
}
