//! Findings about direct delivery to pods of this node: what is in its way.

use std::{collections::BTreeSet, path::Path};

use anyhow::Result;
use traffic_policy_dataplane::{conntrack_obstacle, is_conntrack_strict, judged_pods, node::ipsec};

use super::Finding;

/// The pods' devices of this node.
#[derive(Clone, Debug, Default)]
pub(super) struct Facts {
    /// The reason for which nothing may bypass the stack on this node.
    obstacle: Option<String>,
    /// Whether the agent will set `nf_conntrack_tcp_be_liberal`.
    strict: bool,
    /// Devices by name, each with the reason why the stack delivers its packets.
    pods: Vec<(String, Option<String>)>,
}

impl Facts {
    pub(super) fn look(pins: &Path, served: &BTreeSet<u32>) -> Result<Self> {
        let pods = judged_pods(pins, served)?.into_iter().map(|pod| (pod.name, pod.by_stack));
        Ok(Self { obstacle: obstacle(), strict: is_conntrack_strict(), pods: pods.collect() })
    }
}

/// Returns why no packet may bypass the stack on this node, whatever the device.
#[must_use]
pub fn obstacle() -> Option<String> {
    match ipsec::policies() {
        Ok(0) => conntrack_obstacle(),
        Ok(policies) => Some(format!("{policies} IPsec policies (ip xfrm policy) would be passed by")),
        Err(error) => Some(format!("whether there are IPsec policies cannot be read: {error:#}")),
    }
}

pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    const PROBE: &str = "local-delivery";
    if let Some(obstacle) = &facts.obstacle {
        return vec![Finding::warning(
            PROBE,
            format!("--local-delivery direct has no effect: {obstacle}"),
            "--local-delivery stack, or remove what is in the way",
        )];
    }
    let mut findings = Vec::new();
    for (name, reason) in &facts.pods {
        if let Some(reason) = reason {
            findings.push(Finding::note(
                PROBE,
                format!("the stack will deliver the packets of {name}: {reason}"),
                "nothing; docs/local-delivery.md has what direct delivery passes by",
            ));
        }
    }
    let direct = facts.pods.iter().filter(|(_, reason)| reason.is_none()).count();
    findings.push(Finding::ok(
        PROBE,
        format!("packets to {direct} of {} devices of pods will bypass the stack", facts.pods.len()),
    ));
    if facts.strict {
        findings.push(Finding::note(
            PROBE,
            "nf_conntrack_tcp_be_liberal is 0 in this network namespace: `run` sets it to 1, since conntrack will not see all packets",
            "nothing; `cleanup` sets it back",
        ));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::Severity;

    #[test]
    fn each_reason_is_said() {
        let facts = Facts {
            obstacle: None,
            strict: true,
            pods: vec![("cali1".into(), None), ("cali2".into(), Some("a TC filter is on it".into()))],
        };
        let [note, ok, strict] = judge(&facts).try_into().unwrap();
        assert_eq!(note.found, "the stack will deliver the packets of cali2: a TC filter is on it");
        assert_eq!(ok.found, "packets to 1 of 2 devices of pods will bypass the stack");
        assert_eq!(
            (note.severity, ok.severity, strict.severity),
            (Severity::Note, Severity::Ok, Severity::Note)
        );
        let facts = Facts { obstacle: Some("2 IPsec policies".into()), ..facts };
        let [finding] = judge(&facts).try_into().unwrap();
        assert_eq!(finding.severity, Severity::Warning);
        assert!(finding.found.ends_with("has no effect: 2 IPsec policies"), "{finding:?}");
    }
}
