//! Layouts of the maps.
//!
//! Words taken from packets stay as they lie in memory (network byte order, loaded natively): the packet path compares
//! and stores them and never needs their numeric value. Each type is free of implicit padding where its bytes are
//! compared. A change of any layout raises [`ABI_VERSION`], which is part of the pin path.

mod affinity;
mod agent;
mod event;
mod flow_key;
mod fragment;
mod frontends;
mod hop;
#[cfg(all(feature = "user", not(target_arch = "bpf")))]
mod pod;
mod scratch;
mod service;
mod slot_route;
mod socket;
mod sweep;
mod trace;

use core::mem::{align_of, offset_of, size_of};

pub use self::{
    affinity::{Affinity, AffinityKey, client},
    agent::Agent,
    event::{Event, EventBucket},
    flow_key::{FlowKey, Fold},
    fragment::{Fragment, FragmentKey, REASSEMBLY},
    frontends::{
        Cidr, CidrQuery, Frontend, FrontendKey, Range, SourceQuery, SourceRange, frontend, frontend_kind,
        scope,
    },
    hop::{Device, HOP_XDP, HOPS, HOPS_PER_GENERATION, Hop, HopKey},
    scratch::{AffinityLookup, PortSearch, Scratch, Walked},
    service::{NAME_LENGTH, NO_SERVICE, ServiceCount, ServiceCountKey, ServiceInfo, policy},
    slot_route::{HOP_LOCAL, SlotRoute},
    socket::{Node, Socket, SocketKey},
    sweep::{Sweep, mark},
    trace::{STEPS, SocketQuestion, Step, Trace, list, step},
};

/// Version of all layouts below.
pub const ABI_VERSION: u32 = 2;

/// An address as it lies in a packet.
pub trait Address: Fold + Copy + PartialEq + Default + 'static {
    /// Sum of its 16-bit words, not folded.
    fn sum(self) -> u64;
    /// Its first eight bytes and its last eight, zero filled: the form of [`HopKey`].
    fn wide(self) -> [u64; 2];
    /// Both words mixed into one word.
    fn mixed(self) -> u64;
}

/// An IPv4 address in memory order.
pub type Address4 = u32;
/// An IPv6 address in memory order.
pub type Address6 = [u64; 2];

impl Address for Address4 {
    #[inline(always)]
    fn sum(self) -> u64 {
        (self & 0xffff) as u64 + (self >> 16) as u64
    }
    #[inline(always)]
    fn wide(self) -> [u64; 2] {
        [self as u64, 0]
    }
    #[inline(always)]
    fn mixed(self) -> u64 {
        self as u64
    }
}

impl Address for Address6 {
    #[inline(always)]
    fn sum(self) -> u64 {
        let [a, b] = self;
        (a & 0xffff_ffff) + (a >> 32) + (b & 0xffff_ffff) + (b >> 32)
    }
    #[inline(always)]
    fn wide(self) -> [u64; 2] {
        self
    }
    #[inline(always)]
    fn mixed(self) -> u64 {
        self[0] ^ self[1].rotate_left(29)
    }
}

/// Source and destination port, two 16-bit words in memory order, as one load takes them from a packet.
#[inline(always)]
pub const fn ports(source: u16, destination: u16) -> u32 {
    u32::from_ne_bytes({
        let (s, d) = (source.to_ne_bytes(), destination.to_ne_bytes());
        [s[0], s[1], d[0], d[1]]
    })
}

/// Source port of a pair of ports, in memory order.
#[inline(always)]
pub const fn source_port(ports: u32) -> u16 {
    let b = ports.to_ne_bytes();
    u16::from_ne_bytes([b[0], b[1]])
}

/// Destination port of a pair of ports, in memory order.
#[inline(always)]
pub const fn destination_port(ports: u32) -> u16 {
    let b = ports.to_ne_bytes();
    u16::from_ne_bytes([b[2], b[3]])
}

pub const PROTOCOL_TCP: u32 = 6;
pub const PROTOCOL_UDP: u32 = 17;

/// The packet's own addresses and ports: what finds its flow, as a [`FlowKey`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Tuple<A> {
    pub source: A,
    pub destination: A,
    /// See [`ports`].
    pub ports: u32,
    /// IP protocol number.
    pub protocol: u32,
}

impl<A: Address> Tuple<A> {
    /// The tuple of a packet in the opposite direction.
    #[inline(always)]
    #[must_use]
    pub fn reversed(&self) -> Self {
        Self {
            source: self.destination,
            destination: self.source,
            ports: self.ports.rotate_left(16),
            protocol: self.protocol,
        }
    }
}

/// What becomes of a packet of a flow.
pub mod kind {
    /// Request entry, endpoint on another node: both addresses rewritten, sent to the next hop.
    pub const FORWARD: u8 = 1;
    /// Reply entry of [`FORWARD`].
    pub const REPLY: u8 = 2;
    /// Request entry, endpoint on this node: destination rewritten, handed to the stack.
    pub const DELIVER: u8 = 3;
    /// Reply entry of [`DELIVER`], seen at TC egress.
    pub const REPLY_LOCAL: u8 = 4;
}

/// A flow entry, of requests or of replies: all that an established packet needs.
///
/// IPv4: 48 bytes of the kernel's element + 16 of key + 64 = two cache lines.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Flow<A: Address> {
    /// What the key does not tell of the packets that it matches.
    pub kept: A::Kept,
    /// Addresses and ports that the packet gets.
    pub source: A,
    pub destination: A,
    pub ports: u32,
    /// Difference of the one's complement sums of the addresses, and of the ports: [`crate::checksum`].
    pub address_delta: u16,
    pub port_delta: u16,
    /// Index into `HOPS`, valid while `epoch` is the current route epoch.
    pub hop: u16,
    /// Of `hop`: one aligned word with it, which is read and written as one.
    pub epoch: u16,
    /// See [`kind`].
    pub kind: u8,
    /// See [`crate::tcp`].
    pub state: u8,
    pub reserved: u16,
    /// Time of the last packet: low half of jiffies.
    pub last: u32,
    /// Index of the Service port.
    pub service: u32,
    pub packets: u64,
    /// Bytes of IP packets.
    pub bytes: u64,
    /// Reply entry of TCP: the acknowledgement number that confirms the endpoint's SYN-ACK, in memory order.
    pub confirming_ack: u32,
    /// Reply entry: the device by which the request came, and the MAC address that sent it. Used only if there is no
    /// route to the client.
    pub ifindex: u32,
    pub mac: [u8; 6],
    pub reserved2: u16,
}

impl<A: Address> Flow<A> {
    /// The tuple of the packets that this entry's packets become.
    #[inline(always)]
    pub fn translated(&self, protocol: u32) -> Tuple<A> {
        Tuple { source: self.source, destination: self.destination, ports: self.ports, protocol }
    }
}

/// An endpoint of this node, by its `nodeName` or because the address is the node's own: delivered here whatever the routes
/// say.
pub const SLOT_LOCAL: u16 = 1;

/// An endpoint, by value.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Slot<A> {
    pub address: A,
    /// Memory order.
    pub port: u16,
    /// [`SLOT_LOCAL`].
    pub flags: u16,
    pub zero: u32,
}

/// Words that the agent writes and the packet path reads: one cache line, not written per packet.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct State {
    /// Route epoch in the lower half (never 0), hop generation (0 or 1) in the upper. Raised when a stored route may be wrong.
    pub route: u32,
    /// Raised when a stored MAC may be wrong.
    pub hop_epoch: u32,
    /// Jiffies after which a hop is resolved again.
    pub hop_max_age: u32,
    /// Number of ports in `POOL`.
    pub pool_len: u32,
    /// New flows are put in `PENDING` while this many in the main table are not confirmed.
    pub unconfirmed_limit: [u32; 2],
    /// Seed of the flow hash.
    pub seed: u64,
    /// [`Usage::snat_created`] at the start of the last sweep that found no flow with SNAT.
    pub snat_swept: u64,
    /// [`Usage::pending_created`] at the start of the last sweep that found `PENDING` empty.
    pub pending_swept: u64,
    /// Answers that one CPU may make per jiffy, on average.
    pub answers_per_jiffy: u32,
    /// Fingerprint of the routes and rules under which the epoch was raised last, so that an agent that takes over can
    /// tell whether they changed while nobody watched.
    pub network: u32,
    /// CLOCK_MONOTONIC nanoseconds until which somebody reads `EVENTS`; 0 = nobody does.
    pub monitor_until: u64,
}

/// Words that the packet path writes for new flows, in cache lines of their own.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Usage {
    /// Flows with SNAT ever created.
    pub snat_created: u64,
    /// Flows ever put into `PENDING`.
    pub pending_created: u64,
    /// Flows in the main tables that are not confirmed: IPv4, IPv6.
    pub unconfirmed: [u64; 2],
    /// Hops handed out in each generation.
    pub hops: [u64; 2],
    pub zero: [u64; 2],
}

/// Words of one bit array over all ports.
pub const PORT_WORDS: usize = 1024;

/// Bit arrays of the prefilter, read before any lookup. Ports in host order.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Filter {
    /// Destination ports of frontends but for ClusterIPs.
    pub frontends: [u64; PORT_WORDS],
    /// Ports used as source towards endpoints.
    pub pool: [u64; PORT_WORDS],
    /// Ports of endpoints, wherever they are.
    pub endpoints: [u64; PORT_WORDS],
    /// Hashes of ClusterIPs: [`crate::hash::address`].
    pub cluster_ips: [u64; PORT_WORDS],
    /// Prefixes of the ranges that ClusterIPs are taken from: [`crate::hash::prefix`].
    pub service_cidrs: [u64; PORT_WORDS],
}

/// Key of `GONE`: an endpoint that takes no more new flows of a Service port; of others it may.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct EndpointKey {
    /// [`Address::wide`].
    pub address: [u64; 2],
    /// Memory order.
    pub port: u16,
    pub protocol: u8,
    pub ipv6: u8,
    /// Index of the Service port.
    pub service: u32,
}

/// A token bucket of one CPU for answers that the program makes itself.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Bucket {
    pub tokens: u32,
    /// Low half of jiffies.
    pub filled: u32,
}

/// Programs that take over from the entry program of a hook, in its array of programs: index = [`FAMILY`][jump::FAMILY]
/// × (0: IPv4, 1: IPv6) + one of these.
pub mod jump {
    /// Flows to be made, and those whose state changes.
    pub const SLOW_PATH: u32 = 0;
    /// Rejections, which answer the sender, and drops.
    pub const REJECT: u32 = 1;
    /// ICMP errors about packets of flows.
    pub const ICMP_ERROR: u32 = 2;
    /// Fragments, IPv4 options and IPv6 extension headers.
    pub const VARIABLE_HEADERS: u32 = 3;
    /// [`ICMP_ERROR`] and [`VARIABLE_HEADERS`] for packets that leave.
    pub const ICMP_ERROR_OUT: u32 = 4;
    pub const VARIABLE_HEADERS_OUT: u32 = 5;
    pub const FAMILY: u32 = 8;
    pub const COUNT: u32 = 2 * FAMILY;
}

/// Packets of one hook by outcome: one element of `COUNTERS`.
pub type Counters = [u64; crate::outcome::OUTCOMES as usize];

/// Hooks, index into `COUNTERS`.
pub mod hook {
    pub const XDP: u32 = 0;
    pub const INGRESS: u32 = 1;
    pub const EGRESS: u32 = 2;
    /// Calls of processes: connect, sendmsg.
    pub const SOCKET: u32 = 3;
    pub const COUNT: u32 = 4;
}

const _: () = {
    assert!(size_of::<Tuple<Address4>>() == 16);
    assert!(size_of::<Tuple<Address6>>() == 40);
    // Two cache lines with the kernel's 48 bytes.
    assert!(48 + size_of::<FlowKey<Address4>>() + size_of::<Flow<Address4>>() == 128);
    assert!(size_of::<Flow<Address6>>() == 104);
    assert!(offset_of!(Flow<Address4>, hop) % 4 == 0 && offset_of!(Flow<Address6>, hop) % 4 == 0);
    assert!(offset_of!(Flow<Address4>, epoch) == offset_of!(Flow<Address4>, hop) + 2);
    assert!(offset_of!(Flow<Address6>, epoch) == offset_of!(Flow<Address6>, hop) + 2);
    assert!(size_of::<FrontendKey<Address4>>() == 12);
    assert!(size_of::<FrontendKey<Address6>>() == 24);
    assert!(size_of::<Frontend>() == 40);
    assert!(size_of::<SourceQuery<Address4>>() == 4 + size_of::<SourceRange<1>>());
    assert!(size_of::<SourceQuery<Address6>>() == 4 + size_of::<SourceRange<4>>());
    assert!(size_of::<CidrQuery<Address4>>() == 4 + size_of::<Cidr<1>>());
    assert!(size_of::<CidrQuery<Address6>>() == 4 + size_of::<Cidr<4>>());
    assert!(size_of::<Slot<Address4>>() == 12);
    assert!(size_of::<Slot<Address6>>() == 24);
    assert!(size_of::<SlotRoute<Address4>>() == 12);
    assert!(size_of::<SlotRoute<Address6>>() == 24);
    assert!(size_of::<Hop>() == 32 && align_of::<Hop>() == 8);
    assert!(size_of::<HopKey>() == 24);
    assert!(size_of::<Device>() == 40);
    assert!(size_of::<State>() == 64);
    assert!(size_of::<Usage>() == 64);
    assert!(size_of::<EndpointKey>() == 24);
    assert!(size_of::<AffinityKey>() == 24);
    assert!(size_of::<Affinity>() == 32);
    assert!(size_of::<SocketKey>() == 32);
    assert!(size_of::<Socket>() == 40);
    assert!(size_of::<Node>() == 80);
    assert!(size_of::<Event>() == 96);
    assert!(size_of::<FragmentKey<Address4>>() == 16);
    assert!(size_of::<FragmentKey<Address6>>() == 40);
    assert!(size_of::<Fragment>() == 16);
};
