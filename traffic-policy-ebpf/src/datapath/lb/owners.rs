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
//! connections of others; each node knows those of its own endpoints, and sends a segment of
//! another one on to the next owner. The outer packet counts the owners that were asked: the number
//! grows with each node, up to [`FORMER`], so a packet never goes round. What nobody knows is reset
//! for the frontend.

use traffic_policy_ebpf::{
    abi::{
        Address, Frontend, IndexRange, REPLY_THROUGH_FRONT, SLOT_LOCAL, Scratch, Slot, Tuple, frontend,
        maglev::{FORMER, elements},
        scope,
    },
    outcome::Outcome,
    tcp::flag,
};

use core::ptr;

use crate::datapath::{
    clock,
    ctx::Packet,
    family::{Family, V4, V6},
    flow::table::FlowTable,
    forward::direct,
    lb::{Client, List, Target, maglev, select},
    maps::LOCAL_NODE,
    parse::Parsed,
    value::{borrow, load},
    verdict::Decision,
};

/// The number of no slot.
pub const NONE: u32 = u32::MAX;

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
/// Only the node in front could know the connection, as it would have its own address as source; or
/// the endpoints are here, and nobody else knows it.
#[inline(always)]
pub fn in_front<F: Family>(
    scratch: *mut Scratch<F::Address>,
    list: &List,
    segment: u8,
    chosen: u32,
) -> Result<u32, Decision> {
    set!(scratch.owners.asked = 0);
    let index = next::<F>(scratch, chosen);
    if index == NONE { Err(unknown(list, segment)) } else { Ok(index) }
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
    next::<F>(scratch, list.range.base + place)
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

/// Returns the slot of the next owner for the connection `Scratch::opening`, or [`NONE`]. `chosen`:
/// the slot that the node in front has chosen for it.
#[inline(always)]
pub fn next<F: Family>(scratch: *mut Scratch<F::Address>, chosen: u32) -> u32 {
    set!(scratch.owners.chosen = chosen);
    (if F::V6 { next_owner6() } else { next_owner4() }) as u32
}

global_functions! {
    next_owner4 => search::<V4>;
    next_owner6 => search::<V6>;
}

/// Implements [`next`]: the first owner that was not asked yet, and is on another node that opens
/// packets. Sets `OwnerSearch::number`.
#[inline(always)]
fn search<F: Family>() -> i32 {
    let Some(scratch) = F::scratch() else { return NONE as i32 };
    let tuple = borrow(place!(const scratch.opening));
    let (asked, chosen) = (get!(scratch.owners.asked), get!(scratch.owners.chosen));
    set!(scratch.owners.number = 0);
    // A flow whose replies are not known any more goes by no other way.
    if !FlowTable::<F>::new().find(tuple).is_null() {
        return NONE as i32;
    }
    if chosen != NONE {
        match whereabouts::<F>(chosen) {
            Whereabouts::Elsewhere => return chosen as i32,
            Whereabouts::Here => {}
            Whereabouts::Closed => return NONE as i32,
        }
    }
    let found = frontend::<F>(tuple);
    if found.is_null() || get!(found.flags) & MATTER != FOUND_BY_ALL {
        return NONE as i32;
    }
    let table = get!(found.maglev);
    let slot = maglev::slot::<F>(found, *tuple);
    let mut index = NONE;
    let mut number = 1;
    if asked == 0 {
        // Nodes hear of a change at different times: the one in front may have another table.
        index = owner::<F>(table.base, slot, get!(found.cluster));
    }
    let former = get!(found.former);
    if index == NONE && get!(found.former_until) > clock::nanoseconds() {
        let list = get!(found.former_list);
        let nth = |nth: u32| {
            if nth <= asked || nth > former.len {
                return NONE;
            }
            owner::<F>(former.base + (nth - 1) * elements(table.len), slot, list)
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

/// Returns the slot of a table's endpoint, if that is on another node which opens packets.
#[inline(always)]
fn owner<F: Family>(base: u32, slot: u32, list: IndexRange) -> u32 {
    let place = maglev::place_in(base, slot);
    if place >= list.len {
        return NONE;
    }
    let index = list.base + place;
    if matches!(whereabouts::<F>(index), Whereabouts::Elsewhere) { index } else { NONE }
}

/// Returns the frontend of a packet that another node has sent, or that this one is to send on, or
/// null. A node port on an address of another node is served by the one that this node has at its
/// own address.
#[inline(always)]
pub fn frontend<F: Family>(tuple: &Tuple<F::Address>) -> *const Frontend {
    let target = Target::of(tuple);
    let found = select::frontend::<F>(&target);
    if !found.is_null() {
        return found;
    }
    let Some(node) = LOCAL_NODE.get_ptr(0) else { return ptr::null() };
    let address = F::narrow(get!(node.primary[F::INDEX]));
    select::frontend::<F>(&Target { address, scope: scope::ADDRESS, ..target })
}

/// The node of an endpoint.
enum Whereabouts {
    Here,
    /// Another node, which opens packets.
    Elsewhere,
    /// Another node, which does not.
    Closed,
}

#[inline(always)]
fn whereabouts<F: Family>(index: u32) -> Whereabouts {
    let Some(slot) = F::slots().lookup::<u32, Slot<F::Address>>(&index) else { return Whereabouts::Closed };
    if get!(slot.flags) & SLOT_LOCAL != 0 {
        return Whereabouts::Here;
    }
    if load(slot).opens() != 0 { Whereabouts::Elsewhere } else { Whereabouts::Closed }
}
