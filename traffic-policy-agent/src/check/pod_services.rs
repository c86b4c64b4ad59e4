//! Findings about Services for pods at their devices: which pods have them, and what is in the way.

use std::collections::BTreeSet;

use anyhow::Result;
use traffic_policy_dataplane::{Cgroup, judged_pods};

use super::{Finding, Settings};

/// The pods' devices of this node.
#[derive(Clone, Debug, Default)]
pub(super) struct Facts {
    /// Devices by name, each with the reason why what its pod sends is not translated.
    pods: Vec<(String, Option<String>)>,
    /// Whether no socket is served, so that pods' devices are all that pods have.
    no_sockets: bool,
}

impl Facts {
    pub(super) fn look(settings: &Settings, served: &BTreeSet<u32>) -> Result<Self> {
        let pods = judged_pods(&settings.pins, served)?.into_iter().map(|pod| (pod.name, pod.unserved));
        Ok(Self { pods: pods.collect(), no_sockets: settings.cgroup == Cgroup::None })
    }
}

pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    const PROBE: &str = "pod-services";
    let mut findings = Vec::new();
    for (name, reason) in &facts.pods {
        let Some(reason) = reason else { continue };
        let found = format!("what the pod behind {name} sends to Services will not be translated: {reason}");
        let fix = "remove what is in the way, or keep pods without sockets of this kernel on other nodes";
        findings.push(if facts.no_sockets {
            Finding::warning(PROBE, found, fix)
        } else {
            Finding::note(PROBE, found, fix)
        });
    }
    let served: Vec<&str> = facts.pods.iter().filter(|it| it.1.is_none()).map(|it| it.0.as_str()).collect();
    let number = format!("{} of {} devices of pods", served.len(), facts.pods.len());
    let names = if served.is_empty() { String::new() } else { format!(": {}", served.join(", ")) };
    findings.push(Finding::ok(PROBE, format!("packets to Services will be translated at {number}{names}")));
    if facts.no_sockets {
        findings.push(Finding::note(
            PROBE,
            "with --cgroup none processes in the node's own network (hostNetwork, kubelet) have no Services",
            "let --cgroup name their cgroup, or nothing if they need none",
        ));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::Severity;

    #[test]
    fn who_is_served_and_who_is_not() {
        let pods = vec![("cali1".into(), None), ("cali2".into(), Some("a TC filter is on it".into()))];
        let facts = Facts { pods, no_sockets: false };
        let [note, ok] = judge(&facts).try_into().unwrap();
        assert_eq!(
            note.found,
            "what the pod behind cali2 sends to Services will not be translated: a TC filter is on it"
        );
        assert_eq!(ok.found, "packets to Services will be translated at 1 of 2 devices of pods: cali1");
        assert_eq!((note.severity, ok.severity), (Severity::Note, Severity::Ok));
        let [warning, _, processes] = judge(&Facts { no_sockets: true, ..facts }).try_into().unwrap();
        assert_eq!((warning.severity, processes.severity), (Severity::Warning, Severity::Note));
    }
}
