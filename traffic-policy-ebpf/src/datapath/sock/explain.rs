//! The program that evaluates a hypothetical socket call for `explain`: the kernel can test-run it,
//! unlike socket programs.

use traffic_policy_ebpf::{
    abi::{PROTOCOL_TCP, PROTOCOL_UDP, SocketQuestion, hook, step},
    outcome::Outcome,
};

use crate::datapath::{
    ctx::xdp::Xdp,
    family::{Family, V4, V6},
    maps::EXPLAIN_CALL,
    sock::lookup::{self, Query},
    trace,
    value::borrow,
};

#[inline(always)]
pub fn run(_: Xdp) -> u32 {
    judge();
    0
}

#[inline(always)]
fn judge() {
    let Some(asked) = EXPLAIN_CALL.get_ptr(0) else { return };
    // The map has no writer while the agent runs this program.
    let asked = borrow(asked);
    let protocol = asked.protocol as u32;
    let outcome = if protocol != PROTOCOL_TCP && protocol != PROTOCOL_UDP {
        Outcome::PassedUnsupportedProtocol
    } else if asked.ipv6 == 0 {
        decide::<V4>(asked)
    } else {
        decide::<V6>(asked)
    };
    trace::note(step::OUTCOME, outcome as u32, [hook::SOCKET as u64, 0]);
}

#[inline(always)]
fn decide<F: Family>(asked: &SocketQuestion) -> Outcome {
    let Some(scratch) = F::scratch() else { return Outcome::DroppedInternalError };
    let query = Query {
        destination: F::narrow(asked.destination),
        port: asked.port,
        protocol: asked.protocol,
        source: F::narrow(asked.source),
        netns: asked.netns,
        node: asked.node != 0,
        hash: asked.hash,
        had: core::ptr::null(),
    };
    lookup::decide::<F>(&query, place!(mut scratch.affinity_lookup)).outcome
}
