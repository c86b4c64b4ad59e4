//! A new flow: from a frontend to a pair of halves in the table.

use core::ptr;

use aya_ebpf::helpers::{bpf_ktime_get_coarse_ns, bpf_loop};
use traffic_policy_ebpf::{
    abi::{
        Address, Claim, Flow, Frontend, FrontendKey, HOP_LOCAL, Range, SLOT_LOCAL, Scratch, Slot, SlotRoute,
        SourceQuery, Tuple, Usage, destination_port, frontend, kind, ports, source_port,
    },
    checksum, hash,
    outcome::Outcome,
    tcp::{CONFIRMED, GONE, flag},
};

use super::{
    context::Packet,
    exit::Exit,
    family::{Family, pending_in_use},
    hop::{self, Route, Via},
    maps::{ANY, EXISTS, NOEXIST, POOL, STATE, USAGE},
    pair::{other_key, table},
    parse::Parsed,
    wire::{fetch_add, load16, load32},
};

/// Source ports tried for one new flow.
const TRIES: u32 = 32;

/// A flow that exists now.
pub struct Created<A> {
    pub request: *mut Flow<A>,
    /// Not 0: the device to leave by; the FIB was asked, and its neighbour is not resolved.
    pub unresolved: u32,
}

/// The frontend that a packet is addressed to.
#[inline(always)]
pub fn frontend_of<F: Family>(parsed: &Parsed<F>) -> Option<*mut Frontend> {
    let key = FrontendKey {
        address: parsed.tuple.destination,
        port: destination_port(parsed.tuple.ports),
        protocol: parsed.tuple.protocol as u16,
        zero: 0,
    };
    F::frontends().lookup::<_, Frontend>(&key)
}

/// The frontend of a packet, if it is one of ours and may start a flow.
#[inline(always)]
fn range<P: Packet, F: Family>(packet: P, parsed: &Parsed<F>) -> Result<(Range, *const Frontend), Outcome> {
    let Some(found) = frontend_of(parsed) else {
        return Err(Outcome::PassedNotService);
    };
    if !packet.for_us() {
        return Err(Outcome::PassedOtherHost);
    }
    let found = found.cast_const();
    let (flags, service) = unsafe { ((*found).flags, (*found).service) };
    if flags & frontend::SOURCE_RANGES != 0 {
        let bits = 32 + size_of::<F::Address>() as u32 * 8;
        let query = SourceQuery { bits, service, address: parsed.tuple.source };
        if F::sources().lookup::<_, u32>(&query).is_none() {
            return Err(Outcome::DroppedSourceRange);
        }
    }
    let mut range = unsafe { (*found).cluster };
    if flags & frontend::LOCAL != 0 && flags & frontend::HAS_ENDPOINTS != 0 {
        let local = unsafe { (*found).local };
        let until = unsafe { (*found).drain_until };
        if local.len != 0 {
            range = local;
        } else if until == 0 || until <= unsafe { bpf_ktime_get_coarse_ns() } {
            return Err(Outcome::DroppedNoLocalEndpoint);
        }
    }
    if parsed.is_tcp() && !parsed.opens() {
        // Nothing is known of this connection. What is the node's own stays the stack's business: it answers RST, or
        // goes on with a connection that an earlier proxy left in conntrack.
        let flags_byte = parsed.tcp_flags();
        if flags & frontend::NODE_ADDRESS != 0 || flags_byte & flag::RST != 0 || flags_byte & flag::ACK == 0 {
            return Err(Outcome::PassedNoFlow);
        }
        return Err(Outcome::ResetNoFlow);
    }
    if range.len == 0 {
        return Err(Outcome::RejectedNoEndpoint);
    }
    Ok((range, found))
}

/// Whether XDP has delivered this packet: then its tuple is that of a reply, reversed.
#[inline(always)]
fn delivered<F: Family>(parsed: &Parsed<F>) -> bool {
    let Some(scratch) = F::scratch() else { return false };
    let key = unsafe { &mut (*scratch).other };
    *key = parsed.tuple.reversed();
    F::flows().lookup::<_, Flow<F::Address>>(&*key).is_some()
        || pending_in_use() && F::pending().lookup::<_, Flow<F::Address>>(&*key).is_some()
}

/// How this slot's endpoint is reached: from the slot's last answer while that is fresh, else from the FIB.
#[inline(always)]
fn route<P: Packet, F: Family>(
    packet: P,
    index: u32,
    slot: &Slot<F::Address>,
    now: u32,
) -> Route<F::Address> {
    if slot.flags & SLOT_LOCAL != 0 {
        return Route::Local;
    }
    let stored = F::slot_routes().lookup::<u32, SlotRoute<F::Address>>(&index);
    let epoch = hop::epoch();
    if let Some(stored) = stored {
        let word = unsafe { ptr::read_volatile(&raw const (*stored).word) };
        let source = unsafe { (*stored).source };
        let again = unsafe { ptr::read_volatile(&raw const (*stored).word) };
        let hop = word as u16;
        if word == again && (word >> 16) as u16 == epoch && epoch != 0 {
            if hop == HOP_LOCAL {
                return Route::Local;
            }
            if hop::fresh(epoch, hop, now).is_some() {
                return Route::Via(Via { hop, epoch, ifindex: 0, attached: true, source });
            }
        }
    }
    let route = hop::resolve::<F>(packet.raw(), packet.ingress(), F::Address::default(), slot.address, now);
    if let Some(stored) = stored {
        let (hop, source) = match &route {
            Route::Local => (HOP_LOCAL, F::Address::default()),
            Route::Via(via) if !via.attached => (HOP_LOCAL, F::Address::default()),
            Route::Via(via) => (via.hop, via.source),
            Route::Failed(_) => (0, F::Address::default()),
        };
        if hop != 0 {
            unsafe {
                ptr::write_volatile(&raw mut (*stored).word, 0);
                (*stored).source = source;
                ptr::write_volatile(&raw mut (*stored).word, (epoch as u32) << 16 | hop as u32);
            }
        }
    }
    route
}

/// Makes the flow of a packet that has none. `restart`: a half of the main table to be written over.
#[inline(always)]
pub fn create<P: Packet, F: Family>(
    packet: P,
    parsed: &Parsed<F>,
    restart: Option<*mut Flow<F::Address>>,
    now: u32,
) -> Result<Created<F::Address>, Exit> {
    if P::TC && restart.is_none() && delivered(parsed) {
        return Err(Outcome::PassedDelivered.into());
    }
    let (range, found) = range(packet, parsed)?;
    let (Some(state), Some(usage)) = (STATE.get_ptr(0), USAGE.get_ptr_mut(0)) else {
        return Err(Outcome::DroppedFailed.into());
    };
    let hash = hash::tuple(&parsed.tuple, unsafe { (*state).seed });
    let index = range.base + hash::pick(hash, range.len);
    let Some(slot) = F::slots().lookup::<u32, Slot<F::Address>>(&index) else {
        return Err(Outcome::DroppedFailed.into());
    };
    // Its range rests before it is written again, so it does not change under our hands.
    let slot = unsafe { &*slot.cast_const() };

    let route = route::<P, F>(packet, index, slot, now);
    let (local, source, hop, epoch, unresolved) = match route {
        Route::Failed(outcome) => return Err(outcome.into()),
        Route::Local => (true, parsed.tuple.source, 0, 0, 0),
        Route::Via(via) if !via.attached => (true, parsed.tuple.source, 0, 0, 0),
        Route::Via(via) if via.hop != 0 => (false, via.source, via.hop, via.epoch, 0),
        Route::Via(via) => {
            if !P::TC {
                return Err(Outcome::PassedToTc.into());
            }
            (false, via.source, 0, 0, via.ifindex)
        }
    };
    if !local && parsed.ttl <= 1 {
        return Err(Outcome::RejectedTtl.into());
    }

    let pending = restart.is_none()
        && unsafe { (*usage).unconfirmed[F::INDEX] >= (*state).unconfirmed_limit[F::INDEX] as u64 };
    let Some(scratch) = F::scratch() else { return Err(Outcome::DroppedFailed.into()) };
    let halves = Halves {
        scratch,
        packet,
        parsed,
        slot,
        source,
        service: unsafe { (*found).service },
        now,
        local,
        pending,
    };
    halves.claim(hash, usage, unsafe { (*state).pool_len })?;
    let key = unsafe { &(*scratch).key };
    let request = halves.request(unsafe { (*scratch).claim.ports }, hop, epoch);

    match restart {
        Some(half) => unsafe {
            // Packets of the old conversation may be reading: no kind while it is being written. A mixture would carry
            // a wrong checksum.
            let was_confirmed = (*half).state & CONFIRMED != 0;
            retire::<F>(half, parsed.tuple.protocol, key);
            ptr::write_volatile(&raw mut (*half).kind, 0);
            let kind = (*request).kind;
            (*request).kind = 0;
            *half = *request;
            ptr::write_volatile(&raw mut (*half).kind, kind);
            if was_confirmed {
                fetch_add(unconfirmed::<F>(usage), 1);
            }
            return Ok(Created { request: half, unresolved });
        },
        None => {
            let flags = if pending { ANY } else { NOEXIST };
            match table::<F>(pending).insert(&parsed.tuple, request.cast_const(), flags) {
                0 if pending => {}
                0 => {
                    unsafe { fetch_add(unconfirmed::<F>(usage), 1) };
                }
                failed => {
                    // Another CPU was first, or the table is full. Our reply half is nobody else's, unless the winner
                    // made it too: for an endpoint on this node both have the same.
                    let winner = F::flows().lookup::<_, Flow<F::Address>>(&parsed.tuple);
                    let shared = winner.is_some_and(|w| {
                        unsafe { (*w).translated(parsed.tuple.protocol) }.reversed() == *key
                    });
                    if !shared {
                        table::<F>(pending).remove(key);
                    }
                    if failed != EXISTS {
                        return Err(Outcome::DroppedTableFull.into());
                    }
                }
            }
        }
    }
    // The entry as it lies in the table: ours, or that of the CPU that was first.
    match table::<F>(pending).lookup(&parsed.tuple) {
        Some(request) => Ok(Created { request, unresolved }),
        None => Err(Outcome::DroppedTableFull.into()),
    }
}

#[inline(always)]
fn unconfirmed<F: Family>(usage: *mut Usage) -> *mut u64 {
    // SAFETY: fields of a map value.
    unsafe { if F::V6 { &raw mut (*usage).unconfirmed[1] } else { &raw mut (*usage).unconfirmed[0] } }
}

/// Marks the reply half of a request half that is about to be written over, so that it is believed no more.
#[inline(always)]
unsafe fn retire<F: Family>(request: *mut Flow<F::Address>, protocol: u32, successor: &Tuple<F::Address>) {
    let Some(key) = other_key::<F>(request, protocol) else { return };
    if *key == *successor {
        return;
    }
    if let Some(old) = F::flows().lookup::<_, Flow<F::Address>>(key) {
        unsafe { (*old).state |= GONE };
    }
}

/// All that both halves are made of.
struct Halves<'a, P, F: Family> {
    scratch: *mut Scratch<F::Address>,
    packet: P,
    parsed: &'a Parsed<F>,
    slot: &'a Slot<F::Address>,
    /// Source towards the endpoint.
    source: F::Address,
    service: u32,
    now: u32,
    local: bool,
    pending: bool,
}

impl<P: Packet, F: Family> Halves<'_, P, F> {
    /// Claims the reply half: for an endpoint on this node with the client's own port if nobody has it, else with a
    /// port of the pool. Leaves its key and ports in `Scratch`.
    #[inline(always)]
    fn claim(&self, hash: u64, usage: *mut Usage, pool_len: u32) -> Result<(), Exit> {
        if self.pending {
            // Announced before there is anything to find.
            unsafe { fetch_add(&raw mut (*usage).pending_created, 1) };
        }
        self.reply();
        // A retry of the same packet starts elsewhere.
        let at = hash::pick((hash >> 32) ^ (self.now as u64).wrapping_mul(0x9e37_79b9), pool_len);
        let scratch = self.scratch;
        unsafe {
            (*scratch).claim = Claim {
                client_ports: self.parsed.tuple.ports,
                ports: 0,
                endpoint_port: self.slot.port,
                pending: self.pending as u16,
                at,
                pool_len,
                result: 0,
                zero: 0,
            };
            (*scratch).key = Tuple {
                source: self.slot.address,
                destination: self.source,
                ports: 0,
                protocol: self.parsed.tuple.protocol,
            };
        }
        if self.local {
            let result = attempt::<F>(scratch, source_port(self.parsed.tuple.ports));
            if result == 0 || result == EXISTS && self.renew() {
                return Ok(());
            }
            if result != EXISTS {
                return Err(Outcome::DroppedTableFull.into());
            }
        }
        if !self.local {
            unsafe { fetch_add(&raw mut (*usage).snat_created, 1) };
        }
        if pool_len == 0 {
            return Err(Outcome::DroppedNoPort.into());
        }
        // As a callback the verifier sees one turn only.
        unsafe { bpf_loop(TRIES, F::next_port(), ptr::null_mut(), 0) };
        match unsafe { (*scratch).claim.result } as i64 {
            0 => Ok(()),
            EXISTS => Err(Outcome::DroppedNoPort.into()),
            _ => Err(Outcome::DroppedTableFull.into()),
        }
    }

    /// Takes over a reply half that already answers to this very request: left by a conversation that ended, or made
    /// by another CPU just now.
    #[inline(always)]
    fn renew(&self) -> bool {
        let key = unsafe { &(*self.scratch).key };
        let Some(old) = table::<F>(self.pending).lookup::<_, Flow<F::Address>>(key) else { return false };
        if unsafe { (*old).translated(self.parsed.tuple.protocol) } != self.parsed.tuple.reversed() {
            return false;
        }
        unsafe {
            (*old).state = 0;
            (*old).last = self.now;
        }
        true
    }

    /// Sums of the addresses before and after the translation of a request.
    #[inline(always)]
    fn address_sums(&self) -> (u64, u64) {
        let before = self.parsed.tuple.source.sum() + self.parsed.tuple.destination.sum();
        (before, self.source.sum() + self.slot.address.sum())
    }

    /// The reply half. Its hop is resolved by the first reply.
    #[inline(always)]
    fn reply(&self) {
        let tuple = &self.parsed.tuple;
        let data = self.packet.data();
        let mut mac = [0u8; 6];
        if data + 14 <= self.packet.end() {
            let (head, tail) = unsafe { (load32::<6>(data).to_ne_bytes(), load16::<10>(data).to_ne_bytes()) };
            mac = [head[0], head[1], head[2], head[3], tail[0], tail[1]];
        }
        let (before, after) = self.address_sums();
        let reply = unsafe { &raw mut (*self.scratch).reply };
        unsafe {
            *reply = Flow {
                source: tuple.destination,
                destination: tuple.source,
                ports: tuple.ports.rotate_left(16),
                address_delta: checksum::delta(after, before),
                // Known only when the source port is.
                port_delta: 0,
                hop: 0,
                epoch: 0,
                kind: if self.local { kind::REPLY_LOCAL } else { kind::REPLY },
                state: 0,
                reserved: 0,
                last: self.now,
                service: self.service,
                packets: 0,
                bytes: 0,
                confirming_ack: 0,
                ifindex: self.packet.ingress(),
                mac,
                reserved2: 0,
            };
        }
    }

    #[inline(always)]
    fn request(&self, new_ports: u32, hop: u16, epoch: u16) -> *mut Flow<F::Address> {
        let (before, after) = self.address_sums();
        let request = unsafe { &raw mut (*self.scratch).request };
        unsafe {
            *request = Flow {
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
                reserved: 0,
                last: self.now,
                service: self.service,
                packets: 0,
                bytes: 0,
                confirming_ack: 0,
                ifindex: 0,
                mac: [0; 6],
                reserved2: 0,
            };
        }
        request
    }
}

/// Tries to insert the reply half with this source port (memory order); a key that the other table has is taken, too.
#[inline(always)]
fn attempt<F: Family>(scratch: *mut Scratch<F::Address>, port: u16) -> i64 {
    unsafe {
        let claim = &mut (*scratch).claim;
        claim.ports = ports(port, claim.endpoint_port);
        (*scratch).key.ports = ports(claim.endpoint_port, port);
        (*scratch).reply.port_delta =
            checksum::delta(checksum::port_sum(claim.ports), checksum::port_sum(claim.client_ports));
        let (key, reply, pending) = (&(*scratch).key, &raw const (*scratch).reply, claim.pending != 0);
        if pending_in_use() && table::<F>(!pending).lookup::<_, Flow<F::Address>>(key).is_some() {
            return EXISTS;
        }
        table::<F>(pending).insert(key, reply, NOEXIST)
    }
}

/// One turn of the search: 0 to go on, 1 to stop.
#[inline(always)]
pub fn next_port<F: Family>() -> i64 {
    let (Some(scratch), Some(pool)) = (F::scratch(), POOL.get_ptr(0)) else { return 1 };
    let claim = unsafe { &mut (*scratch).claim };
    let port = unsafe { *pool.cast::<u16>().add((claim.at & 0xffff) as usize) };
    claim.at += 1;
    if claim.at >= claim.pool_len {
        claim.at = 0;
    }
    let result = attempt::<F>(scratch, port.to_be());
    unsafe { (*scratch).claim.result = result as i32 };
    (result != EXISTS) as i64
}
