//! State transitions of an SCTP association's two entries: [`traffic_policy_ebpf::sctp`] has their
//! tags and states.
//!
//! Only an INIT begins a flow. An INIT on an assured flow may be forged, so it changes nothing
//! until the endpoint has accepted it: its initiate tag is kept in `tail`, which the flow's
//! place in the queue no longer needs. A COOKIE ACK with that tag proves that the client has
//! restarted and that the endpoint has accepted the restart (RFC 9260 section 5.2). The endpoint's
//! new tag is then taken from the client's next packet.

use traffic_policy_ebpf::{
    abi::{Address, Flow, Tail},
    outcome::Outcome,
    sctp::{self, Head, Tags, chunk, tags},
    tcp::{ANSWERED, ASSURED, FIN, REMOVED, RST},
};

use crate::datapath::{
    barrier::compare_exchange,
    clock,
    ctx::Packet,
    family::Family,
    flow::{
        claim::CLAIMED,
        pair::{self, Transition},
    },
    parse::Parsed,
};

/// The fraction of a second without a packet after which an INIT with another tag is a new attempt,
/// as for a SYN in [`super::silence`].
const NEW_ATTEMPT: u32 = 4;
/// The seconds without a packet after which it is a new attempt, once the endpoint has answered:
/// the client's COOKIE ECHO is then awaited, and arrives or is retransmitted within that time
/// (RTO.Initial of Linux).
const ANSWERED_ATTEMPT: u32 = 3;

/// Advances the state of a flow by a packet of its client. `reply`: the reply entry, never null.
#[inline(always)]
pub fn request<P: Packet, F: Family>(
    packet: P,
    parsed: &Parsed<F>,
    entry: *mut Flow<F::Address>,
    reply: *mut Flow<F::Address>,
) -> Transition<F::Address> {
    let (head, numbers) = (parsed.head_of_any(packet), get!(entry.numbers));
    let state = get!(entry.state);
    if parsed.opens(packet) {
        if numbers == CLAIMED {
            return Transition::Leave(Outcome::DroppedTableFull);
        }
        if (state | get!(reply.state)) & RST != 0 || state & (REMOVED | ASSURED) == REMOVED {
            return pair::again::<P, F>(parsed, entry);
        }
        let tag = parsed.initiate_tag(packet);
        if state & ASSURED == 0 {
            return if is_attempt(entry, reply, tag) {
                Transition::Keep(entry)
            } else {
                Transition::Ignore(entry)
            };
        }
        if is_quiet(entry, reply, sctp::SILENCE * clock::hz()) {
            return pair::again::<P, F>(parsed, entry);
        }
        set!(entry.tail = Tail::of_initiate_tag(tag));
        return Transition::Ignore(entry);
    }
    // A packet that ends an association is not used here: a forged one would end the flow.
    if state & ASSURED != 0 && sctp::carried(numbers) == 0 && head.tag != 0 && !head.is_last() {
        let known = get!(reply.numbers);
        replace(entry, numbers, tags(sctp::own(numbers), head.tag));
        replace(reply, known, tags(head.tag, sctp::carried(known)));
    }
    if !head.fits(get!(entry.numbers)) {
        return Transition::Ignore(entry);
    }
    note(entry, &head);
    if (state | get!(entry.state)) & (ASSURED | RST) == 0 {
        pair::assure::<F>(&parsed.tuple, entry, reply);
    }
    Transition::Keep(entry)
}

/// Advances the state of a flow by a packet of its endpoint.
#[inline(always)]
pub fn reply<P: Packet, F: Family>(
    packet: P,
    parsed: &Parsed<F>,
    entry: *mut Flow<F::Address>,
) -> Transition<F::Address> {
    let Some(key) = pair::counterpart_key::<F>(entry, parsed.tuple.protocol) else {
        return Transition::Leave(Outcome::DroppedInternalError);
    };
    let request = pair::counterpart(parsed, key);
    if request.is_null() {
        return Transition::Leave(Outcome::PassedStaleFlow);
    }
    let (head, state) = (parsed.head_of_any(packet), get!(entry.state));
    if head.kind == chunk::COOKIE_ACK && accepts_restart(entry, request, &head) {
        return Transition::Keep(entry);
    }
    if !head.fits(get!(entry.numbers)) {
        // The tuple may belong to another association, one to the endpoint itself.
        return if state & ASSURED == 0 || (state | get!(request.state)) & RST != 0 {
            Transition::Leave(Outcome::PassedOutOfWindow)
        } else {
            Transition::Ignore(entry)
        };
    }
    note(entry, &head);
    if state & ASSURED != 0 {
        return Transition::Keep(entry);
    }
    if head.kind == chunk::INIT_ACK {
        // Each answer to a repeated INIT has a tag of its own, and the client takes the first that
        // it gets. If that is another one, its COOKIE ECHO does not fit, but the COOKIE ACK does.
        let (known, of_request) = (get!(entry.numbers), get!(request.numbers));
        let (tag, client) = (parsed.initiate_tag(packet), sctp::carried(known));
        replace(entry, known, tags(tag, client));
        replace(request, of_request, tags(client, tag));
        set!(entry.state |= ANSWERED);
    } else if head.kind == chunk::COOKIE_ACK {
        let client = sctp::carried(get!(entry.numbers));
        set!(entry.state |= ANSWERED);
        pair::assure::<F>(key, request, entry);
        begin(entry, request, client);
    }
    Transition::Keep(entry)
}

/// Notes the client's tag of an association that has begun. The endpoint's tag is not known, and is
/// taken from the client's next packet.
#[inline(always)]
fn begin<A: Address>(entry: *mut Flow<A>, request: *mut Flow<A>, client: u32) {
    replace(request, get!(request.numbers), tags(client, 0));
    replace(entry, get!(entry.numbers), tags(0, client));
}

/// Replaces the tags of an entry that were read just before, unless another CPU has claimed the
/// entry or written it meanwhile.
#[inline(always)]
fn replace<A: Address>(entry: *mut Flow<A>, read: Tags, by: Tags) {
    if read != CLAIMED {
        compare_exchange(place!(mut entry.numbers), read, by);
    }
}

/// Whether a COOKIE ACK proves that the endpoint has accepted a restart, whose INIT came on this
/// flow. Notes the new association if it does.
#[inline(always)]
fn accepts_restart<A: Address>(entry: *mut Flow<A>, request: *mut Flow<A>, head: &Head) -> bool {
    let client = get!(request.tail).initiate_tag();
    if get!(request.state) & ASSURED == 0 || client == 0 || head.tag != client {
        return false;
    }
    set!(request.tail = Tail::NONE);
    begin(entry, request, client);
    set!(request.state &= !(RST | FIN));
    set!(entry.state &= !(RST | FIN));
    true
}

/// Writes the state of an entry after a packet that fits.
#[inline(always)]
fn note<A: Address>(entry: *mut Flow<A>, head: &Head) {
    let state = get!(entry.state);
    let after = head.after(state);
    if after != state {
        set!(entry.state = after);
    }
}

/// Notes an INIT on an unassured flow. False: it is neither the INIT that awaits its answer nor a
/// new attempt.
#[inline(always)]
fn is_attempt<A: Address>(entry: *mut Flow<A>, reply: *mut Flow<A>, tag: u32) -> bool {
    let (known, of_reply) = (get!(entry.numbers), get!(reply.numbers));
    if sctp::own(known) == tag {
        return true;
    }
    let second = clock::hz();
    let answered = get!(reply.state) & ANSWERED != 0;
    if !is_quiet(entry, reply, if answered { ANSWERED_ATTEMPT * second } else { second / NEW_ATTEMPT }) {
        return false;
    }
    replace(entry, known, tags(tag, 0));
    replace(reply, of_reply, tags(0, tag));
    set!(reply.state &= !ANSWERED);
    true
}

/// Whether no packet of a flow has come for `time` jiffies.
#[inline(always)]
fn is_quiet<A: Address>(entry: *const Flow<A>, reply: *const Flow<A>, time: u32) -> bool {
    let now = clock::jiffies();
    // 0 until an agent has measured the length of a second.
    time != 0 && now.wrapping_sub(get!(entry.last)) >= time && now.wrapping_sub(get!(reply.last)) >= time
}
