//! The kernel's context of a socket call: reading and writing of addresses and ports.

use aya_ebpf::{
    bindings::{bpf_sock, bpf_sock_addr},
    cty::c_void,
    helpers::{bpf_get_netns_cookie, bpf_get_socket_cookie, bpf_set_retval},
};
use traffic_policy_ebpf::{
    abi::{Address4, Address6, PROTOCOL_TCP, PROTOCOL_UDP, Port},
    outcome::Outcome,
};

use crate::datapath::{
    family::{Family, V4},
    words::{load16, load32, load64, store32},
};

const PROTOCOL_MPTCP: u32 = 262;

const ECONNREFUSED: i32 = 111;
const ETIMEDOUT: i32 = 110;
const EPERM: i32 = 1;

/// Offsets within `struct bpf_sock_addr`, which may be read and written only by single instructions
/// at constant offsets. <https://github.com/torvalds/linux/blob/v6.1/include/uapi/linux/bpf.h>
mod at {
    use core::mem::offset_of;

    use super::{bpf_sock, bpf_sock_addr};

    pub const IP4: i16 = offset_of!(bpf_sock_addr, user_ip4) as i16;
    pub const IP6: i16 = offset_of!(bpf_sock_addr, user_ip6) as i16;
    pub const PORT: i16 = offset_of!(bpf_sock_addr, user_port) as i16;
    pub const PROTOCOL: i16 = offset_of!(bpf_sock_addr, protocol) as i16;
    pub const SOURCE4: i16 = offset_of!(bpf_sock_addr, msg_src_ip4) as i16;
    pub const SOURCE6: i16 = offset_of!(bpf_sock_addr, msg_src_ip6) as i16;
    pub const SOCKET: i16 = offset_of!(bpf_sock_addr, __bindgen_anon_1) as i16;
    pub const BOUND4: i16 = offset_of!(bpf_sock, src_ip4) as i16;
    pub const BOUND6: i16 = offset_of!(bpf_sock, src_ip6) as i16;
    pub const PEER_PORT: i16 = offset_of!(bpf_sock, dst_port) as i16;
    pub const PEER4: i16 = offset_of!(bpf_sock, dst_ip4) as i16;
    pub const PEER6: i16 = offset_of!(bpf_sock, dst_ip6) as i16;
    pub const SOCKET_FAMILY: i16 = offset_of!(bpf_sock, family) as i16;
    pub const SOCKET_PROTOCOL: i16 = offset_of!(bpf_sock, protocol) as i16;
}

/// An address as the application passed it, or as it is returned to the application.
#[derive(Clone, Copy)]
pub enum Named {
    V4(Address4),
    V6(Address6),
}

/// Bytes 8 to 11 of an IPv4-mapped IPv6 address (RFC 4291, section 2.5.5.2), memory order.
const MAPPED: u32 = u32::from_ne_bytes([0, 0, 0xff, 0xff]);

impl Named {
    /// Returns an IPv4 address; zero, "not bound", for an IPv6 address.
    #[inline(always)]
    pub fn v4(self) -> Address4 {
        match self {
            Self::V4(address) => address,
            Self::V6(_) => Address4::UNSPECIFIED,
        }
    }

    /// Returns an IPv6 address as [`Self::v4`] returns an IPv4 one.
    #[inline(always)]
    pub fn v6(self) -> Address6 {
        match self {
            Self::V4(_) => Address6::UNSPECIFIED,
            Self::V6(address) => address,
        }
    }
}

/// Converts four words. IPv4-mapped addresses become IPv4, as packets carry them.
#[inline(always)]
pub fn named([a, b, c, d]: [u32; 4]) -> Named {
    if a | b == 0 && c == MAPPED {
        return Named::V4(Address4::from_wire(d));
    }
    Named::V6(Address6::from_wire([joined(a, b), joined(c, d)]))
}

/// Joins two words into one, in memory order.
#[inline(always)]
fn joined(first: u32, second: u32) -> u64 {
    if cfg!(target_endian = "little") {
        first as u64 | (second as u64) << 32
    } else {
        (first as u64) << 32 | second as u64
    }
}

/// Returns the two words that [`joined`] has joined.
#[inline(always)]
fn split(both: u64) -> (u32, u32) {
    if cfg!(target_endian = "little") {
        (both as u32, (both >> 32) as u32)
    } else {
        ((both >> 32) as u32, both as u32)
    }
}

/// Loads four words at an offset, each by an instruction of its own.
macro_rules! load128 {
    ($offset:path, $base:expr) => {{
        let base = $base;
        [
            load32::<{ $offset }>(base),
            load32::<{ $offset + 4 }>(base),
            load32::<{ $offset + 8 }>(base),
            load32::<{ $offset + 12 }>(base),
        ]
    }};
}

/// Returns the peer of the `struct bpf_sock` at `base`.
#[inline(always)]
fn peer(base: usize) -> Named {
    if load32::<{ at::SOCKET_FAMILY }>(base) == V4::AF as u32 {
        return Named::V4(Address4::from_wire(load32::<{ at::PEER4 }>(base)));
    }
    named(load128!(at::PEER6, base))
}

/// Returns TCP or UDP; 0 for other protocols. The subflows of MPTCP are TCP (RFC 8684).
#[inline(always)]
fn transport(protocol: u32) -> u32 {
    match protocol {
        PROTOCOL_TCP | PROTOCOL_MPTCP => PROTOCOL_TCP,
        PROTOCOL_UDP => PROTOCOL_UDP,
        _ => 0,
    }
}

/// One call of a process on a socket.
#[derive(Clone, Copy)]
pub struct Call {
    context: *mut bpf_sock_addr,
}

impl Call {
    #[inline(always)]
    pub fn new(context: *mut bpf_sock_addr) -> Self {
        Self { context }
    }

    #[inline(always)]
    fn base(self) -> usize {
        self.context as usize
    }

    /// Returns the peer's address, in an IPv4 hook.
    #[inline(always)]
    pub fn ip4(self) -> Address4 {
        Address4::from_wire(load32::<{ at::IP4 }>(self.base()))
    }

    /// Returns the peer's address, in an IPv6 hook.
    #[inline(always)]
    pub fn ip6(self) -> Named {
        let base = self.base();
        named(load128!(at::IP6, base))
    }

    /// Returns the peer's port.
    #[inline(always)]
    pub fn port(self) -> Port {
        Port::from_wire(load32::<{ at::PORT }>(self.base()) as u16)
    }

    /// Returns TCP or UDP; 0 for other protocols.
    #[inline(always)]
    pub fn protocol(self) -> u32 {
        transport(load32::<{ at::PROTOCOL }>(self.base()))
    }

    /// Returns the address that the socket is bound to, in a hook of connect; zero if it is not
    /// bound.
    #[inline(always)]
    pub fn bound4(self) -> Address4 {
        let socket = load64::<{ at::SOCKET }>(self.base()) as usize;
        Address4::from_wire(if socket == 0 { 0 } else { load32::<{ at::BOUND4 }>(socket) })
    }

    /// Returns the bound address as [`Self::bound4`] does, for IPv6.
    #[inline(always)]
    pub fn bound6(self) -> Named {
        let socket = load64::<{ at::SOCKET }>(self.base()) as usize;
        if socket == 0 {
            return Named::V6(Address6::UNSPECIFIED);
        }
        named(load128!(at::BOUND6, socket))
    }

    /// Whether the socket is connected.
    #[inline(always)]
    pub fn is_connected(self) -> bool {
        self.peer_port() != Port::NONE
    }

    /// Returns the port of the peer that the socket is connected to; none if it is not connected.
    #[inline(always)]
    pub fn peer_port(self) -> Port {
        let socket = load64::<{ at::SOCKET }>(self.base()) as usize;
        Port::from_wire(if socket == 0 { 0 } else { load16::<{ at::PEER_PORT }>(socket) })
    }

    /// Returns the address of the peer that the socket is connected to.
    #[inline(always)]
    pub fn peer(self) -> Named {
        let socket = load64::<{ at::SOCKET }>(self.base()) as usize;
        if socket == 0 { Named::V6(Address6::UNSPECIFIED) } else { peer(socket) }
    }

    /// Returns the source that the application chose for a datagram, in a hook of sendmsg; zero if
    /// routing is to choose it.
    #[inline(always)]
    pub fn source4(self) -> Address4 {
        Address4::from_wire(load32::<{ at::SOURCE4 }>(self.base()))
    }

    /// Returns the source as [`Self::source4`] does, for IPv6.
    #[inline(always)]
    pub fn source6(self) -> Named {
        let base = self.base();
        named(load128!(at::SOURCE6, base))
    }

    /// Writes the peer, in an IPv4 hook.
    #[inline(always)]
    pub fn set4(self, address: Address4, port: Port) {
        store32::<{ at::IP4 }>(self.base(), address.wire());
        store32::<{ at::PORT }>(self.base(), port.wire() as u32);
    }

    /// Writes the peer, in an IPv6 hook.
    #[inline(always)]
    pub fn set6(self, address: Address6, port: Port) {
        let [head, tail] = address.wire();
        let ((a, b), (c, d)) = (split(head), split(tail));
        let base = self.base();
        store32::<{ at::IP6 }>(base, a);
        store32::<{ at::IP6 + 4 }>(base, b);
        store32::<{ at::IP6 + 8 }>(base, c);
        store32::<{ at::IP6 + 12 }>(base, d);
        store32::<{ at::PORT }>(base, port.wire() as u32);
    }

    /// Writes an IPv4 address over an IPv4-mapped one: the rest of it stays.
    #[inline(always)]
    pub fn set_mapped(self, address: Address4, port: Port) {
        store32::<{ at::IP6 + 12 }>(self.base(), address.wire());
        store32::<{ at::PORT }>(self.base(), port.wire() as u32);
    }

    /// Returns the kernel's number of this socket.
    #[inline(always)]
    pub fn cookie(self) -> u64 {
        // SAFETY: a helper of the kernel: the verifier checks its arguments.
        unsafe { bpf_get_socket_cookie(self.context.cast::<c_void>()) }
    }

    /// Returns the kernel's number of the socket's network namespace.
    #[inline(always)]
    pub fn netns(self) -> u64 {
        // SAFETY: a helper of the kernel: the verifier checks its arguments.
        unsafe { bpf_get_netns_cookie(self.context.cast::<c_void>()) }
    }

    /// Makes the call fail with the error that the application would have got from netfilter, only
    /// sooner.
    ///
    /// Rejected: kube-proxy answers with port unreachable, which connect() and a connected UDP
    /// socket report as ECONNREFUSED. Dropped: a TCP connection retries until ETIMEDOUT (RFC 9293,
    /// section 3.8.3: R2), so the call fails with it at once; a datagram that netfilter drops in
    /// OUTPUT makes the sender's call fail with EPERM (`nf_hook_slow`).
    /// <https://github.com/torvalds/linux/blob/v6.1/net/netfilter/core.c>
    #[inline(always)]
    pub fn fail(self, outcome: Outcome, protocol: u32) {
        let error = match outcome {
            Outcome::RejectedNoEndpoint | Outcome::RejectedUnknownPort => ECONNREFUSED,
            _ if protocol == PROTOCOL_TCP => ETIMEDOUT,
            _ => EPERM,
        };
        // SAFETY: a helper of the kernel: the verifier checks its arguments.
        unsafe { bpf_set_retval(-error) };
    }
}

/// A socket that its last owner has closed; the context is the socket itself.
#[derive(Clone, Copy)]
pub struct Closing {
    context: *mut bpf_sock,
}

impl Closing {
    #[inline(always)]
    pub fn new(context: *mut bpf_sock) -> Self {
        Self { context }
    }

    #[inline(always)]
    fn base(self) -> usize {
        self.context as usize
    }

    /// Returns the protocol as [`Call::protocol`] does.
    #[inline(always)]
    pub fn protocol(self) -> u32 {
        transport(load32::<{ at::SOCKET_PROTOCOL }>(self.base()))
    }

    /// Returns the peer's port; none without a peer.
    #[inline(always)]
    pub fn port(self) -> Port {
        Port::from_wire(load16::<{ at::PEER_PORT }>(self.base()))
    }

    #[inline(always)]
    pub fn peer(self) -> Named {
        peer(self.base())
    }

    #[inline(always)]
    pub fn cookie(self) -> u64 {
        // SAFETY: a helper of the kernel: the verifier checks its arguments.
        unsafe { bpf_get_socket_cookie(self.context.cast::<c_void>()) }
    }
}
