//! The balancer: its health checks, its view of the nodes, and the choice of a node for each
//! request.

use std::{collections::BTreeMap, time::Duration};

use traffic_policy_cluster::model::Policy;

use super::{
    effect::{Effect, Through},
    input::{SHORTEST_INTERVAL, Simulation},
    line::What,
    machines::Machine,
    queue::Next,
    tally::Why,
};
use crate::{
    balancer::{Balancer, Check},
    judge::Standpoint,
    verdict::{Answer, Question},
};

/// The state of a balancer, with its view of each node.
#[derive(Debug)]
pub(super) struct Front<'s> {
    balancer: &'s Balancer,
    /// The measured times of checks, by node.
    measured: &'s BTreeMap<String, Vec<Duration>>,
    /// The policy in the version that its controller has propagated; the next two fields are from
    /// there, too.
    policy: Policy,
    question: Question,
    weighs: bool,
    /// The generation of the checks; those of an earlier one are abandoned.
    generation: u32,
    targets: Vec<Target>,
    /// Nodes that get requests.
    taking: Vec<usize>,
    any_healthy: bool,
    weights: Vec<usize>,
    /// The time of each node's first check.
    phases: BTreeMap<String, Duration>,
}

/// A node, and what the balancer knows about it.
#[derive(Debug)]
struct Target {
    name: String,
    /// The node's place among all, for a balancer that sends everything to the first one.
    order: u64,
    /// Whether the times of its checks are measured ones.
    is_measured: bool,
    is_member: bool,
    health: Health,
}

#[derive(Clone, Copy, Debug, Default)]
struct Health {
    healthy: bool,
    failures: u32,
    successes: u32,
    /// The weight in the last answer of the health port.
    weight: usize,
}

impl<'s> Front<'s> {
    /// Returns a balancer that knows a version of the objects and no node.
    pub(super) fn new(input: &'s Simulation<'s>, standpoint: &Standpoint) -> Self {
        Self {
            balancer: &input.balancer,
            measured: &input.measured.checks,
            policy: standpoint.policy,
            question: standpoint.question,
            weighs: standpoint.weighs,
            generation: 0,
            targets: Vec::new(),
            taking: Vec::new(),
            any_healthy: false,
            weights: Vec::new(),
            phases: BTreeMap::new(),
        }
    }

    pub(super) fn question(&self) -> Question {
        self.question
    }

    pub(super) fn into_phases(self) -> BTreeMap<String, Duration> {
        self.phases
    }

    fn asks(&self) -> &'s Check {
        self.balancer.check(self.policy)
    }

    /// Adds nodes that are new, and makes those members that are in the known version.
    pub(super) fn meet_new_nodes(
        &mut self,
        standpoint: &Standpoint,
        machines: &[Machine],
        random: &mut fastrand::Rng,
    ) {
        for machine in machines.iter().skip(self.targets.len()) {
            self.targets.push(Target {
                name: machine.name.clone(),
                order: random.u64(..),
                is_measured: self.measured.contains_key(&machine.name),
                is_member: false,
                health: Health::default(),
            });
        }
        for target in &mut self.targets {
            let on_node = standpoint.nodes.get(&target.name);
            target.is_member = on_node.is_some_and(|on_node| on_node.member);
        }
    }

    /// Begins in a state that has lasted for long, with the present answers of all nodes.
    pub(super) fn begin_front(
        &mut self,
        answers: impl IntoIterator<Item = Answer>,
        random: &mut fastrand::Rng,
    ) -> Vec<Effect> {
        for (target, answer) in self.targets.iter_mut().zip(answers) {
            target.health.healthy = target.is_member && answer.is_healthy();
            if let Answer::Ok(Some(weight)) = answer {
                target.health.weight = weight;
            }
        }
        self.any_healthy = self.targets.iter().any(|target| target.health.healthy);
        self.choose_takers();
        let mut effects = Vec::new();
        for (node, target) in self.targets.iter().enumerate() {
            let moments = self.measured.get(&target.name).into_iter().flatten();
            effects.extend(moments.map(|at| Effect::Later(*at, Next::Check { node, generation: 0 })));
        }
        effects.extend(self.begin_checks(Duration::ZERO, |_| true, random));
        effects
    }

    /// Schedules the first checks of members, each at a random time within the interval.
    fn begin_checks(
        &mut self,
        now: Duration,
        which: impl Fn(usize) -> bool,
        random: &mut fastrand::Rng,
    ) -> Vec<Effect> {
        let mut effects = Vec::new();
        if self.question == Question::Nothing {
            return effects;
        }
        let interval = self.asks().interval.value.max(SHORTEST_INTERVAL);
        for (node, target) in self.targets.iter().enumerate().filter(|(node, _)| which(*node)) {
            if target.is_member && !target.is_measured {
                let at = now + interval.mul_f64(random.f64());
                self.phases.entry(target.name.clone()).or_insert(at);
                effects.push(Effect::Later(at, Next::Check { node, generation: self.generation }));
            }
        }
        effects
    }

    /// Lets the controller propagate a version: the members, and the check to make.
    pub(super) fn handed_on(
        &mut self,
        now: Duration,
        standpoint: &Standpoint,
        machines: &[Machine],
        random: &mut fastrand::Rng,
    ) -> Vec<Effect> {
        let mut effects = Vec::new();
        let before: Vec<bool> = self.targets.iter().map(|target| target.is_member).collect();
        let (asked, interval) = (self.question, self.asks().interval.value);
        (self.policy, self.question, self.weighs) =
            (standpoint.policy, standpoint.question, standpoint.weighs);
        self.meet_new_nodes(standpoint, machines, random);
        let is_new = |node: usize| !before.get(node).copied().unwrap_or(false);
        if self.question != asked {
            effects.push(Effect::Note(What::Asks(self.question), None));
            for Target { health, .. } in &mut self.targets {
                (health.failures, health.successes) = (0, 0);
            }
        }
        for target in self.targets.iter_mut().filter(|target| !target.is_member) {
            target.health = Health::default();
        }
        let was_silent = asked == Question::Nothing && self.question != Question::Nothing;
        effects.extend(if self.asks().interval.value != interval || was_silent {
            // The check is a different one, and starts again. A node that gets traffic keeps it
            // until it fails the new check.
            self.generation += 1;
            self.begin_checks(now, |_| true, random)
        } else {
            self.begin_checks(now, is_new, random)
        });
        if self.question == Question::Nothing {
            effects.extend(self.announce(standpoint, machines));
        }
        effects.extend(self.choose_takers_and_tell());
        effects
    }

    /// Lets the speakers on the nodes follow the objects. A speaker that is gone withdraws nothing,
    /// and its announcement lasts until it times out.
    fn announce(&mut self, standpoint: &Standpoint, machines: &[Machine]) -> Vec<Effect> {
        let mut effects = Vec::new();
        for (node, machine) in machines.iter().enumerate().take(self.targets.len()) {
            let on_node = standpoint.nodes.get(&machine.name);
            let announced = on_node.is_some_and(|on_node| on_node.member && on_node.announced);
            let healthy = announced && (machine.is_there || self.targets[node].health.healthy);
            effects.extend(self.believe(node, healthy));
        }
        effects
    }

    /// Withdraws the announcements of a node that is gone, which have timed out.
    pub(super) fn withdraw(&mut self, node: usize) -> Vec<Effect> {
        if self.question != Question::Nothing {
            return Vec::new();
        }
        let mut effects = self.believe(node, false);
        effects.extend(self.choose_takers_and_tell());
        effects
    }

    /// Lets the speakers on nodes that are back announce them again.
    pub(super) fn back(&mut self, standpoint: &Standpoint, machines: &[Machine]) -> Vec<Effect> {
        if self.question != Question::Nothing {
            return Vec::new();
        }
        let mut effects = self.announce(standpoint, machines);
        effects.extend(self.choose_takers_and_tell());
        effects
    }

    /// Returns the question of a check; `None` if the check is abandoned.
    pub(super) fn check(&self, node: usize, generation: u32) -> Option<Question> {
        let target = &self.targets[node];
        let is_over = generation != self.generation && !target.is_measured;
        (!is_over && target.is_member && self.question != Question::Nothing).then_some(self.question)
    }

    /// Handles the answer to a check, and schedules the next check.
    pub(super) fn answered(
        &mut self,
        now: Duration,
        node: usize,
        generation: u32,
        answer: Answer,
    ) -> Vec<Effect> {
        let check = self.asks();
        let mut effects = match answer {
            Answer::Silence => {
                vec![Effect::Later(now + check.timeout.value, Next::TimedOut { node, generation })]
            }
            answer => self.judge(node, answer),
        };
        if !self.targets[node].is_measured {
            let next = now + check.interval.value.max(SHORTEST_INTERVAL);
            effects.push(Effect::Later(next, Next::Check { node, generation }));
        }
        effects
    }

    /// Handles a check that had no answer in time.
    pub(super) fn timed_out(&mut self, node: usize, generation: u32) -> Vec<Effect> {
        if generation == self.generation || self.targets[node].is_measured {
            self.judge(node, Answer::Silence)
        } else {
            Vec::new()
        }
    }

    fn judge(&mut self, node: usize, answer: Answer) -> Vec<Effect> {
        let (wanted, allowed) = (self.asks().successes.value, self.asks().failures.value);
        let health = &mut self.targets[node].health;
        let before = *health;
        if answer.is_healthy() {
            (health.failures, health.successes) = (0, health.successes.saturating_add(1));
        } else {
            (health.failures, health.successes) = (health.failures.saturating_add(1), 0);
        }
        if let Answer::Ok(Some(weight)) = answer {
            health.weight = weight;
        }
        let healthy =
            if health.healthy { health.failures < allowed.max(1) } else { health.successes >= wanted.max(1) };
        let weight_changed = health.weight != before.weight;
        let mut effects = Vec::new();
        if healthy != before.healthy {
            effects.extend(self.believe(node, healthy));
            effects.extend(self.choose_takers_and_tell());
        } else if weight_changed && self.weighs {
            self.choose_takers();
        }
        effects
    }

    fn believe(&mut self, node: usize, healthy: bool) -> Vec<Effect> {
        let target = &mut self.targets[node];
        let is = healthy && target.is_member;
        let was = std::mem::replace(&mut target.health.healthy, is);
        if was == is {
            return Vec::new();
        }
        let what = if was { What::Unhealthy } else { What::Healthy };
        let mut effects = vec![Effect::Note(what, Some(target.name.clone()))];
        if was && self.balancer.moves_address(self.policy) {
            effects.push(Effect::Moved(node));
        }
        if was && self.balancer.cuts.value {
            effects.push(Effect::Cut(Why::CutByBalancer, Through::Node(node)));
        }
        effects
    }

    fn choose_takers_and_tell(&mut self) -> Vec<Effect> {
        let before = self.taking.clone();
        let mut effects = Vec::new();
        self.choose_takers();
        if self.balancer.rehashes.value && self.taking != before {
            effects.push(Effect::Rehashed);
        }
        let any_healthy = self.targets.iter().any(|target| target.health.healthy);
        if std::mem::replace(&mut self.any_healthy, any_healthy) && !any_healthy {
            let what = if self.taking.is_empty() { What::NobodyLeft } else { What::FailsOpen };
            effects.push(Effect::Note(what, None));
        }
        effects
    }

    /// Chooses the nodes that get requests: members that are healthy, or all members if none is
    /// healthy and the balancer fails open.
    fn choose_takers(&mut self) {
        let targets = self.targets.iter().enumerate();
        let members: Vec<_> = targets.filter(|(_, target)| target.is_member).collect();
        let healthy: Vec<usize> =
            members.iter().filter(|(_, target)| target.health.healthy).map(|(node, _)| *node).collect();
        let failed_open = healthy.is_empty() && self.balancer.fail_open.value;
        let mut taking = if failed_open { members.iter().map(|(node, _)| *node).collect() } else { healthy };
        if self.balancer.one_node {
            let first = taking.iter().min_by_key(|node| self.targets[**node].order).copied();
            taking = first.into_iter().collect();
        }
        let weighs = self.weighs && !failed_open;
        self.weights = match weighs {
            true => taking.iter().map(|node| self.targets[*node].health.weight.max(1)).collect(),
            false => Vec::new(),
        };
        self.taking = taking;
    }

    /// Returns the node for a request: nodes in turn, or by their weights.
    pub(super) fn choose(&self, number: u64, random: &mut fastrand::Rng) -> Option<usize> {
        let Self { taking, weights, .. } = self;
        if weights.is_empty() {
            let turn = number.checked_rem(taking.len() as u64)?;
            return taking.get(usize::try_from(turn).ok()?).copied();
        }
        let mut drawn = random.usize(..weights.iter().sum::<usize>().max(1));
        for (node, weight) in taking.iter().zip(weights) {
            match drawn.checked_sub(*weight) {
                Some(rest) => drawn = rest,
                None => return Some(*node),
            }
        }
        None
    }
}
