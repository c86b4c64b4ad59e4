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
    let Some(question) = EXPLAIN_CALL.get_ptr(0) else { return };
    // The map has no writer while the agent runs this program.
    let question = borrow(question);
    let protocol = question.protocol as u32;
    let outcome = if protocol != PROTOCOL_TCP && protocol != PROTOCOL_UDP {
        Outcome::PassedUnsupportedProtocol
    } else if question.ipv6 == 0 {
        decide::<V4>(question)
    } else {
        decide::<V6>(question)
    };
    trace::note(step::OUTCOME, outcome as u32, [hook::SOCKET as u64, 0]);
}

#[inline(always)]
fn decide<F: Family>(question: &SocketQuestion) -> Outcome {
    let Some(scratch) = F::scratch() else { return Outcome::DroppedInternalError };
    let query = Query {
        destination: F::narrow(question.destination),
        port: question.port,
        protocol: question.protocol,
        source: F::narrow(question.source),
        netns: question.netns,
        node: question.node != 0,
        hash: question.hash,
        had: core::ptr::null(),
    };
    lookup::decide::<F>(&query, place!(mut scratch.affinity_lookup)).outcome
}
