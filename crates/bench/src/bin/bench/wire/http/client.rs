//! The smallest HTTP client: sends a request, waits for the whole answer, and repeats.

use std::{
    cell::Cell,
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use socket2::{Domain, Socket, Type};

use super::{super::fixture::CLIENTS, server::BODY};

/// Time limit, longer than any answer takes.
const PATIENCE: Duration = Duration::from_secs(3);

pub(in super::super) struct Client {
    server: SocketAddr,
    request: String,
    /// Number of the next connection.
    next: Cell<usize>,
}

impl Client {
    pub(in super::super) fn new(server: SocketAddr) -> Self {
        let request = format!("GET / HTTP/1.1\r\nHost: {server}\r\nUser-Agent: bench\r\nAccept: */*\r\n\r\n");
        Self { server, request, next: Cell::new(0) }
    }

    /// Returns the durations of answers on a single connection.
    pub(in super::super) fn keep_asking(&self, window: Duration) -> Result<Vec<Duration>> {
        let mut stream = self.connect()?;
        repeat(window, || self.ask(&mut stream))
    }

    /// Asks on several connections at once, again when all of them have answered, and returns the
    /// number of answers.
    pub(in super::super) fn keep_asking_on(&self, connections: usize, window: Duration) -> Result<usize> {
        let mut streams = (0..connections).map(|_| self.connect()).collect::<Result<Vec<_>>>()?;
        let rounds = repeat(window, || {
            streams.iter_mut().try_for_each(|stream| self.send(stream))?;
            streams.iter_mut().try_for_each(receive)
        })?;
        Ok(rounds.len() * connections)
    }

    /// Returns the durations of answers, each on a connection of its own, including the time to
    /// open it.
    pub(super) fn keep_connecting(&self, window: Duration) -> Result<Vec<Duration>> {
        repeat(window, || self.ask(&mut self.connect()?))
    }

    fn connect(&self) -> Result<TcpStream> {
        let number = self.next.replace(self.next.get() + 1);
        let own: Ipv4Addr = CLIENTS[number % CLIENTS.len()];
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        // Closing resets the connection: neither end waits for late segments, so ports do not run
        // out after some ten thousand connections.
        socket.set_linger(Some(Duration::ZERO))?;
        socket.set_tcp_nodelay(true)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.bind(&SocketAddr::from((own, 0)).into())?;
        socket
            .connect_timeout(&self.server.into(), PATIENCE)
            .with_context(|| format!("connecting to {}", self.server))?;
        Ok(socket.into())
    }

    fn ask(&self, stream: &mut TcpStream) -> Result<()> {
        self.send(stream)?;
        receive(stream)
    }

    fn send(&self, stream: &mut TcpStream) -> Result<()> {
        Ok(stream.write_all(self.request.as_bytes())?)
    }
}

/// Reads an answer.
fn receive(stream: &mut TcpStream) -> Result<()> {
    let mut answer = [0; 1024];
    let mut length = 0;
    loop {
        match stream.read(&mut answer[length..]).context("reading an answer")? {
            0 => bail!("the connection ended within an answer"),
            read => length += read,
        }
        let Some(head) = answer[..length].windows(4).position(|end| end == b"\r\n\r\n") else { continue };
        ensure!(answer.starts_with(b"HTTP/1.1 200 "), "another answer than 200");
        if length == head + 4 + BODY.len() {
            return Ok(());
        }
    }
}

fn repeat(window: Duration, mut what: impl FnMut() -> Result<()>) -> Result<Vec<Duration>> {
    let started = Instant::now();
    let mut times = Vec::new();
    let mut before = started;
    while before - started < window {
        what()?;
        let now = Instant::now();
        times.push(now - before);
        before = now;
    }
    Ok(times)
}
