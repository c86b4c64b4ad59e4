//! The SNAT port search: a source port for which the key of the reply entry is free, claimed by
//! inserting that entry.

use core::ptr;

use aya_ebpf::{cty::c_void, helpers::bpf_loop};
use traffic_policy_ebpf::{
    abi::{Address, PROTOCOL_TCP, Packets, Port, PortSearch, Ports, Scratch, TableUsage, kind},
    checksum, hash,
    outcome::Outcome,
    tcp::{ANSWERED, ASSURED},
};

use crate::datapath::{
    counters,
    family::{Family, V4, V6},
    flow::{
        no_port::NoPort,
        recycle,
        table::{self, FlowTable},
        way_back,
    },
    lb::pod_stack,
    maps::{EXISTS, FULL, NOEXIST, SNAT_PORTS},
    own,
    value::{borrow, load},
};

/// The most source ports tried for one flow. If 95 % are taken, one client of 500,000 finds none.
const TRIES: u32 = 256;

/// The tries that look for a free port, before one is taken over from a flow that has ended: an
/// endpoint that closed first is in TIME_WAIT, and if the next client's time stamps are older than
/// the last one's its SYN waits for a second.
const FREE_TRIES: u64 = 7;

/// Writes the parameters of the search for a new flow's port, by the hash of its packet. `stays`:
/// whether its request entry exists.
#[inline(always)]
pub fn begin<A: Address>(
    scratch: *mut Scratch<A>,
    client_ports: Ports,
    endpoint_port: Port,
    hash: u64,
    now: u32,
    snat_port_count: u32,
    stays: bool,
) {
    // A retransmission of the same packet starts elsewhere.
    let spread = (hash >> 32) ^ (now as u64).wrapping_mul(0x9e37_79b9);
    let at = hash::pick(spread, snat_port_count);
    // Every port of a small range is tried.
    let step = if snat_port_count <= TRIES { 1 } else { 1 + hash::pick(hash, snat_port_count - 1) };
    set!(
        scratch.port_search = PortSearch {
            client_ports,
            ports: Ports::NONE,
            endpoint_port,
            takes_over: 0,
            at,
            snat_port_count,
            step,
            result: 0,
            now,
            stays: stays as u32,
            spread: hash as u32,
        }
    );
}

/// Claims the reply entry: with the client's own port if the endpoint is on this node and the port
/// is free, otherwise with a SNAT port.
#[inline(always)]
pub fn insert_reply<F: Family>(
    scratch: *mut Scratch<F::Address>,
    usage: *mut TableUsage,
) -> Result<(), Outcome> {
    if get!(scratch.reply.kind) == kind::REPLY_LOCAL {
        match if F::V6 { keep_port6() } else { keep_port4() } {
            0 => return Ok(()),
            EXISTS => {}
            _ => return Err(Outcome::DroppedTableFull),
        }
    }
    if get!(scratch.port_search.snat_port_count) == 0 {
        return Err(Outcome::DroppedNoSnatPort);
    }
    let mut inserted = if F::V6 { first_port6() } else { first_port4() };
    if inserted == EXISTS {
        let known = NoPort::of(scratch, usage);
        if known.is_known() {
            return Err(Outcome::DroppedNoSnatPort);
        }
        inserted = if F::V6 { other_port6() } else { other_port4() };
        if inserted == EXISTS {
            known.note();
        }
    }
    match inserted {
        0 => Ok(()),
        EXISTS => Err(Outcome::DroppedNoSnatPort),
        _ => Err(Outcome::DroppedTableFull),
    }
}

global_functions! {
    keep_port4 => keep_port::<V4>;
    keep_port6 => keep_port::<V6>;
    first_port4 => first_port::<V4>;
    first_port6 => first_port::<V6>;
    other_port4 => other_port::<V4>;
    other_port6 => other_port::<V6>;
}

/// Inserts or takes over the reply entry with the client's own port: 0, or a negative error number.
#[inline(always)]
fn keep_port<F: Family>() -> i32 {
    let Some(scratch) = F::scratch() else { return FULL };
    way_back::note(scratch);
    pod_stack::note::<F>(scratch);
    let result = own_port::<F>(scratch);
    if result == EXISTS && take_over_reply::<F>(scratch) { 0 } else { result }
}

/// Takes over a reply entry that already answers this request: left behind, or just created.
#[inline(always)]
fn take_over_reply<F: Family>(scratch: *mut Scratch<F::Address>) -> bool {
    let key = borrow(place!(const scratch.key));
    let old = FlowTable::<F>::new().find_in(key, place!(mut scratch.flow_key));
    if old.is_null() || !table::is_counterpart_in_place(old, place!(const scratch.opening)) {
        return false;
    }
    // If another CPU created it just now, there is nothing to count yet.
    if get!(old.packets).count() != 0 {
        counters::end(old.cast_const());
    }
    set!(old.packets = Packets::default());
    set!(old.bytes = get!(scratch.reply.bytes));
    set!(old.service = get!(scratch.reply.service));
    // The client may be behind another device now.
    set!(old.device_or_place = get!(scratch.reply.device_or_place));
    set!(old.head = get!(scratch.reply.head));
    set!(old.tail = get!(scratch.reply.tail));
    table::set_next_hop(old, 0, 0);
    // Its numbers stay: `tcp::numbers::unassured`. An exception are those of a connection that was
    // reset before it was assured: the endpoint does not know that connection.
    if get!(old.state) & (ASSURED | ANSWERED) == ANSWERED || key.protocol != PROTOCOL_TCP {
        set!(old.numbers = get!(scratch.reply.numbers));
    }
    set!(old.state = 0);
    set!(old.last = get!(scratch.port_search.now));
    true
}

/// Inserts the reply entry with the client's own port: 0, or a negative error number.
#[inline(always)]
fn own_port<F: Family>(scratch: *mut Scratch<F::Address>) -> i32 {
    name_port(scratch, get!(scratch.port_search.client_ports).source());
    try_insert::<F>(scratch)
}

/// Inserts the reply entry with the first port of the range, which is not empty; that port is
/// nearly always free. Returns 0, or a negative error number.
#[inline(always)]
fn first_port<F: Family>() -> i32 {
    next_port::<F>(false);
    result::<F>()
}

/// Inserts as [`first_port`] does, with the next ports: [`EXISTS`] if all of them are taken.
#[inline(always)]
fn other_port<F: Family>() -> i32 {
    // SAFETY: a helper of the kernel: the verifier checks its arguments and the callback.
    unsafe { bpf_loop(TRIES, turn::<F>(), ptr::null_mut(), 0) };
    result::<F>()
}

/// Returns the result of the last insertion: 0, or a negative error number.
#[inline(always)]
fn result<F: Family>() -> i32 {
    F::scratch().map_or(FULL, |scratch| get!(scratch.port_search.result))
}

/// Gives the reply entry this source port.
#[inline(always)]
fn name_port<A: Address>(scratch: *mut Scratch<A>, port: Port) {
    let search = place!(mut scratch.port_search);
    set!(search.ports = Ports::new(port, get!(search.endpoint_port)));
    set!(scratch.key.ports = Ports::new(get!(search.endpoint_port), port));
    set!(
        scratch.reply.port_delta = checksum::delta(
            checksum::port_sum(get!(search.ports)),
            checksum::port_sum(get!(search.client_ports)),
        )
    );
}

/// Tries to insert the reply entry. A key under which the node itself receives answers is taken.
#[inline(always)]
fn try_insert<F: Family>(scratch: *mut Scratch<F::Address>) -> i32 {
    let room = place!(mut scratch.flow_key);
    let (key, reply) = (borrow(place!(const scratch.key)), place!(const scratch.reply));
    if own::holds::<F>(key, get!(scratch.port_search.now)) {
        return EXISTS;
    }
    FlowTable::<F>::new().insert_in(key, room, reply, NOEXIST)
}

/// Performs one turn of the search, also with a port that became free: 0 to continue, 1 to stop.
#[inline(always)]
fn next_port<F: Family>(takes_over: bool) -> i64 {
    let (Some(scratch), Some(ports)) = (F::scratch(), SNAT_PORTS.get_ptr(0)) else { return 1 };
    // The flag is kept here because the stack of a callback has no room for it.
    set!(scratch.port_search.takes_over = takes_over as u16);
    let at = get!(scratch.port_search.at) & 0xffff;
    let port = load(ports.cast::<u16>().wrapping_add(at as usize));
    name_port(scratch, Port::from_host(port));
    let result = try_insert::<F>(scratch);
    set!(scratch.port_search.result = result);
    if result == EXISTS && !(get!(scratch.port_search.takes_over) != 0 && recycle::take_over::<F>(scratch)) {
        advance(scratch);
    }
    (get!(scratch.port_search.result) != EXISTS) as i64
}

/// Moves on to the next place of the range.
#[inline(always)]
fn advance<A: Address>(scratch: *mut Scratch<A>) {
    // The numbers of a connection whose port it was about to take over.
    if get!(scratch.key.protocol) == PROTOCOL_TCP {
        set!(scratch.reply.numbers = 0);
    }
    let search = place!(mut scratch.port_search);
    let at = get!(search.at) + get!(search.step);
    if let Some(at) = at.checked_rem(get!(search.snat_port_count)) {
        set!(search.at = at);
    }
    if get!(search.snat_port_count) > TRIES {
        set!(search.step += 1);
    }
}

/// The [`next_port`] of a family, as a callback of `bpf_loop`.
#[inline(always)]
fn turn<F: Family>() -> *mut c_void {
    if F::V6 { next_port6 as *mut c_void } else { next_port4 as *mut c_void }
}

extern "C" fn next_port4(turn: u64, _: *mut c_void) -> i64 {
    next_port::<V4>(turn >= FREE_TRIES)
}

extern "C" fn next_port6(turn: u64, _: *mut c_void) -> i64 {
    next_port::<V6>(turn >= FREE_TRIES)
}
