//! The end by signals, pipes and terminals of Unix.

use std::{io, os::fd::AsFd as _};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Signals that stop the command. A hangup of the terminal does so only if there is a view: `nohup`
/// disables it for a command that writes to a file.
pub(in super::super) struct Stop {
    interrupt: Signal,
    terminate: Signal,
    hangup: Option<Signal>,
}

impl Stop {
    pub(in super::super) fn new(screen: bool) -> io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: screen.then(|| signal(SignalKind::hangup())).transpose()?,
        })
    }

    pub(in super::super) async fn wait(&mut self) {
        let hangup = async {
            match &mut self.hangup {
                Some(hangup) => _ = hangup.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! { _ = self.interrupt.recv() => {}, _ = self.terminate.recv() => {}, () = hangup => {} }
    }
}

/// Whether standard output is a pipe or a terminal without a reader.
pub(in super::super) fn nobody_reads() -> bool {
    let out = io::stdout();
    let mut fds = [PollFd::new(out.as_fd(), PollFlags::empty())];
    let gone = PollFlags::POLLERR | PollFlags::POLLHUP;
    poll(&mut fds, PollTimeout::ZERO).is_ok()
        && fds[0].revents().is_some_and(|events| events.intersects(gone))
}

/// Whether a write has failed because the terminal no longer exists.
pub(super) fn is_terminal_lost(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EIO)
}
