//! Fragment records, and the translation of later fragments. The first fragment has the ports and
//! is translated like any packet of its flow; it leaves a record, by which the later ones are
//! assigned to the flow. A later fragment that arrives before the first one passes: it may be for
//! the stack, and nothing here can hold it back. Senders send the first fragment first; a datagram
//! that the network reorders is lost, and its sender retransmits it.
//!
//! The identification is kept. Towards an endpoint on another node it was chosen by the client,
//! whose address is replaced by the node's: datagrams of two clients to one endpoint with the same
//! 16 bits within a second or so corrupt each other there, as with any translation that does not
//! reassemble (RFC 6864 section 5.3.1).

use traffic_policy_ebpf::{
    abi::{Flow, Fragment, FragmentKey, IGNORED, REASSEMBLY},
    outcome::Outcome,
};

use crate::datapath::{
    clock,
    ctx::{Packet, Skb as _},
    family::Family,
    flow::{pair, table::FlowTable},
    forward::{self, Rewrite, Translatable},
    maps::ANY,
    parse::{Parsed, variable::VariableHeaders},
    value::{borrow, load, load_once, store_once},
    verdict::Decision,
};

/// A fragment without a transport header: only its addresses can be translated.
pub struct Later<F: Family> {
    pub parsed: Parsed<F>,
    /// The time to note for its flow's last packet: now, except for a fragment that the flow
    /// ignores.
    pub last: u32,
}

/// Notes the key by which the other fragments of a packet are found, if the packet is a fragment.
#[inline(always)]
pub fn note<F: Family>(headers: &VariableHeaders<F>) -> bool {
    let Some(scratch) = F::scratch() else { return false };
    let tuple = &headers.parsed.tuple;
    let protocol = if F::V6 { 0 } else { tuple.protocol };
    store_once(place!(mut scratch.fragmented), headers.fragmented);
    set!(scratch.fragment.protocol = 0);
    set!(
        scratch.fragment_key = FragmentKey {
            source: tuple.source,
            destination: tuple.destination,
            identification: headers.identification,
            protocol,
        }
    );
    true
}

/// Whether the packet that [`note`] has seen last is a fragment.
#[inline(always)]
pub fn is_one<F: Family>() -> bool {
    F::scratch().is_none_or(|scratch| load_once(place!(const scratch.fragmented)) != 0)
}

/// Marks the packet that [`note`] has seen last as ignored by its flow.
#[inline(always)]
pub fn ignore<F: Family>() {
    if let Some(scratch) = F::scratch() {
        set!(scratch.fragment.protocol = IGNORED);
    }
}

/// Stores the record of a packet that [`note`] has seen, if it is a fragment, which is then the
/// first one. Without the record (the kernel has no room at the moment) the later ones pass.
///
/// It reads the flag back from scratch memory, although the caller knows it: otherwise the verifier
/// would follow the code in between twice.
#[inline(always)]
pub fn record<F: Family>(parsed: &Parsed<F>) {
    let Some(scratch) = F::scratch() else { return };
    if load_once(place!(const scratch.fragmented)) == 0 {
        return;
    }
    set!(
        scratch.fragment = Fragment {
            ports: parsed.tuple.ports,
            protocol: parsed.tuple.protocol | get!(scratch.fragment.protocol) & IGNORED,
            seen: clock::nanoseconds(),
        }
    );
    let key = borrow(place!(const scratch.fragment_key));
    F::fragments().insert(key, place!(const scratch.fragment), ANY);
}

/// Completes a later fragment by the record of its first one, and finds its entry.
///
/// # Errors
/// There is no record, or its flow has been removed.
#[inline(always)]
pub fn later<F: Family>(
    headers: VariableHeaders<F>,
    now: u32,
) -> Result<(Later<F>, *mut Flow<F::Address>), Outcome> {
    let Some(scratch) = F::scratch() else { return Err(Outcome::DroppedInternalError) };
    let key = borrow(place!(const scratch.fragment_key));
    let Some(record) = F::fragments().lookup::<_, Fragment>(key) else {
        return Err(Outcome::PassedFragment);
    };
    let Fragment { ports, protocol, seen } = load(record);
    if clock::nanoseconds().wrapping_sub(seen) > REASSEMBLY {
        return Err(Outcome::PassedFragment);
    }
    let mut parsed = headers.parsed;
    parsed.tuple.ports = ports;
    parsed.tuple.protocol = protocol & !IGNORED;
    let entry = FlowTable::<F>::new().find(&parsed.tuple);
    if entry.is_null() {
        return Err(Outcome::PassedFragment);
    }
    let last = if protocol & IGNORED == 0 { now } else { get!(entry.last) };
    Ok((Later { parsed, last }, entry))
}

impl<P: Packet, F: Rewrite> Translatable<P, F> for Later<F> {
    #[inline(always)]
    fn outcome(kind: u8) -> Outcome {
        <Parsed<F> as Translatable<P, F>>::outcome(kind)
    }
    #[inline(always)]
    fn ip(&self) -> usize {
        self.parsed.ip
    }
    #[inline(always)]
    fn ttl(&self) -> u8 {
        self.parsed.ttl
    }
    #[inline(always)]
    fn wire_length(&self, _: P) -> u32 {
        self.parsed.length
    }
    #[inline(always)]
    fn ttl_exceeded(&self) -> Outcome {
        Outcome::DroppedTtlExceeded
    }
    /// No error is sent for it. The first fragment, as long as any, was answered.
    #[inline(always)]
    fn mtu_exceeded(&self, mtu: u32) -> Decision {
        Decision { mtu, ..Outcome::DroppedMtuExceeded.into() }
    }
    #[inline(always)]
    fn account(&self, entry: *mut Flow<F::Address>, now: u32) {
        pair::begin_count(entry);
        forward::account::<F>(entry, self.parsed.length, now);
    }
    #[inline(always)]
    fn translate(&self, packet: P, entry: *const Flow<F::Address>, step: bool) -> bool {
        F::addresses(&self.parsed, entry, step);
        if let Some(skb) = packet.skb()
            && F::V6
        {
            // Nothing in this packet compensates for the new addresses: the checksum of the
            // datagram is in the first fragment.
            skb.update_sum(get!(entry.address_delta));
        }
        true
    }
}
