//! The programs for rejected and dropped packets: the answer to the sender (ICMP error or TCP RST),
//! built in place of the packet, the Service's count, and the event.

pub mod v4;
pub mod v6;

use traffic_policy_ebpf::{
    abi::{DeviceInfo, HOP_ROUTED, NO_SERVICE, Port, Ports, RejectBucket, Scratch, hook, jump},
    checksum::{fold, port_sum, word_sum},
    outcome::{OUTCOMES, Outcome, Verdict},
};

use crate::datapath::{
    barrier::opaque,
    clock, counters,
    ctx::{Packet, Skb as _},
    events::{self, NewEvent},
    family::Family,
    flow::table::FlowTable,
    forward::{
        outer::{self, Outer},
        through_front,
    },
    maps::{CONFIG, DEVICES, REJECT_LIMITS, Table},
    parse::Parsed,
    value::{borrow, load, store},
    verdict::{self, Decision},
    words::{load16, load32, store16, store32, store64},
};

/// The capacity of a CPU's token bucket, in jiffies' worth of answers.
const BURST: u32 = 128;
const ICMP: usize = 8;
const TTL: u8 = 64;
/// A flag of the outcome in scratch memory: the packet is outgoing, so its sender is behind this
/// node's stack, which gets the answer as if it had arrived by the outgoing device.
const LEAVING: u32 = 1 << 31;
/// A flag of the outcome in scratch memory: the packet travels within an outer one, which the
/// answer is about.
const WITHIN: u32 = 1 << 30;
const _: () = assert!(hook::INGRESS + 1 == hook::EGRESS);
/// The RST flag in the word of data offset and flags: five words of header.
const RST_FLAGS: u16 = 0x5004u16.to_be();

/// A family for which answers can be built.
///
/// An answer comes from the address that the packet was sent to, as that of the kernel's `reject`
/// does, and goes back to the MAC that sent the packet. A frame whose checksum is still partial
/// (from a veth neighbour) keeps its mark: it stays within the machine, where the sum is not
/// checked.
pub trait Answer: Outer {
    /// The types and codes of ICMP errors.
    const PORT_UNREACHABLE: u16;
    const TTL_EXCEEDED: u16;
    const TOO_LONG: u16;

    /// Turns the packet into an ICMP error with `rest` as the last word of its header; false if
    /// that is impossible. It quotes `inside` bytes, whole words, more than the headers and the
    /// first eight bytes behind them. `opened`: the packet was opened, or is an outer one.
    fn error<P: Packet>(packet: P, kind: u16, rest: u32, inside: u32, opened: bool) -> bool;
    /// Turns a segment with ACK into the RST that RFC 9293 section 3.10.7.1 requires for it; false
    /// if that is impossible.
    fn reset<P: Packet>(packet: P, opened: bool) -> bool;
}

/// Hands a refused packet to the program that counts it and answers the sender.
#[inline(always)]
pub fn if_refused<P: Packet, F: Family>(packet: P, parsed: &Parsed<F>, decision: Decision) -> Decision {
    if P::TC && !F::V6 && matches!(decision.outcome, Outcome::DroppedMtuExceeded) {
        // It may be sent in pieces; if not, it is handed back to [`run`].
        let _ = if P::SCTP {
            to_program::<P, F, { jump::SCTP_SPLIT }>(packet, parsed, decision, 0)
        } else {
            to_program::<P, F, { jump::SPLIT }>(packet, parsed, decision, 0)
        };
    }
    if matches!(decision.outcome.verdict(), Verdict::Drop) {
        let _ = to_reject::<P, F>(packet, parsed, decision);
        return decision;
    }
    if decision.is_answered() { to_reject::<P, F>(packet, parsed, decision) } else { decision }
}

/// Continues with the program for refused packets; returns only if that is missing.
#[inline(always)]
pub fn to_reject<P: Packet, F: Family>(packet: P, parsed: &Parsed<F>, decision: Decision) -> Decision {
    to_program::<P, F, { jump::REJECT }>(packet, parsed, decision, 0)
}

/// Continues as [`to_reject`] does, for an outgoing packet.
#[inline(always)]
pub fn to_reject_leaving<P: Packet, F: Family>(
    packet: P,
    parsed: &Parsed<F>,
    decision: Decision,
) -> Decision {
    to_program::<P, F, { jump::REJECT }>(packet, parsed, decision, LEAVING)
}

/// Continues as [`to_reject`] does, for a packet of `length` bytes in a reply's outer packet that
/// this node is to open, and that would have to be `mtu` bytes long at most. Returns only if the
/// program is missing.
#[inline(always)]
pub fn to_reject_outer<P: Packet, F: Family>(
    packet: P,
    scratch: *mut Scratch<F::Address>,
    length: u32,
    mtu: u32,
) {
    set!(scratch.outcome = Outcome::RejectedMtuExceeded as u32 | WITHIN);
    set!(scratch.mtu = mtu);
    set!(scratch.service = NO_SERVICE);
    set!(scratch.length = length);
    set!(scratch.key = get!(scratch.opening));
    set!(scratch.opened.routed = 0);
    packet.jump::<F, { jump::REJECT }>();
}

#[inline(always)]
fn to_program<P: Packet, F: Family, const PROGRAM: u32>(
    packet: P,
    parsed: &Parsed<F>,
    decision: Decision,
    leaving: u32,
) -> Decision {
    if let Some(scratch) = F::scratch() {
        set!(scratch.outcome = decision.outcome as u32 | leaving);
        set!(scratch.mtu = decision.mtu);
        set!(scratch.service = decision.service);
        set!(scratch.length = parsed.length);
        set!(scratch.key = parsed.tuple);
        packet.jump::<F, PROGRAM>();
    }
    Outcome::PassedMissedTailCall.into()
}

/// The program for refused packets: it answers the sender, within the rate limit, then counts the
/// packet and emits the event.
#[inline(always)]
pub fn run<P: Packet, F: Answer>(packet: P) -> i32 {
    let Some(scratch) = F::scratch() else {
        return verdict::finish(packet, P::HOOK, Outcome::DroppedInternalError.into());
    };
    // Masked: kernels before 6.18 do not carry a bound found on `number - n` back to `number`,
    // which indexes the counters.
    let number = get!(scratch.outcome) & (OUTCOMES - 1);
    let leaving =
        if P::TC { opaque((get!(scratch.outcome) >> LEAVING.trailing_zeros()) as u64) as u32 } else { 0 };
    let hook = P::HOOK + leaving;
    let decision = match Outcome::numbered(number) {
        Some(outcome) if matches!(outcome.verdict(), Verdict::Drop) => outcome.into(),
        _ => answer::<P, F>(packet, number, leaving),
    };
    let service = service::<F>(scratch);
    if !matches!(decision.outcome.verdict(), Verdict::Pass) {
        counters::add(service, decision.outcome, 1, get!(scratch.length) as u64, 0);
        events::emit::<F>(|| NewEvent {
            hook,
            outcome: decision.outcome,
            service,
            ifindex: packet.ingress(),
            netns: 0,
            tuple: get!(scratch.key),
            endpoint: (F::Address::default(), Port::NONE),
        });
    }
    verdict::finish(packet, hook, decision)
}

/// Returns the Service that refused the packet. The fast path does not record it: the flow holds
/// it.
#[inline(always)]
fn service<F: Answer>(scratch: *mut Scratch<F::Address>) -> u32 {
    let service = get!(scratch.service);
    if service != NO_SERVICE {
        return service;
    }
    let key = borrow(place!(const scratch.key));
    let entry = FlowTable::<F>::new().find(key);
    if entry.is_null() { NO_SERVICE } else { get!(entry.service) }
}

#[inline(always)]
fn answer<P: Packet, F: Answer>(packet: P, number: u32, leaving: u32) -> Decision {
    let Some(scratch) = F::scratch() else { return Outcome::DroppedInternalError.into() };
    let mtu = get!(scratch.mtu);
    // Before anything ends this: it concerns no other packet.
    let routed = is_answered_by_route::<P, F>();
    if !take() {
        return Outcome::DroppedRateLimited.into();
    }
    let (outcome, kind, rest) = if number == Outcome::ResetNoFlow as u32 {
        (Outcome::ResetNoFlow, 0, 0)
    } else if number == Outcome::RejectedTtlExceeded as u32 {
        (Outcome::RejectedTtlExceeded, F::TTL_EXCEEDED, 0)
    } else if number == Outcome::RejectedMtuExceeded as u32 {
        (Outcome::RejectedMtuExceeded, F::TOO_LONG, mtu)
    } else if number == Outcome::RejectedUnknownPort as u32 {
        (Outcome::RejectedUnknownPort, F::PORT_UNREACHABLE, 0)
    } else {
        (Outcome::RejectedNoEndpoint, F::PORT_UNREACHABLE, 0)
    };
    let inside = (get!(scratch.outcome) >> WITHIN.trailing_zeros() & 1) * (F::OUTER + outer::UDP);
    let opened = inside != 0 || routed;
    let built =
        if kind == 0 { F::reset(packet, opened) } else { F::error(packet, kind, rest, inside, opened) };
    if !built {
        // XDP cannot build a longer answer from a frame that fills its buffer, and no answer to one
        // in several buffers. The frame is still unchanged, and TC answers it.
        return if P::TC { Outcome::DroppedInternalError } else { Outcome::PassedToTc }.into();
    }
    Decision::sent(outcome, send_back::<P, F>(packet, leaving, routed))
}

/// Whether the refused packet was opened.
#[inline(always)]
fn is_answered_by_route<P: Packet, F: Family>() -> bool {
    if !P::TC {
        return false;
    }
    let Some(scratch) = F::scratch() else { return false };
    let routed = get!(scratch.opened.routed);
    set!(scratch.opened.routed = 0);
    routed != 0
}

/// Sends the answer by the device that the packet came by, or hands it to the stack if the packet
/// was outgoing, and returns the verdict. `routed`: by the route to the client, or through the node
/// in front.
#[inline(always)]
fn send_back<P: Packet, F: Outer>(packet: P, leaving: u32, routed: bool) -> i32 {
    let ifindex = packet.ingress();
    if let Some(skb) = packet.skb()
        && routed
    {
        return through_front::answer::<P, F>(packet).unwrap_or_else(|| skb.send_routed(ifindex));
    }
    if let Some(skb) = packet.skb()
        && leaving == 0
        && let Some(device) = Table::of(&raw const DEVICES).lookup::<u32, DeviceInfo>(&ifindex)
        && get!(device.flags) & HOP_ROUTED != 0
    {
        return skb.send_routed(ifindex);
    }
    packet.send_or_receive(if leaving == 0 { ifindex } else { leaves_by::<F>(ifindex) }, leaving)
}

/// Returns the device by which an outgoing packet would have left: the one where it is, `ifindex`,
/// or where it was before it was divided (`divide` in `forward::sctp`), which `Scratch::outer` has.
/// Its frame has that one's MAC address, so at any other the stack would take the answer for
/// another host's.
#[inline(always)]
fn leaves_by<F: Family>(ifindex: u32) -> u32 {
    let is_divided = CONFIG.get_ptr(0).is_some_and(|config| get!(config.sctp_divided) == ifindex);
    match F::scratch() {
        Some(scratch) if is_divided => get!(scratch.outer.ifindex),
        _ => ifindex,
    }
}

/// Takes a token of this CPU.
#[inline(always)]
fn take() -> bool {
    let (Some(bucket), Some(config)) = (REJECT_LIMITS.get_ptr_mut(0), CONFIG.get_ptr(0)) else {
        return false;
    };
    let now = clock::jiffies();
    let RejectBucket { tokens, filled } = load(bucket);
    let rate = get!(config.answers_per_jiffy);
    let elapsed = now.wrapping_sub(filled);
    let elapsed = if elapsed > BURST { BURST } else { elapsed };
    let full = rate.wrapping_mul(BURST);
    let tokens = tokens.wrapping_add(elapsed.wrapping_mul(rate));
    let tokens = if tokens > full { full } else { tokens };
    if tokens == 0 {
        return false;
    }
    store(bucket, RejectBucket { tokens: tokens - 1, filled: now });
    true
}

/// Returns the MAC addresses in the opposite order, read before the frame is resized.
#[inline(always)]
fn swapped(data: usize) -> (u64, u32) {
    let (to, from) =
        ([load32::<0>(data), load16::<4>(data) as u32], [load32::<6>(data), load16::<10>(data) as u32]);
    let first = from[0] as u64 | (from[1] as u64) << 32 | (to[0] as u64) << 48;
    (first, to[0] >> 16 | to[1] << 16)
}

#[inline(always)]
fn store_macs(data: usize, (first, second): (u64, u32)) {
    store64::<0>(data, first);
    store32::<8>(data, second);
}

/// Writes an RST without data.
#[inline(always)]
fn segment(l4: usize, ports: Ports, sequence: u32, pseudo: u64) {
    store32::<0>(l4, ports.wire());
    store32::<4>(l4, sequence);
    store32::<8>(l4, 0);
    store16::<12>(l4, RST_FLAGS);
    store16::<14>(l4, 0);
    store16::<16>(l4, !fold(pseudo + port_sum(ports) + word_sum(sequence) + RST_FLAGS as u64));
    store16::<18>(l4, 0);
}
