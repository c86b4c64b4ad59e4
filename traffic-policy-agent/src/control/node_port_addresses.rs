//! On which addresses of the node node ports are reached.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::node::Address;

/// `--node-port-addresses`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodePortAddresses {
    /// Every address of the node but loopback and link-local ones.
    All,
    /// The Node object's addresses.
    Primary,
    /// Addresses of the node in these ranges; a family without a range has all.
    Within(Vec<IpNet>),
}

impl std::str::FromStr for NodePortAddresses {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "all" => Ok(Self::All),
            "primary" => Ok(Self::Primary),
            ranges => ranges
                .split(',')
                .map(|range| {
                    range.trim().parse::<IpNet>().map_err(|_| {
                        format!("`{range}` is neither `all`, `primary` nor a CIDR such as 192.0.2.0/24")
                    })
                })
                .collect::<Result<_, _>>()
                .map(Self::Within),
        }
    }
}

impl NodePortAddresses {
    /// The addresses, given all of the node's and the Node object's.
    pub(super) fn resolve(&self, addresses: &[Address], primary: &[IpAddr]) -> Vec<IpAddr> {
        let global = addresses.iter().filter(|address| address.global).map(|address| address.address);
        let mut resolved: Vec<IpAddr> = match self {
            Self::All => global.collect(),
            Self::Primary => global.filter(|address| primary.contains(address)).collect(),
            Self::Within(ranges) => global
                .filter(|address| {
                    let mut of_family =
                        ranges.iter().filter(|range| range.addr().is_ipv4() == address.is_ipv4());
                    let unrestricted = of_family.clone().next().is_none();
                    unrestricted || of_family.any(|range| range.contains(address))
                })
                .collect(),
        };
        resolved.sort_unstable();
        resolved.dedup();
        resolved
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_port_addresses() {
        let address = |text: &str, global| Address { link: 2, address: text.parse().unwrap(), global };
        let all = [
            address("127.0.0.1", false),
            address("192.0.2.1", true),
            address("198.51.100.1", true),
            address("fe80::1", false),
            address("2001:db8::1", true),
        ];
        let resolve = |text: &str, primary: &[&str]| {
            let primary: Vec<IpAddr> = primary.iter().map(|text| text.parse().unwrap()).collect();
            let resolved = text.parse::<NodePortAddresses>().unwrap().resolve(&all, &primary);
            resolved.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(resolve("all", &[]), "192.0.2.1 198.51.100.1 2001:db8::1");
        assert_eq!(resolve("primary", &["198.51.100.1"]), "198.51.100.1");
        assert_eq!(resolve("192.0.2.0/24", &[]), "192.0.2.1 2001:db8::1", "a family without a range has all");
        assert_eq!(resolve("192.0.2.0/24,::/0", &[]), "192.0.2.1 2001:db8::1");
        assert!("everything".parse::<NodePortAddresses>().is_err());
    }
}
