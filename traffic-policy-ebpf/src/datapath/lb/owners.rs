//! The owners of a TCP connection that goes on by a node which does not know it: the endpoint that
//! the Maglev table names for it, and those that the table named before.
//!
//! ```text
//! node in front → owner's node ─ knows the connection: delivers
//!                               └ does not: → node of the last owner before → … → the third one
//! ```
//!
//! Tables are equal on every node, so a node to which a router has moved an established connection
//! finds the endpoint that has it, unless the table has changed meanwhile. It does not know the
//! connections of others; each node knows those of its own endpoints, or the [stacks of their
//! pods][pod_stack] do, and it sends a segment of another one on to the next owner. The outer
//! packet counts the owners that were asked: the number grows with each node, up to [`FORMER`], so
//! a packet never goes round. What nobody knows is reset for the frontend.

use aya_ebpf::bindings::{__sk_buff, xdp_md};
use traffic_policy_ebpf::{
    abi::{
        Address, BY_FLOW, Frontend, IndexRange, REPLY_THROUGH_FRONT, SLOT_LOCAL, Scratch, Slot, Tuple,
        frontend,
        maglev::{FORMER, elements},
        scope,
    },
    outcome::Outcome,
    tcp::flag,
};

use core::ptr;

use crate::datapath::{
    clock,
    ctx::{Packet, tc::Tc, xdp::Xdp},
    family::{Family, V4, V6},
    flow::table::FlowTable,
    forward::direct,
    lb::{
        Client, List, Target, maglev,
        pod_stack::{self, Answer},
        select,
    },
    maps::LOCAL_NODE,
    parse::Parsed,
    value::{borrow, load},
    verdict::Decision,
};

/// The number of no slot.
pub const NONE: u32 = u32::MAX;
/// The answer in place of a slot: a pod of this node has the connection, with other numbers.
pub const OUT_OF_WINDOW: u32 = u32::MAX - 1;
/// The answer in place of a slot: TC is to ask a pod of this node.
const BY_TC: u32 = u32::MAX - 2;

/// The flags of a frontend whose connections other nodes find, of those that matter here. The
/// endpoints of a Local list are other ones on each node.
const MATTER: u32 = frontend::DIRECT | frontend::MAGLEV | frontend::LOCAL;
const FOUND_BY_ALL: u32 = frontend::DIRECT | frontend::MAGLEV;

/// Whether a segment shows a connection that is established. Neither a SYN-ACK nor an RST is worth
/// an entry.
#[inline(always)]
pub fn goes_on<F: Family>(parsed: &Parsed<F>) -> bool {
    parsed.is_tcp() && parsed.tcp_flags() & (flag::SYN | flag::RST | flag::ACK) == flag::ACK
}

/// Whether the owners of a connection to this frontend follow from its addresses and ports.
#[inline(always)]
pub fn are_known<P: Packet, F: Family>(list: &List) -> bool {
    direct::wanted::<P, F>(list) != 0 && get!((list.frontend).flags) & MATTER == FOUND_BY_ALL
}

/// Returns the decision on a segment of a connection that nobody knows.
#[inline(always)]
pub fn unknown(list: &List, segment: u8) -> Decision {
    if get!((list.frontend).flags) & frontend::NODE_ADDRESS != 0
        || segment & flag::RST != 0
        || segment & flag::ACK == 0
    {
        return Outcome::PassedNoFlow.into();
    }
    Decision::refused(Outcome::ResetNoFlow, list.service)
}

/// Returns the slot of the endpoint for a segment that [goes on][goes_on] with a connection which
/// the node in front does not know, but whose owners [are known][are_known]. `chosen`: the slot of
/// a new connection. The tuple is `Scratch::opening`.
///
/// # Errors
/// The endpoints are here, and their pods do not know the connection, or on nodes that open
/// nothing: only the node in front could know it, as it would have its own address as source.
#[inline(always)]
pub fn in_front<P: Packet, F: Family>(
    packet: P,
    parsed: &Parsed<F>,
    scratch: *mut Scratch<F::Address>,
    list: &List,
    chosen: u32,
) -> Result<u32, Decision> {
    set!(scratch.owners.asked = 0);
    pod_stack::note_segment(scratch, parsed);
    match of_segment::<P, F>(packet, scratch, chosen) {
        NONE => Err(unknown(list, parsed.tcp_flags())),
        OUT_OF_WINDOW => Err(Decision::refused(Outcome::DroppedOutOfWindow, list.service)),
        BY_TC => Err(Outcome::PassedToTc.into()),
        index => Ok(index),
    }
}

/// Returns the slot of the endpoint whose reply an ICMP error quotes that has come to this node in
/// front, which does not know the flow; [`NONE`] if that does not follow from the tuple of the
/// flow's requests, `Scratch::opening`.
///
/// The endpoints that clients with affinity used last are not asked: any host can send an error.
#[inline(always)]
pub fn of_quoted<P: Packet, F: Family>(scratch: *mut Scratch<F::Address>) -> u32 {
    let tuple = borrow(place!(const scratch.opening));
    let client = Client { source: tuple.source, netns: 0, of_pod: P::POD, hash: 0 };
    let Ok(list) = select::list::<F>(&Target::of(tuple), &client) else { return NONE };
    if !are_known::<P, F>(&list) {
        return NONE;
    }
    let place = maglev::place::<F>(list.frontend);
    if place >= list.range.len {
        return NONE;
    }
    set!(scratch.owners.asked = 0);
    elsewhere::<F>(scratch, list.range.base + place)
}

/// Returns the number of owners that were asked before an outer packet with this number came.
#[inline(always)]
pub fn asked(number: u32) -> u32 {
    number & !REPLY_THROUGH_FRONT
}

/// Whether another owner may be asked after so many.
#[inline(always)]
pub fn may_be_asked(asked: u32) -> bool {
    asked < FORMER
}

/// Begins the search for the owner of an opened packet, before which [others may be
/// asked][may_be_asked].
#[inline(always)]
pub fn note_opened<A: Address>(scratch: *mut Scratch<A>, asked: u32) {
    set!(scratch.owners.asked = asked);
    // For a connection that this node sends on already.
    set!(scratch.owners.number = asked + 1);
}

/// Returns the slot of the next owner for the connection `Scratch::opening`, or [`NONE`]: one on
/// another node, or here if its pod has the connection; or [`OUT_OF_WINDOW`], or [`BY_TC`].
/// `chosen`: the slot that the node in front has chosen for it. [`pod_stack::note_segment`] comes
/// first.
#[inline(always)]
pub fn of_segment<P: Packet, F: Family>(packet: P, scratch: *mut Scratch<F::Address>, chosen: u32) -> u32 {
    if P::POD {
        return NONE;
    }
    set!(scratch.owners.chosen = chosen);
    let context = packet.raw();
    let index = match (P::TC, F::V6) {
        (false, false) => owner_xdp4(context.cast()),
        (false, true) => owner_xdp6(context.cast()),
        (true, false) => owner_tc4(context.cast()),
        (true, true) => owner_tc6(context.cast()),
    };
    index as u32
}

/// Returns the slot of the next owner on another node, as [`of_segment`] does: errors are never
/// asked for in pods, for any host can send one.
#[inline(always)]
pub fn elsewhere<F: Family>(scratch: *mut Scratch<F::Address>, chosen: u32) -> u32 {
    set!(scratch.owners.chosen = chosen);
    (if F::V6 { owner_elsewhere6() } else { owner_elsewhere4() }) as u32
}

global_functions! {
    owner_xdp4 => search_all::<Xdp, V4>, context: *mut xdp_md;
    owner_xdp6 => search_all::<Xdp, V6>, context: *mut xdp_md;
    owner_tc4 => search_all::<Tc, V4>, context: *mut __sk_buff;
    owner_tc6 => search_all::<Tc, V6>, context: *mut __sk_buff;
    owner_elsewhere4 => search_elsewhere::<V4>;
    owner_elsewhere6 => search_elsewhere::<V6>;
}

#[inline(always)]
fn search_all<P: Packet, F: Family>(context: *mut P::Context) -> i32 {
    search::<P, F, true>(context)
}

#[inline(always)]
fn search_elsewhere<F: Family>() -> i32 {
    search::<Tc, F, false>(ptr::null_mut())
}

/// Implements [`of_segment`], and without `PODS` [`elsewhere`]: the first owner that was not asked
/// yet, and is on another node that opens packets, or here and has the connection. Sets
/// `OwnerSearch::number`.
#[inline(always)]
fn search<P: Packet, F: Family, const PODS: bool>(context: *mut P::Context) -> i32 {
    let Some(scratch) = F::scratch() else { return NONE as i32 };
    let tuple = borrow(place!(const scratch.opening));
    let (asked, chosen) = (get!(scratch.owners.asked), get!(scratch.owners.chosen));
    set!(scratch.owners.number = 0);
    // A flow whose replies are not known any more goes by no other way. One that another CPU
    // creates meanwhile is found when this packet's cannot be inserted.
    let has_flow = if PODS {
        get!(scratch.owners.known) == BY_FLOW
    } else {
        !FlowTable::<F>::new().find(tuple).is_null()
    };
    if has_flow {
        return NONE as i32;
    }
    if chosen != NONE && is_elsewhere::<F>(chosen) {
        return chosen as i32;
    }
    let found = frontend::<F>(tuple);
    if found.is_null() || get!(found.flags) & MATTER != FOUND_BY_ALL {
        return NONE as i32;
    }
    set!(scratch.owners.service = get!(found.service));
    let owner = |index: u32| may_know::<P, F, PODS>(context, index);
    let mut index = if PODS { owner(chosen) } else { NONE };
    if index != NONE {
        return index as i32;
    }
    let table = get!(found.maglev);
    let slot = maglev::slot::<F>(found, *tuple);
    let mut number = 1;
    if asked == 0 {
        // Nodes hear of a change at different times: the one in front may have another table.
        index = owner(slot_in(table.base, slot, get!(found.cluster)));
    }
    let former = get!(found.former);
    if index == NONE && get!(found.former_until) > clock::nanoseconds() {
        let list = get!(found.former_list);
        let nth = |nth: u32| {
            if nth <= asked || nth > former.len {
                return NONE;
            }
            owner(slot_in(former.base + (nth - 1) * elements(table.len), slot, list))
        };
        // Not a loop: the verifier of Linux 6.1 refuses the order of its instructions.
        index = nth(1);
        if index == NONE {
            (index, number) = (nth(2), 2);
        }
        if index == NONE {
            (index, number) = (nth(3), 3);
        }
    }
    if index != NONE {
        set!(scratch.owners.number = number);
    }
    index as i32
}

const _: () = assert!(FORMER == 3, "search() looks at three");

/// Returns the number of the slot of a table's endpoint.
#[inline(always)]
fn slot_in(base: u32, slot: u32, list: IndexRange) -> u32 {
    let place = maglev::place_in(base, slot);
    if place < list.len { list.base + place } else { NONE }
}

/// Returns the number of this slot if its endpoint may have the connection: it is on another node
/// which opens packets, or the stack of its pod here says so; otherwise [`NONE`], or what the stack
/// says instead.
#[inline(always)]
fn may_know<P: Packet, F: Family, const PODS: bool>(context: *mut P::Context, index: u32) -> u32 {
    if !PODS {
        return if is_elsewhere::<F>(index) { index } else { NONE };
    }
    let answer = match (P::TC, F::V6) {
        (false, false) => slot_knows_xdp4(context.cast(), index),
        (false, true) => slot_knows_xdp6(context.cast(), index),
        (true, false) => slot_knows_tc4(context.cast(), index),
        (true, true) => slot_knows_tc6(context.cast(), index),
    };
    answer as u32
}

global_functions! {
    slot_knows_xdp4 => slot_knows::<Xdp, V4>, context: *mut xdp_md, index: u32;
    slot_knows_xdp6 => slot_knows::<Xdp, V6>, context: *mut xdp_md, index: u32;
    slot_knows_tc4 => slot_knows::<Tc, V4>, context: *mut __sk_buff, index: u32;
    slot_knows_tc6 => slot_knows::<Tc, V6>, context: *mut __sk_buff, index: u32;
}

/// Implements [`may_know`].
#[inline(always)]
fn slot_knows<P: Packet, F: Family>(context: *mut P::Context, index: u32) -> i32 {
    let none = NONE as i32;
    let Some(scratch) = F::scratch() else { return none };
    let Some(slot) = F::slots().lookup::<u32, Slot<F::Address>>(&index) else { return none };
    if get!(slot.flags) & SLOT_LOCAL == 0 {
        return if load(slot).opens() != 0 { index as i32 } else { none };
    }
    match pod_stack::ask::<P, F>(context, scratch, get!(slot.address)) {
        Answer::Unknown => none,
        Answer::Known => index as i32,
        Answer::OutOfWindow => OUT_OF_WINDOW as i32,
        Answer::ByTc => BY_TC as i32,
    }
}

/// Returns the frontend of a packet that another node has sent, or that this one is to send on, or
/// null. A node port on an address of another node is one of this node, too, wherever, or whether,
/// that serves its own.
#[inline(always)]
pub fn frontend<F: Family>(tuple: &Tuple<F::Address>) -> *const Frontend {
    let target = Target::of(tuple);
    let found = select::frontend::<F>(&target);
    if !found.is_null() {
        return found;
    }
    let any = Target { address: F::Address::default(), scope: scope::NODE_PORT, ..target };
    let found = select::frontend::<F>(&any);
    if !found.is_null() {
        return found;
    }
    // There is none at a node that does not serve loopback, while no other node takes part.
    let Some(node) = LOCAL_NODE.get_ptr(0) else { return ptr::null() };
    let address = F::narrow(get!(node.primary[F::INDEX]));
    select::frontend::<F>(&Target { address, scope: scope::ADDRESS, ..target })
}

/// Whether a slot's endpoint is on another node, which opens packets.
#[inline(always)]
fn is_elsewhere<F: Family>(index: u32) -> bool {
    let Some(slot) = F::slots().lookup::<u32, Slot<F::Address>>(&index) else { return false };
    get!(slot.flags) & SLOT_LOCAL == 0 && load(slot).opens() != 0
}
