//! One HTTP request, made in the network namespace that this program was started in.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context, Result};

/// The time limit: longer than the retransmission of a lost SYN and the answer of an emulated
/// machine take.
const LIMIT: Duration = Duration::from_secs(3);

/// A response: status and body.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) body: String,
}

impl Answer {
    /// Parses an HTTP/1 response; servers of the tests answer with a bare line, which counts as
    /// 200.
    pub(super) fn parse(text: &str) -> Result<Self> {
        if !text.starts_with("HTTP/") {
            return Ok(Self { status: 200, body: text.to_owned() });
        }
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or((text, ""));
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
        Ok(Self { status: status.context("a response without a status")?, body: body.to_owned() })
    }
}

/// Prints the answer of the server at `ADDRESS:PORT/PATH`.
pub(super) fn run(url: &str) -> Result<ExitCode> {
    let (host, path) = url.split_once('/').context("no path")?;
    let address: SocketAddr = host.parse().with_context(|| format!("{host} is no address with a port"))?;
    let mut stream = TcpStream::connect_timeout(&address, LIMIT)?;
    stream.set_read_timeout(Some(LIMIT))?;
    write!(stream, "GET /{path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    print!("{text}");
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_and_body() {
        let answer = Answer::parse("HTTP/1.1 503 Service Unavailable\r\nA: b\r\n\r\n{}").unwrap();
        assert_eq!(answer, Answer { status: 503, body: "{}".to_owned() });
        assert!(Answer::parse("HTTP/1.1\r\n\r\n").is_err());
    }
}
