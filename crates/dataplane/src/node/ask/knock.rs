//! One TCP connection attempt: a SYN that is answered by whatever is a sign of life.

use std::{
    io,
    net::SocketAddr,
    os::fd::{AsFd, BorrowedFd},
    time::Duration,
};

use socket2::{Domain, Protocol, Socket, Type};

/// A connection that is being established. Dropping it resets one that was.
#[derive(Debug)]
pub struct Knock {
    pub address: SocketAddr,
    socket: Socket,
}

/// The reason why there is nothing to wait for.
#[derive(Debug)]
pub enum Failure {
    /// The answer is there already.
    Answered,
    /// No SYN was sent.
    Unsent(io::Error),
}

/// The state of the attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Waiting,
    Answered,
    /// Somebody else has reported an error: a router, or this node's resolution of the neighbour.
    Failed,
}

impl Knock {
    /// Sends a SYN. The kernel would repeat it only after a second.
    pub fn send(address: SocketAddr) -> Result<Self, Failure> {
        let open = || {
            let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
            socket.set_nonblocking(true)?;
            // The other end need not wait for a request, nor this one keep a port for a minute.
            socket.set_linger(Some(Duration::ZERO))?;
            Ok(socket)
        };
        let socket = open().map_err(Failure::Unsent)?;
        match socket.connect(&address.into()) {
            Ok(()) => Err(Failure::Answered),
            Err(error) if is_answer(&error) => Err(Failure::Answered),
            Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => Ok(Self { address, socket }),
            Err(error) => Err(Failure::Unsent(error)),
        }
    }

    pub fn look(&self) -> State {
        match self.socket.take_error() {
            Ok(None) if self.socket.peer_addr().is_ok() => State::Answered,
            Ok(None) => State::Waiting,
            Ok(Some(error)) if is_answer(&error) => State::Answered,
            Ok(Some(_)) | Err(_) => State::Failed,
        }
    }
}

fn is_answer(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::ConnectionReset)
}

impl AsFd for Knock {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
