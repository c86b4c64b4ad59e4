//! What becomes of a destination that a socket names. Nothing here needs a socket: the kernel cannot test-run socket
//! hooks, so `explain` asks the same function from an XDP program.

use aya_ebpf::helpers::bpf_ktime_get_coarse_ns;
use traffic_policy_ebpf::{
    abi::{Address, EndpointKey, NO_SERVICE, Node, Search, Slot, Socket, frontend, scope, step},
    hash,
    outcome::Outcome,
};

use super::super::{
    choose::{self, Client, List, NANOSECONDS, Target},
    family::Family,
    ingress::bit,
    maps::{FILTER, GONE, NODE, Table},
    trace,
    wire::opaque,
};

/// What a socket is about to do.
#[derive(Clone, Copy)]
pub struct Question<A> {
    /// The address that the application names; an IPv4-mapped IPv6 address counts as IPv4.
    pub destination: A,
    /// Memory order.
    pub port: u16,
    /// TCP or UDP, as IP protocol number.
    pub protocol: u16,
    /// The address that the socket is bound to; zero if it is not.
    pub source: A,
    /// Cookie of the socket's network namespace, never 0.
    pub netns: u64,
    /// The namespace is the node's own.
    pub node: bool,
    /// Spreads connections over endpoints.
    pub hash: u64,
    /// Where earlier datagrams of this socket to this destination went, or null: a conversation stays with its endpoint.
    pub had: *const Socket,
}

/// The answer. For [`Outcome::Connected`] all of it holds, else only `outcome`, `service` and `assumed`.
#[derive(Clone, Copy)]
pub struct Decision<A> {
    /// `Connected`, one of those that refuse (`Rejected…`, `Dropped…`), or one that passes: the call is none of ours.
    pub outcome: Outcome,
    /// Index of the Service port, or [`NO_SERVICE`].
    pub service: u32,
    /// The endpoint.
    pub address: A,
    /// Memory order.
    pub port: u16,
    /// Source ranges were compared with the address that the socket will probably get: it is not bound to one.
    pub assumed: bool,
    /// Its slot, and the place of that within its list.
    pub slot: u32,
    pub offset: u32,
}

/// Whether a destination may be ours by the bit arrays: all that other calls pay for.
#[inline(always)]
pub fn concerns<F: Family>(destination: F::Address, port: u16) -> bool {
    let Some(filter) = FILTER.get_ptr(0) else { return false };
    unsafe {
        bit((&raw const (*filter).frontends).cast(), u16::from_be(port))
            || bit((&raw const (*filter).cluster_ips).cast(), hash::address(destination))
            || bit((&raw const (*filter).service_cidrs).cast(), hash::prefix(destination))
    }
}

/// Whether an address leads to the caller's own namespace: 127.0.0.0/8, ::1, and the unspecified address, which the kernel
/// takes for loopback.
#[inline(always)]
fn is_loopback<F: Family>(address: F::Address) -> bool {
    let [head, tail] = address.wide();
    if F::V6 {
        return head == 0 && (tail == 0 || tail == u64::from_ne_bytes([0, 0, 0, 0, 0, 0, 0, 1]));
    }
    let address = head as u32;
    address == 0 || address.to_ne_bytes()[0] == 127
}

/// The source that a socket without one will probably get: the node's address, or one of its pods' range.
#[inline(always)]
fn usual_source<F: Family>(node: bool) -> F::Address {
    let Some(this) = NODE.get_ptr(0) else { return F::Address::default() };
    let this: *const Node = this;
    F::narrow(unsafe { if node { (*this).primary[F::INDEX] } else { (*this).pods[F::INDEX] } })
}

/// Decides. `search` is the caller's own: a socket's call is interrupted by packets, which use the per-CPU one.
#[inline(always)]
pub fn decide<F: Family>(
    question: &Question<F::Address>,
    search: *mut Search<F::Address>,
) -> Decision<F::Address> {
    let mut decision = Decision {
        outcome: Outcome::Passed,
        service: NO_SERVICE,
        address: F::Address::default(),
        port: 0,
        assumed: false,
        slot: 0,
        offset: 0,
    };
    if !concerns::<F>(question.destination, question.port) {
        trace::note(step::FILTER, 0, [0; 2]);
        return decision;
    }
    let mut target = Target {
        address: question.destination,
        port: question.port,
        protocol: question.protocol,
        scope: scope::ADDRESS,
    };
    if is_loopback::<F>(question.destination) {
        // The loopback addresses of a pod are the pod's own business.
        if !question.node {
            trace::note(step::OWN_LOOPBACK, 0, [0; 2]);
            decision.outcome = Outcome::PassedNotService;
            return decision;
        }
        target.address = F::Address::default();
        target.scope = scope::LOOPBACK;
    }
    let had = question.had;
    if goes_on::<F>(question, &target) {
        decision.outcome = Outcome::Connected;
        unsafe {
            decision.service = (*had).service;
            (decision.address, decision.port) = (F::narrow((*had).address), (*had).port);
            decision.offset = (*had).offset;
        }
        return decision;
    }
    let mut client = Client { source: question.source, netns: question.netns, hash: question.hash };
    let unbound = client.source == F::Address::default();
    if unbound {
        client.source = usual_source::<F>(question.node);
    }
    // Opaque, or the compiler writes the loop out twice.
    let mut last = opaque(0);
    loop {
        let list = match choose::list::<F>(&target, &client) {
            Ok(list) => list,
            Err(refusal) => {
                decision.outcome = refusal.outcome;
                decision.service = refusal.service;
                decision.assumed = unbound && refusal.outcome as u32 == Outcome::DroppedSourceRange as u32;
                return decision;
            }
        };
        decision.service = list.service;
        decision.assumed = unbound && unsafe { (*list.frontend).flags } & frontend::SOURCE_RANGES != 0;
        if list.range.len == 0 {
            decision.outcome = Outcome::RejectedNoEndpoint;
            return decision;
        }
        let offset = conversation::<F>(question, &list, search);
        let slot = if offset == choose::NONE {
            choose::slot::<F>(&list, &client, search)
        } else {
            list.range.base + offset
        };
        let Some(endpoint) = F::slots().lookup::<u32, Slot<F::Address>>(&slot) else {
            decision.outcome = Outcome::DroppedFailed;
            return decision;
        };
        decision.outcome = Outcome::Connected;
        (decision.address, decision.port) = unsafe { ((*endpoint).address, (*endpoint).port) };
        decision.slot = slot;
        decision.offset = slot - list.range.base;
        // A process may be set aside for long between two instructions, and the frontend that it has looked up, or the
        // slots, be written anew as somebody else's. Once more is enough: it takes two such pauses to be wrong.
        if last != 0 || choose::holds::<F>(&target, &list) {
            return decision;
        }
        last = opaque(1);
    }
}

/// Seconds for which an unconnected socket's conversation stays with its endpoint after its last datagram: as long as
/// conntrack keeps a UDP flow that was answered (`nf_conntrack_udp_timeout_stream`).
const CONVERSATION: u32 = 120;

/// Seconds of CLOCK_MONOTONIC.
#[inline(always)]
pub fn seconds() -> u32 {
    (unsafe { bpf_ktime_get_coarse_ns() } / NANOSECONDS) as u32
}

/// Whether a conversation goes on with its endpoint whatever has become of lists, policies and source ranges: they are for
/// new ones. It ends with its time-out, with its Service, and with its endpoint when that serves no more.
#[inline(always)]
fn goes_on<F: Family>(question: &Question<F::Address>, target: &Target<F::Address>) -> bool {
    let had = question.had;
    if had.is_null() {
        return false;
    }
    let (service, used) = unsafe { ((*had).service, (*had).used) };
    if used == 0 || seconds().wrapping_sub(used) > CONVERSATION {
        return false;
    }
    let found = choose::frontend::<F>(target);
    // Services with affinity know where their clients are.
    if found.is_null() || unsafe { (*found).service != service || (*found).affinity != 0 } {
        return false;
    }
    let endpoint = EndpointKey {
        address: unsafe { (*had).address },
        port: unsafe { (*had).port },
        protocol: question.protocol,
        ipv6: F::V6 as u32,
    };
    Table::of(&raw const GONE).lookup::<_, u32>(&endpoint).is_none()
}

/// Place of the endpoint that this conversation has within the list, [`choose::NONE`] without one. Services with affinity
/// know it by themselves.
#[inline(always)]
fn conversation<F: Family>(
    question: &Question<F::Address>,
    list: &List,
    search: *mut Search<F::Address>,
) -> u32 {
    let had = question.had;
    if had.is_null() || unsafe { (*list.frontend).affinity } != 0 {
        return choose::NONE;
    }
    unsafe { choose::find::<F>(list, F::narrow((*had).address), (*had).port, (*had).offset, search) }
}
