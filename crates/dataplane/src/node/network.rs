//! The devices, addresses and routes of the kernel, queried through rtnetlink.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    time::Duration,
};

use anyhow::{Context, Result};
use futures::TryStreamExt;
use netlink_packet_route::{
    address::{AddressAttribute, AddressMessage, AddressScope},
    link::{InfoKind, LinkAttribute, LinkFlags, LinkInfo, LinkMessage},
    route::{RouteAddress, RouteAttribute, RouteMessage, RouteType, RouteVia},
};
use rtnetlink::{Handle, RouteMessageBuilder};
use tokio::time::timeout;

use super::{
    events::{self, Events},
    headers::{self, Header},
    ipvs,
    link::{Address, Link, Route},
    route_mtus::RouteMtus,
};

/// A connection to the kernel's network configuration, of the namespace that the process is in.
#[derive(Clone, Debug)]
pub struct Network {
    pub(super) handle: Handle,
}

/// The time to wait for the kernel's reply to a request. It replies at once, or to a dump of many
/// routes within a second.
const ANSWER: Duration = Duration::from_secs(10);

/// The error of a request that the kernel did not answer in time. It may have executed the request.
#[derive(Debug, thiserror::Error)]
#[error("{what} failed: the kernel does not answer within {} s", ANSWER.as_secs())]
pub(super) struct Unanswered {
    what: String,
}

/// Returns the kernel's reply, or [`Unanswered`].
pub(super) async fn answered<T>(what: &str, answer: impl Future<Output = Result<T>>) -> Result<T> {
    match timeout(ANSWER, answer).await {
        Ok(answer) => answer.with_context(|| format!("{what} failed")),
        Err(_) => Err(Unanswered { what: what.to_owned() }.into()),
    }
}

impl Network {
    /// Connects to the kernel; changes arrive through [`Events`]. It must be called within a tokio
    /// runtime.
    pub fn connect() -> Result<(Self, Events)> {
        let (handle, events) = events::connect().context("opening a netlink socket failed")?;
        Ok((Self { handle }, events))
    }

    /// Returns the network devices.
    pub async fn links(&self) -> Result<Vec<Link>> {
        let list = async { Ok(self.handle.link().get().execute().try_collect().await?) };
        let messages: Vec<LinkMessage> = answered("listing devices", list).await?;
        Ok(links(&messages))
    }

    /// Returns the addresses of this node.
    pub async fn addresses(&self) -> Result<Vec<Address>> {
        let leftover = self.ipvs_device().await?;
        let list = async { Ok(self.handle.address().get().execute().try_collect().await?) };
        let messages: Vec<AddressMessage> = answered("listing addresses", list).await?;
        Ok(messages.iter().filter_map(|message| address(message, leftover)).collect())
    }

    /// Returns the device that kube-proxy creates in its mode ipvs, if it exists.
    async fn ipvs_device(&self) -> Result<Option<u32>> {
        let request = self.handle.link().get().match_name(ipvs::DEVICE.to_owned());
        let device = async {
            match request.execute().try_next().await {
                Ok(message) => Ok(message.map(|message| message.header.index)),
                Err(rtnetlink::Error::NetlinkError(error)) if error.raw_code() == -libc::ENODEV => Ok(None),
                Err(error) => Err(error.into()),
            }
        };
        answered("looking for kube-ipvs0", device).await
    }

    /// Returns the device through which this node's packets to an address leave; `None` without a
    /// route.
    pub async fn device_towards(&self, address: IpAddr) -> Option<u32> {
        let message = match address {
            IpAddr::V4(address) => {
                RouteMessageBuilder::<Ipv4Addr>::new().destination_prefix(address, 32).build()
            }
            IpAddr::V6(address) => {
                RouteMessageBuilder::<Ipv6Addr>::new().destination_prefix(address, 128).build()
            }
        };
        let route = async { Ok(self.handle.route().get(message).execute().try_next().await?) };
        let route = answered("asking for a route", route).await.ok()??;
        route.attributes.iter().find_map(|attribute| match attribute {
            RouteAttribute::Oif(index) => Some(*index),
            _ => None,
        })
    }

    /// Returns the unicast routes of all tables.
    pub async fn routes(&self) -> Result<Vec<Route>> {
        Ok(self.unicast_routes().await?.iter().flat_map(route).collect())
    }

    /// Returns the unicast routes of all tables, and their MTUs.
    pub async fn routing(&self) -> Result<(Vec<Route>, RouteMtus)> {
        let messages = self.unicast_routes().await?;
        Ok((messages.iter().flat_map(route).collect(), RouteMtus::of(&messages)))
    }

    /// Returns the gateways of the unicast routes, each with its device.
    pub async fn gateways(&self) -> Result<BTreeSet<(u32, IpAddr)>> {
        Ok(self.unicast_routes().await?.iter().flat_map(gateways).collect())
    }

    /// Returns the gateways of the default routes that have an address beyond their link.
    pub async fn default_gateways(&self) -> Result<BTreeSet<IpAddr>> {
        let routes = self.unicast_routes().await?;
        let defaults = routes.iter().filter(|route| route.header.destination_prefix_length == 0);
        let gateways = defaults.flat_map(gateways).map(|(_, gateway)| gateway);
        Ok(gateways.filter(|gateway| !is_link_local(*gateway)).collect())
    }

    pub(super) async fn unicast_routes(&self) -> Result<Vec<RouteMessage>> {
        let requests =
            [RouteMessageBuilder::<Ipv4Addr>::new().build(), RouteMessageBuilder::<Ipv6Addr>::new().build()];
        let mut routes = Vec::new();
        for request in requests {
            let list = async { Ok(self.handle.route().get(request).execute().try_collect().await?) };
            let messages: Vec<RouteMessage> = answered("listing routes", list).await?;
            routes.extend(messages.into_iter().filter(|message| message.header.kind == RouteType::Unicast));
        }
        Ok(routes)
    }
}

fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    }
}

/// Returns the address of a message. `leftover`: the device on which kube-proxy in mode ipvs has
/// left the Services' addresses. The kernel considers them the node's own, but no node port is
/// reachable there.
fn address(message: &AddressMessage, leftover: Option<u32>) -> Option<Address> {
    let (link, scope) = (message.header.index, message.header.scope);
    // On point-to-point links `Address` is the peer's address.
    let local = message.attributes.iter().find_map(|attribute| match attribute {
        AddressAttribute::Local(address) => Some(*address),
        _ => None,
    });
    let address = local.or_else(|| {
        message.attributes.iter().find_map(|attribute| match attribute {
            AddressAttribute::Address(address) => Some(*address),
            _ => None,
        })
    })?;
    let global = scope != AddressScope::Host
        && scope != AddressScope::Link
        && !address.is_loopback()
        && !is_link_local(address)
        && leftover != Some(link);
    Some(Address { link, address, global })
}

fn links(messages: &[LinkMessage]) -> Vec<Link> {
    let below = messages.iter().filter_map(|message| {
        let is_vlan = message.attributes.iter().any(|attribute| {
            matches!(attribute, LinkAttribute::LinkInfo(infos) if infos.contains(&LinkInfo::Kind(InfoKind::Vlan)))
        });
        let below = message.attributes.iter().find_map(|attribute| match attribute {
            LinkAttribute::Link(below) => Some(*below),
            _ => None,
        });
        below.filter(|_| is_vlan)
    });
    let below: BTreeSet<u32> = below.collect();
    let with_vlans = |message| {
        let link = link(message);
        Link { has_vlans: below.contains(&link.index), ..link }
    };
    messages.iter().map(with_vlans).collect()
}

fn link(message: &LinkMessage) -> Link {
    let mut link = Link {
        index: message.header.index,
        name: String::new(),
        mac: [0; 6],
        mtu: 0,
        up: message.header.flags.contains(LinkFlags::Up),
        running: message.header.flags.contains(LinkFlags::Up | LinkFlags::LowerUp),
        loopback: message.header.flags.contains(LinkFlags::Loopback),
        header: Header::of(message),
        wire: true,
        has_vlans: false,
        point_to_point: message.header.flags.contains(LinkFlags::Pointopoint),
    };
    for attribute in &message.attributes {
        match attribute {
            LinkAttribute::IfName(name) => link.name.clone_from(name),
            LinkAttribute::Address(mac) => link.mac.iter_mut().zip(mac).for_each(|(to, from)| *to = *from),
            LinkAttribute::Mtu(mtu) => link.mtu = *mtu,
            LinkAttribute::LinkInfo(infos) => {
                link.wire = !infos.iter().any(|info| headers::kind(info).is_some());
            }
            _ => {}
        }
    }
    link
}

/// Returns the gateway of a route, or of one of its nexthops.
fn gateway(attributes: &[RouteAttribute]) -> Option<IpAddr> {
    attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Gateway(RouteAddress::Inet(address))
        | RouteAttribute::Via(RouteVia::Inet(address)) => Some(IpAddr::V4(*address)),
        RouteAttribute::Gateway(RouteAddress::Inet6(address))
        | RouteAttribute::Via(RouteVia::Inet6(address)) => Some(IpAddr::V6(*address)),
        _ => None,
    })
}

fn gateways(message: &RouteMessage) -> Vec<(u32, IpAddr)> {
    let alone = gateway(&message.attributes);
    let ways = message.attributes.iter().flat_map(|attribute| match attribute {
        RouteAttribute::Oif(link) => vec![(*link, alone)],
        RouteAttribute::MultiPath(hops) => {
            hops.iter().map(|hop| (hop.interface_index, gateway(&hop.attributes))).collect()
        }
        _ => Vec::new(),
    });
    ways.filter_map(|(link, gateway)| Some((link, gateway?))).collect()
}

fn route(message: &RouteMessage) -> Vec<Route> {
    let default = message.header.destination_prefix_length == 0;
    let gateway = |attributes: &[RouteAttribute]| gateway(attributes).is_some();
    let mut routes = Vec::new();
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Oif(link) => {
                routes.push(Route { link: *link, default, gateway: gateway(&message.attributes) });
            }
            RouteAttribute::MultiPath(hops) => {
                routes.extend(hops.iter().map(|hop| Route {
                    link: hop.interface_index,
                    default,
                    gateway: gateway(&hop.attributes),
                }));
            }
            _ => {}
        }
    }
    routes
}

#[cfg(test)]
mod tests {
    use netlink_packet_route::route::RouteNextHop;

    use super::*;

    #[test]
    fn what_ipvs_has_left_is_no_address_for_node_ports() {
        let message = |link, scope, address: &str| {
            let mut message = AddressMessage::default();
            (message.header.index, message.header.scope) = (link, scope);
            message.attributes = vec![AddressAttribute::Address(address.parse().unwrap())];
            message
        };
        for (link, scope, text, global) in [
            (2, AddressScope::Universe, "192.0.2.1", true),
            (2, AddressScope::Universe, "2001:db8::1", true),
            (7, AddressScope::Universe, "10.96.0.1", false),
            (7, AddressScope::Universe, "2001:db8:1::1", false),
            (2, AddressScope::Link, "fe80::1", false),
            (1, AddressScope::Host, "127.0.0.1", false),
        ] {
            let found = address(&message(link, scope, text), Some(7)).unwrap();
            assert_eq!(found, Address { link, address: text.parse().unwrap(), global });
        }
    }

    #[test]
    fn a_device_knows_of_the_vlans_on_it() {
        let device = |index, below, kind: Option<InfoKind>| {
            let mut message = LinkMessage::default();
            message.header.index = index;
            message.attributes = vec![LinkAttribute::IfName(format!("d{index}"))];
            if let Some(kind) = kind {
                message.attributes.push(LinkAttribute::Link(below));
                message.attributes.push(LinkAttribute::LinkInfo(vec![LinkInfo::Kind(kind)]));
            }
            message
        };
        let messages = [
            device(2, 0, None),
            device(3, 0, None),
            device(4, 2, Some(InfoKind::Vlan)),
            device(5, 3, Some(InfoKind::MacVlan)),
        ];
        let found: Vec<_> = links(&messages).iter().map(|link| (link.wire, link.has_vlans)).collect();
        assert_eq!(found, [(true, true), (true, false), (false, false), (false, false)]);
    }

    #[test]
    fn every_gateway_of_a_route_is_named() {
        let (four, six): (Ipv4Addr, Ipv6Addr) = ([192, 0, 2, 1].into(), "fe80::1".parse().unwrap());
        let hop = |link, attribute| {
            let mut hop = RouteNextHop::default();
            (hop.interface_index, hop.attributes) = (link, vec![attribute]);
            hop
        };
        let by_four = RouteAttribute::Gateway(RouteAddress::Inet(four));
        // RFC 8950 allows an IPv4 route over an IPv6 gateway.
        let by_six = RouteAttribute::Via(RouteVia::Inet6(six));
        let hops = vec![hop(3, by_four.clone()), hop(4, by_six.clone())];
        for (attributes, wanted) in [
            (vec![RouteAttribute::Oif(2), by_four.clone()], vec![(2, four.into())]),
            (vec![by_six, RouteAttribute::Oif(2)], vec![(2, six.into())]),
            (vec![RouteAttribute::MultiPath(hops)], vec![(3, four.into()), (4, six.into())]),
            (vec![RouteAttribute::Oif(2)], vec![]),
        ] {
            let mut message = RouteMessage::default();
            message.attributes = attributes;
            assert_eq!(gateways(&message), wanted, "{message:?}");
            assert!(route(&message).iter().all(|route| route.gateway != wanted.is_empty()));
        }
    }
}
