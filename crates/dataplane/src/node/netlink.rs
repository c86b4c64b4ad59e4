//! Netlink families that rtnetlink does not support (sock_diag, nf_tables, generic netlink): one
//! request at a time, blocking, in the network namespace of the thread that opened the connection.

use std::{io, str};

use netlink_packet_core::{NlaBuffer, NlasIterator};
/// The numbers of the protocols that a [`Connection`] supports.
pub use netlink_sys::protocols;
use netlink_sys::{Socket, SocketAddr};
use nix::sys::{
    socket::{setsockopt, sockopt::ReceiveTimeout},
    time::{TimeVal, TimeValLike},
};

/// A socket of one netlink protocol.
#[derive(Debug)]
pub struct Connection {
    socket: Socket,
    sequence: u32,
}

/// A message: the type in its header, and all bytes after the header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    pub kind: u16,
    pub payload: Vec<u8>,
}

// linux/netlink.h
const HEADER: usize = 16;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLM_F_REQUEST: u16 = 0x1;
const NLM_F_ACK: u16 = 0x4;
const NLM_F_DUMP_INTR: u16 = 0x10;
const NLM_F_DUMP: u16 = 0x300;
// linux/netfilter/nfnetlink.h
const NFNL_MSG_BATCH_BEGIN: u16 = 16;
const NFNL_MSG_BATCH_END: u16 = 17;

/// The time to wait for the next message of the kernel's reply, in seconds.
const ANSWER: i64 = 10;
/// The number of times that a dump is attempted if its list changes in the meantime.
const ATTEMPTS: u32 = 8;

impl Connection {
    /// Opens a connection; `protocol` is one of [`netlink_sys::protocols`].
    ///
    /// # Errors
    /// The kernel does not support the protocol.
    pub fn open(protocol: isize) -> io::Result<Self> {
        let mut socket = Socket::new(protocol)?;
        setsockopt(&socket, ReceiveTimeout, &TimeVal::seconds(ANSWER))?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        Ok(Self { socket, sequence: 0 })
    }

    /// Makes the kernel heed all that is in requests for rtnetlink, such as another network
    /// namespace in that for addresses.
    pub fn check_requests_strictly(&self) -> io::Result<()> {
        self.socket.set_netlink_get_strict_chk(true)
    }

    /// Returns all messages of a dump.
    ///
    /// # Errors
    /// The kernel's error; [`io::ErrorKind::Interrupted`] if the list kept changing.
    pub fn dump(&mut self, kind: u16, payload: &[u8]) -> io::Result<Vec<Message>> {
        for _ in 0..ATTEMPTS {
            self.send(kind, NLM_F_REQUEST | NLM_F_DUMP, payload)?;
            if let (messages, false) = self.receive()? {
                return Ok(messages);
            }
        }
        Err(io::Error::new(io::ErrorKind::Interrupted, "the list changed whenever it was read"))
    }

    /// Dumps like [`Self::dump`], but calls `visit` with the payload of each message as it arrives.
    /// A list that changes in the meantime is not read again.
    pub fn dump_each(&mut self, kind: u16, payload: &[u8], visit: impl FnMut(&[u8])) -> io::Result<()> {
        self.send(kind, NLM_F_REQUEST | NLM_F_DUMP, payload)?;
        let mut visit = visit;
        self.receive_each(|message| visit(message.payload)).map(drop)
    }

    /// Sends requests of nfnetlink that are executed together or not at all: type, flags in
    /// addition to those of a request, payload.
    ///
    /// # Errors
    /// The kernel's error for one of them; then none was executed.
    pub fn transaction(&mut self, subsystem: u16, requests: &[(u16, u16, Vec<u8>)]) -> io::Result<()> {
        // The begin and end messages name the subsystem, in network byte order.
        let bounds = [[0, 0], subsystem.to_be_bytes()].concat();
        let first = self.sequence + 1;
        let mut batch = message(NFNL_MSG_BATCH_BEGIN, NLM_F_REQUEST, first, &bounds);
        for (place, (kind, flags, payload)) in requests.iter().enumerate() {
            let sequence = first + 1 + place as u32;
            batch.extend(message(*kind, NLM_F_REQUEST | NLM_F_ACK | flags, sequence, payload));
        }
        let last = first + requests.len() as u32;
        batch.extend(message(NFNL_MSG_BATCH_END, NLM_F_REQUEST, last + 1, &bounds));
        self.socket.send(&batch, 0)?;
        for sequence in first + 1..=last {
            self.sequence = sequence;
            self.receive_each(|_| ())?;
        }
        self.sequence = last + 1;
        Ok(())
    }

    /// Sends one request, and returns the messages that the kernel sends before its
    /// acknowledgement. `flags` are added to those of a request.
    pub fn request(&mut self, kind: u16, flags: u16, payload: &[u8]) -> io::Result<Vec<Message>> {
        self.send(kind, NLM_F_REQUEST | NLM_F_ACK | flags, payload)?;
        Ok(self.receive()?.0)
    }

    fn send(&mut self, kind: u16, flags: u16, payload: &[u8]) -> io::Result<()> {
        self.sequence += 1;
        self.socket.send(&message(kind, flags, self.sequence, payload), 0).map(drop)
    }

    /// Returns the messages up to the end of the reply, and whether the list changed while they
    /// were read.
    fn receive(&self) -> io::Result<(Vec<Message>, bool)> {
        let mut messages = Vec::new();
        let interrupted = self.receive_each(|message| {
            messages.push(Message { kind: message.kind, payload: message.payload.to_vec() });
        })?;
        Ok((messages, interrupted))
    }

    /// Calls `visit` with each message up to the end of the reply; returns whether the list changed
    /// while it was read.
    fn receive_each(&self, mut visit: impl FnMut(&Received<'_>)) -> io::Result<bool> {
        let mut interrupted = false;
        loop {
            let (datagram, _) = self.socket.recv_from_full()?;
            let mut rest = datagram.as_slice();
            while let Some((message, after)) = split(rest) {
                rest = after;
                if message.sequence != self.sequence {
                    // The message is left over from a reply that was abandoned.
                    continue;
                }
                interrupted |= message.flags & NLM_F_DUMP_INTR != 0;
                match message.kind {
                    NLMSG_ERROR | NLMSG_DONE => {
                        // The end of a dump carries an error, too: the kernel reports a missing
                        // handler in this way.
                        let code = message.payload.first_chunk().map_or(0, |code| i32::from_ne_bytes(*code));
                        if code < 0 {
                            return Err(io::Error::from_raw_os_error(-code));
                        }
                        return Ok(interrupted);
                    }
                    _ => visit(&message),
                }
            }
        }
    }
}

struct Received<'a> {
    kind: u16,
    flags: u16,
    sequence: u32,
    payload: &'a [u8],
}

/// Returns a message as it is sent, with `flags` as in linux/netlink.h. Port 0 stands for the
/// kernel.
fn message(kind: u16, flags: u16, sequence: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER + payload.len());
    bytes.extend(((HEADER + payload.len()) as u32).to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(flags.to_ne_bytes());
    bytes.extend(sequence.to_ne_bytes());
    bytes.extend(0u32.to_ne_bytes());
    bytes.extend(payload);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// Returns the first message of a datagram, and the bytes after it.
fn split(datagram: &[u8]) -> Option<(Received<'_>, &[u8])> {
    let length = u32::from_ne_bytes(*datagram.first_chunk()?) as usize;
    let payload = datagram.get(HEADER..length)?;
    let number = |at: usize| datagram.get(at..).and_then(|bytes| bytes.first_chunk::<2>());
    let header = Received {
        kind: u16::from_ne_bytes(*number(4)?),
        flags: u16::from_ne_bytes(*number(6)?),
        sequence: u32::from_ne_bytes(*datagram.get(8..)?.first_chunk()?),
        payload,
    };
    Some((header, datagram.get(length.next_multiple_of(4)..).unwrap_or_default()))
}

/// Returns an attribute as the kernel reads it: type, and value in the byte order that the family
/// uses.
pub fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = (4 + value.len()) as u16;
    let mut bytes = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// Returns the attributes in `bytes`, up to the first one that is truncated.
pub fn attributes(bytes: &[u8]) -> impl Iterator<Item = NlaBuffer<&[u8]>> {
    NlasIterator::new(bytes).map_while(Result::ok)
}

/// Returns the value of the first attribute of a type.
pub fn find(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    attributes(bytes)
        .find(|attribute| attribute.kind() == kind)
        .and_then(|attribute| attribute.into_inner().get(4..usize::from(attribute.length())))
}

/// Returns a value that is text, without its terminating zero.
pub fn text(value: &[u8]) -> String {
    let value = value.strip_suffix(&[0]).unwrap_or(value);
    str::from_utf8(value).unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_datagram_is_taken_apart_and_never_read_past_its_end() {
        let datagram = [message(7, 0x10, 3, b"abcde"), message(NLMSG_DONE, 0, 3, &[0; 4])].concat();
        let (first, rest) = split(&datagram).unwrap();
        assert_eq!((first.kind, first.flags, first.sequence, first.payload), (7, 0x10, 3, &b"abcde"[..]));
        let (second, rest) = split(rest).unwrap();
        assert_eq!((second.kind, second.payload), (NLMSG_DONE, &[0; 4][..]));
        assert!(rest.is_empty() && split(rest).is_none());
        for end in 0..HEADER + 5 {
            assert!(split(&datagram[..end]).is_none(), "cut at {end}");
        }
        // The length is shorter than the header.
        assert!(split(&[8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]).is_none());
    }

    #[test]
    fn attributes_are_found_by_type() {
        let bytes = [attribute(1, b"eth0\0"), attribute(2 | 0x8000, &attribute(3, &[9]))].concat();
        assert_eq!(find(&bytes, 1).map(text), Some("eth0".to_owned()));
        assert_eq!(find(&bytes, 2).and_then(|nested| find(nested, 3)), Some(&[9][..]));
        assert_eq!(find(&bytes, 3), None);
        for end in 0..bytes.len() {
            // Wherever the bytes are cut off, values lie within them.
            assert!(attributes(&bytes[..end]).all(|attribute| attribute.value().len() <= end));
        }
    }
}
