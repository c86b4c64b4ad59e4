//! SNAT port search: the two entries of a new flow, and a source port for which the key of the reply entry is free.

use core::ptr;

use aya_ebpf::{cty::c_void, helpers::bpf_loop};
use traffic_policy_ebpf::{
    abi::{Address, Flow, Fold, Port, PortSearch, Ports, Scratch, Slot, TableUsage, Tuple, kind},
    checksum, hash,
    outcome::Outcome,
};

use crate::datapath::{
    barrier::fetch_add,
    counters,
    ctx::Packet,
    family::{Family, V4, V6},
    flow::{
        recycle,
        table::{self, FlowTable},
    },
    maps::{EXISTS, FULL, NOEXIST, SNAT_PORTS, TABLE_USAGE},
    parse::Parsed,
    value::{borrow, load, store},
    verdict::Decision,
    words::{load16, load32},
};

/// Source ports tried for one new flow, at most. Where 95 % are taken, one client of 500,000 finds none.
const TRIES: u32 = 256;

/// All that both entries are made of.
pub struct NewFlow<'a, P, F: Family> {
    pub scratch: *mut Scratch<F::Address>,
    pub packet: P,
    pub parsed: &'a Parsed<F>,
    pub slot: &'a Slot<F::Address>,
    /// Source towards the endpoint.
    pub source: F::Address,
    pub service: u32,
    pub now: u32,
    pub local: bool,
    pub pending: bool,
    /// It has an entry in the main table.
    pub stays: bool,
}

impl<P: Packet, F: Family> NewFlow<'_, P, F> {
    /// Claims the reply entry: for an endpoint on this node with the client's own port if nobody has it, else with a
    /// port of the pool. Leaves its key and ports in `Scratch`.
    #[inline(always)]
    pub fn insert_reply(&self, hash: u64, usage: *mut TableUsage, pool_len: u32) -> Result<(), Decision> {
        if self.pending {
            // Announced before there is anything to find.
            fetch_add(place!(mut usage.pending_created), 1);
        }
        self.reply();
        // A retry of the same packet starts elsewhere.
        let spread = (hash >> 32) ^ (self.now as u64).wrapping_mul(0x9e37_79b9);
        let at = hash::pick(spread, pool_len);
        // Of a small pool every port is tried.
        let step = if pool_len <= TRIES { 1 } else { 1 + hash::pick(hash, pool_len - 1) };
        let scratch = self.scratch;
        set!(
            scratch.port_search = PortSearch {
                client_ports: self.parsed.tuple.ports,
                ports: Ports::NONE,
                endpoint_port: self.slot.port,
                pending: self.pending as u16,
                at,
                pool_len,
                step,
                result: 0,
                now: self.now,
                stays: self.stays as u32,
            }
        );
        set!(
            scratch.key = Tuple {
                source: self.slot.address,
                destination: self.source,
                ports: Ports::NONE,
                protocol: self.parsed.tuple.protocol,
            }
        );
        if self.local {
            name_port(scratch, self.parsed.tuple.ports.source());
            let mut result = insert::<F>(scratch);
            if result == FULL && fall_back::<F>(scratch) {
                result = insert::<F>(scratch);
            }
            if result == 0 || result == EXISTS && self.take_over_reply() {
                return Ok(());
            }
            if result != EXISTS {
                return Err(Outcome::DroppedTableFull.into());
            }
        }
        if !self.local {
            fetch_add(place!(mut usage.snat_created), 1);
        }
        if pool_len == 0 {
            return Err(Outcome::DroppedNoSnatPort.into());
        }
        // The first port is nearly always free. As a callback the verifier sees one turn only of the others.
        if next_port::<F>(false) == 0 {
            // SAFETY: a helper of the kernel: the verifier checks its arguments, and the callback with them.
            unsafe { bpf_loop(TRIES, turn::<F>(), ptr::null_mut(), 0) };
        }
        match get!(scratch.port_search.result) {
            0 => Ok(()),
            EXISTS => Err(Outcome::DroppedNoSnatPort.into()),
            _ => Err(Outcome::DroppedTableFull.into()),
        }
    }

    /// Takes over a reply entry that already answers to this very request: left by a conversation that ended, or made
    /// by another CPU just now.
    #[inline(always)]
    fn take_over_reply(&self) -> bool {
        let key = borrow(place!(const (self.scratch).key));
        let old = FlowTable::<F>::of(self.pending).find(key);
        if old.is_null() || !table::is_counterpart(old, &self.parsed.tuple) {
            return false;
        }
        // Where another CPU made it just now, there is nothing to count yet.
        if get!(old.packets) != 0 {
            counters::end(old.cast_const());
            set!(old.packets = 0);
            set!(old.bytes = 0);
        }
        set!(old.service = self.service);
        // Its numbers stay: `tcp::numbers::unassured`.
        set!(old.state = 0);
        set!(old.last = self.now);
        true
    }

    /// Sums of the addresses before and after the translation of a request.
    #[inline(always)]
    fn address_sums(&self) -> (u64, u64) {
        let before = self.parsed.tuple.source.sum() + self.parsed.tuple.destination.sum();
        (before, self.source.sum() + self.slot.address.sum())
    }

    /// The reply entry. Its hop is resolved by the first reply.
    #[inline(always)]
    fn reply(&self) {
        let tuple = &self.parsed.tuple;
        let data = self.packet.data();
        let (mut mac_head, mut mac_tail) = ([0u8; 2], [0u8; 4]);
        if data + 14 <= self.packet.end() {
            let (head, tail) = (load16::<6>(data), load32::<8>(data));
            (mac_head, mac_tail) = (head.to_ne_bytes(), tail.to_ne_bytes());
        }
        let (before, after) = self.address_sums();
        let reply = place!(mut (self.scratch).reply);
        store(
            reply,
            Flow {
                kept: self.source.kept(),
                source: tuple.destination,
                destination: tuple.source,
                ports: tuple.ports.reversed(),
                address_delta: checksum::delta(after, before),
                // Known only when the source port is.
                port_delta: 0,
                hop: 0,
                epoch: 0,
                kind: if self.local { kind::REPLY_LOCAL } else { kind::REPLY },
                state: 0,
                mac_head,
                last: self.now,
                service: self.service,
                packets: 0,
                bytes: 0,
                numbers: 0,
                ifindex: self.packet.ingress(),
                mac_tail,
            },
        );
    }

    #[inline(always)]
    pub fn request(&self, new_ports: Ports, hop: u16, epoch: u16, place: u32) -> *mut Flow<F::Address> {
        let (before, after) = self.address_sums();
        let request = place!(mut (self.scratch).request);
        store(
            request,
            Flow {
                kept: self.parsed.tuple.destination.kept(),
                source: self.source,
                destination: self.slot.address,
                ports: new_ports,
                address_delta: checksum::delta(before, after),
                port_delta: checksum::delta(
                    checksum::port_sum(self.parsed.tuple.ports),
                    checksum::port_sum(new_ports),
                ),
                hop,
                epoch,
                kind: if self.local { kind::DELIVER } else { kind::FORWARD },
                state: 0,
                mac_head: [0; 2],
                last: self.now,
                service: self.service,
                packets: 0,
                bytes: 0,
                numbers: if self.parsed.is_tcp() { self.parsed.segment().opening() } else { 0 },
                ifindex: place,
                mac_tail: [0; 4],
            },
        );
        request
    }
}

/// Makes the reply entry that of this source port.
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

/// Tries to insert the reply entry; a key that the other table has is taken, too.
#[inline(always)]
fn insert<F: Family>(scratch: *mut Scratch<F::Address>) -> i32 {
    let room = place!(mut scratch.flow_key);
    let (key, reply, pending) = (
        borrow(place!(const scratch.key)),
        place!(const scratch.reply),
        get!(scratch.port_search.pending) != 0,
    );
    if table::pending_in_use() && !FlowTable::<F>::of(!pending).find_in(key, room).is_null() {
        return EXISTS;
    }
    FlowTable::<F>::of(pending).insert_in(key, room, reply, NOEXIST)
}

/// The main table is full: whether the flow may go into the other one, which the kernel evicts from.
#[inline(always)]
fn fall_back<F: Family>(scratch: *mut Scratch<F::Address>) -> bool {
    let Some(usage) = TABLE_USAGE.get_ptr_mut(0) else { return false };
    let port_search = place!(mut scratch.port_search);
    if get!(port_search.pending) != 0 {
        return false;
    }
    recycle::note_full(usage, get!(port_search.now));
    if get!(port_search.stays) != 0 {
        return false;
    }
    set!(port_search.pending = 1);
    fetch_add(place!(mut usage.pending_created), 1);
    true
}

/// One turn of the search: 0 to go on, 1 to stop. It goes on with the same port where that has become free, or the table is
/// another one.
#[inline(always)]
fn next_port<F: Family>(take_over: bool) -> i64 {
    let (Some(scratch), Some(pool)) = (F::scratch(), SNAT_PORTS.get_ptr(0)) else { return 1 };
    let at = get!(scratch.port_search.at) & 0xffff;
    let port = load(pool.cast::<u16>().wrapping_add(at as usize));
    name_port(scratch, Port::from_host(port));
    let mut result = insert::<F>(scratch);
    if result == FULL && fall_back::<F>(scratch) {
        result = EXISTS;
    } else if result == EXISTS && !(take_over && recycle::take_over::<F>(scratch)) {
        advance(scratch);
    }
    set!(scratch.port_search.result = result);
    (result != EXISTS) as i64
}

/// On to the next place of the pool.
#[inline(always)]
fn advance<A: Address>(scratch: *mut Scratch<A>) {
    // Those of a connection whose port it was about to take over.
    set!(scratch.reply.numbers = 0);
    let search = place!(mut scratch.port_search);
    let at = get!(search.at) + get!(search.step);
    if let Some(at) = at.checked_rem(get!(search.pool_len)) {
        set!(search.at = at);
    }
    if get!(search.pool_len) > TRIES {
        set!(search.step += 1);
    }
}

/// [`next_port`] of a family, as `bpf_loop` calls it.
#[inline(always)]
fn turn<F: Family>() -> *mut c_void {
    if F::V6 { next_port6 as *mut c_void } else { next_port4 as *mut c_void }
}

extern "C" fn next_port4(_: u64, _: *mut c_void) -> i64 {
    next_port::<V4>(true)
}

extern "C" fn next_port6(_: u64, _: *mut c_void) -> i64 {
    next_port::<V6>(true)
}
