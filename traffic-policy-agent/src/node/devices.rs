//! Choice of the devices that packets from outside come by.

use std::{collections::BTreeSet, net::IpAddr};

use anyhow::{Result, bail};

use super::{
    headers::Header,
    link::{Address, Link, Route},
    without_ethernet::WithoutEthernet,
};

/// The devices to attach to: the named ones, or else those of default routes, of the Node's addresses and of routes with
/// a gateway (other nodes' pods). Never lo, nor a pod's device. Named devices that do not exist are in the second list.
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
    let found = leading_out(links, addresses, routes, node_addresses)
        .filter(|link| link.header == Header::Ethernet)
        .collect();
    (found, Vec::new())
}

/// Devices that lead to the outside or to other nodes' pods, and cannot be attached to: those by which devices are found, unless they are
/// named; and in any case tunnels with routes, whose pods of other nodes would be taken for this node's.
pub fn without_ethernet(
    named: &[String],
    links: &[Link],
    addresses: &[Address],
    routes: &[Route],
    node_addresses: &[IpAddr],
) -> Vec<WithoutEthernet> {
    let leading: BTreeSet<u32> = if named.is_empty() {
        leading_out(links, addresses, routes, node_addresses).map(|link| link.index).collect()
    } else {
        BTreeSet::new()
    };
    let routed: BTreeSet<u32> = routes.iter().map(|route| route.link).collect();
    let concerned = |link: &&Link| {
        !link.loopback && (leading.contains(&link.index) || routed.contains(&link.index) && link.up)
    };
    links.iter().filter(concerned).filter_map(|link| WithoutEthernet::refuse(link).err()).collect()
}

fn leading_out<'a>(
    links: &'a [Link],
    addresses: &[Address],
    routes: &[Route],
    node_addresses: &[IpAddr],
) -> impl Iterator<Item = &'a Link> {
    let by_route = routes.iter().filter(|route| route.default || route.gateway).map(|route| route.link);
    let by_address = addresses
        .iter()
        .filter(|address| node_addresses.contains(&address.address))
        .map(|address| address.link);
    let indices: BTreeSet<u32> = by_route.chain(by_address).collect();
    links.iter().filter(move |link| indices.contains(&link.index) && !link.loopback)
}

/// Refuses names that are certainly wrong, at start.
///
/// # Errors
/// Names the devices that do not exist, and those that do; or one without Ethernet header.
pub fn check(named: &[String], links: &[Link]) -> Result<()> {
    let names: Vec<_> = links.iter().map(|link| link.name.as_str()).collect();
    for name in named {
        match links.iter().find(|link| link.name == *name) {
            None => bail!("there is no device {name} (there are: {}): correct --device", names.join(", ")),
            Some(link) => WithoutEthernet::refuse(link)?,
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
                "tunl0" => Header::Other("ipip".into()),
                _ => Header::Ethernet,
            },
            wire: false,
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
        assert!(refused.starts_with("device lo has no Ethernet header (type loopback)"), "{refused}");
    }

    #[test]
    fn tunnels_without_ethernet_header_are_left_out_and_told_of() {
        let links = [link(1, "lo"), link(2, "eth0"), link(3, "tunl0")];
        let routes = [
            Route { link: 2, default: true, gateway: true },
            Route { link: 3, default: false, gateway: true },
        ];
        let (found, missing) = wanted(&[], &links, &[], &routes, &[]);
        assert_eq!((found.as_slice(), missing.len()), (&[&links[1]][..], 0));
        let [tunnel] = without_ethernet(&[], &links, &[], &routes, &[]).try_into().unwrap();
        assert_eq!((tunnel.name.as_str(), tunnel.kind.as_str()), ("tunl0", "ipip"));
        // Also where the devices are named; WireGuard's routes have no gateway.
        let routes = [routes[0], Route { link: 3, default: false, gateway: false }];
        for named in [vec![], vec!["eth0".to_owned()]] {
            assert_eq!(without_ethernet(&named, &links, &[], &routes, &[]), std::slice::from_ref(&tunnel));
        }
        assert_eq!(without_ethernet(&[], &links, &[], &routes[..1], &[]), [], "a tunnel that leads nowhere");
    }
}
