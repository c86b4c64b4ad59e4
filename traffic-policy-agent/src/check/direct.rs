//! Findings about direct forwarding: what on this node, or between it and another one, is in its
//! way.

mod judgement;
mod peer;

use std::fs;

use anyhow::Result;
use traffic_policy_cluster::source::try_opening;
use traffic_policy_dataplane::node::nftables;

use super::{
    Finding, Settings,
    devices::Device,
    settings::{DirectSettings, Peer},
};

const PROBE: &str = "direct";

/// Facts about this node.
#[derive(Clone, Debug, Default)]
struct Facts {
    /// Devices by name, each with the larger of its own and the global `rp_filter`, and its MTU.
    devices: Vec<(String, u8, u32)>,
    /// Chains with a rule that drops or rejects what conntrack calls INVALID.
    chains: Vec<String>,
}

/// Strict mode of RFC 3704: Documentation/networking/ip-sysctl.rst.
const STRICT: u8 = 1;
/// IPv6's least MTU (RFC 8200 section 5), and the longest outer headers.
const LEAST_MTU: u32 = 1280 + 48;

/// Inspects this node, and sends packets to another one that is named.
pub(super) async fn look(settings: &Settings, direct: &DirectSettings, devices: &[Device]) -> Vec<Finding> {
    let mut findings = match Facts::look(devices) {
        Ok(facts) => judge(&facts),
        Err(error) => vec![super::unseen(PROBE, &error)],
    };
    findings.push(match &direct.announce {
        Some((namespace, access)) => permission(namespace, try_opening(access, namespace).await.err()),
        None => Finding::note(
            "direct-lease",
            "whether this node may tell the others that it opens packets was not asked",
            "give --announce-opening NAMESPACE, and --kubeconfig or --api-server, as `run` has them",
        ),
    });
    if let Some(peer) = &direct.peer {
        findings.extend(look_at(settings, peer).await);
    }
    findings
}

/// Asks another node.
async fn look_at(settings: &Settings, peer: &Peer) -> Vec<Finding> {
    let (name, asked) = match &peer.node {
        Ok(name) => (name, peer::ask(settings, name).await),
        Err(why) => (&peer.given, Err(anyhow::anyhow!("{why}"))),
    };
    match asked {
        Ok(facts) => facts.iter().flat_map(|facts| judgement::of(name, facts)).collect(),
        Err(error) => vec![Finding::warning(
            "direct-peer",
            format!("no packet can be sent to {name}: {error:#}"),
            "run `check` as root on a node whose agent runs, and name a node that has an endpoint of a Service of TCP, by its name or by an address in its Lease",
        )],
    }
}

impl Facts {
    fn look(devices: &[Device]) -> Result<Self> {
        let of_device = |name: &str| -> u8 {
            let text = fs::read_to_string(format!("/proc/sys/net/ipv4/conf/{name}/rp_filter"));
            text.ok().and_then(|text| text.trim().parse().ok()).unwrap_or_default()
        };
        let all = of_device("all");
        let devices = devices.iter().filter(|device| !device.addresses.is_empty());
        let devices = devices.map(|device| {
            let name = device.link.name.clone();
            let filter = of_device(&name).max(all);
            (name, filter, device.link.mtu)
        });
        Ok(Self { devices: devices.collect(), chains: nftables::invalid_drops()? })
    }
}

fn judge(facts: &Facts) -> Vec<Finding> {
    let mut findings = Vec::new();
    let strict = facts.devices.iter().filter(|(_, filter, _)| *filter == STRICT);
    let strict: Vec<_> = strict.map(|(name, ..)| name.as_str()).collect();
    if !strict.is_empty() {
        findings.push(Finding::warning(
            PROBE,
            format!(
                "rp_filter is strict on {}: a packet that another node has sent directly to a pod here is dropped by the kernel if the route to its client leads by another device",
                strict.join(", ")
            ),
            format!(
                "nothing if clients are reached by the device that other nodes are behind; else sysctl -w {}",
                strict.iter().map(|name| format!("net.ipv4.conf.{}.rp_filter=2", name.replace('.', "/"))).collect::<Vec<_>>().join(" ")
            ),
        ));
    }
    if !facts.chains.is_empty() {
        findings.push(Finding::warning(
            PROBE,
            format!(
                "{} drops packets that conntrack calls INVALID: a connection that goes on by another node in front is one of those until both of its sides were seen here",
                facts.chains.join(", ")
            ),
            "let them pass to the pods of this node, before that rule",
        ));
    }
    for (name, _, mtu) in facts.devices.iter().filter(|(.., mtu)| *mtu < LEAST_MTU) {
        findings.push(Finding::note(
            PROBE,
            format!("{name} has an MTU of {mtu}: IPv6 is not forwarded directly there, because what remains is less than 1280"),
            format!("an MTU of {LEAST_MTU} or more, or nothing: such packets use snat"),
        ));
    }
    if findings.is_empty() {
        let mtus = facts.devices.iter().map(|(name, _, mtu)| {
            format!("{} bytes of IPv4, {} of IPv6 by {name}", mtu.saturating_sub(28), mtu.saturating_sub(48))
        });
        let mtus: Vec<_> = mtus.collect();
        findings.push(Finding::ok(
            PROBE,
            format!(
                "nothing on this node is in the way; within UDP, packets of up to {} fit",
                mtus.join("; ")
            ),
        ));
    }
    findings
}

/// Reports whether the Lease could be written.
fn permission(namespace: &str, refused: Option<String>) -> Finding {
    match refused {
        None => Finding::ok(
            "direct-lease",
            format!("the Leases in namespace {namespace} may be listed and written"),
        ),
        Some(reason) => Finding::warning(
            "direct-lease",
            format!("this node cannot tell the others that it opens packets: {reason}"),
            format!(
                "a role with list, watch, create, patch and delete on leases in namespace {namespace}: deploy/components/direct has it"
            ),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::Severity;

    #[test]
    fn what_is_in_the_way_is_named() {
        let device = |filter, mtu| ("eth0".to_owned(), filter, mtu);
        let fine = Facts { devices: vec![device(2, 1500)], ..Facts::default() };
        let [finding] = judge(&fine).try_into().unwrap();
        assert_eq!(finding.severity, Severity::Ok);
        assert!(finding.found.contains("1472 bytes of IPv4, 1452 of IPv6 by eth0"), "{finding:?}");
        let [finding] = judge(&Facts { devices: vec![device(1, 1500)], ..fine.clone() }).try_into().unwrap();
        assert_eq!(finding.severity, Severity::Warning);
        assert!(finding.fix.unwrap().ends_with("sysctl -w net.ipv4.conf.eth0.rp_filter=2"));
        let [finding] = judge(&Facts { devices: vec![device(0, 1327)], ..fine.clone() }).try_into().unwrap();
        assert_eq!(finding.severity, Severity::Note);
        let [finding] = judge(&Facts { chains: vec!["chain c".to_owned()], ..fine }).try_into().unwrap();
        assert!(finding.found.starts_with("chain c drops packets"), "{finding:?}");
    }
}
