//! Addresses and routes of both families, for labs and for tests that wire their own namespaces.

use anyhow::Result;

use super::plan::Addresses;
use crate::family::Family;
use crate::netlink::Netlink;
use crate::netns::Namespace;

const EVERYWHERE: Addresses = Addresses::new([0; 4], [0; 8]);

/// Adds addresses to devices, with the prefixes of the plan, and routes to a network (to
/// everything, if none is given) by a gateway. The `lo` of each namespace is set up.
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
