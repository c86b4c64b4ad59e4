//! The SNAT port search: the two entries of a new flow, written from its packet and inserted, with
//! a source port for which the key of the reply entry is free.

use core::ptr;

use aya_ebpf::{cty::c_void, helpers::bpf_loop};
use traffic_policy_ebpf::{
    abi::{
        Address, BY_MAC, DeviceOrPlace, Flow, Fold, Head, PROTOCOL_TCP, Packets, Port, PortSearch, Ports,
        REPLY_THROUGH_FRONT, Scratch, Slot, TableUsage, Tail, Tuple, kind, outer_port, step,
    },
    checksum, hash,
    outcome::Outcome,
    sctp,
    tcp::{ANSWERED, ASSURED},
};

use crate::datapath::{
    counters,
    ctx::Packet,
    family::{Family, V4, V6},
    flow::{
        directory, narrow,
        no_port::NoPort,
        recycle,
        table::{self, FlowTable},
        unassured, way_back,
    },
    maps::{EXISTS, FULL, NOEXIST, SNAT_PORTS},
    own,
    parse::Parsed,
    trace,
    value::{borrow, load, store},
    words::{load16, load32},
};

/// The most source ports tried for one flow. If 95 % are taken, one client of 500,000 finds none.
const TRIES: u32 = 256;

/// The tries that look for a free port, before one is taken over from a flow that has ended: an
/// endpoint that closed first is in TIME_WAIT, and if the next client's time stamps are older than
/// the last one's its SYN waits for a second.
const FREE_TRIES: u64 = 7;

/// The inputs of both entries.
pub struct NewFlow<'a, P, F: Family> {
    pub packet: P,
    pub parsed: &'a Parsed<F>,
    pub slot: &'a Slot<F::Address>,
    /// The source towards the endpoint.
    pub source: F::Address,
    pub service: u32,
    /// The next hop of the request entry, and its route epoch: [`Flow::hop`].
    pub hop: u16,
    pub epoch: u16,
    pub now: u32,
    /// Whether the endpoint is on this node.
    pub local: bool,
    /// The place of the endpoint's node in `tp_node_silence`.
    pub node: u16,
    /// The place of the main table's entry that the new flow overwrites; [`NEW`] if there is none.
    pub place: u32,
}

/// The distance from [`kind::FORWARD`] to [`kind::DIRECT`]: the kind is computed without a branch,
/// so that the verifier walks what follows once.
const TO_DIRECT: u8 = kind::DIRECT - kind::FORWARD;

/// The [`NewFlow::place`] of a flow that has no entry yet.
pub const NEW: u32 = u32::MAX;

impl<P: Packet, F: Family> NewFlow<'_, P, F> {
    /// Writes both entries, except for the source port, and the parameters of [`insert`].
    #[inline(always)]
    pub fn write(&self, scratch: *mut Scratch<F::Address>, hash: u64, snat_port_count: u32) {
        let tuple = &self.parsed.tuple;
        // A retransmission of the same packet starts elsewhere.
        let spread = (hash >> 32) ^ (self.now as u64).wrapping_mul(0x9e37_79b9);
        let at = hash::pick(spread, snat_port_count);
        // Every port of a small range is tried.
        let step = if snat_port_count <= TRIES { 1 } else { 1 + hash::pick(hash, snat_port_count - 1) };
        set!(
            scratch.port_search = PortSearch {
                client_ports: tuple.ports,
                ports: Ports::NONE,
                endpoint_port: self.slot.port,
                takes_over: 0,
                at,
                snat_port_count,
                step,
                result: 0,
                now: self.now,
                stays: (self.place != NEW) as u32,
                spread: hash as u32,
            }
        );
        set!(
            scratch.key = Tuple {
                source: self.slot.address,
                destination: self.source,
                ports: Ports::NONE,
                protocol: tuple.protocol,
            }
        );
        let before = tuple.source.sum() + tuple.destination.sum();
        let after = self.source.sum() + self.slot.address.sum();
        store(place!(mut scratch.reply), self.reply(checksum::delta(after, before)));
        store(place!(mut scratch.request), self.request(checksum::delta(before, after)));
        set!(scratch.request.kind += (get!(scratch.direct) & 1) as u8 * TO_DIRECT);
    }

    /// Returns the reply entry. The first reply resolves its hop.
    #[inline(always)]
    fn reply(&self, address_delta: u16) -> Flow<F::Address> {
        let tuple = &self.parsed.tuple;
        let data = self.packet.data();
        let (mut mac_head, mut mac_tail) = ([0u8; 2], [0u8; 4]);
        if data + 14 <= self.packet.end() {
            let (head, tail) = (load16::<6>(data), load32::<8>(data));
            (mac_head, mac_tail) = (head.to_ne_bytes(), tail.to_ne_bytes());
        }
        Flow {
            kept: self.source.kept(),
            source: tuple.destination,
            destination: tuple.source,
            ports: tuple.ports.reversed(),
            address_delta,
            port_delta: 0,
            hop: 0,
            epoch: 0,
            kind: if self.local { kind::REPLY_LOCAL } else { kind::REPLY },
            state: 0,
            head: Head::of_mac(mac_head),
            last: self.now,
            service: self.service,
            packets: if self.parsed.is_tcp() { Packets::awaited_from(self.node) } else { Packets::default() },
            bytes: self.opening(),
            numbers: self.numbers(false),
            device_or_place: DeviceOrPlace::of_device(self.packet.ingress()),
            tail: Tail::of_mac(mac_tail),
        }
    }

    /// Returns the numbers of the SYN; 0 for other protocols than TCP.
    #[inline(always)]
    fn opening(&self) -> u64 {
        if self.parsed.is_tcp() { self.parsed.segment().opening() } else { 0 }
    }

    /// Returns [`Flow::numbers`] of the request entry or of the reply entry at the start of a flow:
    /// numbers of the SYN, the client's initiate tag, or the time.
    #[inline(always)]
    fn numbers(&self, of_request: bool) -> u64 {
        if self.parsed.is_tcp() {
            return if of_request { self.opening() } else { 0 };
        }
        if self.parsed.is_sctp::<P>() {
            let client = self.parsed.initiate_tag(self.packet);
            return if of_request { sctp::tags(client, 0) } else { sctp::tags(0, client) };
        }
        self.now as u64
    }

    /// Returns the window scale of the SYN.
    #[inline(always)]
    fn scale(&self) -> Option<u8> {
        if self.parsed.is_tcp() { self.parsed.window_scale(self.packet) } else { None }
    }

    #[inline(always)]
    fn request(&self, address_delta: u16) -> Flow<F::Address> {
        Flow {
            kept: self.parsed.tuple.destination.kept(),
            source: self.source,
            destination: self.slot.address,
            ports: Ports::NONE,
            address_delta,
            port_delta: 0,
            hop: self.hop,
            epoch: self.epoch,
            kind: if self.local { kind::DELIVER } else { kind::FORWARD },
            state: 0,
            head: Head::of_node(self.node),
            last: self.now,
            service: self.service,
            // An entry that is overwritten counts the packet later.
            packets: Packets::of((self.place == NEW) as u64).with_scale(self.scale()),
            bytes: if self.place == NEW { self.parsed.length as u64 } else { 0 },
            numbers: self.numbers(true),
            device_or_place: DeviceOrPlace::of_place(self.place),
            tail: Tail::NONE,
        }
    }
}

/// Inserts the entries that [`NewFlow::write`] has written: the reply entry with a source port,
/// except for a direct flow, then the request entry, unless it overwrites an existing one. False:
/// another CPU has created the request entry.
///
/// # Errors
/// There is no free port, or no room.
#[inline(always)]
pub fn insert<F: Family>(scratch: *mut Scratch<F::Address>, usage: *mut TableUsage) -> Result<bool, Outcome> {
    if get!(scratch.request.kind) == kind::DIRECT && narrow::fits::<F>() {
        let search = place!(mut scratch.port_search);
        set!(search.ports = Ports::new(get!(search.client_ports).source(), get!(search.endpoint_port)));
    } else {
        insert_reply::<F>(scratch, usage)?;
    }
    // Not earlier: a flow that gets no port must not push out another.
    let place = unassured::take_place::<F>(scratch, usage, get!(scratch.key.protocol));
    set!(scratch.request.tail = Tail::of_queue_place(place));
    trace::note(step::PORT, get!(scratch.port_search.ports).source().to_host() as u32, [0; 2]);
    _ = if F::V6 { note_ports6() } else { note_ports4() };
    if get!(scratch.port_search.stays) != 0 {
        return Ok(true);
    }
    match if F::V6 { insert_request6() } else { insert_request4() } {
        0 => Ok(true),
        EXISTS => Ok(false),
        _ => Err(Outcome::DroppedTableFull),
    }
}

global_functions! {
    note_ports4 => note_ports::<V4>;
    note_ports6 => note_ports::<V6>;
}

/// Writes the ports of the request entry, and their difference, or what its packets travel in and
/// whether replies come back.
#[inline(always)]
fn note_ports<F: Family>() -> i32 {
    let Some(scratch) = F::scratch() else { return 0 };
    let ports = get!(scratch.port_search.ports);
    set!(scratch.request.ports = ports);
    let difference = if get!(scratch.request.kind) == kind::DIRECT {
        let port = outer_port(get!(scratch.port_search.spread) as u64);
        let way = get!(scratch.direct) as u16;
        set!(scratch.request.address_delta = (way >> 3 & 1) * REPLY_THROUGH_FRONT as u16);
        (port.wire() * ((way >> 1) & 1)) | (BY_MAC * ((way >> 2) & 1))
    } else {
        let client_ports = get!(scratch.port_search.client_ports);
        checksum::delta(checksum::port_sum(client_ports), checksum::port_sum(ports))
    };
    set!(scratch.request.port_delta = difference);
    0
}

/// Claims the reply entry: with the client's own port if the endpoint is on this node and the port
/// is free, otherwise with a SNAT port.
#[inline(always)]
fn insert_reply<F: Family>(scratch: *mut Scratch<F::Address>, usage: *mut TableUsage) -> Result<(), Outcome> {
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
    insert_request4 => insert_request::<V4>;
    insert_request6 => insert_request::<V6>;
}

/// Inserts or takes over the reply entry with the client's own port: 0, or a negative error number.
#[inline(always)]
fn keep_port<F: Family>() -> i32 {
    let Some(scratch) = F::scratch() else { return FULL };
    way_back::note(scratch);
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

/// Inserts the request entry. Returns 0, or a negative error number: [`EXISTS`] if another CPU was
/// first. If it fails, the reply entry is removed.
#[inline(always)]
fn insert_request<F: Family>() -> i32 {
    let Some(scratch) = F::scratch() else { return FULL };
    let (tuple, key) = (borrow(place!(const scratch.opening)), borrow(place!(const scratch.key)));
    let (request, room) = (place!(mut scratch.request), place!(mut scratch.flow_key));
    let place = directory::free_place::<F>(get!(scratch.port_search.spread));
    set!(request.device_or_place = DeviceOrPlace::of_place(place));
    let table = FlowTable::<F>::new();
    let inserted = table.insert_in(tuple, room, request.cast_const(), NOEXIST);
    if inserted == 0 {
        unassured::enter::<F>(scratch, tuple);
        directory::enter::<F>(place, tuple);
        return 0;
    }
    // Another CPU was first, or the table is full. Our reply entry belongs to no other flow, unless
    // the winner uses it too: for an endpoint on this node both have the same.
    let winner = table.find_in(tuple, room);
    let shared = !winner.is_null() && table::is_counterpart_in_place(winner, key);
    if !shared {
        table.remove_in(key, room);
    }
    inserted
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
