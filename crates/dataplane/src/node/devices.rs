//! The choice of the devices on which packets from outside arrive.

use std::{collections::BTreeSet, net::IpAddr};

use anyhow::{Result, bail};

use super::{
    headers::Header,
    link::{Address, Link, Route},
    refusal::Refusal,
};

/// Returns the devices to attach to: the named ones, or else those of default routes, of the Node's
/// addresses, of routes with a gateway (other nodes' pods), and tunnels with any route (WireGuard's
/// have no gateway). lo and pods' devices are never included. The second list contains the named
/// devices that do not exist.
pub fn wanted<'a>(
    named: &[String],
    links: &'a [Link],
    addresses: &[Address],
    routes: &[Route],
    node_addresses: &[IpAddr],
) -> (Vec<&'a Link>, Vec<String>) {
    if !named.is_empty() {
        let found = links.iter().filter(|link| named.contains(&link.name)).collect();
        let missing =
            named.iter().filter(|name| !links.iter().any(|link| link.name == **name)).cloned().collect();
        return (found, missing);
    }
    let leading = leading_out(links, addresses, routes, node_addresses);
    let found = links.iter().filter(|link| match link.header {
        Header::Ethernet => leading.contains(&link.index),
        Header::Ip(_) => leading.contains(&link.index) || has_route(link, routes),
        Header::Other(_) => false,
    });
    (found.collect(), Vec::new())
}

/// Returns the devices that lead to the outside or to other nodes' pods, and are not attached to.
/// If no devices are named, these are the ones to which nothing can be attached; in any case they
/// include tunnels with routes, behind which pods of other nodes would be treated as this node's.
pub fn left_out(
    named: &[String],
    links: &[Link],
    addresses: &[Address],
    routes: &[Route],
    node_addresses: &[IpAddr],
) -> Vec<Refusal> {
    let leading = if named.is_empty() {
        leading_out(links, addresses, routes, node_addresses)
    } else {
        BTreeSet::new()
    };
    let concerned =
        |link: &&Link| !link.loopback && (leading.contains(&link.index) || has_route(link, routes));
    let refusal = |link: &Link| {
        let not_named = !named.is_empty() && !named.contains(&link.name);
        Refusal::of(link).err().or_else(|| not_named.then(|| Refusal::not_named(link)).flatten())
    };
    links.iter().filter(concerned).filter_map(refusal).collect()
}

fn has_route(link: &Link, routes: &[Route]) -> bool {
    !link.loopback && link.up && routes.iter().any(|route| route.link == link.index)
}

/// Returns the numbers of the devices of default routes, of routes with a gateway, and of the
/// Node's addresses.
fn leading_out(
    links: &[Link],
    addresses: &[Address],
    routes: &[Route],
    node_addresses: &[IpAddr],
) -> BTreeSet<u32> {
    let by_route = routes.iter().filter(|route| route.default || route.gateway).map(|route| route.link);
    let by_address = addresses
        .iter()
        .filter(|address| node_addresses.contains(&address.address))
        .map(|address| address.link);
    let loopback = |index: &u32| links.iter().any(|link| link.index == *index && link.loopback);
    by_route.chain(by_address).filter(|index| !loopback(index)).collect()
}

/// Rejects names that are certainly wrong, at start.
///
/// # Errors
/// The error names the devices that do not exist and those that do, or a device that nothing can be
/// attached to.
pub fn check(named: &[String], links: &[Link]) -> Result<()> {
    let names: Vec<_> = links.iter().map(|link| link.name.as_str()).collect();
    for name in named {
        match links.iter().find(|link| link.name == *name) {
            None => bail!("there is no device {name} (there are: {}): correct --device", names.join(", ")),
            Some(link) => Refusal::of(link)?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(index: u32, name: &str) -> Link {
        Link {
            index,
            name: name.into(),
            mac: [2, 0, 0, 0, 0, index as u8],
            mtu: 1500,
            up: true,
            running: true,
            loopback: name == "lo",
            header: match name {
                "lo" => Header::Other("loopback".into()),
                "tunl0" => Header::Ip("ipip".into()),
                "gre0" => Header::Other("gre".into()),
                _ => Header::Ethernet,
            },
            wire: false,
            has_vlans: false,
            point_to_point: false,
        }
    }

    #[test]
    fn devices_of_routes_and_of_the_node() {
        let links = [link(1, "lo"), link(2, "eth0"), link(3, "eth1"), link(4, "flannel.1"), link(5, "cni0")];
        let routes = [
            Route { link: 2, default: true, gateway: true },
            Route { link: 4, default: false, gateway: true },
            Route { link: 5, default: false, gateway: false },
        ];
        let address = "192.0.2.7".parse().unwrap();
        let addresses = [Address { link: 3, address, global: true }];
        let names =
            |(links, _): (Vec<&Link>, Vec<String>)| links.iter().map(|l| l.name.clone()).collect::<Vec<_>>();
        assert_eq!(
            names(wanted(&[], &links, &addresses, &routes, &[address])),
            ["eth0", "eth1", "flannel.1"]
        );
        assert_eq!(names(wanted(&[], &links, &addresses, &routes, &[])), ["eth0", "flannel.1"]);
        let named = ["eth1".to_owned(), "eth9".to_owned()];
        let (found, missing) = wanted(&named, &links, &addresses, &routes, &[]);
        assert_eq!(found[0].name, "eth1");
        assert_eq!(missing, ["eth9"]);
        assert!(check(&named, &links).unwrap_err().to_string().contains("there is no device eth9"));
        let refused = check(&["lo".into()], &links).unwrap_err().to_string();
        assert!(refused.starts_with("packets of device lo (type loopback) begin neither"), "{refused}");
    }

    #[test]
    fn tunnels_with_routes_are_wanted_and_told_of_where_they_are_not_named() {
        let links = [link(1, "lo"), link(2, "eth0"), link(3, "tunl0"), link(4, "gre0")];
        let uplink = Route { link: 2, default: true, gateway: true };
        let eth0 = ["eth0".to_owned()];
        // The routes of WireGuard have no gateway.
        for gateway in [false, true] {
            let routes = [uplink, Route { link: 3, default: false, gateway }];
            let (found, missing) = wanted(&[], &links, &[], &routes, &[]);
            assert_eq!((found.as_slice(), missing.len()), (&[&links[1], &links[2]][..], 0));
            assert_eq!(left_out(&[], &links, &[], &routes, &[]), []);
            let [tunnel] = left_out(&eth0, &links, &[], &routes, &[]).try_into().unwrap();
            assert_eq!((tunnel.name.as_str(), tunnel.kind.as_str()), ("tunl0", "ipip"));
            assert!(tunnel.to_string().ends_with("name it with --device, too"), "{tunnel}");
        }
        assert_eq!(wanted(&[], &links, &[], &[uplink], &[]).0, [&links[1]], "a tunnel that leads nowhere");
        // The packets of this device begin with its own header.
        let routes = [uplink, Route { link: 4, default: false, gateway: true }];
        assert_eq!(wanted(&[], &links, &[], &routes, &[]).0, [&links[1]]);
        for named in [&[][..], &eth0] {
            let [tunnel] = left_out(named, &links, &[], &routes, &[]).try_into().unwrap();
            assert_eq!((tunnel.name.as_str(), tunnel.kind.as_str()), ("gre0", "gre"));
        }
    }
}
