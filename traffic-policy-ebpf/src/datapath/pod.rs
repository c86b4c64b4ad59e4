//! The program at TC ingress of pods' devices, on their host side: replies of established flows go
//! from there to the client, bypassing the stack (`--local-delivery direct`).
//!
//! Everything else goes on to the stack, uncounted: the program at TC egress translates and counts
//! it.

use core::ptr;

use traffic_policy_ebpf::{
    abi::{DeviceOrPlace, hook, kind},
    outcome::Outcome,
    tcp::flag,
};

use crate::datapath::{
    clock,
    ctx::{LINEAR, Packet, Skb as _, tc::Tc},
    family::{V4, V6},
    flow::{
        established,
        pair::counterpart_key,
        table::{self, FlowTable},
        way_back,
    },
    forward::{
        self, Current, Forwarding, Rewrite, local,
        nexthop::{self, Route},
    },
    maps::NEXTHOPS,
    parse::{ETHERTYPE_IPV4, ETHERTYPE_IPV6, fixed},
    prefilter,
    verdict::{self, Decision},
    words::load16,
};

#[inline(always)]
pub fn run(packet: Tc) -> i32 {
    let decision = from_pod(packet);
    if matches!(decision.outcome, Outcome::Passed) {
        return Tc::<false>::PASS;
    }
    verdict::finish(packet, hook::INGRESS, decision)
}

#[inline(always)]
fn from_pod(packet: Tc) -> Decision {
    packet.pull(LINEAR);
    let data = packet.data();
    if data + Tc::<false>::L2 > packet.end() || packet.tagged() {
        return Outcome::Passed.into();
    }
    match load16::<12>(data) {
        ETHERTYPE_IPV4 => of_family::<V4>(packet),
        ETHERTYPE_IPV6 => of_family::<V6>(packet),
        _ => Outcome::Passed.into(),
    }
}

#[inline(always)]
fn of_family<F: Rewrite>(packet: Tc) -> Decision {
    let Ok(parsed) = F::parse_fixed(packet) else { return Outcome::Passed.into() };
    if !prefilter::is_local_endpoint::<F>(parsed.tuple.source, parsed.tuple.ports.source())
        || parsed.tcp_flags() & (flag::SYN | flag::FIN | flag::RST) != 0
        || parsed.ttl <= 1
        || !fixed::is_whole(packet, &parsed)
    {
        return Outcome::Passed.into();
    }
    let entry = FlowTable::<F>::new().find(&parsed.tuple);
    if entry.is_null()
        || get!(entry.kind) != kind::REPLY_LOCAL
        || !established::is_established(get!(entry.state), parsed.tcp_flags())
    {
        return Outcome::Passed.into();
    }
    let Some(current) = Current::load() else { return Outcome::Passed.into() };
    let now = clock::jiffies();
    let (index, epoch) = table::next_hop(entry);
    let mut hop = current.hop(epoch, index, now).unwrap_or(ptr::null());
    if hop.is_null() {
        let came_by = get!(entry.device_or_place);
        if came_by == DeviceOrPlace::TUNNELLED || local::is_of_pod(came_by.device()) {
            // The reply goes back through the node in front; or the client is a pod of this node,
            // whose device translates it.
            return Outcome::Passed.into();
        }
    }
    if hop.is_null() || local::is_due(get!(entry.last), now) {
        let Some(scratch) = F::scratch() else { return Outcome::Passed.into() };
        set!(scratch.opening = parsed.tuple);
        if counterpart_key::<F>(entry, parsed.tuple.protocol).is_some() {
            local::learn::<F>(packet);
        }
    }
    let mut unresolved = 0;
    if hop.is_null() {
        // The new source may have another route than the endpoint's address: see `reply_way`.
        let (source, destination) = (get!(entry.source), get!(entry.destination));
        let ingress = local::routed_by(packet.ingress());
        if ingress == 0 {
            return Outcome::Passed.into();
        }
        let Route::Via(via) = nexthop::resolve::<Tc, F>(packet, ingress, 0, source, destination, now) else {
            return Outcome::Passed.into();
        };
        if via.attached == 0 {
            return Outcome::Passed.into();
        }
        match NEXTHOPS.get_ptr(via.hop as u32).filter(|_| via.hop != 0) {
            Some(found) => {
                hop = found;
                let Some(scratch) = F::scratch() else { return Outcome::Passed.into() };
                if !way_back::store_hop(entry, via.hop, via.epoch, scratch) {
                    return Outcome::Passed.into();
                }
            }
            None => unresolved = via.ifindex,
        }
    }
    let mtu = if hop.is_null() {
        let Some(scratch) = F::scratch() else { return Outcome::Passed.into() };
        forward::device::unresolved::<F>(unresolved, scratch).0
    } else {
        get!(hop.mtu)
    };
    if parsed.wire_length(packet) > mtu
        || !established::advance(entry, &parsed, established::numbers_of(&parsed), now)
    {
        return Outcome::Passed.into();
    }
    sent(forward::forward(packet, &parsed, &Forwarding { entry, hop, unresolved }, now))
}

/// Returns the decision on a reply that was sent from here rather than translated at TC egress.
#[inline(always)]
fn sent(decision: Decision) -> Decision {
    if matches!(decision.outcome, Outcome::RepliedLocal) {
        return Decision { outcome: Outcome::RepliedDirect, ..decision };
    }
    decision
}
