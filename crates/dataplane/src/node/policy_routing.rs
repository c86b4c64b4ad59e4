//! Rules of source routing: the sources whose packets leave through another device than that of the
//! main table.

use std::{collections::BTreeMap, net::IpAddr};

use anyhow::Result;
use futures::TryStreamExt;
use netlink_packet_route::{
    route::{RouteAttribute, RouteMessage},
    rule::{RuleAttribute, RuleMessage},
};
use rtnetlink::IpVersion;

use super::network::{Network, answered};

/// RT_TABLE_MAIN of linux/rtnetlink.h.
const MAIN: u32 = 254;

/// The outgoing devices of a node, for one family.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ways {
    /// The device of the main table's default route.
    pub main: Option<u32>,
    /// The sources for which a rule selects another table, whose default route has another device.
    pub other: Vec<OtherWay>,
}

/// The device through which a source's packets leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OtherWay {
    pub source: IpAddr,
    /// The length of the source's prefix.
    pub prefix: u8,
    pub table: u32,
    pub device: u32,
}

impl Network {
    /// Returns the outgoing devices for IPv4 and for IPv6.
    pub async fn ways(&self) -> Result<[Ways; 2]> {
        let routes = self.unicast_routes().await?;
        let mut ways = [Ways::default(), Ways::default()];
        for (ways, version) in ways.iter_mut().zip([IpVersion::V4, IpVersion::V6]) {
            let ipv6 = matches!(version, IpVersion::V6);
            let list = async { Ok(self.handle.rule().get(version).execute().try_collect().await?) };
            let rules: Vec<RuleMessage> = answered("listing rules of routing", list).await?;
            *ways = judge(&rules, &defaults(&routes, ipv6));
        }
        Ok(ways)
    }
}

/// Returns the device of each table's default route.
fn defaults(routes: &[RouteMessage], ipv6: bool) -> BTreeMap<u32, u32> {
    let family = if ipv6 { libc::AF_INET6 } else { libc::AF_INET };
    let mut defaults = BTreeMap::new();
    let default = |route: &&RouteMessage| {
        route.header.destination_prefix_length == 0
            && i32::from(u8::from(route.header.address_family)) == family
    };
    for route in routes.iter().filter(default) {
        let attribute = |wanted: fn(&RouteAttribute) -> Option<u32>| route.attributes.iter().find_map(wanted);
        let table = attribute(|attribute| match attribute {
            RouteAttribute::Table(table) => Some(*table),
            _ => None,
        });
        let device = attribute(|attribute| match attribute {
            RouteAttribute::Oif(device) => Some(*device),
            _ => None,
        });
        if let Some(device) = device {
            defaults.entry(table.unwrap_or_else(|| route.header.table.into())).or_insert(device);
        }
    }
    defaults
}

fn judge(rules: &[RuleMessage], defaults: &BTreeMap<u32, u32>) -> Ways {
    let mut ways = Ways { main: defaults.get(&MAIN).copied(), ..Ways::default() };
    for rule in rules {
        let (mut source, mut marked) = (None, false);
        let mut table = u32::from(rule.header.table);
        for attribute in &rule.attributes {
            match attribute {
                RuleAttribute::Source(address) => source = Some(*address),
                RuleAttribute::FwMark(_) => marked = true,
                RuleAttribute::Table(number) => table = *number,
                _ => {}
            }
        }
        if let Some(source) = source.filter(|_| !marked) {
            let device = defaults.get(&table).copied().filter(|device| Some(*device) != ways.main);
            let prefix = rule.header.src_len;
            ways.other.extend(device.map(|device| OtherWay { source, prefix, table, device }));
        }
    }
    ways
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(table: u8, src_len: u8, attributes: Vec<RuleAttribute>) -> RuleMessage {
        let mut rule = RuleMessage::default();
        (rule.header.table, rule.header.src_len, rule.attributes) = (table, src_len, attributes);
        rule
    }

    #[test]
    fn sources_that_leave_by_another_device_are_found() {
        let pod: IpAddr = [10, 244, 1, 2].into();
        let marked = vec![RuleAttribute::FwMark(0x80), RuleAttribute::FwMask(0x80)];
        let rules = [
            rule(255, 0, vec![]),
            rule(254, 0, marked),
            rule(2, 32, vec![RuleAttribute::Source(pod)]),
            // This table has the same device as the main table.
            rule(3, 32, vec![RuleAttribute::Source(pod)]),
            // This table has no default route.
            rule(4, 32, vec![RuleAttribute::Source(pod)]),
        ];
        let defaults = BTreeMap::from([(254, 7), (2, 8), (3, 7)]);
        let ways = judge(&rules, &defaults);
        let other = vec![OtherWay { source: pod, prefix: 32, table: 2, device: 8 }];
        assert_eq!(ways, Ways { main: Some(7), other });
    }
}
