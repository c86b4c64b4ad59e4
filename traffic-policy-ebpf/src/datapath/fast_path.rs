//! The fast path: the entry programs of XDP and of TC ingress. A packet of an established flow
//! needs nothing else.
//!
//! ```text
//! parse → prefilter → one flow lookup → translation as the entry says → verdict
//!                       └ no flow, not established, or a stale next hop: the slow path
//! ```
//!
//! Instructions before the lookup are nearly free, because they overlap with the hash of the
//! lookup; each instruction after it counts. So checks that can be made before the lookup are made
//! there.

use traffic_policy_ebpf::{
    abi::{jump, kind, step},
    outcome::Outcome,
    tcp::{ANSWERED, ASSURED, flag},
};

use core::ptr;

use crate::datapath::{
    clock, counters,
    ctx::{LINEAR, Packet, Skb as _},
    family::{V4, V6},
    flow::{
        datagrams, established,
        table::{self, FlowTable},
    },
    forward::{self, Current, Forwarding, enclose, local, outer::Outer},
    lb::{Target, select},
    maps::PREFILTER,
    open,
    parse::{self, ETHERTYPE_IPV4, ETHERTYPE_IPV6, fixed},
    prefilter::{self, Match},
    reject, trace,
    verdict::{self, Decision},
    words::load16,
};

#[inline(always)]
pub fn run<P: Packet>(packet: P) -> i32 {
    packet.pull(LINEAR);
    let counters = counters::of_hook(P::HOOK);
    let data = packet.data();
    let decision = if data + P::L2 > packet.end() {
        Outcome::PassedNotIp.into()
    } else if let Some(skb) = packet.skb()
        && skb.tagged()
    {
        if skb.is_priority_tag() {
            packet.jump::<V4, { jump::PRIORITY_TAG }>();
        }
        Outcome::PassedNotIp.into()
    } else {
        match load16::<12>(data) {
            ETHERTYPE_IPV4 => of_family::<P, V4>(packet),
            ETHERTYPE_IPV6 => of_family::<P, V6>(packet),
            _ => Outcome::PassedNotIp.into(),
        }
    };
    if P::POD && matches!(decision.outcome, Outcome::Passed | Outcome::PassedNotIp) {
        // Not counted: most of what pods send concerns no Service. A reply may bypass the stack.
        packet.jump::<V4, { jump::LOCAL_DELIVERY }>();
        return P::PASS;
    }
    verdict::finish_with(packet, P::HOOK, counters, decision)
}

#[inline(always)]
fn of_family<P: Packet, F: Outer>(packet: P) -> Decision {
    let parsed = match F::parse_fixed(packet) {
        Ok(parsed) => parsed,
        Err(outcome) => return parse::hand_over::<P, F, false>(packet, outcome),
    };
    let Some(filter) = PREFILTER.get_ptr(0) else { return Outcome::DroppedInternalError.into() };
    let matched = prefilter::classify::<F>(filter, &parsed.tuple);
    if matches!(matched, Match::No) {
        trace::note(step::FILTER, Match::No as u32, [0; 2]);
        if open::may_be_outer::<P, _>(&parsed.tuple) {
            parse::to_open::<P, F>(packet);
        }
        return Outcome::Passed.into();
    }
    trace::note(step::FILTER, matched as u32, [0; 2]);
    // Packets that open or end a conversation change its state: they go to the slow path, which
    // checks the lengths itself. So does a frame in several buffers (XDP), whose length only a
    // helper of the kernel returns.
    if parsed.tcp_flags() & (flag::SYN | flag::FIN | flag::RST) == 0 && fixed::is_whole(packet, &parsed) {
        let now = clock::jiffies();
        let numbers = established::numbers_of(&parsed);
        let current = Current::of(filter);
        let entry = FlowTable::<F>::new().find(&parsed.tuple);
        if !entry.is_null() {
            let (kind, entry_state) = (get!(entry.kind), get!(entry.state));
            let (index, epoch) = table::next_hop(entry);
            let assured = entry_state & !ANSWERED == ASSURED;
            if assured || !parsed.is_tcp() && datagrams::is_looked_at(entry, entry_state, now) {
                let mut hop = ptr::null();
                // An entry that is being written has kind 0.
                if matches!(kind, kind::FORWARD | kind::REPLY) {
                    hop = current.hop(epoch, index, now).unwrap_or(ptr::null());
                } else if !P::POD && index != 0 && kind == kind::DELIVER && assured && epoch == current.route
                {
                    if !P::TC {
                        return Outcome::PassedToTc.into();
                    }
                    hop = local::hop(entry, &current, index, now);
                }
                if (kind == kind::DELIVER || !hop.is_null())
                    && (!assured || established::advance(entry, &parsed, numbers, now))
                {
                    let decision =
                        forward::forward(packet, &parsed, &Forwarding { entry, hop, unresolved: 0 }, now);
                    // The only drop here that is no failure of the kernel: `slow_path` finds the
                    // packet again.
                    if !matches!(decision.outcome, Outcome::DroppedMtuExceeded) {
                        if !decision.is_answered() {
                            return decision;
                        }
                        // What cannot go straight to its pod is left to the stack, which answers.
                        if kind != kind::DELIVER {
                            return reject::to_reject::<P, F>(packet, &parsed, decision);
                        }
                    }
                }
            }
            // Here, so that the packets above pay nothing for it. An answer is not seen, so no
            // datagram has to be examined.
            if !P::POD
                && kind == kind::DIRECT
                && (assured || !parsed.is_tcp() && entry_state == 0)
                && let Some(hop) = current.hop(epoch, index, now)
                && (!assured || established::advance(entry, &parsed, numbers, now))
            {
                let decision = enclose::forward(packet, &parsed, entry, hop, now);
                if !matches!(decision.outcome, Outcome::DroppedMtuExceeded) {
                    return if decision.is_answered() {
                        reject::to_reject::<P, F>(packet, &parsed, decision)
                    } else {
                        decision
                    };
                }
            }
        } else if matches!(matched, Match::SnatPort)
            // Its address may share a bit with one of this node's addresses.
            && !prefilter::may_be_service::<F>(parsed.tuple.destination, parsed.tuple.ports.destination())
            || matches!(matched, Match::NodePort)
                && select::frontend::<F>(&Target::of(&parsed.tuple)).is_null()
        {
            // A reply that another node has sent within UDP, to an address of this one.
            if open::may_be_outer::<P, _>(&parsed.tuple) {
                parse::to_open::<P, F>(packet);
            }
            // The node's own traffic that shares a port with us goes no further.
            return Outcome::PassedNotService.into();
        }
    }
    packet.jump::<F, { jump::SLOW_PATH }>();
    Outcome::PassedMissedTailCall.into()
}
