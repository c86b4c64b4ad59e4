//! `--node-port-addresses`: the addresses of the node on which node ports are reached.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;
use traffic_policy_cluster::model::address::parse_cidr;
use traffic_policy_dataplane::node::Address;

/// Value of `--node-port-addresses`: words and CIDRs, each of which adds addresses. A family
/// without a word or CIDR has all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodePortAddresses {
    words: BTreeSet<Word>,
    ranges: Vec<IpNet>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Word {
    /// Every address of the node except loopback and link-local ones.
    All,
    /// The Node object's addresses.
    Primary,
    /// 127.0.0.0/8 and `::1`, for the node itself.
    Localhost,
}

impl std::str::FromStr for NodePortAddresses {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut chosen = Self { words: BTreeSet::new(), ranges: Vec::new() };
        for item in text.split(',').map(str::trim) {
            match item {
                "all" => _ = chosen.words.insert(Word::All),
                "primary" => _ = chosen.words.insert(Word::Primary),
                "localhost" => _ = chosen.words.insert(Word::Localhost),
                range => chosen.ranges.push(parse_cidr(range).ok_or_else(|| {
                    format!(
                        "`{range}` is neither `all`, `primary`, `localhost` nor a CIDR such as 192.0.2.0/24"
                    )
                })?),
            }
        }
        Ok(chosen)
    }
}

impl NodePortAddresses {
    /// Returns the addresses on which health-check node ports are listened on: wherever node ports
    /// are reached. The unspecified IPv4 address stands for all of both families.
    pub(super) fn listen(&self, addresses: &[Address], primary: &[IpAddr]) -> BTreeSet<IpAddr> {
        if self.words.contains(&Word::All) {
            return [Ipv4Addr::UNSPECIFIED.into()].into();
        }
        let mut listen = BTreeSet::from_iter(self.resolve(addresses, primary));
        let loopback: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
        listen.extend(loopback.into_iter().filter(|address| self.loopback(address.is_ipv6())));
        listen
    }

    /// Returns the chosen addresses, given all of the node's and the Node object's.
    pub(super) fn resolve(&self, addresses: &[Address], primary: &[IpAddr]) -> Vec<IpAddr> {
        let global = addresses.iter().filter(|address| address.global).map(|address| address.address);
        self.among(global, primary)
    }

    /// Returns the chosen ones of `addresses`, sorted. `primary` are the Node object's; while it
    /// has none, the result is empty: they are waited for, as in kube-proxy ([`Self::concern`]
    /// reports it).
    #[must_use]
    pub fn among(&self, addresses: impl IntoIterator<Item = IpAddr>, primary: &[IpAddr]) -> Vec<IpAddr> {
        let chosen = |address: &IpAddr| {
            self.words.contains(&Word::All)
                || (self.words.contains(&Word::Primary) && primary.contains(address))
                || self.within(*address)
        };
        let chosen: BTreeSet<IpAddr> = addresses.into_iter().filter(chosen).collect();
        chosen.into_iter().collect()
    }

    /// Whether the node itself reaches node ports on 127.0.0.0/8, or on `::1`.
    #[must_use]
    pub fn loopback(&self, ipv6: bool) -> bool {
        let loopback = if ipv6 { Ipv6Addr::LOCALHOST.into() } else { Ipv4Addr::LOCALHOST.into() };
        !self.words.is_empty() || self.within(loopback)
    }

    /// Returns the warning for `primary` in the list when none of the primary addresses is on this
    /// node.
    #[must_use]
    pub fn concern(
        &self,
        node_name: &str,
        addresses: impl IntoIterator<Item = IpAddr>,
        primary: &[IpAddr],
    ) -> Option<String> {
        if !self.words.contains(&Word::Primary) || self.words.contains(&Word::All) {
            return None;
        }
        if primary.is_empty() {
            return Some(format!(
                "Node {node_name:?} has no address in status.addresses: node ports wait for one, and answer on no address \
                 of the Node's until then (see --node-port-addresses)."
            ));
        }
        let is_here = addresses.into_iter().any(|address| primary.contains(&address));
        (!is_here).then(|| {
            let primary: Vec<_> = primary.iter().map(ToString::to_string).collect();
            format!(
                "No device of this node has an address of Node {node_name:?} ({}), so node ports answer on none of them \
                 (see --node-name and --node-port-addresses).",
                primary.join(", ")
            )
        })
    }

    fn within(&self, address: IpAddr) -> bool {
        let mut of_family = self.ranges.iter().filter(|range| range.addr().is_ipv4() == address.is_ipv4());
        let unrestricted = self.words.is_empty() && of_family.clone().next().is_none();
        unrestricted || of_family.any(|range| range.contains(&address))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(text: &str) -> NodePortAddresses {
        text.parse().unwrap()
    }

    #[test]
    fn addresses() {
        let address = |text: &str, global| Address { link: 2, address: text.parse().unwrap(), global };
        let all = [
            address("127.0.0.1", false),
            address("192.0.2.1", true),
            address("198.51.100.1", true),
            address("fe80::1", false),
            address("2001:db8::1", true),
        ];
        for (text, primary, expected) in [
            ("all", "", "192.0.2.1 198.51.100.1 2001:db8::1"),
            ("primary", "198.51.100.1", "198.51.100.1"),
            ("primary", "203.0.113.1", ""),
            ("primary", "", ""),
            ("primary,192.0.2.0/24", "", "192.0.2.1"),
            ("primary,192.0.2.0/24", "2001:db8::1", "192.0.2.1 2001:db8::1"),
            ("localhost", "192.0.2.1", ""),
            ("localhost, 192.0.2.0/24", "198.51.100.1", "192.0.2.1"),
            ("all,192.0.2.0/24", "", "192.0.2.1 198.51.100.1 2001:db8::1"),
            // A family without a range has all addresses.
            ("192.0.2.0/24", "", "192.0.2.1 2001:db8::1"),
            ("192.0.2.0/24,::/0", "", "192.0.2.1 2001:db8::1"),
            ("192.000.002.077/024,::/0", "", "192.0.2.1 2001:db8::1"),
            ("203.0.113.0/24,2001:db8:1::/48", "", ""),
        ] {
            let primary: Vec<IpAddr> = primary.split_whitespace().map(|text| text.parse().unwrap()).collect();
            let resolved = chosen(text).resolve(&all, &primary);
            let resolved: Vec<_> = resolved.iter().map(ToString::to_string).collect();
            assert_eq!(resolved.join(" "), expected, "{text}, primary {primary:?}");
        }
    }

    #[test]
    fn health_ports_listen_where_node_ports_are_reached() {
        let address = |text: &str, global| Address { link: 2, address: text.parse().unwrap(), global };
        let all = [address("127.0.0.1", false), address("192.0.2.1", true), address("198.51.100.1", true)];
        let primary: [IpAddr; 1] = ["192.0.2.1".parse().unwrap()];
        for (text, expected) in [
            ("all", "0.0.0.0"),
            ("primary,all", "0.0.0.0"),
            ("primary", "127.0.0.1 192.0.2.1 ::1"),
            ("198.51.100.0/24,::/0", "198.51.100.1 ::1"),
            ("198.51.100.0/24,localhost", "127.0.0.1 198.51.100.1 ::1"),
        ] {
            let listen = chosen(text).listen(&all, &primary);
            let listen: Vec<_> = listen.iter().map(ToString::to_string).collect();
            assert_eq!(listen.join(" "), expected, "{text}");
        }
    }

    #[test]
    fn loopback() {
        for (text, expected) in [
            ("all", [true, true]),
            ("primary", [true, true]),
            ("localhost", [true, true]),
            ("192.0.2.0/24", [false, true]),
            ("2001:db8::/32", [true, false]),
            ("192.0.2.0/24,::/0", [false, true]),
            ("127.0.0.0/8,2001:db8::/32", [true, false]),
            ("192.0.2.0/24,localhost", [true, true]),
        ] {
            assert_eq!([false, true].map(|ipv6| chosen(text).loopback(ipv6)), expected, "{text}");
        }
    }

    #[test]
    fn what_is_not_understood_is_named() {
        for text in ["everything", "", "primary,", "192.0.2.1", "all,192.0.2.0/33"] {
            assert!(text.parse::<NodePortAddresses>().unwrap_err().contains("CIDR"), "{text}");
        }
    }

    #[test]
    fn a_node_without_addresses_is_told() {
        let primary: [IpAddr; 1] = ["192.0.2.1".parse().unwrap()];
        let (here, elsewhere) = (primary, ["192.0.2.2".parse().unwrap()]);
        let concern = |text, addresses: &[IpAddr; 1], primary: &[IpAddr]| {
            chosen(text).concern("n", *addresses, primary)
        };
        assert!(concern("primary", &here, &[]).unwrap().contains("wait"));
        assert_eq!(concern("primary", &here, &primary), None);
        let text = concern("primary", &elsewhere, &primary).unwrap();
        assert!(
            text.contains("No device") && text.contains("192.0.2.1") && text.contains("--node-name"),
            "{text}"
        );
        for other in ["primary,all", "192.0.2.0/24"] {
            assert_eq!(concern(other, &elsewhere, &[]), None);
            assert_eq!(concern(other, &elsewhere, &primary), None);
        }
    }
}
