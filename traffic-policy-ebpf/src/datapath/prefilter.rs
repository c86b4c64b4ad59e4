//! The prefilter: bit arrays that say, before any lookup, whether a packet or a call may concern a Service.

use traffic_policy_ebpf::{
    abi::{Port, Tuple},
    hash,
};

use crate::datapath::{
    family::Family,
    maps::{CONFIG, PREFILTER, TABLE_USAGE},
    value::load,
};

/// Result of the prefilter for a packet. Numbers as in [`step::FILTER`][traffic_policy_ebpf::abi::step::FILTER].
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
    let Some(filter) = PREFILTER.get_ptr(0) else { return Match::No };
    let port = tuple.ports.destination().to_host();
    // The ports first: an established packet asks no further.
    if bit(place!(const filter.frontends).cast(), port) {
        return Match::FrontendPort;
    }
    if bit(place!(const filter.pool).cast(), port) && snat_in_use() {
        return Match::SnatPort;
    }
    if may_be_cluster_ip::<F>(tuple.destination) { Match::ClusterIp } else { Match::No }
}

/// Whether the bits allow a destination to be a ClusterIP.
#[inline(always)]
pub fn may_be_cluster_ip<F: Family>(destination: F::Address) -> bool {
    let Some(filter) = PREFILTER.get_ptr(0) else { return false };
    bit(place!(const filter.cluster_ips).cast(), hash::address(destination))
        || bit(place!(const filter.service_cidrs).cast(), hash::prefix(destination))
}

/// Whether there may be flows with SNAT.
#[inline(always)]
fn snat_in_use() -> bool {
    let (Some(config), Some(usage)) = (CONFIG.get_ptr(0), TABLE_USAGE.get_ptr(0)) else { return false };
    get!(usage.snat_created) != get!(config.snat_swept)
}

/// Whether a destination may be a Service by the bit arrays: all that other calls pay for.
#[inline(always)]
pub fn may_be_service<F: Family>(destination: F::Address, port: Port) -> bool {
    let Some(filter) = PREFILTER.get_ptr(0) else { return false };
    bit(place!(const filter.frontends).cast(), port.to_host())
        || bit(place!(const filter.cluster_ips).cast(), hash::address(destination))
        || bit(place!(const filter.service_cidrs).cast(), hash::prefix(destination))
}

/// Whether a frontend has this port.
#[inline(always)]
pub fn is_frontend_port(port: Port) -> bool {
    let Some(filter) = PREFILTER.get_ptr(0) else { return false };
    bit(place!(const filter.frontends).cast(), port.to_host())
}

/// Whether new flows may have had this port as source towards endpoints.
#[inline(always)]
pub fn is_pool_port(port: Port) -> bool {
    let Some(filter) = PREFILTER.get_ptr(0) else { return false };
    bit(place!(const filter.pool).cast(), port.to_host())
}

/// The ports of endpoints, wherever they are: a bit array of the prefilter.
pub struct EndpointPorts(*const u64);

impl EndpointPorts {
    /// Whether an endpoint has this port.
    #[inline(always)]
    pub fn has(&self, port: Port) -> bool {
        bit(self.0, port.to_host())
    }
}

/// `None` never, but the verifier does not know.
#[inline(always)]
pub fn endpoint_ports() -> Option<EndpointPorts> {
    let filter = PREFILTER.get_ptr(0)?;
    Some(EndpointPorts(place!(const filter.endpoints).cast()))
}

/// Whether an endpoint has this port.
#[inline(always)]
pub fn is_endpoint(port: Port) -> bool {
    endpoint_ports().is_some_and(|ports| ports.has(port))
}

/// Bit `index` of a bit array of 65,536.
#[inline(always)]
fn bit(array: *const u64, index: u16) -> bool {
    load(array.wrapping_add((index >> 6) as usize)) >> (index & 63) & 1 != 0
}
