//! Witnesses: others that are asked before a silent node is judged, because it may be this node
//! that hears nobody.

use std::{
    collections::BTreeSet,
    hash::{DefaultHasher, Hash as _, Hasher as _},
};

use super::hearing::{Heard, Subject};

/// The most other nodes that are asked.
const NODES: usize = 3;

/// Witnesses of one judgement.
#[derive(Debug, Default)]
pub(super) struct Witnesses {
    asked: BTreeSet<Subject>,
    pending: BTreeSet<Subject>,
    silent: BTreeSet<Subject>,
    /// Whether the silence of one of them proves nothing.
    doubtful: bool,
}

/// The testimony of all witnesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    SomebodyAnswers,
    NobodyAnswers { nodes: usize, gateway: bool },
    NobodyKnows,
}

impl Witnesses {
    /// Chooses some of the other nodes, and the gateway. `salt` decides which: when a node dies,
    /// all others look for witnesses at the same moment.
    pub(super) fn choose<'a>(salt: &str, others: impl Iterator<Item = &'a str>) -> Self {
        let place = |node: &str| {
            let mut hasher = DefaultHasher::new();
            (salt, node).hash(&mut hasher);
            hasher.finish()
        };
        let mut others: Vec<_> = others.map(|node| (place(node), node)).collect();
        others.sort_unstable();
        let nodes = others.into_iter().take(NODES).map(|(_, node)| Subject::Node(node.to_owned()));
        let asked: BTreeSet<_> = nodes.chain([Subject::Gateway]).collect();
        Self { pending: asked.clone(), asked, ..Self::default() }
    }

    pub(super) fn asked(&self) -> impl Iterator<Item = &Subject> {
        self.asked.iter()
    }

    /// Returns the nodes that did not answer.
    pub(super) fn silent(&self) -> impl Iterator<Item = &str> {
        self.silent.iter().filter_map(|subject| match subject {
            Subject::Node(node) => Some(node.as_str()),
            Subject::Gateway => None,
        })
    }

    /// Takes what one of them says; returns the verdict with the last.
    pub(super) fn hear(&mut self, subject: &Subject, heard: &Heard) -> Option<Verdict> {
        if !self.pending.remove(subject) {
            return None;
        }
        match heard {
            Heard::Alive => return Some(Verdict::SomebodyAnswers),
            Heard::Silent(_) => drop(self.silent.insert(subject.clone())),
            Heard::Nothing => self.doubtful = true,
            Heard::Absent => {}
        }
        self.verdict()
    }

    /// Returns the verdict if nobody is waited for.
    pub(super) fn verdict(&self) -> Option<Verdict> {
        if !self.pending.is_empty() {
            return None;
        }
        Some(if self.doubtful {
            Verdict::NobodyKnows
        } else {
            let gateway = self.silent.contains(&Subject::Gateway);
            Verdict::NobodyAnswers { nodes: self.silent.len() - usize::from(gateway), gateway }
        })
    }
}
