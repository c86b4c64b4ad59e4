//! A new flow: its two entries, written from its packet and inserted. A direct flow has the request
//! entry alone; every other one has a reply entry, for which a [source port][snat_port] is looked
//! for.

use traffic_policy_ebpf::{
    abi::{
        Address as _, BY_MAC, BY_TABLE, DeviceOrPlace, Flow, Fold, Head, Packets, Ports, REPLY_THROUGH_FRONT,
        Scratch, Slot, TO_OWNER, TableUsage, Tail, Tuple, kind, outer_port, step, way,
    },
    checksum,
    outcome::Outcome,
    sctp,
};

use crate::datapath::{
    ctx::Packet,
    family::{Family, V4, V6},
    flow::{
        directory, narrow, snat_port,
        table::{self, FlowTable},
        unassured,
    },
    maps::{EXISTS, FULL, NOEXIST},
    parse::Parsed,
    trace,
    value::{borrow, store},
    words::{load16, load32},
};

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
const TO_DIRECT: u64 = (kind::DIRECT - kind::FORWARD) as u64;

/// The [`NewFlow::place`] of a flow that has no entry yet.
pub const NEW: u32 = u32::MAX;

impl<P: Packet, F: Family> NewFlow<'_, P, F> {
    /// Writes both entries, except for the source port, and the parameters of [`insert`].
    #[inline(always)]
    pub fn write(&self, scratch: *mut Scratch<F::Address>, hash: u64, snat_port_count: u32) {
        let tuple = &self.parsed.tuple;
        let stays = self.place != NEW;
        snat_port::begin(scratch, tuple.ports, self.slot.port, hash, self.now, snat_port_count, stays);
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
        let to_direct = way::moved(get!(scratch.direct), way::DIRECT, TO_DIRECT);
        set!(scratch.request.kind += to_direct as u8);
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
        snat_port::insert_reply::<F>(scratch, usage)?;
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
    insert_request4 => insert_request::<V4>;
    insert_request6 => insert_request::<V6>;
}

/// Writes the ports of the request entry, and into `port_delta` the difference of their sums. Of a
/// direct flow `port_delta` says instead what its packets travel in, and `address_delta` whether
/// replies come back through this node.
#[inline(always)]
fn note_ports<F: Family>() -> i32 {
    let Some(scratch) = F::scratch() else { return 0 };
    let ports = get!(scratch.port_search.ports);
    set!(scratch.request.ports = ports);
    let difference = if get!(scratch.request.kind) == kind::DIRECT {
        let port = outer_port(get!(scratch.port_search.spread) as u64);
        let ways = get!(scratch.direct);
        let back = way::moved(ways, way::TUNNEL, REPLY_THROUGH_FRONT as u64);
        let owner = way::moved(ways, way::OWNER, TO_OWNER as u64);
        let by_table = way::moved(ways, way::BY_TABLE, BY_TABLE as u64);
        set!(scratch.request.address_delta = (back | owner | by_table) as u16);
        (way::moved(ways, way::UDP, port.wire() as u64) | way::moved(ways, way::BY_MAC, BY_MAC as u64)) as u16
    } else {
        let client_ports = get!(scratch.port_search.client_ports);
        checksum::delta(checksum::port_sum(client_ports), checksum::port_sum(ports))
    };
    set!(scratch.request.port_delta = difference);
    0
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
