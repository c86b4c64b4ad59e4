//! Answers of nodes from round to round: differences that last, and nodes that agents leave out.

use std::collections::{BTreeMap, BTreeSet};

use traffic_policy_cluster::model::ServiceName;

use super::alike::tell;
use crate::{
    probe::{Cause, Heard as Answer, Probed, expected_text, heard_text, question_text},
    verdict::Question,
};

/// Answers that differ and that two rounds of probes have found alike, because objects and nodes
/// are not read at the same moment.
#[derive(Clone, Debug, Default)]
pub struct Heard {
    last: BTreeMap<Key, Cause>,
    confirmed: BTreeMap<Key, Cause>,
    /// The nodes that do not answer an agent, by the node of the agent.
    left_out: BTreeMap<String, BTreeSet<String>>,
}

/// A Service, a node and a probe.
type Key = (Option<ServiceName>, String, String);

impl Heard {
    /// Returns the changes by one more round, a sentence each.
    pub fn round(&mut self, probed: &Probed) -> Vec<String> {
        let mut lines = Vec::new();
        let mut now: BTreeMap<Key, Cause> = BTreeMap::new();
        let mut told: BTreeMap<String, Vec<&str>> = BTreeMap::new();
        let mut asked = BTreeSet::new();
        for one in &probed.answered {
            let question = question_text(one.asking.question);
            let key = (one.asking.service.clone(), one.asking.node.clone(), question);
            let about = key.0.as_ref().map_or_else(String::new, |service| format!("{service}: "));
            if let Some(difference) = one.difference {
                let cause = difference.cause;
                if self.last.get(&key) == Some(&cause) && self.confirmed.get(&key) != Some(&cause) {
                    let what = format!(
                        "{about}{}: {}, and the objects say {} ({})",
                        key.2,
                        heard_text(&one.heard),
                        expected_text(one.asking.expected),
                        cause.code()
                    );
                    told.entry(what).or_default().push(&one.asking.node);
                    self.confirmed.insert(key.clone(), cause);
                }
                now.insert(key, cause);
            } else if self.confirmed.remove(&key).is_some() {
                let what = format!("{about}{}: {}, as the objects say", key.2, heard_text(&one.heard));
                told.entry(what).or_default().push(&one.asking.node);
                asked.insert(key);
            } else {
                asked.insert(key);
            }
        }
        self.silent(probed, &mut told);
        tell(told, &mut lines);
        // Answers that are no longer probed are forgotten.
        self.confirmed.retain(|key, _| now.contains_key(key) || asked.contains(key));
        self.last = now;
        lines
    }

    /// Reports which nodes' endpoints an agent begins and ceases to leave out. It says so itself,
    /// so that one round is enough; without an answer it is not known, and nothing is reported.
    fn silent<'p>(&mut self, probed: &'p Probed, told: &mut BTreeMap<String, Vec<&'p str>>) {
        for one in &probed.answered {
            if one.asking.question != Question::ProxyHealth || !matches!(one.heard, Answer::Http(_)) {
                continue;
            }
            let now: BTreeSet<String> = one.heard.left_out().iter().cloned().collect();
            let before = self.left_out.insert(one.asking.node.clone(), now.clone()).unwrap_or_default();
            let names = |of: &BTreeSet<String>, but: &BTreeSet<String>| {
                let names: Vec<_> = of.difference(but).map(String::as_str).collect();
                (!names.is_empty()).then(|| names.join(", "))
            };
            let begins = names(&now, &before)
                .map(|names| format!("leaves out the endpoints of {names}: no answer from there"));
            let ends = names(&before, &now).map(|names| format!("does not leave out {names} any more"));
            for what in begins.into_iter().chain(ends) {
                told.entry(what).or_default().push(&one.asking.node);
            }
        }
    }

    /// Returns what is known of a node's answers, in a few words.
    #[must_use]
    pub fn answers(&self, service: &ServiceName, node: &str) -> String {
        let by = self.left_out.values().filter(|left_out| left_out.contains(node)).count();
        match (self.cause(service, node), by) {
            (Some(cause), _) => cause.code().to_owned(),
            (None, 0) => "as told".to_owned(),
            (None, by) => format!("left out by {by}"),
        }
    }

    /// Whether one more round should come soon: a difference may be transient.
    #[must_use]
    pub fn doubts(&self) -> bool {
        self.last.iter().any(|(key, cause)| self.confirmed.get(key) != Some(cause))
    }

    /// Returns the cause of a difference in a node's answers about a Service, or about its proxy.
    #[must_use]
    pub fn cause(&self, service: &ServiceName, node: &str) -> Option<Cause> {
        let mut own = self.confirmed.iter().filter(|((_, other, _), _)| other == node);
        own.find(|((about, ..), _)| about.as_ref().is_none_or(|about| about == service))
            .map(|(_, cause)| *cause)
    }
}
