//! The stack of an endpoint's pod, which is asked for a connection that the flow table does not
//! have: its entry gave way in a full table, or the maps were made anew under open connections.
//!
//! The agent names the pod's network namespace by the id that the node's namespace has for it. A
//! connection of which the stack has a socket, and whose numbers are near the segment's, gets a
//! flow that is assured from the start. Otherwise a forged segment would have replies of another
//! connection of the pod, one to the pod itself, get the frontend's address.

use aya_ebpf::{
    bindings::{__sk_buff, bpf_sock_tuple, xdp_md},
    helpers::generated::{bpf_sk_release, bpf_skc_lookup_tcp, bpf_tcp_sock},
};
use traffic_policy_ebpf::{
    abi::{BY_POD, DirectEndpoint, DirectEndpointKey, Ports, Scratch},
    tcp::{ANSWERED, ASSURED, numbers},
};

use crate::datapath::{
    ctx::{Packet, tc::Tc, xdp::Xdp},
    family::{Family, V4, V6},
    parse::Parsed,
};

/// TCP_LISTEN of `include/net/tcp_states.h`: the socket that takes new connections has none itself.
const LISTEN: u32 = 10;

/// The answer of the stack of a pod of this node.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// The stack has no such connection, or cannot be asked.
    Unknown,
    Known,
    /// The stack has such a connection, with other numbers.
    OutOfWindow,
    /// The stack has such a connection, and TC, which alone may read the numbers of a socket, is to
    /// compare them.
    ByTc,
}

const UNKNOWN: i32 = Answer::Unknown as i32;
const KNOWN: i32 = Answer::Known as i32;
const OUT_OF_WINDOW: i32 = Answer::OutOfWindow as i32;
const BY_TC: i32 = Answer::ByTc as i32;

/// Notes how the flow of a segment begins, if the stack of a pod turns out to have its connection.
#[inline(always)]
pub fn note_segment<F: Family>(scratch: *mut Scratch<F::Address>, parsed: &Parsed<F>) {
    let after = numbers::assuring(ASSURED, &parsed.segment());
    set!(scratch.owners.numbers = after.numbers);
    set!(scratch.owners.state = after.state as u32);
}

/// Asks the stack of the pod at `address`, an endpoint of `OwnerSearch::service` on this node, for
/// the connection `Scratch::opening`. `context`: that of the program.
#[inline(always)]
pub fn ask<P: Packet, F: Family>(
    context: *mut P::Context,
    scratch: *mut Scratch<F::Address>,
    address: F::Address,
) -> Answer {
    if P::POD {
        return Answer::Unknown;
    }
    set!(scratch.other.destination = address);
    let answer = match (P::TC, F::V6) {
        (false, false) => pod_stack_xdp4(context.cast()),
        (false, true) => pod_stack_xdp6(context.cast()),
        (true, false) => pod_stack_tc4(context.cast()),
        (true, true) => pod_stack_tc6(context.cast()),
    };
    match answer {
        KNOWN => Answer::Known,
        OUT_OF_WINDOW => Answer::OutOfWindow,
        BY_TC => Answer::ByTc,
        _ => Answer::Unknown,
    }
}

global_functions! {
    pod_stack_xdp4 => look_up::<Xdp, V4>, context: *mut xdp_md;
    pod_stack_xdp6 => look_up::<Xdp, V6>, context: *mut xdp_md;
    pod_stack_tc4 => look_up::<Tc, V4>, context: *mut __sk_buff;
    pod_stack_tc6 => look_up::<Tc, V6>, context: *mut __sk_buff;
}

/// Implements [`ask`] for the pod whose address is the destination of `Scratch::other`. Sets
/// `OwnerSearch::known` if it has the connection.
#[inline(always)]
fn look_up<P: Packet, F: Family>(context: *mut P::Context) -> i32 {
    let Some(scratch) = F::scratch() else { return UNKNOWN };
    let key = DirectEndpointKey {
        address: get!(scratch.other.destination),
        service: get!(scratch.owners.service),
        zero: 0,
    };
    let Some(endpoint) = F::direct_endpoints().lookup::<_, DirectEndpoint>(&key) else { return UNKNOWN };
    let netns = get!(endpoint.netns) as u64;
    if netns == 0 {
        return UNKNOWN;
    }
    set!(scratch.other.source = get!(scratch.opening.source));
    set!(scratch.other.ports = Ports::new(get!(scratch.opening.ports).source(), get!(endpoint.port)));
    // Addresses and ports are laid out as in `struct bpf_sock_tuple`.
    let tuple = place!(mut scratch.other).cast::<bpf_sock_tuple>();
    let size = 2 * size_of::<F::Address>() + size_of::<Ports>();
    // SAFETY: helpers of the kernel: the verifier checks their arguments, and that the socket is
    // released.
    let (rcv_nxt, snd_una, snd_nxt) = unsafe {
        let socket = bpf_skc_lookup_tcp(context.cast(), tuple, size as u32, netns - 1, 0);
        if socket.is_null() {
            return UNKNOWN;
        }
        if !P::TC {
            let state = (*socket).state;
            bpf_sk_release(socket.cast());
            return if state == LISTEN { UNKNOWN } else { BY_TC };
        }
        // Null for one that awaits the end of the handshake, or of TIME-WAIT.
        let tcp = bpf_tcp_sock(socket);
        if tcp.is_null() || (*socket).state == LISTEN {
            bpf_sk_release(socket.cast());
            return UNKNOWN;
        }
        let numbers = ((*tcp).rcv_nxt, (*tcp).snd_una, (*tcp).snd_nxt);
        bpf_sk_release(socket.cast());
        numbers
    };
    if !numbers::is_awaited(get!(scratch.owners.numbers), rcv_nxt, snd_una, snd_nxt) {
        return OUT_OF_WINDOW;
    }
    set!(scratch.owners.reply_numbers = numbers::numbers(snd_nxt, rcv_nxt));
    set!(scratch.owners.known = BY_POD);
    KNOWN
}

/// Makes the entries of a new flow, before they exist, those of a connection that the pod's stack
/// knows.
#[inline(always)]
pub fn note<F: Family>(scratch: *mut Scratch<F::Address>) {
    if get!(scratch.owners.known) != BY_POD {
        return;
    }
    set!(scratch.request.numbers = get!(scratch.owners.numbers));
    set!(scratch.reply.numbers = get!(scratch.owners.reply_numbers));
    set!(scratch.request.state |= get!(scratch.owners.state) as u8);
    set!(scratch.reply.state |= ASSURED | ANSWERED);
}
