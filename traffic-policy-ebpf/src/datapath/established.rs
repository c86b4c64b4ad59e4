//! The entry programs of what comes in: a packet of an established flow goes no further.
//!
//! ```text
//! parse → bit arrays → one flow lookup → translation as the entry says → verdict
//!                          └ no flow, not quiet, or its hop is old: the program `attend`
//! ```
//!
//! What comes before the lookup costs next to nothing, for the packet waits for the lookup's hash meanwhile; each instruction
//! after it counts. So all that can be known before is looked at before.

use core::ptr;

use traffic_policy_ebpf::{
    abi::{jump, kind, step},
    outcome::Outcome,
    tcp::{ANSWERED, CONFIRMED, flag},
};

use crate::datapath::{
    choose,
    context::{LINEAR, Packet},
    create,
    exit::{self, Exit},
    family::{V4, V6, pending_in_use},
    flows,
    hop::{self, Current},
    ingress::{Ours, Ready, answered, carry_out, may_be_cluster_ip, ours},
    irregular,
    parse::{self, ETHERTYPE_IPV4, ETHERTYPE_IPV6},
    rewrite::Rewrite,
    trace,
    wire::load16,
};

#[inline(always)]
pub fn run<P: Packet>(packet: P) -> i32 {
    packet.reach(LINEAR);
    let counters = exit::counters(P::HOOK);
    let data = packet.data();
    let exit = if data + parse::ETHERNET > packet.end() || packet.tagged() {
        Outcome::PassedNotIp.into()
    } else {
        match unsafe { load16::<12>(data) } {
            ETHERTYPE_IPV4 => family::<P, V4>(packet),
            ETHERTYPE_IPV6 => family::<P, V6>(packet),
            _ => Outcome::PassedNotIp.into(),
        }
    };
    exit::leave_by(packet, P::HOOK, counters, exit)
}

#[inline(always)]
fn family<P: Packet, F: Rewrite>(packet: P) -> Exit {
    let parsed = match F::headers(packet) {
        Ok(parsed) => parsed,
        Err(outcome) => return irregular::hand_over::<P, F, false>(packet, outcome),
    };
    let ours = ours(&parsed);
    trace::note(step::FILTER, ours as u32, [0; 2]);
    if matches!(ours, Ours::No) {
        return Outcome::Passed.into();
    }
    if let Err(outcome) = parse::finish(packet, &parsed) {
        return outcome.into();
    }
    // What opens or ends a conversation changes its state.
    if parsed.tcp_flags() & (flag::SYN | flag::FIN | flag::RST) == 0 {
        let now = hop::now();
        let Some(current) = Current::load() else { return Outcome::DroppedInternalError.into() };
        let half = F::flows().find(&parsed.tuple);
        if !half.is_null() {
            let (kind, state) = unsafe { ((*half).kind, (*half).state) };
            let (index, epoch) = unsafe { flows::way(half) };
            if state & !ANSWERED == CONFIRMED {
                let mut hop = ptr::null();
                // A half that is being written has no kind.
                if matches!(kind, kind::FORWARD | kind::REPLY) {
                    hop = current.hop(epoch, index, now).unwrap_or(ptr::null());
                }
                if kind == kind::DELIVER || !hop.is_null() {
                    let exit = carry_out(packet, &parsed, &Ready { half, hop, unresolved: 0 }, now);
                    // Of what can be dropped here, this alone is no failure of the kernel: `attend` finds it again.
                    if !matches!(exit.outcome, Outcome::DroppedMtuExceeded) {
                        return if exit.answers() { answered::<P, F>(packet, &parsed, exit) } else { exit };
                    }
                }
            }
        } else if !P::TC
            && !pending_in_use()
            && (matches!(ours, Ours::Pool)
                || matches!(ours, Ours::Port)
                    && choose::frontend::<F>(&create::target::<F>(&parsed.tuple)).is_null())
            && !may_be_cluster_ip::<F>(parsed.tuple.destination)
        {
            // Traffic of the node's own that shares a port with us goes no further. (TC looks more closely: XDP may have
            // delivered the packet.)
            return Outcome::PassedNotService.into();
        }
    }
    packet.jump::<F, { jump::ATTEND }>();
    Outcome::PassedMissedTailCall.into()
}
