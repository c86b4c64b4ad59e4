//! The judgement of silent nodes: which of them are dead, and whether it is this node itself that
//! is cut off. Pure: time and answers are passed in, and what is to be done is returned.
//!
//! ```text
//! healthy ── suspected ──> asked ── silent ──> dead, if anybody else answers
//!    ↑                       │                  │ asked once a second
//!    └─────── answers ───────┴── answers in a row, or a newer heartbeat of its Node and an answer
//!                                or none ever ┘
//! ```

mod damping;
mod hearing;
mod heartbeat;
mod witnesses;

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

pub use self::hearing::{Heard, Subject};
use self::{
    damping::Damping,
    heartbeat::Looks,
    witnesses::{Verdict, Witnesses},
};
use traffic_policy_cluster::source::Heartbeat;

/// The interval at which dead nodes are asked, and all others while this node is cut off.
const AGAIN: Duration = Duration::from_secs(1);
/// The time for which an answer of anybody shows that this node is not cut off.
const SIGN: Duration = Duration::from_secs(2);

/// A consequence of what was heard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    Ask(Subject),
    /// The Node of this dead node is to be read: [`SilentNodes::heartbeat`] takes what it says.
    Look(String),
    /// The suspicion was wrong.
    Cleared(String),
    Died {
        node: String,
        /// The time since the suspicion.
        silent: Duration,
        /// A list, in words, of all that was asked without an answer.
        asked: String,
    },
    Returned {
        node: String,
        after: Duration,
        /// Whether a heartbeat speaks for it, and no answer of its own.
        unheard: bool,
    },
    /// Kubernetes has removed the endpoints of a dead node.
    Removed(String),
    /// Nobody answers: this node itself is cut off.
    CutOff,
    Rejoined(Duration),
    /// More nodes are dead than may be left out.
    TooMany {
        dead: usize,
        most: usize,
    },
}

/// A dead node that is left out, for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeftOut<'a> {
    pub node: &'a str,
    pub since: Instant,
    pub asked: &'a str,
}

#[derive(Debug)]
enum State {
    /// Asked because of a suspicion.
    Asked {
        since: Instant,
    },
    /// Silent; the witnesses decide whether it is this node that is cut off.
    Judged {
        since: Instant,
        asked: String,
    },
    Dead(Dead),
}

#[derive(Debug)]
struct Dead {
    since: Instant,
    asked: String,
    /// The answers in a row so far.
    row: u32,
    /// The answers in a row after which it is healthy.
    needed: u32,
    last: Instant,
    /// Whether an answer is being waited for.
    waits: bool,
    looks: Looks,
    /// Whether its kubelet has gone on: the next answer decides.
    beats: bool,
}

/// All nodes that are not healthy, and whether this one is cut off.
#[derive(Debug)]
pub struct SilentNodes {
    own: String,
    /// The most nodes that are left out, in percent of those with endpoints and this one.
    most: u8,
    /// The other nodes with endpoints.
    nodes: BTreeSet<String>,
    states: BTreeMap<String, State>,
    /// The nodes that have answered a question: their silence says something.
    answered: BTreeSet<String>,
    damping: Damping,
    witnesses: Option<Witnesses>,
    /// The time of the last answer of anybody.
    heard: Option<Instant>,
    cut_off: Option<CutOff>,
    /// Whether too many are dead, which has been told.
    too_many: bool,
}

#[derive(Debug)]
struct CutOff {
    since: Instant,
    /// The nodes whose silence is to be judged again once somebody answers.
    silent: BTreeSet<String>,
    last: Instant,
}

impl SilentNodes {
    pub fn new(own: String, most: u8) -> Self {
        Self {
            own,
            most,
            nodes: BTreeSet::new(),
            states: BTreeMap::new(),
            answered: BTreeSet::new(),
            damping: Damping::default(),
            witnesses: None,
            heard: None,
            cut_off: None,
            too_many: false,
        }
    }

    /// Whether time must be told to [`Self::tick`].
    pub fn is_active(&self) -> bool {
        self.cut_off.is_some() || !self.states.is_empty()
    }

    /// Whether a node is suspected or dead.
    pub fn is_in_question(&self, node: &str) -> bool {
        self.states.contains_key(node)
    }

    pub fn is_cut_off(&self) -> bool {
        self.cut_off.is_some()
    }

    /// Takes over the nodes that have endpoints now. Those that have none any more are forgotten.
    pub fn follow(&mut self, nodes: &BTreeSet<&str>) -> Vec<Effect> {
        let others = nodes.iter().filter(|node| **node != self.own);
        self.nodes = others.map(|node| (*node).to_owned()).collect();
        self.answered.retain(|node| self.nodes.contains(node));
        let gone: Vec<_> = self.states.keys().filter(|node| !self.nodes.contains(*node)).cloned().collect();
        let mut effects = Vec::new();
        for node in gone {
            if let Some(State::Dead(_)) = self.states.remove(&node) {
                effects.push(Effect::Removed(node));
            }
        }
        if let Some(cut_off) = &mut self.cut_off {
            cut_off.silent.retain(|node| self.nodes.contains(node));
        }
        effects
    }

    /// Takes a suspicion of the packet path.
    pub fn suspect(&mut self, node: &str, now: Instant) -> Vec<Effect> {
        // Whoever is cut off hears nobody, and can accuse nobody.
        if self.is_cut_off() || !self.nodes.contains(node) || self.states.contains_key(node) {
            return Vec::new();
        }
        self.states.insert(node.to_owned(), State::Asked { since: now });
        vec![Effect::Ask(Subject::Node(node.to_owned()))]
    }

    /// Takes an answer, or the lack of it.
    pub fn hear(&mut self, subject: &Subject, heard: Heard, now: Instant) -> Vec<Effect> {
        let mut effects = Vec::new();
        if heard == Heard::Alive {
            self.heard = Some(now);
            self.rejoin(subject, now, &mut effects);
        }
        let waited = self.witnesses.as_mut().and_then(|witnesses| witnesses.hear(subject, &heard));
        if let Subject::Node(node) = subject {
            if heard == Heard::Alive && !self.answered.contains(node) {
                self.answered.insert(node.clone());
            }
            self.hear_node(node, heard, now, &mut effects);
        }
        self.decide(waited, now, &mut effects);
        effects
    }

    fn hear_node(&mut self, node: &str, heard: Heard, now: Instant, effects: &mut Vec<Effect>) {
        match (self.states.get_mut(node), heard) {
            (Some(State::Dead(dead)), heard) => {
                dead.waits = false;
                let beats = std::mem::take(&mut dead.beats);
                let mut unheard = false;
                match heard {
                    Heard::Alive if beats => dead.row = dead.needed,
                    Heard::Alive => dead.row += 1,
                    Heard::Silent(_) => {
                        dead.row = 0;
                        unheard = beats && !self.answered.contains(node);
                    }
                    Heard::Nothing | Heard::Absent => unheard = beats,
                }
                if dead.row >= dead.needed || unheard {
                    let after = now - dead.since;
                    effects.push(Effect::Returned { node: node.to_owned(), after, unheard });
                    self.damping.returned(node, now);
                    self.states.remove(node);
                }
            }
            (Some(State::Asked { since }), Heard::Silent(asked)) => {
                let since = *since;
                self.states.insert(node.to_owned(), State::Judged { since, asked });
                if !self.has_heard(now) && self.witnesses.is_none() {
                    let witnesses = self.choose(node);
                    effects.extend(witnesses.asked().cloned().map(Effect::Ask));
                    self.witnesses = Some(witnesses);
                }
            }
            (
                Some(State::Asked { .. } | State::Judged { .. }),
                Heard::Alive | Heard::Nothing | Heard::Absent,
            ) => {
                self.states.remove(node);
                effects.push(Effect::Cleared(node.to_owned()));
            }
            (None, _) | (Some(State::Judged { .. }), Heard::Silent(_)) => {}
        }
    }

    /// Judges the silent nodes if somebody has answered lately, or if nobody will.
    fn decide(&mut self, waited: Option<Verdict>, now: Instant, effects: &mut Vec<Effect>) {
        let verdict = if self.has_heard(now) {
            Some(Verdict::SomebodyAnswers)
        } else {
            waited.or_else(|| self.witnesses.as_ref().and_then(Witnesses::verdict))
        };
        let Some(verdict) = verdict else { return };
        let witnesses = self.witnesses.take();
        let judged: Vec<_> = self
            .states
            .iter()
            .filter(|(_, state)| matches!(state, State::Judged { .. }))
            .map(|(node, _)| node.clone())
            .collect();
        let is_cut_off = match verdict {
            Verdict::SomebodyAnswers => false,
            Verdict::NobodyKnows => {
                for node in judged {
                    self.states.remove(&node);
                    effects.push(Effect::Cleared(node));
                }
                return;
            }
            Verdict::NobodyAnswers { nodes, gateway } => {
                let dead = |state: &&State| matches!(state, State::Dead(dead) if dead.row == 0);
                judged.len() + nodes + self.states.values().filter(dead).count() >= 2 || gateway
            }
        };
        if judged.is_empty() {
            return;
        }
        if is_cut_off {
            let silent = std::mem::take(&mut self.states).into_keys().collect();
            self.cut_off = Some(CutOff { since: now, silent, last: now });
            effects.push(Effect::CutOff);
            return;
        }
        for node in judged {
            self.bury(&node, now, effects);
        }
        // A witness that was silent while another one answered is in question itself.
        for node in witnesses.iter().flat_map(Witnesses::silent) {
            effects.extend(self.suspect(node, now));
        }
    }

    fn bury(&mut self, node: &str, now: Instant, effects: &mut Vec<Effect>) {
        let Some(State::Judged { since, asked }) = self.states.remove(node) else { return };
        let needed = self.damping.needed(node, now);
        effects.push(Effect::Died { node: node.to_owned(), silent: now - since, asked: asked.clone() });
        let looks = Looks::begin(&format!("{}{node}", self.own), now);
        let dead = Dead { since, asked, row: 0, needed, last: now, waits: false, looks, beats: false };
        self.states.insert(node.to_owned(), State::Dead(dead));
        let (dead, most) = (self.dead().count(), self.most());
        if dead > most && !std::mem::replace(&mut self.too_many, true) {
            effects.push(Effect::TooMany { dead, most });
        }
    }

    /// Ends being cut off, and asks anew all who were silent, except the one who answers.
    fn rejoin(&mut self, subject: &Subject, now: Instant, effects: &mut Vec<Effect>) {
        let Some(cut_off) = self.cut_off.take() else { return };
        effects.push(Effect::Rejoined(now - cut_off.since));
        for node in cut_off.silent {
            if *subject != Subject::Node(node.clone()) {
                effects.extend(self.suspect(&node, now));
            }
        }
    }

    /// Returns whom to ask again by now, and what time has changed.
    pub fn tick(&mut self, now: Instant) -> Vec<Effect> {
        self.damping.forget(now);
        self.too_many &= self.dead().count() > self.most();
        let mut effects = Vec::new();
        for (node, state) in &mut self.states {
            let State::Dead(dead) = state else { continue };
            if !dead.waits && now.saturating_duration_since(dead.last) >= AGAIN {
                (dead.waits, dead.last) = (true, now);
                effects.push(Effect::Ask(Subject::Node(node.clone())));
            }
            if dead.looks.are_due(now) {
                effects.push(Effect::Look(node.clone()));
            }
        }
        if let Some(cut_off) = &mut self.cut_off
            && now.saturating_duration_since(cut_off.last) >= AGAIN
        {
            cut_off.last = now;
            // Others each time: the first who can be reached ends it.
            let salt = format!("{}{:?}", self.own, now.saturating_duration_since(cut_off.since));
            let others = self.nodes.iter().map(String::as_str);
            effects.extend(Witnesses::choose(&salt, others).asked().cloned().map(Effect::Ask));
        }
        effects
    }

    /// Takes what the Node of a dead node says. If its kubelet has gone on, the node is asked at
    /// once. One answer suffices then; and if it has never answered a question, as behind a
    /// firewall, silence does not count against it.
    pub fn heartbeat(&mut self, node: &str, heartbeat: Heartbeat, now: Instant) -> Vec<Effect> {
        let Some(State::Dead(dead)) = self.states.get_mut(node) else { return Vec::new() };
        if !dead.looks.see(heartbeat) {
            return Vec::new();
        }
        (dead.beats, dead.waits, dead.last) = (true, true, now);
        vec![Effect::Ask(Subject::Node(node.to_owned()))]
    }

    fn choose(&self, node: &str) -> Witnesses {
        let others = self.nodes.iter().map(String::as_str);
        let others = others.filter(|other| !self.states.contains_key(*other));
        Witnesses::choose(&format!("{}{node}", self.own), others)
    }

    fn has_heard(&self, now: Instant) -> bool {
        self.heard.is_some_and(|heard| now.saturating_duration_since(heard) < SIGN)
    }

    fn dead(&self) -> impl Iterator<Item = (&str, &Dead)> {
        self.states.iter().filter_map(|(node, state)| match state {
            State::Dead(dead) => Some((node.as_str(), dead)),
            State::Asked { .. } | State::Judged { .. } => None,
        })
    }

    /// Returns the most nodes that may be left out.
    fn most(&self) -> usize {
        (self.nodes.len() + 1) * usize::from(self.most) / 100
    }

    /// Returns the nodes that are left out: the oldest dead ones, up to the limit; none while this
    /// node is cut off.
    pub fn left_out(&self) -> Vec<LeftOut<'_>> {
        let mut dead: Vec<_> =
            self.dead().map(|(node, dead)| LeftOut { node, since: dead.since, asked: &dead.asked }).collect();
        dead.sort_by_key(|dead| dead.since);
        dead.truncate(self.most());
        dead
    }
}

#[cfg(test)]
mod tests;
