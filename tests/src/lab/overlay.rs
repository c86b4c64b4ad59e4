//! Pod traffic between nodes by VXLAN, set up as flannel does it: static neighbours and forwarding entries.

use anyhow::Result;

use super::Node;
use super::plan::{self, Addresses, Family};

/// What is left of 1500 under an outer IPv4, UDP and VXLAN header.
pub(super) const MTU: u32 = 1450;

const DEVICE: &str = "flannel.1";

pub(super) fn connect(nodes: &[Node]) -> Result<()> {
    let devices: Vec<Addresses> = (1..).zip(nodes).map(|(number, _)| plan::overlay(number)).collect();
    for (here, own) in nodes.iter().zip(&devices) {
        let others = || nodes.iter().zip(&devices).filter(|(there, _)| there.name != here.name);
        here.netns().netlink(async |net| {
            net.vxlan(DEVICE, own.mac(), here.addresses.v4, "eth0", MTU).await?;
            net.address(DEVICE, own.v4.into(), 32).await?;
            net.address(DEVICE, own.v6.into(), 128).await?;
            for (there, device) in others() {
                net.forward_mac(DEVICE, device.mac(), there.addresses.v4.into()).await?;
                for family in Family::BOTH {
                    let gateway = device.of(family);
                    net.neighbour(DEVICE, gateway, device.mac()).await?;
                    let network = there.pod_network.of(family);
                    net.route_on_link(network, family.prefix(), gateway, DEVICE).await?;
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}
