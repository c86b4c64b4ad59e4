//! The frontend look-up, the policy's list of endpoints, and the endpoint of a new connection, for
//! packets and sockets alike.

use traffic_policy_ebpf::{
    abi::{
        AffinityLookup, Frontend, FrontendKey, ListKind, NO_SERVICE, Port, RangeMatch, ServiceCidrQuery,
        SourceQuery, frontend, frontend_kind, scope, step,
    },
    hash,
    outcome::Outcome,
};

use crate::datapath::{
    clock,
    family::Family,
    lb::{Client, List, Refusal, Target, affinity},
    trace,
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
        if client.netns != 0 && frontend::kind(flags) != frontend_kind::CLUSTER_IP {
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
    let offset = hash::pick(client.hash, list.range.len);
    let lasts = get!((list.frontend).affinity);
    let offset = if lasts == 0 {
        offset
    } else {
        affinity::endpoint_of_client::<F>(list, client, lookup, offset, lasts)
    };
    let index = list.range.base + offset;
    trace::note(step::SLOT, index, [0; 2]);
    index
}
