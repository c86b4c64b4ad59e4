//! A single request and its outcome: the difference between an answer, a refusal and silence is
//! what traffic policies are about.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use socket2::{Domain, Socket, Type};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpSocket, UdpSocket};
use tokio::time::timeout;

use super::answer::Answer;
use crate::netns::Namespace;
use crate::pace::scaled;

/// The outcome of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Answered(Answer),
    /// A reset or an ICMP error, and the time until it arrived.
    Refused(Duration),
    /// No response within the limit.
    Silent,
}

/// A request to be sent.
#[derive(Clone, Copy, Debug)]
pub struct Probe {
    kind: Kind,
    target: SocketAddr,
    source_port: u16,
    limit: Duration,
    /// The number of bytes of the request.
    length: usize,
}

/// The request, unless its length is chosen.
const QUESTION: &[u8] = b"hello\n";

#[derive(Clone, Copy, Debug)]
enum Kind {
    Tcp,
    Udp,
}

impl Probe {
    pub fn tcp(target: SocketAddr) -> Self {
        Self {
            kind: Kind::Tcp,
            target,
            source_port: 0,
            limit: Duration::from_millis(800),
            length: QUESTION.len(),
        }
    }

    pub fn udp(target: SocketAddr) -> Self {
        Self { kind: Kind::Udp, ..Self::tcp(target) }
    }

    /// Sets the source port; by default, it is any free one.
    pub fn source_port(mut self, port: u16) -> Self {
        self.source_port = port;
        self
    }

    /// Sets the length of the request in bytes; over UDP it is one datagram.
    pub fn length(mut self, length: usize) -> Self {
        self.length = length;
        self
    }

    /// Sets the time limit for an answer. The default is less than a second, so that no SYN is
    /// retransmitted.
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Sends the request from a namespace. Fails only if it could not be sent at all.
    pub fn from(self, namespace: &Namespace) -> Result<Outcome> {
        let asked = namespace.block_on(async || self.ask().await);
        asked.with_context(|| format!("asking {} from {}", self.target, namespace.name()))
    }

    /// Sends a request that must be answered, if late on a busy machine.
    pub fn answer(self, namespace: &Namespace) -> Result<Answer> {
        let limit = self.limit.max(scaled(Duration::from_secs(3)));
        let outcome = self.limit(limit).from(namespace)?;
        outcome.answer().with_context(|| format!("asking {} from {}", self.target, namespace.name()))
    }

    async fn ask(self) -> Result<Outcome> {
        let start = Instant::now();
        let line = match self.kind {
            Kind::Tcp => {
                timeout(self.limit, exchange(self.socket(Type::STREAM)?, self.target, &self.question())).await
            }
            Kind::Udp => {
                timeout(self.limit, datagram(self.socket(Type::DGRAM)?, self.target, &self.question())).await
            }
        };
        match line {
            Err(_) => Ok(Outcome::Silent),
            Ok(Ok(line)) => Ok(Outcome::Answered(Answer::parse(&line)?)),
            Ok(Err(error)) => match error.kind() {
                ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset => {
                    Ok(Outcome::Refused(start.elapsed()))
                }
                _ => Err(error.into()),
            },
        }
    }

    fn question(&self) -> Vec<u8> {
        let mut question = QUESTION.repeat(self.length.div_ceil(QUESTION.len()));
        question.truncate(self.length);
        question
    }

    fn socket(&self, kind: Type) -> Result<Socket> {
        let any =
            if self.target.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let socket = Socket::new(Domain::for_address(self.target), kind, None)?;
        socket.set_nonblocking(true)?;
        // The port may have a connection of another probe in TIME_WAIT.
        socket.set_reuse_address(true)?;
        socket.bind(&SocketAddr::new(any, self.source_port).into())?;
        Ok(socket)
    }
}

impl Outcome {
    /// Returns the answer; any other outcome is an error.
    pub fn answer(self) -> Result<Answer> {
        match self {
            Self::Answered(answer) => Ok(answer),
            other => anyhow::bail!("no answer but {other:?}"),
        }
    }

    /// Whether the request was refused at once: not after a retransmission of the SYN, which takes
    /// a second.
    pub fn is_refused_at_once(&self) -> bool {
        matches!(self, Self::Refused(took) if *took < Duration::from_secs(1))
    }
}

async fn exchange(socket: Socket, target: SocketAddr, question: &[u8]) -> std::io::Result<String> {
    let stream = TcpSocket::from_std_stream(socket.into()).connect(target).await?;
    let mut stream = BufReader::new(stream);
    stream.write_all(question).await?;
    let mut line = String::new();
    stream.read_line(&mut line).await?;
    Ok(line)
}

async fn datagram(socket: Socket, target: SocketAddr, question: &[u8]) -> std::io::Result<String> {
    let socket = UdpSocket::from_std(socket.into())?;
    socket.connect(target).await?;
    socket.send(question).await?;
    let mut buffer = [0; 2048];
    let length = socket.recv(&mut buffer).await?;
    Ok(String::from_utf8_lossy(&buffer[..length]).into_owned())
}

/// Sends the request `times` times and fails unless each was answered.
pub fn answers(namespace: &Namespace, probe: Probe, times: usize) -> Result<Vec<Answer>> {
    let answers: Result<Vec<_>> = (0..times).map(|_| probe.answer(namespace)).collect();
    let answers = answers?;
    ensure!(!answers.is_empty(), "asked {times} times");
    Ok(answers)
}
