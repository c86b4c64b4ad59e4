//! Addresses and routes of both families: of labs, and of what tests wire by themselves.

use anyhow::Result;

use super::plan::{Addresses, Family};
use crate::netlink::Netlink;
use crate::netns::Namespace;

const EVERYWHERE: Addresses = Addresses::new([0; 4], [0; 8]);

/// Addresses of devices, with the prefixes of the plan, and routes to a network (without one: to everything) by a gateway. Each namespace's
/// own `lo` is switched on.
///
/// # Errors
/// The kernel refuses one.
pub fn assign(
    addresses: &[(&Namespace, &str, Addresses)],
    routes: &[(&Namespace, Option<Addresses>, Addresses)],
) -> Result<()> {
    for (namespace, device, addresses) in addresses {
        namespace.netlink(async |net| {
            net.up("lo").await?;
            add_addresses(&net, device, addresses).await
        })?;
    }
    routes.iter().try_for_each(|(namespace, network, gateway)| {
        namespace.netlink(async |net| match network {
            Some(network) => add_routes(&net, network, gateway).await,
            None => default_route(&net, gateway).await,
        })
    })
}

pub(super) async fn add_addresses(net: &Netlink, device: &str, addresses: &Addresses) -> Result<()> {
    for family in Family::BOTH {
        net.address(device, addresses.of(family), family.prefix()).await?;
    }
    Ok(())
}

pub(super) async fn add_routes(net: &Netlink, network: &Addresses, gateway: &Addresses) -> Result<()> {
    for family in Family::BOTH {
        net.route(network.of(family), family.prefix(), gateway.of(family)).await?;
    }
    Ok(())
}

pub(super) async fn default_route(net: &Netlink, gateway: &Addresses) -> Result<()> {
    for family in Family::BOTH {
        net.route(EVERYWHERE.of(family), 0, gateway.of(family)).await?;
    }
    Ok(())
}
