//! `check`: inspection of a machine before the agent starts on it. Nothing is changed.
//!
//! Each part first gathers facts (by netlink, /proc and harmless system calls, in the network
//! namespace in which it is called) and then judges them, which is a pure function.

mod devices;
mod direct;
mod finding;
mod folders;
mod forwarding;
mod ipsec;
mod kernel;
mod listeners;
mod local_delivery;
mod migrate;
mod netfilter;
mod other_end;
mod pod_services;
mod policy_routing;
mod ports;
mod programs;
mod settings;

use std::{collections::BTreeSet, net::IpAddr};

use anyhow::Result;
use traffic_policy_cluster::{
    model::object::{Node, Service},
    source::{Change, Manifests, Update},
};
use traffic_policy_dataplane::{LocalDelivery, PinsLook, PodServices, node};

pub use self::{
    finding::{Finding, Severity},
    local_delivery::obstacle as local_delivery_obstacle,
    migrate::migration,
    netfilter::{KUBE_PROXY, forward_policy_drop, kube_proxy_has_rules},
    other_end::{lost_at_other_end, prepared_other_end},
    settings::{DirectSettings, Peer, Settings},
};

/// The objects of a folder of manifests that `check` uses.
#[derive(Clone, Debug, Default)]
struct Objects {
    services: Vec<Service>,
    /// Addresses of this node.
    addresses: Vec<IpAddr>,
}

/// Runs all checks in a fixed order. A check that fails to read its facts yields a finding, too.
pub async fn check(settings: &Settings) -> Vec<Finding> {
    let mut findings = Vec::new();
    let objects = match objects(settings.manifests.as_ref()) {
        Ok(objects) => objects,
        Err(finding) => {
            findings.push(finding);
            Objects::default()
        }
    };
    findings.extend(attempt("kernel", kernel::Facts::look(), kernel::judge));
    findings.extend(attempt("programs", programs::Facts::look(), programs::judge));
    findings.extend(attempt("bpffs", PinsLook::at(&settings.pins), |look| {
        folders::judge_pins(&settings.pins, look)
    }));
    findings.extend(attempt("cgroup", folders::Facts::look(&settings.cgroup), folders::judge_cgroup));
    let used_by = PinsLook::at(&settings.pins).ok().and_then(|look| look.used_by);
    let mut served = BTreeSet::new();
    match devices::DeviceFacts::look(settings, &objects.addresses).await {
        Ok(facts) => {
            served.extend(facts.devices.iter().map(|device| device.link.index));
            findings.extend(devices::judge(&facts));
            findings.extend(attempt(
                "forwarding",
                forwarding::Facts::look(&facts.devices),
                forwarding::judge,
            ));
            findings.extend(netfilter::look(&facts.names));
            if let Some(direct) = &settings.direct {
                findings.extend(direct::look(settings, direct, &facts.devices).await);
            }
        }
        Err(error) => findings.push(unseen("device", &error)),
    }
    if settings.local_delivery == LocalDelivery::Direct {
        let facts = local_delivery::Facts::look(&settings.pins, &served);
        findings.extend(attempt("local-delivery", facts, local_delivery::judge));
    }
    if settings.pod_services == PodServices::On {
        let facts = pod_services::Facts::look(settings, &served);
        findings.extend(attempt("pod-services", facts, pod_services::judge));
    }
    let facts = policy_routing::Facts::look(served).await;
    findings.extend(attempt("policy-routing", facts, policy_routing::judge));
    findings.extend(attempt("ipsec", node::ipsec::policies().map_err(Into::into), ipsec::judge));
    findings.extend(attempt("ports", ports::Facts::look(settings, objects.services, used_by), ports::judge));
    findings
}

fn attempt<T>(probe: &'static str, facts: Result<T>, judge: impl FnOnce(&T) -> Vec<Finding>) -> Vec<Finding> {
    facts.map_or_else(|error| vec![unseen(probe, &error)], |facts| judge(&facts))
}

fn unseen(probe: &'static str, error: &anyhow::Error) -> Finding {
    Finding::warning(
        probe,
        format!("this could not be looked at: {error:#}"),
        "run `check` as root, with /proc mounted",
    )
}

fn objects(manifests: Option<&Manifests>) -> Result<Objects, Finding> {
    let Some(manifests) = manifests else { return Ok(Objects::default()) };
    let batch = manifests.read().map_err(|mistakes| {
        Finding::error(
            "manifests",
            mistakes.to_string(),
            "correct the manifests: `run` waits until they can be read",
        )
    })?;
    let mut objects = Objects::default();
    for update in batch.0 {
        match update {
            Update::Service(Change::Reset { objects: services, .. }) => objects.services = services,
            Update::Node(Change::Reset { objects: nodes, .. }) => {
                let own = |node: &Node| node.name == manifests.node_name;
                objects.addresses =
                    nodes.into_iter().find(own).map(|node| node.addresses).unwrap_or_default();
            }
            _ => {}
        }
    }
    Ok(objects)
}
