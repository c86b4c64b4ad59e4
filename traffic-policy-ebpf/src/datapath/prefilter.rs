//! The prefilter: bit arrays that say, before any lookup, whether a packet or a call may concern a Service.

use traffic_policy_ebpf::{
    abi::{Tuple, destination_port},
    hash,
};

use crate::datapath::{
    family::Family,
    maps::{FILTER, STATE, USAGE},
};

/// What the bits say of a packet. Numbers as in [`step::FILTER`][traffic_policy_ebpf::abi::step::FILTER].
#[derive(Clone, Copy)]
pub enum Match {
    No,
    /// It may be a reply; it is no request, unless to a ClusterIP.
    SnatPort,
    /// A frontend has its port.
    FrontendPort,
    /// Neither, but its address may be a ClusterIP.
    ClusterIp,
}

#[inline(always)]
pub fn classify<F: Family>(tuple: &Tuple<F::Address>) -> Match {
    let Some(filter) = FILTER.get_ptr(0) else { return Match::No };
    let port = u16::from_be(destination_port(tuple.ports));
    // The ports first: an established packet asks no further.
    unsafe {
        if bit((&raw const (*filter).frontends).cast(), port) {
            return Match::FrontendPort;
        }
        if bit((&raw const (*filter).pool).cast(), port) && snat_in_use() {
            return Match::SnatPort;
        }
    }
    if may_be_cluster_ip::<F>(tuple.destination) { Match::ClusterIp } else { Match::No }
}

/// What the bits say of a destination.
#[inline(always)]
pub fn may_be_cluster_ip<F: Family>(destination: F::Address) -> bool {
    let Some(filter) = FILTER.get_ptr(0) else { return false };
    unsafe {
        bit((&raw const (*filter).cluster_ips).cast(), hash::address(destination))
            || bit((&raw const (*filter).service_cidrs).cast(), hash::prefix(destination))
    }
}

/// Whether there may be flows with SNAT.
#[inline(always)]
fn snat_in_use() -> bool {
    let (Some(state), Some(usage)) = (STATE.get_ptr(0), USAGE.get_ptr(0)) else { return false };
    unsafe { (*usage).snat_created != (*state).snat_swept }
}

/// Whether a destination may be a Service by the bit arrays: all that other calls pay for.
#[inline(always)]
pub fn may_be_service<F: Family>(destination: F::Address, port: u16) -> bool {
    let Some(filter) = FILTER.get_ptr(0) else { return false };
    unsafe {
        bit((&raw const (*filter).frontends).cast(), u16::from_be(port))
            || bit((&raw const (*filter).cluster_ips).cast(), hash::address(destination))
            || bit((&raw const (*filter).service_cidrs).cast(), hash::prefix(destination))
    }
}

/// The ports of endpoints, wherever they are: a bit array of the prefilter.
pub struct EndpointPorts(*const u64);

impl EndpointPorts {
    /// Whether an endpoint has this port (memory order).
    #[inline(always)]
    pub fn has(&self, port: u16) -> bool {
        unsafe { bit(self.0, u16::from_be(port)) }
    }
}

/// `None` never, but the verifier does not know.
#[inline(always)]
pub fn endpoint_ports() -> Option<EndpointPorts> {
    let filter = FILTER.get_ptr(0)?;
    Some(EndpointPorts(unsafe { (&raw const (*filter).endpoints).cast() }))
}

/// Whether an endpoint has this port (memory order).
#[inline(always)]
pub fn is_endpoint(port: u16) -> bool {
    endpoint_ports().is_some_and(|ports| ports.has(port))
}

/// Bit `index` of a bit array of 65,536.
#[inline(always)]
unsafe fn bit(array: *const u64, index: u16) -> bool {
    unsafe { *array.add((index >> 6) as usize) >> (index & 63) & 1 != 0 }
}
