//! A fingerprint of routes, rules and links, with which an agent detects whether they changed while
//! none ran.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    net::{Ipv4Addr, Ipv6Addr},
};

use anyhow::{Context, Result};
use futures::TryStreamExt;
use netlink_packet_route::{
    link::{LinkAttribute, LinkFlags},
    route::{RouteAttribute, RouteMessage},
};
use rtnetlink::{IpVersion, RouteMessageBuilder};

use super::network::{Network, answered};

impl Network {
    /// Returns a fingerprint of routes, rules and links, which is never 0.
    ///
    /// It is equal for an equal network as long as the agent is of the same build; otherwise the
    /// only cost is one more lookup for each flow.
    pub async fn fingerprint(&self) -> Result<u32> {
        answered("reading the network", self.read_fingerprint()).await
    }

    async fn read_fingerprint(&self) -> Result<u32> {
        // The hashes are summed, so that the order of the kernel's messages does not matter.
        let mut sum = 0_u64;
        let requests =
            [RouteMessageBuilder::<Ipv4Addr>::new().build(), RouteMessageBuilder::<Ipv6Addr>::new().build()];
        for request in requests {
            let mut routes = self.handle.route().get(request).execute();
            while let Some(route) = routes.try_next().await.context("listing routes failed")? {
                sum = sum.wrapping_add(of_route(&route));
            }
        }
        for version in [IpVersion::V4, IpVersion::V6] {
            let mut rules = self.handle.rule().get(version).execute();
            while let Some(rule) = rules.try_next().await.context("listing rules failed")? {
                sum = sum.wrapping_add(of(&rule));
            }
        }
        let mut links = self.handle.link().get().execute();
        while let Some(link) = links.try_next().await.context("listing devices failed")? {
            let mac = link.attributes.iter().find(|attribute| matches!(attribute, LinkAttribute::Address(_)));
            let mtu = link.attributes.iter().find(|attribute| matches!(attribute, LinkAttribute::Mtu(_)));
            let up = link.header.flags & (LinkFlags::Up | LinkFlags::LowerUp);
            sum = sum.wrapping_add(of(&(link.header.index, up, mac, mtu)));
        }
        Ok((sum ^ sum >> 32) as u32 | 1)
    }
}

fn of_route(route: &RouteMessage) -> u64 {
    // The time for which a route was unused, or remains valid, does not affect where it leads.
    let lasting = |attribute: &&RouteAttribute| {
        !matches!(attribute, RouteAttribute::CacheInfo(_) | RouteAttribute::Expires(_))
    };
    of(&(&route.header, route.attributes.iter().filter(lasting).collect::<Vec<_>>()))
}

/// Returns the hash of a message by its debug format, because not every part of a message
/// implements `Hash`.
fn of(value: &impl std::fmt::Debug) -> u64 {
    let mut hasher = DefaultHasher::new();
    format!("{value:?}").hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use netlink_packet_route::route::RouteCacheInfo;

    use super::*;

    #[test]
    fn what_leads_elsewhere_differs() {
        let route = |gateway: [u8; 4]| {
            let builder = RouteMessageBuilder::<Ipv4Addr>::new().destination_prefix([10, 0, 0, 0].into(), 8);
            builder.gateway(gateway.into()).build()
        };
        assert_eq!(of_route(&route([192, 0, 2, 1])), of_route(&route([192, 0, 2, 1])));
        assert_ne!(of_route(&route([192, 0, 2, 1])), of_route(&route([192, 0, 2, 2])));
        let mut used = route([192, 0, 2, 1]);
        used.attributes.push(RouteAttribute::CacheInfo(RouteCacheInfo::parse(&[7; 32]).unwrap()));
        used.attributes.push(RouteAttribute::Expires(5));
        assert_eq!(of_route(&used), of_route(&route([192, 0, 2, 1])));
    }
}
