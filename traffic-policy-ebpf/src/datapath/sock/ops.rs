//! The kernel's callbacks about TCP sockets (`sock_ops`): which connections to endpoints of other
//! nodes are answered, and which SYNs are sent again.
//!
//! The kernel calls the program several times for each connection of the cgroup's processes, to
//! Services and to others. All but connections to ports of endpoints cost one comparison each.

use core::mem::offset_of;

use aya_ebpf::{
    bindings::{
        BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB, BPF_SOCK_OPS_RTO_CB, BPF_SOCK_OPS_RTO_CB_FLAG,
        BPF_SOCK_OPS_STATE_CB, BPF_SOCK_OPS_STATE_CB_FLAG, BPF_SOCK_OPS_TCP_CONNECT_CB, BPF_TCP_CLOSE,
        BPF_TCP_SYN_SENT, bpf_sock_ops,
    },
    cty::c_void,
    helpers::{bpf_get_socket_cookie, bpf_sock_ops_cb_flags_set},
};
use traffic_policy_ebpf::abi::{Address4, PROTOCOL_TCP, Port, TranslatedSocket};

use crate::datapath::{
    clock,
    family::{Family, V4},
    node_silence, prefilter,
    sock::{
        addr::{Named, named},
        map,
    },
    words::load32,
};

/// The verdict that leaves everything to the kernel and other programs of the cgroup, whose reply
/// in the context stays as it is.
const CONTINUE: i32 = 1;

/// The callbacks that a connection to an endpoint needs besides those of every socket.
const FLAGS: u32 = BPF_SOCK_OPS_STATE_CB_FLAG | BPF_SOCK_OPS_RTO_CB_FLAG;

/// Offsets within `struct bpf_sock_ops`, for loads as of `struct bpf_sock_addr`.
/// <https://github.com/torvalds/linux/blob/v6.1/include/uapi/linux/bpf.h>
mod at {
    use super::{bpf_sock_ops, offset_of};

    pub const OP: i16 = offset_of!(bpf_sock_ops, op) as i16;
    pub const ARGS: i16 = offset_of!(bpf_sock_ops, __bindgen_anon_1) as i16;
    pub const FAMILY: i16 = offset_of!(bpf_sock_ops, family) as i16;
    pub const PEER4: i16 = offset_of!(bpf_sock_ops, remote_ip4) as i16;
    pub const PEER6: i16 = offset_of!(bpf_sock_ops, remote_ip6) as i16;
    pub const PEER_PORT: i16 = offset_of!(bpf_sock_ops, remote_port) as i16;
    pub const FLAGS: i16 = offset_of!(bpf_sock_ops, bpf_sock_ops_cb_flags) as i16;
    pub const STATE: i16 = offset_of!(bpf_sock_ops, state) as i16;
    pub const SEGMENTS_IN: i16 = offset_of!(bpf_sock_ops, segs_in) as i16;
}

/// One callback about a socket.
#[derive(Clone, Copy)]
pub struct Callback {
    context: *mut bpf_sock_ops,
}

impl Callback {
    #[inline(always)]
    pub fn new(context: *mut bpf_sock_ops) -> Self {
        Self { context }
    }

    #[inline(always)]
    fn base(self) -> usize {
        self.context as usize
    }

    /// Returns the peer's port. The kernel puts its two bytes, in network byte order, where the
    /// last two of a word in that order are (`sock_ops_convert_ctx_access`).
    /// <https://github.com/torvalds/linux/blob/v6.1/net/core/filter.c>
    #[inline(always)]
    fn port(self) -> Port {
        let word = load32::<{ at::PEER_PORT }>(self.base());
        Port::from_wire(if cfg!(target_endian = "little") { word >> 16 } else { word } as u16)
    }

    #[inline(always)]
    fn peer(self) -> Named {
        let base = self.base();
        if load32::<{ at::FAMILY }>(base) == V4::AF as u32 {
            return Named::V4(Address4::from_wire(load32::<{ at::PEER4 }>(base)));
        }
        named([
            load32::<{ at::PEER6 }>(base),
            load32::<{ at::PEER6 + 4 }>(base),
            load32::<{ at::PEER6 + 8 }>(base),
            load32::<{ at::PEER6 + 12 }>(base),
        ])
    }

    /// Returns the number of the endpoint's node, if the connection was translated; otherwise 0.
    #[inline(always)]
    fn node(self) -> u16 {
        let port = self.port();
        if !prefilter::is_endpoint(port) {
            return 0;
        }
        // SAFETY: a helper of the kernel: the verifier checks its arguments.
        let cookie = unsafe { bpf_get_socket_cookie(self.context.cast::<c_void>()) };
        let key = map::named_key(cookie, PROTOCOL_TCP, self.peer(), port);
        let socket = map::table_of(PROTOCOL_TCP, true).lookup::<_, TranslatedSocket>(&key);
        socket.map_or(0, |socket| get!(socket.node))
    }

    /// Asks the kernel for the callbacks of [`FLAGS`], besides those that others have asked for.
    /// They are not given back: another program may want them as well, and they cost little.
    #[inline(always)]
    fn follow(self) {
        if prefilter::is_endpoint(self.port()) {
            let flags = load32::<{ at::FLAGS }>(self.base()) | FLAGS;
            // SAFETY: a helper of the kernel: the verifier checks its arguments.
            unsafe { bpf_sock_ops_cb_flags_set(self.context, flags as i32) };
        }
    }

    /// Whether the peer has refused the connection by a reset: other ends of a connection that is
    /// being opened, such as a time-out or the application's close, come without a segment.
    #[inline(always)]
    fn is_refused(self) -> bool {
        let base = self.base();
        load32::<{ at::ARGS }>(base) == BPF_TCP_SYN_SENT
            && load32::<{ at::ARGS + 4 }>(base) == BPF_TCP_CLOSE
            && load32::<{ at::SEGMENTS_IN }>(base) != 0
    }
}

/// Handles the callbacks of a TCP connection that concern its endpoint's node.
#[inline(always)]
pub fn run(callback: Callback) -> i32 {
    match load32::<{ at::OP }>(callback.base()) {
        BPF_SOCK_OPS_TCP_CONNECT_CB => callback.follow(),
        BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB => {
            node_silence::note_answer(callback.node(), clock::jiffies());
        }
        BPF_SOCK_OPS_STATE_CB if callback.is_refused() => {
            node_silence::note_answer(callback.node(), clock::jiffies());
        }
        // The SYN is sent again, unless this was the last time-out.
        BPF_SOCK_OPS_RTO_CB if load32::<{ at::STATE }>(callback.base()) == BPF_TCP_SYN_SENT => {
            node_silence::note_syn(callback.node(), clock::jiffies());
        }
        _ => {}
    }
    CONTINUE
}
