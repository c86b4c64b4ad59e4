//! The source ranges of a Service (`loadBalancerSourceRanges`), as one node applies them.

use std::net::IpAddr;

use ipnet::IpNet;

use super::{context::Context, object::Service};

/// Returns the source ranges of one family. Ranges that admit this node also admit the load
/// balancer addresses as sources: if the address is bound on the node, the node's own connections
/// come from it.
pub(super) fn source_ranges(service: &Service, ipv6: bool, context: &Context) -> Vec<IpNet> {
    let family = |ip: &IpAddr| ip.is_ipv6() == ipv6;
    let mut ranges: Vec<_> =
        service.source_ranges.iter().filter(|range| family(&range.addr())).copied().collect();
    let node_allowed = context.primary.iter().any(|ip| ranges.iter().any(|range| range.contains(ip)));
    if node_allowed {
        ranges.extend(service.load_balancer_ips.iter().filter(|ip| family(ip)).map(|ip| IpNet::from(*ip)));
    }
    ranges.sort();
    ranges.dedup();
    ranges
}
