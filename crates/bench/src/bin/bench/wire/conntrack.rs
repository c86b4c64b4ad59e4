//! The kernel's connection tracking in a namespace.

use anyhow::{Context, Result};
use traffic_policy_dataplane::node::netlink::Connection;
use traffic_policy_testing::netns::Namespace;

// linux/netlink.h, linux/netfilter/nfnetlink.h, linux/netfilter/nfnetlink_conntrack.h
const NETFILTER: isize = 12;
const SUBSYSTEM: u16 = 1;
const DELETE: u16 = SUBSYSTEM << 8 | 2;

/// Removes all IPv4 connections.
pub(crate) fn flush(namespace: &Namespace) -> Result<()> {
    namespace.run(|| {
        // The fields of struct nfgenmsg: family, version, resource.
        let ipv4 = [2, 0, 0, 0];
        let mut connection = Connection::open(NETFILTER)?;
        connection.request(DELETE, 0, &ipv4).context("emptying the kernel's table of connections")?;
        Ok(())
    })
}
