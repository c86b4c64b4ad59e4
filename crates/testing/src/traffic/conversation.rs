//! A connection that stays open, or a socket that keeps its port, to ask by again and again.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::time::Duration;

use anyhow::Result;

use crate::cluster::Protocol;
use crate::netns::Namespace;
use crate::pace::scaled;

const QUESTION: &[u8] = b"there?\n";

/// A conversation with one endpoint.
#[derive(Debug)]
pub enum Conversation {
    Tcp(BufReader<TcpStream>),
    Udp(UdpSocket),
}

impl Conversation {
    /// Opens one in a namespace; datagrams are not sent yet.
    ///
    /// # Errors
    /// The connection is not accepted within three seconds of a fast machine.
    pub fn open(namespace: &Namespace, protocol: Protocol, to: SocketAddr) -> Result<Self> {
        let limit = scaled(Duration::from_secs(3));
        namespace.run(|| {
            Ok(match protocol {
                Protocol::Tcp => {
                    let stream = TcpStream::connect_timeout(&to, limit)?;
                    stream.set_read_timeout(Some(limit))?;
                    Self::Tcp(BufReader::new(stream))
                }
                Protocol::Udp => {
                    let any: SocketAddr =
                        if to.is_ipv4() { ([0; 4], 0).into() } else { ([0u16; 8], 0).into() };
                    let socket = UdpSocket::bind(any)?;
                    socket.connect(to)?;
                    socket.set_read_timeout(Some(limit))?;
                    Self::Udp(socket)
                }
            })
        })
    }

    /// Whether a request is answered within three seconds of a fast machine.
    pub fn is_answered(&mut self) -> bool {
        match self {
            Self::Tcp(stream) => {
                let mut line = String::new();
                stream.get_mut().write_all(QUESTION).is_ok()
                    && stream.read_line(&mut line).is_ok_and(|read| read > 0)
            }
            Self::Udp(socket) => {
                let mut buffer = [0; 2048];
                socket.send(QUESTION).is_ok() && socket.recv(&mut buffer).is_ok()
            }
        }
    }
}
