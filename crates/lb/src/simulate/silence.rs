//! Nodes that went without a word, as the agent of each other node notices them: SYNs that nobody
//! answers raise a suspicion, the agent asks the node, and leaves out its endpoints if it is dead.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use super::{effect::Effect, line::What, machines::Machines, queue::Next};
use crate::proxy;

/// The least time between the first unanswered SYN and a suspicion.
const SUSPECTED_AFTER: Duration = Duration::from_millis(200);
/// The time in which a suspected node may answer.
const ASKED_FOR: Duration = Duration::from_millis(300);
/// The interval at which a dead node is asked.
const ASKED_EVERY: Duration = Duration::from_secs(1);
/// The number of answers in a row after which a dead node gets new connections again.
const ANSWERS: u32 = 2;

/// The silence of nodes, as each front node knows it.
#[derive(Debug)]
pub(super) struct Silences {
    settings: proxy::Silence,
    /// The time between an agent's finding and its being in effect.
    reaction: Duration,
    fronts: BTreeMap<usize, Front>,
}

/// A node that forwards connections to others.
#[derive(Debug, Default)]
struct Front {
    /// The nodes that it has not heard since some SYN.
    silent: BTreeMap<usize, Silent>,
    /// The dead ones of them, the longest dead first.
    dead: Vec<usize>,
    left_out: Vec<usize>,
    is_cut_off: bool,
}

/// A node that did not answer.
#[derive(Clone, Copy, Debug)]
struct Silent {
    first: Duration,
    syns: u32,
    stage: Stage,
    /// The time of its next step.
    due: Option<Duration>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// SYNs are counted.
    Counted,
    /// The packet path suspects it, and the agent asks it.
    Suspected,
    /// The agent takes it for dead, and has since heard this number of answers in a row.
    Dead { answers: u32 },
}

/// The facts about a front node, for a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Facts<'w> {
    pub(super) front: usize,
    pub(super) machines: &'w Machines,
    /// The nodes with endpoints in the version that the front node has written.
    pub(super) hosts: &'w BTreeSet<usize>,
    pub(super) is_agent_down: bool,
}

impl Silences {
    pub(super) fn new(settings: proxy::Silence, reaction: Duration) -> Self {
        Self { settings, reaction, fronts: BTreeMap::new() }
    }

    /// Counts a SYN from a front node to an endpoint of another, which is answered or not.
    pub(super) fn syn(&mut self, now: Duration, front: usize, node: usize, answered: bool) -> Option<Effect> {
        if answered {
            let known = self.fronts.get_mut(&front)?;
            // One answer ends a suspicion; a dead node has to answer the agent.
            if known.silent.get(&node).is_some_and(|silent| !silent.is_dead()) {
                known.silent.remove(&node);
            }
            return None;
        }
        if self.settings.suspect_syns == 0 {
            return None;
        }
        let known = self.fronts.entry(front).or_default();
        let begin = Silent { first: now, syns: 0, stage: Stage::Counted, due: None };
        let silent = known.silent.entry(node).or_insert(begin);
        silent.syns = silent.syns.saturating_add(1);
        let begins = silent.stage == Stage::Counted && silent.due.is_none();
        if !begins || !self.settings.is_suspect(silent.syns) {
            return None;
        }
        let at = now.max(silent.first + SUSPECTED_AFTER);
        silent.due = Some(at);
        Some(Effect::Later(at, Next::Silence { front, node }))
    }

    /// Executes the next step about a silent node: a suspicion, a judgement, or a question to a
    /// dead one.
    pub(super) fn step(&mut self, now: Duration, node: usize, facts: Facts<'_>) -> Vec<Effect> {
        let Facts { front, machines, is_agent_down, .. } = facts;
        let judged = now + ASKED_FOR + self.reaction;
        let Some(known) = self.fronts.get_mut(&front) else { return Vec::new() };
        let Some(silent) = known.silent.get_mut(&node).filter(|silent| silent.due == Some(now)) else {
            return Vec::new();
        };
        let answers = machines.are_joined(front, node);
        let mut effects = Vec::new();
        let mut died = false;
        let next = match silent.stage {
            Stage::Counted => {
                silent.stage = Stage::Suspected;
                (!is_agent_down).then_some(judged)
            }
            // Nobody asks until the agent is back.
            Stage::Suspected if is_agent_down => None,
            Stage::Suspected if answers => {
                known.silent.remove(&node);
                return effects;
            }
            Stage::Suspected => {
                silent.stage = Stage::Dead { answers: 0 };
                known.dead.push(node);
                died = true;
                Some(now + ASKED_EVERY)
            }
            Stage::Dead { answers: heard } => {
                let heard = if answers && !is_agent_down { heard + 1 } else { 0 };
                silent.stage = Stage::Dead { answers: heard };
                (heard < ANSWERS).then_some(now + ASKED_EVERY)
            }
        };
        silent.due = next;
        effects.extend(next.map(|at| Effect::Later(at, Next::Silence { front, node })));
        let name = || machines.nodes()[node].name.clone();
        if silent.stage == (Stage::Dead { answers: ANSWERS }) {
            known.silent.remove(&node);
            known.dead.retain(|dead| *dead != node);
            effects.push(note(What::TakenBack(name()), facts));
        }
        effects.extend(self.review(facts));
        if died && !self.left_out(front).contains(&node) && !self.is_cut_off(front) {
            effects.push(note(What::NotLeftOut(name()), facts));
        }
        effects
    }

    /// Forgets nodes that have no endpoints any more in the version that a front node has written.
    pub(super) fn written(&mut self, facts: Facts<'_>) -> Vec<Effect> {
        let Some(known) = self.fronts.get_mut(&facts.front) else { return Vec::new() };
        known.silent.retain(|node, _| facts.hosts.contains(node));
        known.dead.retain(|node| facts.hosts.contains(node));
        self.review(facts)
    }

    /// Lets an agent that is back ask the nodes that its packet path suspects.
    pub(super) fn agent_back(&mut self, now: Duration, front: usize) -> Vec<Effect> {
        let at = now + ASKED_FOR + self.reaction;
        let Some(known) = self.fronts.get_mut(&front) else { return Vec::new() };
        let suspected = known.silent.iter_mut().filter(|(_, silent)| silent.stage == Stage::Suspected);
        suspected
            .map(|(node, silent)| {
                silent.due = Some(at);
                Effect::Later(at, Next::Silence { front, node: *node })
            })
            .collect()
    }

    /// Forgets what a front node that is gone knew.
    pub(super) fn forget(&mut self, front: usize) {
        self.fronts.remove(&front);
    }

    /// Returns the nodes whose endpoints a front node chooses for no new connection.
    pub(super) fn left_out(&self, front: usize) -> &[usize] {
        self.fronts.get(&front).map_or(&[], |known| &known.left_out)
    }

    /// Whether a front node suspects a node, or takes it for dead.
    pub(super) fn is_suspected(&self, front: usize, node: usize) -> bool {
        let silent = self.fronts.get(&front).and_then(|known| known.silent.get(&node));
        silent.is_some_and(|silent| silent.stage != Stage::Counted)
    }

    pub(super) fn is_dead(&self, front: usize, node: usize) -> bool {
        let silent = self.fronts.get(&front).and_then(|known| known.silent.get(&node));
        silent.is_some_and(Silent::is_dead)
    }

    /// Whether a node hears nobody, and takes itself for cut off.
    pub(super) fn is_cut_off(&self, node: usize) -> bool {
        self.fronts.get(&node).is_some_and(|known| known.is_cut_off)
    }

    /// Decides anew who is left out: nobody by a node that is cut off, and never more than the part
    /// of the nodes that is allowed.
    fn review(&mut self, facts: Facts<'_>) -> Vec<Effect> {
        let Facts { front, machines, hosts, .. } = facts;
        let Some(known) = self.fronts.get_mut(&front) else { return Vec::new() };
        let mut others = hosts.iter().filter(|node| **node != front).peekable();
        // A single other node may be gone itself; the gateway answers unless this one is isolated.
        let count = hosts.iter().filter(|node| **node != front).count();
        let is_enough = count > 1;
        let may_be = others.peek().is_some() && (is_enough || machines.nodes()[front].is_isolated);
        let is_cut_off = may_be
            && others.all(|node| {
                known.silent.get(node).is_some_and(|silent| silent.stage == Stage::Dead { answers: 0 })
            });
        let most = match is_cut_off {
            true => 0,
            // The agent counts its own node, whether or not that has endpoints.
            false => (count + 1) * usize::from(self.settings.max_left_out) / 100,
        };
        let left_out: Vec<usize> = known.dead.iter().take(most).copied().collect();
        let mut effects = Vec::new();
        if is_cut_off != std::mem::replace(&mut known.is_cut_off, is_cut_off) {
            effects.push(note(if is_cut_off { What::CutOff } else { What::InTouch }, facts));
        }
        let before = std::mem::replace(&mut known.left_out, left_out);
        for node in known.left_out.iter().filter(|node| !before.contains(node)) {
            effects.push(note(What::LeftOut(machines.nodes()[*node].name.clone()), facts));
        }
        effects
    }
}

impl Silent {
    const fn is_dead(&self) -> bool {
        matches!(self.stage, Stage::Dead { .. })
    }
}

fn note(what: What, facts: Facts<'_>) -> Effect {
    let front = &facts.machines.nodes()[facts.front];
    Effect::Note(what, Some(front.name.clone()))
}
