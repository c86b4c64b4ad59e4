//! Routes with several next hops (ECMP), by which a router spreads connections over nodes.

use std::net::IpAddr;

use anyhow::{Context, Result};
use rtnetlink::{RouteMessageBuilder, RouteNextHopBuilder};

use super::Netlink;

impl Netlink {
    /// A variant of [`Netlink::route`] with several gateways of equal weight.
    pub async fn route_by_any(&self, destination: IpAddr, prefix: u8, gateways: &[IpAddr]) -> Result<()> {
        let hops = gateways.iter().map(|gateway| {
            let hop = if gateway.is_ipv4() {
                RouteNextHopBuilder::new_ipv4()
            } else {
                RouteNextHopBuilder::new_ipv6()
            };
            Ok(hop.via(*gateway)?.build())
        });
        let hops = hops.collect::<Result<_>>()?;
        let route = RouteMessageBuilder::<IpAddr>::new().destination_prefix(destination, prefix)?;
        let replaced = self.replace_route(route.multipath(hops).build()).await;
        replaced.with_context(|| format!("route to {destination}/{prefix} via any of {gateways:?}"))
    }
}
