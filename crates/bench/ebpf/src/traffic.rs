//! Map layouts of the generator and the sink of real packets: see `generator.rs` and `sink.rs`.

use traffic_policy_ebpf::abi::Port;

use super::{FRAME_LENGTH, FRAME_WORDS};

/// Number of turns of the generator after which receivers have theirs. It is less than the 256 of a
/// veth's receive ring, even when each packet is answered.
pub const BATCH: u32 = 64;
/// Binary logarithm of the number of consecutive ports of each client; clients have consecutive
/// addresses.
pub const PORTS_SHIFT: u32 = 13;
pub const FIRST_PORT: u16 = 20_000;
/// Offset of a UDP checksum in an IPv4 frame, and that of a TCP checksum.
pub const UDP_SUM: u32 = 40;
pub const TCP_SUM: u32 = 50;
/// Bytes behind the TCP header, also of a SYN-ACK.
pub const SEGMENT: u32 = FRAME_LENGTH as u32 - 54;
/// Sequence number of a client's SYN; [`ENDPOINT_SEQUENCE`] is that of the SYN-ACK that answers it.
pub const CLIENT_SEQUENCE: u32 = 1_000;
pub const ENDPOINT_SEQUENCE: u32 = 7_000;

/// Traffic of the generator: one packet of each flow, then from the first flow again.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Generator {
    /// A packet in which the client's address and port are 0, and whose checksums are not used.
    pub template: [u64; FRAME_WORDS],
    /// Sum of the words of the IP header; `l4_sum` is that of the segment or datagram with its
    /// pseudo header.
    pub ip_sum: u64,
    pub l4_sum: u64,
    /// Address of the first client, as a number.
    pub client: u32,
    /// Index of the next flow.
    pub next: u32,
    pub count: u32,
    /// Packets that remain in the burst.
    pub burst: u32,
    /// Packets of a whole burst: at most [`BATCH`].
    pub burst_length: u32,
    /// Offset of the checksum of TCP or UDP in the frame.
    pub sum_at: u32,
    /// Not 0: the packets are those of an endpoint to its clients, which are their destinations.
    pub to_clients: u64,
    /// Nanoseconds from one burst to the next; 0 means without a pause.
    pub interval: u64,
    /// Time at which the next burst is due.
    pub due: u64,
    /// Time at which the last burst began, if it is not added to `busy` yet.
    pub since: u64,
    /// Nanoseconds from the beginning of each burst to the beginning of the batch after it, summed
    /// up.
    pub busy: u64,
    pub sent: u64,
    /// Number of turns so far; `turns` is their total.
    pub turn: u64,
    pub turns: u64,
    /// Time of the first call, CLOCK_MONOTONIC; `ended` is that of the last. Setting up a run and
    /// taking it down takes tens of milliseconds.
    pub started: u64,
    pub ended: u64,
}

/// Packets that the sink counts. Addresses are words in network byte order, because they are
/// masked.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Sink {
    pub flags: u32,
    pub clients: u32,
    pub client_mask: u32,
    pub endpoints: u32,
    pub endpoint_mask: u32,
    /// Source address that endpoints expect, as far as the mask's bits go.
    pub source: u32,
    pub source_mask: u32,
    /// Frontend address to which the clients send.
    pub frontend: u32,
    pub frontend_port: Port,
    pub target_port: Port,
    /// Device by which a client confirms a connection, and the MAC address there; 0: that by which
    /// the answer came.
    pub device: u32,
    pub mac: u32,
    pub mac_tail: u32,
}

/// Flags of [`Sink`].
pub mod sink {
    /// An endpoint answers SYN by SYN-ACK.
    pub const ANSWER: u32 = 1;
    /// A client answers SYN-ACK by ACK.
    pub const CONFIRM: u32 = 2;
    /// The sink verifies both checksums of each packet.
    pub const VERIFY: u32 = 4;
    /// An endpoint answers each request.
    pub const ECHO: u32 = 8;
}

/// Index of a counter of the sink.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrived {
    /// A SYN at an endpoint.
    Opening,
    /// A SYN-ACK at a client, from the frontend it had contacted.
    Answer,
    /// Another packet at an endpoint.
    Request,
    /// Another packet at a client, from the frontend it had contacted.
    Reply,
    /// A packet to the frontend that was sent back unchanged.
    Untranslated,
    /// A packet from the wrong address or port, to the wrong port, or with a wrong checksum.
    Wrong,
}

impl Arrived {
    pub const COUNT: usize = 6;
}

#[cfg(all(feature = "user", not(target_arch = "bpf")))]
mod pod {
    // SAFETY: repr(C), made of integers, valid for any bytes, and 'static.
    unsafe impl aya::Pod for super::Generator {}
    // SAFETY: repr(C), made of integers, valid for any bytes, and 'static.
    unsafe impl aya::Pod for super::Sink {}
}
