//! SCTP associations of the kernel's own sockets in one-to-one style, which are read and written
//! like those of TCP. The language of a server is like that of [`super`]: `exchange N` sends N
//! bytes each way; any other line is answered with the name of the pod, the address that it sees,
//! and the length of the line.
//!
//! All sockets are bound to one address: hosts behind a Service have one path.

use std::io::{BufRead as _, BufReader, ErrorKind, Write as _};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use socket2::{Domain, Protocol, Socket, Type};

use super::transfer;
use crate::lab::{Family, Pod};
use crate::netns::Namespace;
use crate::pace::scaled;

/// IPPROTO_SCTP
const SCTP: i32 = 132;
/// The time limit of an answer, on a fast machine.
const PATIENCE: Duration = Duration::from_secs(10);
/// The interval at which a server checks whether it is to stop.
const LOOK: Duration = Duration::from_millis(100);

/// Whether this machine's kernel supports SCTP. This call loads its module, if there is one.
pub fn are_there() -> bool {
    socket(Family::V4).is_ok()
}

fn socket(family: Family) -> Result<Socket> {
    let domain = if family == Family::V4 { Domain::IPV4 } else { Domain::IPV6 };
    Socket::new(domain, Type::STREAM, Some(Protocol::from(SCTP))).context("a socket of SCTP")
}

/// Wraps a one-to-one socket, which is used by the same system calls as a TCP stream.
fn stream(socket: Socket) -> Result<TcpStream> {
    socket.set_read_timeout(Some(scaled(PATIENCE)))?;
    socket.set_write_timeout(Some(scaled(PATIENCE)))?;
    Ok(TcpStream::from(OwnedFd::from(socket)))
}

/// A pod's server at one of its addresses; it accepts no new associations once it is dropped.
#[derive(Debug)]
pub struct Server {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Starts a server. It is listening when this returns.
    pub fn start(pod: &Pod, family: Family, port: u16) -> Result<Self> {
        let (name, address) = (pod.name.clone(), SocketAddr::new(pod.address(family), port));
        let listener = pod.netns().run(|| -> Result<Socket> {
            let listener = socket(family)?;
            listener.bind(&address.into()).with_context(|| format!("binding {address}"))?;
            listener.listen(128)?;
            listener.set_read_timeout(Some(LOOK))?;
            Ok(listener)
        })?;
        let stop = Arc::new(AtomicBool::new(false));
        let wish = stop.clone();
        let thread = thread::Builder::new().name(format!("sctp {name}")).spawn(move || {
            while !wish.load(Relaxed) {
                let Ok((accepted, client)) = listener.accept() else { continue };
                let Some(client) = client.as_socket() else { continue };
                let name = name.clone();
                // The thread ends with its association, or by its time-out.
                thread::spawn(move || drop(stream(accepted).map(|stream| converse(stream, &name, client))));
            }
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        self.thread.take().map(JoinHandle::join);
    }
}

fn converse(stream: TcpStream, pod: &str, client: SocketAddr) -> Result<()> {
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    loop {
        line.clear();
        match stream.read_line(&mut line) {
            Ok(0) => return Ok(()),
            Ok(_) => {}
            // An association that is silent for longer is one that the test holds open.
            Err(error) if error.kind() == ErrorKind::WouldBlock => continue,
            Err(error) => return Err(error.into()),
        }
        match line.trim_end().strip_prefix("exchange ") {
            Some(bytes) => transfer::answer_burst(&mut stream, bytes.parse()?)?,
            None => writeln!(stream.get_ref(), "{pod} {} {}", client.ip(), line.trim_end().len())?,
        }
    }
}

/// A client's association.
#[derive(Debug)]
pub struct Association {
    stream: BufReader<TcpStream>,
    /// The client's address and port.
    pub from: SocketAddr,
}

impl Association {
    /// Opens an association; the kernel chooses the source port where that of `from` is 0.
    pub fn open(client: &Namespace, from: SocketAddr, to: SocketAddr) -> Result<Self> {
        client.run(|| {
            let socket = socket(if to.is_ipv4() { Family::V4 } else { Family::V6 })?;
            socket.bind(&from.into()).with_context(|| format!("binding {from}"))?;
            // The limit applies to `connect`, too.
            socket.set_write_timeout(Some(scaled(PATIENCE)))?;
            socket.connect(&to.into()).with_context(|| format!("associating {from} with {to}"))?;
            let from = socket.local_addr()?.as_socket().context("no address")?;
            Ok(Self { stream: BufReader::new(stream(socket)?), from })
        })
    }

    /// Sends a line of `bytes` bytes and returns the answer: pod, client as the pod sees it,
    /// received bytes.
    pub fn ask(&mut self, bytes: usize) -> Result<String> {
        self.stream.get_ref().write_all(format!("{}\n", "?".repeat(bytes)).as_bytes())?;
        let mut line = String::new();
        let read = self.stream.read_line(&mut line).context("waiting for an answer")?;
        ensure!(read > 0, "the association has ended");
        Ok(line.trim_end().to_owned())
    }

    /// Sends `bytes` bytes (a multiple of 8) and receives as many, at the same time. Fails if one
    /// byte differs on either side.
    pub fn burst(&mut self, bytes: u64) -> Result<()> {
        transfer::burst(&mut self.stream, bytes)
    }

    /// Closes the association by a SHUTDOWN, and waits until the endpoint has closed it, too.
    pub fn shut_down(mut self) -> Result<()> {
        self.stream.get_ref().shutdown(Shutdown::Write)?;
        let mut line = String::new();
        match self.stream.read_line(&mut line) {
            Ok(0) => Ok(()),
            // The association is gone.
            Err(error) if error.kind() == ErrorKind::NotConnected => Ok(()),
            other => other.map(drop).context("after SHUTDOWN").and_then(|()| {
                ensure!(line.is_empty(), "{line:?} after SHUTDOWN");
                Ok(())
            }),
        }
    }

    /// Closes the association by an ABORT.
    pub fn abort(self) -> Result<()> {
        let socket = socket2::SockRef::from(self.stream.get_ref());
        Ok(socket.set_linger(Some(Duration::ZERO))?)
    }
}
