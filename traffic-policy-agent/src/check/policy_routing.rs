//! Findings about rules of routing by which replies of endpoints leave by another device than requests come by.

use std::{collections::BTreeSet, net::IpAddr};

use anyhow::Result;

use super::Finding;
use crate::node::{Link, Network, Ways};

const PROBE: &str = "policy-routing";

/// What judging needs.
pub(super) struct Facts {
    links: Vec<Link>,
    own: BTreeSet<IpAddr>,
    /// IPv4, IPv6.
    ways: [Ways; 2],
}

impl Facts {
    pub(super) async fn look() -> Result<Self> {
        let (network, _events) = Network::connect()?;
        let own = network.addresses().await?.iter().map(|address| address.address).collect();
        Ok(Self { links: network.links().await?, own, ways: network.ways().await? })
    }

    fn name(&self, device: u32) -> &str {
        self.links.iter().find(|link| link.index == device).map_or("another device", |link| &link.name)
    }
}

pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    let complaints = facts.ways.iter().zip(["iptables", "ip6tables"]);
    let mut findings: Vec<_> =
        complaints.filter_map(|(ways, command)| complaint(facts, ways, command)).collect();
    if findings.is_empty() {
        findings
            .push(Finding::ok(PROBE, "no rule of routing leads pods' packets out by a device of their own"));
    }
    findings
}

fn complaint(facts: &Facts, ways: &Ways, command: &str) -> Option<Finding> {
    let main = facts.name(ways.main?);
    // Rules for addresses of the node itself are about its own connections.
    let other: Vec<_> = ways.other.iter().filter(|way| !facts.own.contains(&way.source)).collect();
    let first = other.first()?;
    let device = facts.name(first.device);
    let more = if other.len() > 1 { format!(" and {} more", other.len() - 1) } else { String::new() };
    let found = format!(
        "a rule of routing leads packets from {}/{}{more} out by {device} (table {}): replies of such endpoints to requests that came by {main} leave by {device} with {main}'s address as source, which a cloud's network drops (AWS: source/destination check). Requests are translated before the firewall sees them, so that rules which mark connections to the node's own addresses (AWS, primary ENI) do not mark these",
        first.source, first.prefix, first.table
    );
    let fix = match ways.mark {
        Some((mark, mask)) => format!(
            "{command} -t mangle -I PREROUTING -i {main} -m addrtype ! --dst-type LOCAL -m conntrack --ctstate NEW -j CONNMARK --set-xmark {mark:#x}/{mask:#x}"
        ),
        None => format!(
            "mark connections that come by {main} (CONNMARK), and route what is marked by the main table (ip rule add fwmark … lookup main)"
        ),
    };
    Some(Finding::warning(PROBE, found, fix))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{check::Severity, node::OtherWay};

    #[test]
    fn pods_on_a_card_of_their_own_are_named_with_the_rule() {
        let pod: IpAddr = [10, 0, 3, 7].into();
        let way = OtherWay { source: pod, prefix: 32, table: 2, device: 3 };
        let ways = Ways { main: Some(2), other: vec![way], mark: Some((0x80, 0x80)) };
        let mut facts = Facts { links: Vec::new(), own: BTreeSet::new(), ways: [ways, Ways::default()] };
        let [finding] = judge(&facts).try_into().unwrap();
        assert_eq!((finding.severity, finding.probe), (Severity::Warning, PROBE));
        assert!(finding.found.contains("from 10.0.3.7/32 out by"), "{finding:?}");
        assert!(finding.fix.unwrap().ends_with("--set-xmark 0x80/0x80"));
        facts.own.insert(pod);
        assert_eq!(judge(&facts)[0].severity, Severity::Ok);
    }
}
