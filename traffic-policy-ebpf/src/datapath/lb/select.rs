//! The frontend look-up, the policy's list of endpoints, and the endpoint of a new connection, for
//! packets and sockets alike; for packets also martian sources, which no packet from outside can
//! have: no flow is created for them, and they get no answer.
//!
//! The kernel drops such packets as martian, but a redirected packet skips its routing. A reply to
//! a source that is a frontend would come back the same way, and be a request again: one datagram
//! to an endpoint that echoes would loop for ever.

use aya_ebpf::bindings::{__sk_buff, xdp_md};
use traffic_policy_ebpf::{
    abi::{
        Address, AffinityLookup, Frontend, FrontendKey, ListKind, LocalNode, NO_SERVICE, Port, RangeMatch,
        ServiceCidrQuery, Slot, SourceQuery, Tuple, frontend, frontend_kind, scope, source_check, step,
    },
    hash,
    outcome::Outcome,
};

use crate::datapath::{
    clock,
    ctx::{
        Packet,
        tc::{Tc, TcPod},
        xdp::Xdp,
    },
    family::{Family, V4, V6},
    forward::nexthop,
    lb::{Client, List, Refusal, Target, affinity, maglev},
    maps::LOCAL_NODE,
    node_silence, prefilter, trace,
    value::{borrow, load},
};

/// Returns the frontend of a target, or null.
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

/// Returns the outcome for a destination that is no frontend.
#[inline(always)]
fn unknown<F: Family>(target: &Target<F::Address>) -> Outcome {
    let key =
        FrontendKey { address: target.address, port: Port::NONE, protocol: 0, scope: scope::CLUSTER_IP };
    if F::frontends().lookup::<_, Frontend>(&key).is_some() {
        return Outcome::RejectedUnknownPort;
    }
    let bits = size_of::<F::Address>() as u32 * 8;
    let query = ServiceCidrQuery { bits, address: target.address };
    if F::service_cidrs().lookup::<_, u32>(&query).is_some() {
        return Outcome::DroppedUnallocatedClusterIp;
    }
    Outcome::PassedNotService
}

/// Returns the endpoints that may serve a client. The list is empty if there is none on any node.
#[inline(always)]
pub fn list<F: Family>(target: &Target<F::Address>, client: &Client<F::Address>) -> Result<List, Refusal> {
    let found = frontend::<F>(target).cast_const();
    if found.is_null() {
        let outcome = unknown::<F>(target);
        trace::note(step::NO_FRONTEND, outcome as u32, [0; 2]);
        return Err(Refusal { outcome, service: NO_SERVICE });
    }
    let (flags, service) = (get!(found.flags), get!(found.service));
    trace::note(step::FRONTEND, service, [flags as u64, 0]);
    let refuse = |outcome| Err(Refusal { outcome, service });
    if flags & frontend::SOURCE_RANGES != 0 {
        let bits = 32 + size_of::<F::Address>() as u32 * 8;
        let query = SourceQuery { bits, service, address: client.source };
        let within = F::sources().lookup::<_, u32>(&query).is_some();
        trace::note(step::SOURCE_RANGE, RangeMatch::of(within) as u32, [0; 2]);
        if !within {
            return refuse(Outcome::DroppedSourceRange);
        }
    }
    let mut range = get!(found.cluster);
    let mut why = ListKind::Cluster as u32;
    if flags & frontend::LOCAL != 0 {
        // The policy of a ClusterIP is the internal one, which applies to all clients; the policy
        // of other frontends applies to packets from outside.
        if (client.netns != 0 || client.of_pod) && frontend::kind(flags) != frontend_kind::CLUSTER_IP {
            why = ListKind::Internal as u32;
        } else if flags & frontend::HAS_ENDPOINTS == 0 {
            why = ListKind::NoneAnywhere as u32;
        } else {
            let here = get!(found.local);
            let until = get!(found.drain_until);
            if here.len != 0 {
                range = here;
                why = ListKind::Local as u32;
            } else if until == 0 || until <= clock::nanoseconds() {
                trace::note(step::LIST, ListKind::NoneHere as u32, [0; 2]);
                return refuse(Outcome::DroppedNoLocalEndpoint);
            } else {
                why = ListKind::Draining as u32;
            }
        }
    }
    trace::note(step::LIST, why, [range.base as u64, range.len as u64]);
    let local = why == ListKind::Local as u32;
    Ok(List { frontend: found, service, range, local })
}

/// Whether a list still belongs to its target.
#[inline(always)]
pub fn holds<F: Family>(target: &Target<F::Address>, list: &List) -> bool {
    let found = frontend::<F>(target).cast_const();
    if found.is_null() {
        return false;
    }
    let range = if list.local { get!(found.local) } else { get!(found.cluster) };
    get!(found.service) == list.service && range == list.range
}

/// Returns the slot of a client's endpoint in its list, which is not empty: the one it used last,
/// or one at random.
#[inline(always)]
pub fn slot<F: Family>(
    list: &List,
    client: &Client<F::Address>,
    lookup: *mut AffinityLookup<F::Address>,
) -> u32 {
    last_or::<F>(list, client, lookup, hash::pick(client.hash, list.range.len), 0)
}

/// Returns the slot of the endpoint for the packet whose tuple is `Scratch::opening`: as [`slot`]
/// does, or by the table of a Service port that has one.
#[inline(always)]
pub fn slot_of_packet<F: Family>(
    list: &List,
    client: &Client<F::Address>,
    lookup: *mut AffinityLookup<F::Address>,
) -> u32 {
    let mut offset = hash::pick(client.hash, list.range.len);
    let mut by_table = 0;
    // The endpoints of a Local list are other ones on each node.
    if get!((list.frontend).flags) & frontend::MAGLEV != 0 && !list.local {
        let place = maglev::place::<F>(list.frontend);
        if place < list.range.len {
            (offset, by_table) = (place, 1);
        }
    }
    last_or::<F>(list, client, lookup, offset, by_table)
}

/// Returns the slot of the endpoint that a client used last, or else that at `offset`.
#[inline(always)]
fn last_or<F: Family>(
    list: &List,
    client: &Client<F::Address>,
    lookup: *mut AffinityLookup<F::Address>,
    offset: u32,
    by_table: u64,
) -> u32 {
    let lasts = get!((list.frontend).affinity);
    let offset = if lasts == 0 {
        offset
    } else {
        affinity::endpoint_of_client::<F>(list, client, lookup, offset, lasts)
    };
    let index = list.range.base + offset;
    trace::note(step::SLOT, index, [by_table, 0]);
    index
}

/// Returns the slot of an endpoint for a SYN that the endpoint of a silent node has not answered:
/// on a node that answers, if one of four tries finds any, as always in a list of four or fewer.
/// Affinity holds until the agent has removed the endpoint.
#[inline(always)]
pub fn slot_elsewhere<F: Family>(
    list: &List,
    client: &Client<F::Address>,
    lookup: *mut AffinityLookup<F::Address>,
    now: u32,
) -> u32 {
    if get!((list.frontend).affinity) != 0 {
        return slot_of_packet::<F>(list, client, lookup);
    }
    let len = list.range.len;
    let first = hash::pick(mix(client.hash ^ now as u64), len);
    // Neighbours in a list are often on the same node, so the tries lie far apart. Not a loop: the
    // verifier of Linux 6.1 refuses the order of its instructions.
    let mut index = list.range.base + first;
    if is_on_silent_node::<F>(index, now) {
        index = list.range.base + wrapped(first + len / 2, len);
        if is_on_silent_node::<F>(index, now) {
            index = list.range.base + wrapped(first + len / 4, len);
            if is_on_silent_node::<F>(index, now) {
                index = list.range.base + wrapped(first + len - len.div_ceil(4), len);
            }
        }
    }
    trace::note(step::SLOT, index, [0; 2]);
    index
}

/// Returns another hash, whose upper and lower bits depend on the former.
#[inline(always)]
fn mix(hash: u64) -> u64 {
    let product = hash.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    product ^ (product >> 32)
}

/// Reduces an offset that is less than twice the length of a list.
#[inline(always)]
fn wrapped(offset: u32, len: u32) -> u32 {
    if offset >= len { offset - len } else { offset }
}

#[inline(always)]
fn is_on_silent_node<F: Family>(index: u32, now: u32) -> bool {
    let slot = F::slots().lookup::<u32, Slot<F::Address>>(&index);
    slot.is_none_or(|slot| node_silence::is_silent(get!(slot.node), now))
}

/// Whether `--source-check` forbids the source of a packet that may create a flow. Its tuple is
/// `Scratch::opening`.
#[inline(always)]
pub fn is_martian<P: Packet, F: Family>(packet: P) -> bool {
    let context = packet.raw();
    0 != match (P::TC, F::V6) {
        _ if P::POD && F::V6 => martian_pod6(context.cast()),
        _ if P::POD => martian_pod4(context.cast()),
        (false, false) => martian_xdp4(context.cast()),
        (false, true) => martian_xdp6(context.cast()),
        (true, false) => martian_tc4(context.cast()),
        (true, true) => martian_tc6(context.cast()),
    }
}

global_functions! {
    martian_xdp4 => judge_source::<Xdp, V4>, context: *mut xdp_md;
    martian_xdp6 => judge_source::<Xdp, V6>, context: *mut xdp_md;
    martian_tc4 => judge_source::<Tc, V4>, context: *mut __sk_buff;
    martian_tc6 => judge_source::<Tc, V6>, context: *mut __sk_buff;
    martian_pod4 => judge_source::<TcPod, V4>, context: *mut __sk_buff;
    martian_pod6 => judge_source::<TcPod, V6>, context: *mut __sk_buff;
}

/// Judges the source of `Scratch::opening`: 1 if it is martian.
#[inline(always)]
fn judge_source<P: Packet, F: Family>(context: *mut P::Context) -> i32 {
    let (Some(node), Some(scratch)) = (LOCAL_NODE.get_ptr(0), F::scratch()) else { return 0 };
    let tuple = borrow(place!(const scratch.opening));
    let check = get!(node.source_check);
    if check == source_check::OFF {
        return 0;
    }
    if P::POD {
        // A pod's address is behind its device, and no other address is.
        return !nexthop::is_way_back::<P, F>(P::of(context), tuple.source) as i32;
    }
    let martian = tuple.source.is_no_source()
        || is_pod::<F>(node, tuple.source)
        || is_node::<F>(node, &tuple.source)
        || is_frontend::<F>(tuple)
        || check == source_check::STRICT && !nexthop::is_way_back::<P, F>(P::of(context), tuple.source);
    martian as i32
}

/// Whether an address belongs to one of this node's pods: programs are attached to uplinks, by
/// which packets of pods do not arrive.
#[inline(always)]
fn is_pod<F: Family>(node: *const LocalNode, address: F::Address) -> bool {
    let ([a, b], [head, tail], [mask, tail_mask]) =
        (address.wide().wire(), get!(node.pods[F::INDEX]).wire(), get!(node.pod_masks[F::INDEX]).wire());
    mask != 0 && (a ^ head) & mask | (b ^ tail) & tail_mask == 0
}

/// Whether an address is the node's own. One bit excludes nearly all others, without the hash
/// table.
#[inline(always)]
fn is_node<F: Family>(node: *const LocalNode, address: &F::Address) -> bool {
    let (word, bit) = LocalNode::address_bit(*address);
    let words = place!(const node.address_bits[F::INDEX]).cast::<u64>();
    load(words.wrapping_add(word)) & bit != 0 && F::node_addresses().lookup::<_, u32>(address).is_some()
}

/// Whether a packet comes from an address and port of a Service. The address alone proves nothing:
/// load balancers' addresses and external IPs may belong to other nodes, which send packets of
/// their own.
#[inline(always)]
fn is_frontend<F: Family>(tuple: &Tuple<F::Address>) -> bool {
    let port = tuple.ports.source();
    prefilter::may_be_service::<F>(tuple.source, port)
        && !frontend::<F>(&Target {
            address: tuple.source,
            port,
            protocol: tuple.protocol as u16,
            scope: scope::ADDRESS,
        })
        .is_null()
}
