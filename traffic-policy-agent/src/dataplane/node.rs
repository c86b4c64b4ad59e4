//! The description of this node in the map `NODE`: its network namespace, its addresses, the ranges of its pods.

use std::net::IpAddr;

use anyhow::{Context as _, Result};
use ipnet::IpNet;
use traffic_policy_ebpf::abi::Node;

use super::{
    kernel,
    maps::{Maps, keys::wide},
};

/// Tells the packet path what sockets without an address will probably use: the node's primary addresses, and for
/// pods the first of their ranges.
///
/// # Errors
/// The kernel refuses.
pub fn describe(maps: &mut Maps, primary: &[IpAddr], pod_ranges: &[IpNet]) -> Result<()> {
    let pods: Vec<IpAddr> = pod_ranges.iter().map(IpNet::network).collect();
    let first = |addresses: &[IpAddr]| {
        [IpAddr::is_ipv4, IpAddr::is_ipv6]
            .map(|of_family| addresses.iter().copied().find(of_family).map_or([0; 2], wide))
    };
    let pod_bits = [false, true].map(|ipv6| {
        let range = pod_ranges.iter().find(|range| range.addr().is_ipv6() == ipv6);
        range.map_or(0, |range| u32::from(range.prefix_len()))
    });
    put(maps, |node| Node { primary: first(primary), pods: first(&pods), pod_bits, ..node })
}

/// Tells the packet path which network namespace is the node's own: this process's.
pub fn name_namespace(maps: &mut Maps) -> Result<()> {
    let netns = kernel::netns_cookie()?;
    put(maps, |node| Node { netns, ..node })
}

fn put(maps: &mut Maps, change: impl FnOnce(Node) -> Node) -> Result<()> {
    let held = maps.node.get(&0, 0).context("reading the description of the node failed")?;
    let node = change(held);
    if node == held {
        return Ok(());
    }
    maps.node.set(0, node, 0).context("writing the description of the node failed")
}
