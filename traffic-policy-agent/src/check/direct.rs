//! Findings about direct forwarding: what on this node, or between it and another one, is in its
//! way.

use std::{fs, net::IpAddr};

use anyhow::Result;
use traffic_policy_cluster::{
    model::{Dispatch, FrontendKind, Protocol},
    source::try_opening,
};
use traffic_policy_dataplane::{
    inspect::{Nodes, Pinned, ServicePort},
    node::DirectProbe,
};

use super::{Finding, Settings, devices::Device, nftables, settings::DirectSettings};

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
        findings.extend(match probes(settings, peer) {
            Ok(probes) => judge_answers(peer, &probes),
            Err(error) => vec![Finding::warning(
                "direct-peer",
                format!("no packet can be sent to {peer}: {error:#}"),
                "run `check` as root on a node whose agent runs, and name a node that has an endpoint of a Service of TCP",
            )],
        });
    }
    findings
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

/// The answers of another node: by the family of an endpoint there, whether packets of each kind
/// were answered.
type Answers = Vec<(IpAddr, [(Dispatch, bool); 2])>;

/// Asks a node, once for each family.
fn probes(settings: &Settings, peer: &str) -> Result<Answers> {
    let pinned = Pinned::open(&settings.pins)?;
    let nodes = Nodes::read(&pinned)?;
    let ports = ServicePort::all(&pinned)?;
    let mut answers = Answers::new();
    for ipv6 in [false, true] {
        let of_family =
            ports.iter().filter(|port| port.key.ipv6 == ipv6 && port.key.protocol == Protocol::Tcp);
        let found = of_family
            .flat_map(|port| port.cluster.iter().map(move |endpoint| (port, endpoint)))
            .find_map(|(port, endpoint)| {
                let there = nodes.name(endpoint.node) == Some(peer) && endpoint.opens.is_some();
                let foreign = |kind| !matches!(kind, FrontendKind::NodePort | FrontendKind::LoopbackNodePort);
                let frontend =
                    port.frontends.iter().find(|frontend| foreign(frontend.kind)).filter(|_| there)?;
                Some(DirectProbe { endpoint: endpoint.address.ip(), frontend: frontend.address })
            });
        let Some(probe) = found else { continue };
        let ask = |dispatch| anyhow::Ok((dispatch, probe.is_answered(dispatch)?));
        answers.push((probe.endpoint, [ask(Dispatch::Ipip)?, ask(Dispatch::Udp)?]));
    }
    anyhow::ensure!(
        !answers.is_empty(),
        "no endpoint there that opens packets has a Service of TCP with a ClusterIP or a load balancer's address"
    );
    Ok(answers)
}

fn judge_answers(peer: &str, answers: &Answers) -> Vec<Finding> {
    answers
        .iter()
        .map(|(endpoint, [ipip, udp])| {
            let protocol = if endpoint.is_ipv4() { 4 } else { 41 };
            match (ipip.1, udp.1) {
                (true, true) => Finding::ok(
                    "direct-peer",
                    format!("{peer} ({endpoint}) answers packets within protocol {protocol} and within UDP, with a frontend's address as source"),
                ),
                (true, false) => Finding::note(
                    "direct-peer",
                    format!("{peer} ({endpoint}) answers packets within protocol {protocol}, and none within UDP: the network does not let UDP port 6080 pass, or its agent is an older one"),
                    "--dispatch ipip",
                ),
                (false, true) => Finding::warning(
                    "direct-peer",
                    format!("{peer} ({endpoint}) answers packets within UDP, and none within protocol {protocol}, which the network does not let pass"),
                    "--dispatch udp, on all nodes",
                ),
                (false, false) => Finding::warning(
                    "direct-peer",
                    format!("{peer} ({endpoint}) answers no packet that is forwarded to it directly"),
                    "see that the network lets pass protocol 4 and 41, or UDP port 6080, between nodes and pods of others, and packets with a source that is not the sender's own (docs/direct.md); that this node's Lease is known there, for ten seconds; else --forwarding snat",
                ),
            }
        })
        .collect()
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

    #[test]
    fn answers_tell_what_the_network_lets_pass() {
        for (ipip, udp, severity, fix) in [
            (true, true, Severity::Ok, None),
            (true, false, Severity::Note, Some("--dispatch ipip")),
            (false, true, Severity::Warning, Some("--dispatch udp, on all nodes")),
        ] {
            let answers = vec![([10, 0, 2, 3].into(), [(Dispatch::Ipip, ipip), (Dispatch::Udp, udp)])];
            let [finding] = judge_answers("node-2", &answers).try_into().unwrap();
            assert_eq!((finding.severity, finding.fix.as_deref()), (severity, fix), "{finding:?}");
        }
    }
}
