//! Nodes that have stopped answering: SYNs to the endpoints of each node are counted until any of
//! these endpoints answers. When some stay unanswered for a time, the agent is told, which asks the
//! node itself; and a client's retransmission is sent to an endpoint of another node. Those of
//! sockets of this node and its pods are counted as those of packets, but stay where they are.
//!
//! Established packets are not counted. An element is written at most a few times a jiffy by each
//! CPU while a node answers, so that CPUs do not contend for its cache line.

use aya_ebpf::helpers::{bpf_ringbuf_reserve, bpf_ringbuf_submit};
use traffic_policy_ebpf::abi::{HOP_PLACES, NodeSilence, Suspicion};

use crate::datapath::{
    maps::{CONFIG, NODE_SILENCE, SUSPICIONS, Table},
    trace,
};

/// Returns the place of an endpoint's node: its number or, if it has none, the one of the next hop.
/// 0: neither is known.
#[inline(always)]
pub fn place(node: u16, hop: u16) -> u16 {
    if node != 0 || hop == 0 { node } else { HOP_PLACES as u16 + (hop & (HOP_PLACES as u16 - 1)) }
}

/// Notes a SYN that is sent to an endpoint of a node. `now`: low half of jiffies.
#[inline(always)]
pub fn note_syn(place: u16, now: u32) {
    if place == 0 || trace::is_on() {
        return;
    }
    let Some(node) = NODE_SILENCE.get_ptr_mut(place as u32) else { return };
    let syns = get!(node.syns);
    if syns == 0 {
        if get!(node.answered) != now {
            set!(node.asked = now);
            set!(node.syns = 1);
        }
        return;
    }
    let Some(config) = CONFIG.get_ptr(0) else { return };
    if (syns as u32) < get!(config.suspect_syns) {
        set!(node.syns = syns + 1);
    }
    if has_stopped(node, now) {
        report(place, node);
    }
}

/// Notes that an endpoint of a node has answered a SYN. `now`: low half of jiffies.
#[inline(always)]
pub fn note_answer(place: u16, now: u32) {
    if place == 0 || trace::is_on() {
        return;
    }
    let Some(node) = NODE_SILENCE.get_ptr_mut(place as u32) else { return };
    if get!(node.syns) != 0 {
        set!(node.syns = 0);
    }
    if get!(node.answered) != now {
        set!(node.answered = now);
    }
}

/// Notes an ICMP error by which a router says that it does not reach an endpoint whose answer is
/// awaited. Any host can send one, so the agent is told no more often than about silence.
#[inline(always)]
pub fn note_unreachable(place: u16) {
    if place == 0 || trace::is_on() {
        return;
    }
    let Some(node) = NODE_SILENCE.get_ptr_mut(place as u32) else { return };
    if get!(node.syns) != 0 {
        report(place, node);
    }
}

/// Whether a node is suspected or known to be dead. `now`: low half of jiffies.
#[inline(always)]
pub fn is_silent(place: u16, now: u32) -> bool {
    if place == 0 {
        return false;
    }
    let Some(node) = NODE_SILENCE.get_ptr(place as u32) else { return false };
    get!(node.dead) != 0 || has_stopped(node, now)
}

/// Whether enough SYNs have been unanswered for long enough.
#[inline(always)]
fn has_stopped(node: *const NodeSilence, now: u32) -> bool {
    let Some(config) = CONFIG.get_ptr(0) else { return false };
    let syns = get!(config.suspect_syns);
    syns != 0
        && get!(node.syns) as u32 >= syns
        && now.wrapping_sub(get!(node.asked)) >= get!(config.suspect_after)
}

/// Tells the agent, once for each first SYN that remained unanswered.
#[inline(always)]
fn report(place: u16, node: *mut NodeSilence) {
    let asked = get!(node.asked);
    if get!(node.reported) == asked {
        return;
    }
    // SAFETY: a helper of the kernel: the verifier checks its arguments, and that its result is
    // submitted once.
    let suspicion = unsafe {
        bpf_ringbuf_reserve(Table::of(&raw const SUSPICIONS).raw(), size_of::<Suspicion>() as u64, 0)
    }
    .cast::<Suspicion>();
    if suspicion.is_null() {
        return;
    }
    set!(suspicion.place = place as u32);
    set!(suspicion.asked = asked);
    // SAFETY: as above.
    unsafe { bpf_ringbuf_submit(suspicion.cast(), 0) };
    set!(node.reported = asked);
}
