//! Martian sources, which no packet from outside can have: no flow is created for them, and they
//! get no answer.
//!
//! The kernel drops such packets as martian, but a redirected packet skips its routing. A reply to
//! a source that is a frontend would come back the same way, and be a request again: one datagram
//! to an endpoint that echoes would loop for ever.

use traffic_policy_ebpf::abi::{Address, LocalNode, scope, source_check};

use crate::datapath::{
    ctx::Packet,
    family::Family,
    forward::nexthop,
    lb::{Target, select},
    maps::LOCAL_NODE,
    parse::Parsed,
    prefilter,
    value::load,
};

/// Whether `--source-check` forbids the source of a packet that may create a flow.
#[inline(always)]
pub fn is_martian<P: Packet, F: Family>(packet: P, parsed: &Parsed<F>) -> bool {
    let Some(node) = LOCAL_NODE.get_ptr(0) else { return false };
    let check = get!(node.source_check);
    if check == source_check::OFF {
        return false;
    }
    let source = parsed.tuple.source;
    source.is_no_source()
        || is_pod::<F>(node, source)
        || is_node::<F>(node, &parsed.tuple.source)
        || is_frontend(parsed)
        || check == source_check::STRICT && !nexthop::is_way_back::<P, F>(packet, source)
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
fn is_frontend<F: Family>(parsed: &Parsed<F>) -> bool {
    let port = parsed.tuple.ports.source();
    prefilter::may_be_service::<F>(parsed.tuple.source, port)
        && !select::frontend::<F>(&Target {
            address: parsed.tuple.source,
            port,
            protocol: parsed.tuple.protocol as u16,
            scope: scope::ADDRESS,
        })
        .is_null()
}
