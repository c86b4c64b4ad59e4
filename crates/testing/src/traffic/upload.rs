//! Bulk data in one direction, from a client to a pod, whose content is checked at its end. It goes
//! on until it is told to stop, so that it is under way whenever a test does something to it; both
//! ends can be asked how far they are.

use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use crc32fast::Hasher;

use super::retransmissions;
use super::transfer::{CHUNK, content};
use crate::netns::Namespace;
use crate::pace::{poll, scaled};

/// The time limit for the connection.
const PATIENCE: Duration = Duration::from_secs(10);
const SEED: u64 = 0x2545_f491_4f6c_dd1d;
/// More than any test sends.
const ENDLESS: u64 = 1 << 62;

/// An upload that is under way.
#[derive(Debug)]
pub struct Upload {
    client: TcpStream,
    server: TcpStream,
    stop: Arc<AtomicBool>,
    sender: JoinHandle<io::Result<Part>>,
    receiver: JoinHandle<io::Result<Part>>,
}

/// The number of bytes that one end has sent or received, and the hash of their content.
type Part = (u64, u32);

impl Upload {
    /// Connects a client in `from` to `target`, which leads to `port` in `to`, and begins to send.
    pub fn start(from: &Namespace, target: SocketAddr, to: &Namespace, port: u16) -> Result<Self> {
        let any = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), port);
        let listener = to.run(|| TcpListener::bind(any)).with_context(|| format!("listening at {port}"))?;
        let client = from.run(|| TcpStream::connect_timeout(&target, scaled(PATIENCE)));
        let client = client.with_context(|| format!("connecting to {target}"))?;
        let (server, _) = listener.accept()?;
        let stop = Arc::new(AtomicBool::new(false));
        let (sends, receives, until) = (client.try_clone()?, server.try_clone()?, stop.clone());
        Ok(Self {
            client,
            server,
            stop,
            sender: thread::spawn(move || send(sends, &until)),
            receiver: thread::spawn(move || receive(receives)),
        })
    }

    /// The bytes that have arrived.
    pub fn arrived(&self) -> Result<u64> {
        Ok(retransmissions::state(&self.server)?.received)
    }

    /// The client's congestion window: the bytes that it sends before an acknowledgement has to
    /// come.
    pub fn window(&self) -> Result<u64> {
        Ok(retransmissions::state(&self.client)?.window)
    }

    /// The bytes that have arrived and whose acknowledgement the client does not have.
    pub fn unknown_to_client(&self) -> Result<u64> {
        let known = retransmissions::state(&self.client)?.acknowledged;
        Ok(self.arrived()?.saturating_sub(known))
    }

    /// Whether the client has waited for an acknowledgement in vain, so that it sends nothing but
    /// the first segment without one, again and again (RFC 6298 section 5).
    pub fn is_unanswered(&self) -> Result<bool> {
        Ok(retransmissions::state(&self.client)?.is_unanswered)
    }

    /// Ends the upload, and returns the number of bytes that it had. Fails if what is under way has
    /// not arrived within this time, which is [`scaled`], or if one byte differs.
    pub fn finish(self, limit: Duration) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        let arrived = poll(limit, || self.receiver.is_finished().then_some(())).is_some();
        let progress = retransmissions::progress(&self.client)?;
        for end in [&self.client, &self.server] {
            // One that is closed already is an error.
            end.shutdown(Shutdown::Both).ok();
        }
        let sent = self.sender.join().map_err(|_| anyhow!("the sender panicked"))?;
        let received = self.receiver.join().map_err(|_| anyhow!("the receiver panicked"))?;
        ensure!(arrived, "still under way after {limit:?}: {progress}");
        let (sent, received) = (sent.context("sending")?, received.context("receiving")?);
        ensure!(received == sent, "{received:?} arrived of {sent:?} (bytes and their hash): {progress}");
        Ok(received.0)
    }
}

/// Sends until `stop` is set, then closes this direction.
fn send(mut stream: TcpStream, stop: &AtomicBool) -> io::Result<Part> {
    let (mut bytes, mut hash) = (0, Hasher::new());
    for chunk in content(SEED, ENDLESS) {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        stream.write_all(&chunk)?;
        bytes += chunk.len() as u64;
        hash.update(&chunk);
    }
    stream.shutdown(Shutdown::Write)?;
    Ok((bytes, hash.finalize()))
}

/// Receives until the other side has closed its direction.
fn receive(mut stream: TcpStream) -> io::Result<Part> {
    let (mut bytes, mut hash) = (0, Hasher::new());
    let mut chunk = vec![0; CHUNK];
    loop {
        let read = stream.read(&mut chunk)?;
        if read == 0 {
            return Ok((bytes, hash.finalize()));
        }
        hash.update(&chunk[..read]);
        bytes += read as u64;
    }
}
