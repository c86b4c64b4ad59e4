//! A process that makes socket calls on request, so that a test decides in which cgroup and network
//! namespace they are made.
//!
//! It reads one call from each line and answers with one line: `ok` and the result, or `error` and
//! the error number. Sockets are identified by numbers.

use std::io::{self, BufRead, Read, Write};
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::libc;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

/// The time limit of a call, longer than any successful one takes.
const PATIENCE: Duration = Duration::from_secs(2);

fn main() -> Result<()> {
    let mut sockets = Vec::new();
    for line in io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<_> = line.split(' ').collect();
        let answer = match call(&mut sockets, &words) {
            Ok(said) => format!("ok {said}"),
            Err(error) => match error.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error) {
                Some(number) => format!("error {number}"),
                // An invalid call, or the end of the input: the test fails with this text.
                None => format!("failed {error:#}"),
            },
        };
        println!("{answer}");
    }
    Ok(())
}

fn call(sockets: &mut Vec<Option<Socket>>, words: &[&str]) -> Result<String> {
    if let ["open", family, kind] = words {
        let domain = if *family == "4" { Domain::IPV4 } else { Domain::IPV6 };
        let (kind, protocol) = match *kind {
            "tcp" => (Type::STREAM, Protocol::TCP),
            "mptcp" => (Type::STREAM, Protocol::MPTCP),
            _ => (Type::DGRAM, Protocol::UDP),
        };
        let socket = Socket::new(domain, kind, Some(protocol))?;
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.set_write_timeout(Some(PATIENCE))?;
        sockets.push(Some(socket));
        return Ok((sockets.len() - 1).to_string());
    }
    let [verb, number, rest @ ..] = words else { bail!("no call: {words:?}") };
    let place = sockets.get_mut(number.parse::<usize>()?).context("no such socket")?;
    let socket = place.as_ref().context("closed already")?;
    let address = |text: &str| text.parse::<SocketAddr>().with_context(|| format!("no address: {text}"));
    Ok(match (*verb, rest) {
        ("bind", [to]) => socket.bind(&address(to)?.into()).map(|()| String::new())?,
        ("connect", [to]) => socket.connect(&address(to)?.into()).map(|()| String::new())?,
        ("begin", [to]) => {
            socket.set_nonblocking(true)?;
            socket.connect(&address(to)?.into()).map(|()| String::new())?
        }
        ("disconnect", []) => disconnect(socket).map(|()| String::new())?,
        ("send", [text]) => socket.send(text.as_bytes())?.to_string(),
        ("send", [text, to]) => socket.send_to(text.as_bytes(), &address(to)?.into())?.to_string(),
        ("line", [text]) => line(socket, text)?,
        ("receive", []) => {
            let mut bytes = [MaybeUninit::uninit(); 2048];
            let (length, from) = socket.recv_from(&mut bytes)?;
            // SAFETY: the kernel has written that many bytes.
            let text: Vec<u8> = bytes[..length].iter().map(|byte| unsafe { byte.assume_init() }).collect();
            format!("{} {}", from.as_socket().context("from nobody")?, String::from_utf8(text)?)
        }
        ("peer", []) => socket.peer_addr()?.as_socket().context("no address")?.to_string(),
        ("time", [calls, to]) => time(socket, calls.parse()?, address(to)?)?,
        ("connections", [count, to]) => connections(count.parse()?, address(to)?)?,
        ("churn", [sockets, to]) => churn(sockets.parse()?, address(to)?)?,
        ("scatter", [sockets, to]) => scatter(sockets.parse()?, address(to)?)?,
        ("close", []) => {
            *place = None;
            String::new()
        }
        _ => bail!("no call: {words:?}"),
    })
}

/// Dissolves the association by a connect() to AF_UNSPEC.
fn disconnect(socket: &Socket) -> io::Result<()> {
    let nobody = libc::sockaddr { sa_family: libc::AF_UNSPEC as libc::sa_family_t, sa_data: [0; 14] };
    // SAFETY: the address is as long as the given length.
    let done = unsafe {
        libc::connect(socket.as_raw_fd(), &raw const nobody, size_of_val(&nobody) as libc::socklen_t)
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Sends a line on a connection and returns the answer.
fn line(mut socket: &Socket, text: &str) -> io::Result<String> {
    socket.write_all(text.as_bytes())?;
    socket.write_all(b"\n")?;
    let mut said = Vec::new();
    let mut byte = [0];
    while byte != *b"\n" {
        socket.read_exact(&mut byte)?;
        said.extend(byte);
    }
    Ok(String::from_utf8_lossy(&said).trim_end().to_owned())
}

/// Returns the nanoseconds that one connect() of a UDP socket takes, on average.
fn time(socket: &Socket, calls: u32, to: SocketAddr) -> io::Result<String> {
    let to = to.into();
    let start = Instant::now();
    for _ in 0..calls {
        socket.connect(&to)?;
    }
    Ok((start.elapsed().as_nanos() / u128::from(calls)).to_string())
}

/// Makes connections by TCP, each ended by a reset, and returns the nanoseconds that one takes from
/// its socket to its end, on average.
fn connections(count: u32, to: SocketAddr) -> io::Result<String> {
    let to = SockAddr::from(to);
    let start = Instant::now();
    for _ in 0..count {
        let socket = Socket::new(to.domain(), Type::STREAM, None)?;
        socket.set_linger(Some(Duration::ZERO))?;
        socket.connect(&to)?;
    }
    Ok((start.elapsed().as_nanos() / u128::from(count)).to_string())
}

/// Makes, connects and closes UDP sockets.
fn churn(sockets: u32, to: SocketAddr) -> io::Result<String> {
    let to = SockAddr::from(to);
    for _ in 0..sockets {
        Socket::new(to.domain(), Type::DGRAM, None)?.connect(&to)?;
    }
    Ok(sockets.to_string())
}

/// Sends a datagram from each of many UDP sockets, none of them connected.
fn scatter(sockets: u32, to: SocketAddr) -> io::Result<String> {
    let to = SockAddr::from(to);
    for _ in 0..sockets {
        Socket::new(to.domain(), Type::DGRAM, None)?.send_to(b"one", &to)?;
    }
    Ok(sockets.to_string())
}
