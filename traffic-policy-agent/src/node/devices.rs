//! Which devices packets from outside come by.

use std::{collections::BTreeSet, net::IpAddr};

use anyhow::{Result, bail};

use super::{Address, Link, Route};

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
    let by_route = routes.iter().filter(|route| route.default || route.gateway).map(|route| route.link);
    let by_address = addresses
        .iter()
        .filter(|address| node_addresses.contains(&address.address))
        .map(|address| address.link);
    let indices: BTreeSet<u32> = by_route.chain(by_address).collect();
    let found = links
        .iter()
        .filter(|link| indices.contains(&link.index) && !link.loopback && link.ethernet)
        .collect();
    (found, Vec::new())
}

/// Refuses names that are certainly wrong, at start.
///
/// # Errors
/// Names the devices that do not exist, and those that do; or one that carries no Ethernet frames.
pub fn check(named: &[String], links: &[Link]) -> Result<()> {
    let names: Vec<_> = links.iter().map(|link| link.name.as_str()).collect();
    for name in named {
        match links.iter().find(|link| link.name == *name) {
            None => bail!("there is no device {name} (there are: {}): correct --device", names.join(", ")),
            Some(link) if !link.ethernet => {
                bail!("{name} carries no Ethernet frames: --device takes Ethernet-like devices");
            }
            Some(_) => {}
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
            ethernet: name != "lo",
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
        assert!(check(&["lo".into()], &links).is_err());
    }
}
