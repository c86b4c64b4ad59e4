//! Findings about routing rules by which replies of endpoints leave through another device than the
//! one on which requests arrive. TC egress sends such a reply back along the route of its new
//! source, if it is attached to both devices.

use std::{collections::BTreeSet, net::IpAddr};

use anyhow::Result;
use traffic_policy_dataplane::{
    Kernel,
    node::{Link, Network, Ways},
};

use super::Finding;

const PROBE: &str = "policy-routing";

/// Facts about policy routing.
pub(super) struct Facts {
    links: Vec<Link>,
    own: BTreeSet<IpAddr>,
    /// Devices that programs are attached to.
    served: BTreeSet<u32>,
    /// Whether the packet path can look up the route of a packet with a mark.
    asks_with_mark: bool,
    /// Routing rules of IPv4 and IPv6.
    ways: [Ways; 2],
}

impl Facts {
    pub(super) async fn look(served: BTreeSet<u32>) -> Result<Self> {
        let (network, _events) = Network::connect()?;
        let own = network.addresses().await?.iter().map(|address| address.address).collect();
        let asks_with_mark = Kernel::found().is_ok_and(|(kernel, _)| kernel.at_least(6, 10));
        let (links, ways) = (network.links().await?, network.ways().await?);
        Ok(Self { links, own, served, asks_with_mark, ways })
    }

    fn name(&self, device: u32) -> &str {
        self.links.iter().find(|link| link.index == device).map_or("another device", |link| &link.name)
    }
}

pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    let mut findings: Vec<_> = facts.ways.iter().filter_map(|ways| finding(facts, ways)).collect();
    if findings.is_empty() {
        findings
            .push(Finding::ok(PROBE, "no rule of routing leads pods' packets out by a device of their own"));
    }
    findings
}

fn finding(facts: &Facts, ways: &Ways) -> Option<Finding> {
    let main = facts.name(ways.main?);
    // Rules for addresses of the node itself concern its own connections.
    let other: Vec<_> = ways.other.iter().filter(|way| !facts.own.contains(&way.source)).collect();
    // A device that is not served matters most.
    let not_served = other.iter().find(|way| !facts.served.contains(&way.device));
    let first = not_served.or_else(|| other.first())?;
    let device = facts.name(first.device);
    let more = if other.len() > 1 { format!(" and {} more", other.len() - 1) } else { String::new() };
    let leads = format!(
        "a rule of routing leads packets from {}/{}{more} out by {device} (table {})",
        first.source, first.prefix, first.table
    );
    if not_served.is_some() {
        let found = format!(
            "{leads}, which is not served: replies of such endpoints to requests that came by {main} leave with the endpoint's address as source, and no client takes them for an answer"
        );
        return Some(Finding::warning(PROBE, found, format!("serve it, too: --device {main},{device}")));
    }
    let marks = if facts.asks_with_mark {
        ""
    } else {
        "; but those with a mark leave by the former (Linux 6.10 can be asked for the way of a mark)"
    };
    Some(Finding::ok(
        PROBE,
        format!(
            "{leads}: replies of such endpoints to requests that came by {main} are sent out by {main} all the same, where routing leads what has its address as source (replied-redirected){marks}"
        ),
    ))
}

#[cfg(test)]
mod tests {
    use traffic_policy_dataplane::node::OtherWay;

    use super::*;
    use crate::check::Severity;

    fn facts(pod: IpAddr, served: &[u32]) -> Facts {
        let way = OtherWay { source: pod, prefix: 32, table: 2, device: 3 };
        let ways = Ways { main: Some(2), other: vec![way] };
        let served = served.iter().copied().collect();
        let own = BTreeSet::new();
        Facts { links: Vec::new(), own, served, asks_with_mark: true, ways: [ways, Ways::default()] }
    }

    #[test]
    fn pods_on_a_card_of_their_own_are_named() {
        let pod: IpAddr = [10, 0, 3, 7].into();
        let mut facts = facts(pod, &[2, 3]);
        let [finding] = judge(&facts).try_into().unwrap();
        assert_eq!((finding.severity, finding.probe), (Severity::Ok, PROBE));
        assert!(finding.found.contains("from 10.0.3.7/32 out by"), "{finding:?}");
        assert!(!finding.found.contains("Linux 6.10"), "{finding:?}");
        facts.asks_with_mark = false;
        assert!(judge(&facts)[0].found.contains("Linux 6.10"));
        facts.own.insert(pod);
        assert!(judge(&facts)[0].found.starts_with("no rule"));
    }

    #[test]
    fn a_card_that_is_not_served_is_a_warning() {
        let [finding] = judge(&facts([10, 0, 3, 7].into(), &[2])).try_into().unwrap();
        assert_eq!((finding.severity, finding.probe), (Severity::Warning, PROBE));
        assert!(finding.fix.unwrap().contains("--device"));
    }
}
