//! Pod traffic between nodes over VXLAN, set up as flannel does it: static neighbours and
//! forwarding entries.

use anyhow::Result;

use super::Node;
use crate::family::Family;

/// The inner MTU: 1500 less an outer IPv4, UDP and VXLAN header and an inner Ethernet header.
pub(super) const MTU: u32 = 1450;

const DEVICE: &str = "flannel.1";

/// Gives a node its overlay device, and with it the routes to the other nodes' pods.
pub(super) fn connect(here: &Node, nodes: &[Node]) -> Result<()> {
    // The device has the first address of the node's pod network, as flannel assigns it.
    let own = here.pod_network;
    here.netns().netlink(async |net| {
        net.vxlan(DEVICE, own.mac(), here.addresses.v4, "eth0", MTU).await?;
        net.address(DEVICE, own.v4.into(), 32).await?;
        net.address(DEVICE, own.v6.into(), 128).await?;
        for there in nodes.iter().filter(|there| there.name != here.name) {
            let device = there.pod_network;
            net.forward_mac(DEVICE, device.mac(), there.addresses.v4.into()).await?;
            for family in Family::BOTH {
                let gateway = device.of(family);
                net.neighbour(DEVICE, gateway, device.mac()).await?;
                net.route_on_link(there.pod_network.of(family), family.prefix(), gateway, DEVICE).await?;
            }
        }
        Ok(())
    })
}
