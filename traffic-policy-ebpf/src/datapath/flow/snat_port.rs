//! SNAT port search: the two entries of a new flow, and a source port for which the key of the reply entry is free.

use core::ptr;

use aya_ebpf::{cty::c_void, helpers::bpf_loop};
use traffic_policy_ebpf::{
    abi::{Address, Flow, Fold, PortSearch, Scratch, Slot, Tuple, Usage, kind, ports, source_port},
    checksum, hash,
    outcome::Outcome,
};

use crate::datapath::{
    barrier::fetch_add,
    counters,
    ctx::Packet,
    family::{Family, V4, V6},
    flow::table::{self, FlowTable},
    maps::{EXISTS, NOEXIST, POOL},
    parse::Parsed,
    verdict::Decision,
    words::{load16, load32},
};

/// Source ports tried for one new flow.
const TRIES: u32 = 32;

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
}

impl<P: Packet, F: Family> NewFlow<'_, P, F> {
    /// Claims the reply entry: for an endpoint on this node with the client's own port if nobody has it, else with a
    /// port of the pool. Leaves its key and ports in `Scratch`.
    #[inline(always)]
    pub fn insert_reply(&self, hash: u64, usage: *mut Usage, pool_len: u32) -> Result<(), Decision> {
        if self.pending {
            // Announced before there is anything to find.
            unsafe { fetch_add(&raw mut (*usage).pending_created, 1) };
        }
        self.reply();
        // A retry of the same packet starts elsewhere.
        let at = hash::pick((hash >> 32) ^ (self.now as u64).wrapping_mul(0x9e37_79b9), pool_len);
        let scratch = self.scratch;
        unsafe {
            (*scratch).port_search = PortSearch {
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
            if result == 0 || result == EXISTS && self.take_over_reply() {
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
            return Err(Outcome::DroppedNoSnatPort.into());
        }
        // The first port is nearly always free. As a callback the verifier sees one turn only of the others.
        if next_port::<F>() == 0 {
            unsafe { bpf_loop(TRIES - 1, turn::<F>(), ptr::null_mut(), 0) };
        }
        match unsafe { (*scratch).port_search.result } as i64 {
            0 => Ok(()),
            EXISTS => Err(Outcome::DroppedNoSnatPort.into()),
            _ => Err(Outcome::DroppedTableFull.into()),
        }
    }

    /// Takes over a reply entry that already answers to this very request: left by a conversation that ended, or made
    /// by another CPU just now.
    #[inline(always)]
    fn take_over_reply(&self) -> bool {
        let key = unsafe { &(*self.scratch).key };
        let old = FlowTable::<F>::of(self.pending).find(key);
        if old.is_null()
            || unsafe { (*old).translated(self.parsed.tuple.protocol) } != self.parsed.tuple.reversed()
        {
            return false;
        }
        unsafe {
            // Where another CPU made it just now, there is nothing to count yet.
            if (*old).packets != 0 {
                counters::end(old.cast_const());
                (*old).packets = 0;
                (*old).bytes = 0;
            }
            (*old).service = self.service;
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

    /// The reply entry. Its hop is resolved by the first reply.
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
                kept: self.source.kept(),
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
    pub fn request(&self, new_ports: u32, hop: u16, epoch: u16) -> *mut Flow<F::Address> {
        let (before, after) = self.address_sums();
        let request = unsafe { &raw mut (*self.scratch).request };
        unsafe {
            *request = Flow {
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

/// Tries to insert the reply entry with this source port (memory order); a key that the other table has is taken, too.
#[inline(always)]
fn attempt<F: Family>(scratch: *mut Scratch<F::Address>, port: u16) -> i64 {
    unsafe {
        let port_search = &mut (*scratch).port_search;
        port_search.ports = ports(port, port_search.endpoint_port);
        (*scratch).key.ports = ports(port_search.endpoint_port, port);
        (*scratch).reply.port_delta = checksum::delta(
            checksum::port_sum(port_search.ports),
            checksum::port_sum(port_search.client_ports),
        );
        let (key, reply, pending) = (&(*scratch).key, &raw const (*scratch).reply, port_search.pending != 0);
        if table::pending_in_use() && !FlowTable::<F>::of(!pending).find(key).is_null() {
            return EXISTS;
        }
        FlowTable::<F>::of(pending).insert(key, reply, NOEXIST)
    }
}

/// One turn of the search: 0 to go on, 1 to stop.
#[inline(always)]
fn next_port<F: Family>() -> i64 {
    let (Some(scratch), Some(pool)) = (F::scratch(), POOL.get_ptr(0)) else { return 1 };
    let port_search = unsafe { &mut (*scratch).port_search };
    let port = unsafe { *pool.cast::<u16>().add((port_search.at & 0xffff) as usize) };
    port_search.at += 1;
    if port_search.at >= port_search.pool_len {
        port_search.at = 0;
    }
    let result = attempt::<F>(scratch, port.to_be());
    unsafe { (*scratch).port_search.result = result as i32 };
    (result != EXISTS) as i64
}

/// [`next_port`] of a family, as `bpf_loop` calls it.
#[inline(always)]
fn turn<F: Family>() -> *mut c_void {
    if F::V6 { next_port6 as *mut c_void } else { next_port4 as *mut c_void }
}

extern "C" fn next_port4(_: u64, _: *mut c_void) -> i64 {
    next_port::<V4>()
}

extern "C" fn next_port6(_: u64, _: *mut c_void) -> i64 {
    next_port::<V6>()
}
