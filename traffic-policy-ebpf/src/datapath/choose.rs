//! Where a new connection goes: from what the client names to one endpoint. The same for packets and for sockets.

use aya_ebpf::{cty::c_void, helpers::bpf_loop};
use traffic_policy_ebpf::{
    abi::{
        Address, Address4, Address6, Affinity, AffinityKey, CidrQuery, Frontend, FrontendKey, NO_SERVICE,
        Range, Search, Slot, SourceQuery, client, frontend, frontend_kind, list, scope, step,
    },
    hash,
    outcome::Outcome,
};

use crate::datapath::{
    clock,
    family::{Family, V4, V6},
    maps::{AFFINITY, ANY, Table},
    trace,
};

/// Endpoints of one list that are looked through for the one that a client had.
const MOST_ENDPOINTS: u32 = 1 << 16;
pub const NANOSECONDS_PER_SECOND: u64 = 1_000_000_000;

/// What a client names.
#[derive(Clone, Copy)]
pub struct Target<A> {
    pub address: A,
    /// Memory order.
    pub port: u16,
    pub protocol: u16,
    /// See [`scope`].
    pub scope: u32,
}

/// Who asks.
#[derive(Clone, Copy)]
pub struct Client<A> {
    /// Compared with source ranges.
    pub source: A,
    /// A process of this node or of its pods: the cookie of its network namespace, by which affinity knows it, and the
    /// external policy is not for it. 0: a packet from outside.
    pub netns: u64,
    /// Spreads clients over endpoints.
    pub hash: u64,
}

/// Why there is no endpoint, and whose Service said so.
#[derive(Clone, Copy)]
pub struct Refusal {
    pub outcome: Outcome,
    /// Index of the Service port, or [`NO_SERVICE`].
    pub service: u32,
}

/// The list that holds for a client.
pub struct List {
    pub frontend: *const Frontend,
    pub service: u32,
    pub range: Range,
    /// The list of policy Local.
    pub local: bool,
}

/// The frontend of a target, or null.
#[inline(always)]
pub fn frontend<F: Family>(target: &Target<F::Address>) -> *mut Frontend {
    let key = FrontendKey {
        address: target.address,
        port: target.port,
        protocol: target.protocol,
        scope: target.scope,
    };
    F::frontends().lookup::<_, Frontend>(&key).unwrap_or(core::ptr::null_mut())
}

/// What becomes of a target that is no frontend.
#[inline(always)]
fn unknown<F: Family>(target: &Target<F::Address>) -> Outcome {
    let key = FrontendKey { address: target.address, port: 0, protocol: 0, scope: scope::CLUSTER_IP };
    if F::frontends().lookup::<_, Frontend>(&key).is_some() {
        return Outcome::RejectedUnknownPort;
    }
    let bits = size_of::<F::Address>() as u32 * 8;
    let query = CidrQuery { bits, address: target.address };
    if F::service_cidrs().lookup::<_, u32>(&query).is_some() {
        return Outcome::DroppedUnallocatedClusterIp;
    }
    Outcome::PassedNotService
}

/// The endpoints that a client may be sent to. The list is empty if there is none anywhere.
#[inline(always)]
pub fn list<F: Family>(target: &Target<F::Address>, client: &Client<F::Address>) -> Result<List, Refusal> {
    let found = frontend::<F>(target).cast_const();
    if found.is_null() {
        let outcome = unknown::<F>(target);
        trace::note(step::NO_FRONTEND, outcome as u32, [0; 2]);
        return Err(Refusal { outcome, service: NO_SERVICE });
    }
    let (flags, service) = unsafe { ((*found).flags, (*found).service) };
    trace::note(step::FRONTEND, service, [flags as u64, 0]);
    let refuse = |outcome| Err(Refusal { outcome, service });
    if flags & frontend::SOURCE_RANGES != 0 {
        let bits = 32 + size_of::<F::Address>() as u32 * 8;
        let query = SourceQuery { bits, service, address: client.source };
        let within = F::sources().lookup::<_, u32>(&query).is_some();
        trace::note(step::SOURCE_RANGE, within as u32, [0; 2]);
        if !within {
            return refuse(Outcome::DroppedSourceRange);
        }
    }
    let mut range = unsafe { (*found).cluster };
    let mut why = list::CLUSTER;
    if flags & frontend::LOCAL != 0 {
        // The policy of a ClusterIP is the internal one, which holds for everybody; the others' is for packets from
        // outside.
        if client.netns != 0 && frontend::kind(flags) != frontend_kind::CLUSTER_IP {
            why = list::INTERNAL;
        } else if flags & frontend::HAS_ENDPOINTS == 0 {
            why = list::NONE_ANYWHERE;
        } else {
            let here = unsafe { (*found).local };
            let until = unsafe { (*found).drain_until };
            if here.len != 0 {
                range = here;
                why = list::LOCAL;
            } else if until == 0 || until <= clock::nanoseconds() {
                trace::note(step::LIST, list::NONE_HERE, [0; 2]);
                return refuse(Outcome::DroppedNoLocalEndpoint);
            } else {
                why = list::DRAINING;
            }
        }
    }
    trace::note(step::LIST, why, [range.base as u64, range.len as u64]);
    let local = why == list::LOCAL;
    Ok(List { frontend: found, service, range, local })
}

/// Whether a list is still that of its target.
#[inline(always)]
pub fn holds<F: Family>(target: &Target<F::Address>, list: &List) -> bool {
    let found = frontend::<F>(target).cast_const();
    if found.is_null() {
        return false;
    }
    unsafe {
        let range = if list.local { (*found).local } else { (*found).cluster };
        (*found).service == list.service && range == list.range
    }
}

/// The slot of the endpoint that a client gets of its list, which is not empty: the one it had, or one at random.
#[inline(always)]
pub fn slot<F: Family>(list: &List, client: &Client<F::Address>, search: *mut Search<F::Address>) -> u32 {
    let offset = hash::pick(client.hash, list.range.len);
    let lasts = unsafe { (*list.frontend).affinity };
    let offset = if lasts == 0 { offset } else { stay::<F>(list, client, search, offset, lasts) };
    let index = list.range.base + offset;
    trace::note(step::SLOT, index, [0; 2]);
    index
}

/// Offset of the endpoint that a client of a Service with affinity has, or gets with `fresh`.
#[inline(always)]
fn stay<F: Family>(
    list: &List,
    client: &Client<F::Address>,
    search: *mut Search<F::Address>,
    fresh: u32,
    lasts: u32,
) -> u32 {
    let now = clock::nanoseconds();
    let valid_from = now.wrapping_sub(lasts as u64 * NANOSECONDS_PER_SECOND);
    unsafe {
        (*search).key = AffinityKey {
            client: if client.netns == 0 { client.source.wide() } else { [client.netns, 0] },
            service: list.service,
            list: list.local as u16,
            kind: if client.netns == 0 { client::ADDRESS } else { client::NETNS },
        };
    }
    let mut offset = held::<F>(list, search, valid_from);
    // Time-outs are whole seconds, and CPUs contend for what is written for every connection and every datagram of an
    // unconnected socket.
    if offset != NONE && now.wrapping_sub(unsafe { (*search).value.used }) < NANOSECONDS_PER_SECOND {
        trace::note(step::AFFINITY, 1, [0; 2]);
        return offset;
    }
    if offset == NONE {
        // A client that came by the other list stays with its endpoint if that is in this one too: after a change of
        // policy, say.
        unsafe { (*search).key.list = !list.local as u16 };
        offset = held::<F>(list, search, valid_from);
        unsafe { (*search).key.list = list.local as u16 };
    }
    trace::note(step::AFFINITY, (offset != NONE) as u32, [0; 2]);
    if offset == NONE {
        offset = fresh;
    }
    let index = list.range.base + offset;
    if let Some(slot) = F::slots().lookup::<u32, Slot<F::Address>>(&index) {
        unsafe {
            (*search).value =
                Affinity { endpoint: (*slot).address.wide(), used: now, offset, port: (*slot).port, zero: 0 };
            Table::of(&raw const AFFINITY).insert(&(*search).key, &raw const (*search).value, ANY);
        }
    }
    offset
}

pub const NONE: u32 = u32::MAX;

/// Offset within the list of the endpoint that the key in `search` names, if it is there and not too old; else [`NONE`].
/// Leaves in `search` when it was used.
#[inline(always)]
fn held<F: Family>(list: &List, search: *mut Search<F::Address>, valid_from: u64) -> u32 {
    let key = unsafe { &(*search).key };
    let Some(had) = Table::of(&raw const AFFINITY).lookup::<_, Affinity>(key) else { return NONE };
    let used = unsafe { (*had).used };
    // By wrapping difference, for a time-out may reach back beyond the start of the clock.
    if used.wrapping_sub(valid_from) as i64 <= 0 {
        return NONE;
    }
    unsafe { (*search).value.used = used };
    unsafe { find::<F>(list, F::narrow((*had).endpoint), (*had).port, (*had).offset, search) }
}

/// Place of an endpoint within a list, [`NONE`] if it is not there; `guess` is looked at first.
#[inline(always)]
pub fn find<F: Family>(
    list: &List,
    address: F::Address,
    port: u16,
    guess: u32,
    search: *mut Search<F::Address>,
) -> u32 {
    let range = list.range;
    if guess < range.len && is_at::<F>(range.base + guess, address, port) {
        return guess;
    }
    // The kernel wants the context of a loop on the stack.
    let mut context = search;
    unsafe {
        (*search).address = address;
        (*search).port = port;
        (*search).found = 0;
        (*search).base = range.base;
        (*search).len = range.len;
        (*search).offset = 0;
        bpf_loop(MOST_ENDPOINTS, turn::<F>(), (&raw mut context).cast::<c_void>(), 0);
        if (*search).found != 0 { (*search).offset } else { NONE }
    }
}

#[inline(always)]
fn is_at<F: Family>(index: u32, address: F::Address, port: u16) -> bool {
    let Some(slot) = F::slots().lookup::<u32, Slot<F::Address>>(&index) else { return false };
    unsafe { (*slot).address == address && (*slot).port == port }
}

/// One turn of the search: 0 to go on, 1 to stop.
#[inline(always)]
fn next_slot<F: Family>(search: *mut Search<F::Address>) -> i64 {
    unsafe {
        if (*search).offset >= (*search).len {
            return 1;
        }
        if is_at::<F>((*search).base + (*search).offset, (*search).address, (*search).port) {
            (*search).found = 1;
            return 1;
        }
        (*search).offset += 1;
    }
    0
}

/// [`next_slot`] of a family, as `bpf_loop` calls it.
#[inline(always)]
fn turn<F: Family>() -> *mut c_void {
    if F::V6 { next_slot6 as *mut c_void } else { next_slot4 as *mut c_void }
}

extern "C" fn next_slot4(_: u64, search: *mut *mut Search<Address4>) -> i64 {
    next_slot::<V4>(unsafe { *search })
}

extern "C" fn next_slot6(_: u64, search: *mut *mut Search<Address6>) -> i64 {
    next_slot::<V6>(unsafe { *search })
}
