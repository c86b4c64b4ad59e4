//! The balancer: its health checks, its view of the nodes, and the choice of a node for each
//! request.

use std::time::Duration;

use super::{input::SHORTEST_INTERVAL, line::What, queue::Next, run::Run, tally::Why};
use crate::{
    balancer::Check,
    verdict::{Answer, Question},
};

/// The state of a balancer, with its view of each node.
#[derive(Debug)]
pub(super) struct Front {
    /// The version that its controller has propagated.
    version: usize,
    pub(super) question: Question,
    weighs: bool,
    /// The generation of the checks; those of an earlier one are abandoned.
    generation: u32,
    targets: Vec<Target>,
    /// Nodes that get requests.
    taking: Vec<usize>,
    any_green: bool,
    weights: Vec<usize>,
    /// The order of the nodes, for a balancer that sends everything to the first one.
    order: Vec<u64>,
}

impl Default for Front {
    fn default() -> Self {
        Self {
            version: 0,
            question: Question::Nothing,
            weighs: false,
            generation: 0,
            targets: Vec::new(),
            taking: Vec::new(),
            any_green: false,
            weights: Vec::new(),
            order: Vec::new(),
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Target {
    is_member: bool,
    healthy: bool,
    failures: u32,
    successes: u32,
    /// The weight in the last answer of the health port.
    weight: usize,
}

impl Run<'_> {
    fn asks(&self) -> &Check {
        self.input.balancer.check(self.versions[self.front.version].standpoint.policy)
    }

    pub(super) fn begin_front(&mut self) {
        let standpoint = &self.versions[0].standpoint;
        (self.front.question, self.front.weighs) = (standpoint.question, standpoint.weighs);
        self.meet_new_nodes();
        for node in 0..self.nodes.len() {
            let answer = self.answer(Duration::ZERO, node, self.front.question);
            let target = &mut self.front.targets[node];
            target.healthy = target.is_member && answer.is_green();
            if let Answer::Ok(Some(weight)) = answer {
                target.weight = weight;
            }
        }
        self.front.any_green = self.front.targets.iter().any(|target| target.healthy);
        self.choose_takers();
        for node in 0..self.nodes.len() {
            for at in self.input.measured.checks.get(&self.nodes[node].name).into_iter().flatten() {
                self.queue.push(*at, Next::Check { node, generation: 0 });
            }
        }
        self.begin_checks(Duration::ZERO, |_| true);
    }

    /// Adds nodes that are new, as members or not according to the known version.
    fn meet_new_nodes(&mut self) {
        while self.front.targets.len() < self.nodes.len() {
            self.front.targets.push(Target::default());
            self.front.order.push(self.random.u64(..));
        }
        for (node, target) in self.nodes.iter().zip(&mut self.front.targets) {
            let on_node = self.versions[self.front.version].standpoint.nodes.get(&node.name);
            target.is_member = on_node.is_some_and(|on_node| on_node.member);
        }
    }

    /// Schedules the first checks of members, each at a random time within the interval.
    fn begin_checks(&mut self, now: Duration, which: impl Fn(usize) -> bool) {
        if self.front.question == Question::Nothing {
            return;
        }
        let interval = self.asks().interval.value.max(SHORTEST_INTERVAL);
        for node in (0..self.nodes.len()).filter(|node| which(*node)) {
            let is_measured = self.input.measured.checks.contains_key(&self.nodes[node].name);
            if self.front.targets[node].is_member && !is_measured {
                let phase = interval.mul_f64(self.random.f64());
                self.phases.entry(self.nodes[node].name.clone()).or_insert(now + phase);
                self.queue.push(now + phase, Next::Check { node, generation: self.front.generation });
            }
        }
    }

    /// Lets the controller propagate a version: the members, and the check to make.
    pub(super) fn handed_on(&mut self, now: Duration, version: usize) {
        let before: Vec<bool> = self.front.targets.iter().map(|target| target.is_member).collect();
        let (asked, interval) = (self.front.question, self.asks().interval.value);
        self.front.version = version;
        let standpoint = &self.versions[version].standpoint;
        (self.front.question, self.front.weighs) = (standpoint.question, standpoint.weighs);
        self.meet_new_nodes();
        let is_new = |node: usize| !before.get(node).copied().unwrap_or(false);
        if self.front.question != asked {
            self.line.note(now, What::Asks(self.front.question), None);
            for target in &mut self.front.targets {
                (target.failures, target.successes) = (0, 0);
            }
        }
        for target in self.front.targets.iter_mut().filter(|target| !target.is_member) {
            *target = Target::default();
        }
        let was_silent = asked == Question::Nothing && self.front.question != Question::Nothing;
        if self.asks().interval.value != interval || was_silent {
            // The check is a different one, and starts again. A node that gets traffic keeps it
            // until it fails the new check.
            self.front.generation += 1;
            self.begin_checks(now, |_| true);
        } else {
            self.begin_checks(now, is_new);
        }
        if self.front.question == Question::Nothing {
            self.announce(now);
        }
        self.choose_takers_and_tell(now);
    }

    /// Lets the speakers on the nodes follow the objects. A speaker that is gone withdraws nothing,
    /// and its announcement lasts until it times out.
    fn announce(&mut self, now: Duration) {
        for node in 0..self.nodes.len() {
            let standpoint = &self.versions[self.front.version].standpoint;
            let on_node = standpoint.nodes.get(&self.nodes[node].name);
            let announced = on_node.is_some_and(|on_node| on_node.member && on_node.announced);
            let healthy = announced && (self.nodes[node].is_there || self.front.targets[node].healthy);
            self.believe(now, node, healthy);
        }
    }

    /// Withdraws the announcements of a node that is gone, which have timed out.
    pub(super) fn withdraw(&mut self, now: Duration, node: usize) {
        if self.front.question == Question::Nothing {
            self.believe(now, node, false);
            self.choose_takers_and_tell(now);
        }
    }

    pub(super) fn check(&mut self, now: Duration, node: usize, generation: u32) {
        let is_measured = self.input.measured.checks.contains_key(&self.nodes[node].name);
        let is_over = generation != self.front.generation && !is_measured;
        if is_over || !self.front.targets[node].is_member || self.front.question == Question::Nothing {
            return;
        }
        let (interval, timeout) = (self.asks().interval.value, self.asks().timeout.value);
        if !is_measured {
            self.queue.push(now + interval.max(SHORTEST_INTERVAL), Next::Check { node, generation });
        }
        match self.answer(now, node, self.front.question) {
            Answer::Silence => self.queue.push(now + timeout, Next::TimedOut { node, generation }),
            answer => self.judge(now, node, answer),
        }
    }

    pub(super) fn timed_out(&mut self, now: Duration, node: usize, generation: u32) {
        let is_measured = self.input.measured.checks.contains_key(&self.nodes[node].name);
        if generation == self.front.generation || is_measured {
            self.judge(now, node, Answer::Silence);
        }
    }

    fn judge(&mut self, now: Duration, node: usize, answer: Answer) {
        let (wanted, allowed) = (self.asks().successes.value, self.asks().failures.value);
        let target = &mut self.front.targets[node];
        let before = *target;
        if answer.is_green() {
            (target.failures, target.successes) = (0, target.successes.saturating_add(1));
        } else {
            (target.failures, target.successes) = (target.failures.saturating_add(1), 0);
        }
        if let Answer::Ok(Some(weight)) = answer {
            target.weight = weight;
        }
        let healthy =
            if target.healthy { target.failures < allowed.max(1) } else { target.successes >= wanted.max(1) };
        let weight_changed = target.weight != before.weight;
        if healthy != before.healthy {
            self.believe(now, node, healthy);
            self.choose_takers_and_tell(now);
        } else if weight_changed && self.front.weighs {
            self.choose_takers();
        }
    }

    fn believe(&mut self, now: Duration, node: usize, healthy: bool) {
        let target = &mut self.front.targets[node];
        let was = std::mem::replace(&mut target.healthy, healthy && target.is_member);
        if was == target.healthy {
            return;
        }
        let what = if was { What::Dark } else { What::Green };
        self.line.note(now, what, Some(&self.nodes[node].name));
        if was && self.input.balancer.cuts.value {
            self.cut(Why::CutByBalancer, |way| way.node == Some(node));
        }
    }

    fn choose_takers_and_tell(&mut self, now: Duration) {
        self.choose_takers();
        let any_green = self.front.targets.iter().any(|target| target.healthy);
        if std::mem::replace(&mut self.front.any_green, any_green) && !any_green {
            let what = if self.front.taking.is_empty() { What::NobodyLeft } else { What::FailsOpen };
            self.line.note(now, what, None);
        }
    }

    /// Chooses the nodes that get requests: members that are healthy, or all members if none is
    /// healthy and the balancer fails open.
    fn choose_takers(&mut self) {
        let targets = self.front.targets.iter().enumerate();
        let members: Vec<_> = targets.filter(|(_, target)| target.is_member).collect();
        let healthy: Vec<usize> =
            members.iter().filter(|(_, target)| target.healthy).map(|(node, _)| *node).collect();
        let failed_open = healthy.is_empty() && self.input.balancer.fail_open.value;
        let mut taking = if failed_open { members.iter().map(|(node, _)| *node).collect() } else { healthy };
        if self.input.balancer.one_node {
            let first = taking.iter().min_by_key(|node| self.front.order[**node]).copied();
            taking = first.into_iter().collect();
        }
        let weighs = self.front.weighs && !failed_open;
        self.front.weights = match weighs {
            true => taking.iter().map(|node| self.front.targets[*node].weight.max(1)).collect(),
            false => Vec::new(),
        };
        self.front.taking = taking;
    }

    /// Returns the node for a request: nodes in turn, or by their weights.
    pub(super) fn choose(&mut self, number: u64) -> Option<usize> {
        let Front { taking, weights, .. } = &self.front;
        if weights.is_empty() {
            let turn = number.checked_rem(taking.len() as u64)?;
            return taking.get(usize::try_from(turn).ok()?).copied();
        }
        let mut drawn = self.random.usize(..weights.iter().sum::<usize>().max(1));
        for (node, weight) in taking.iter().zip(weights) {
            match drawn.checked_sub(*weight) {
                Some(rest) => drawn = rest,
                None => return Some(*node),
            }
        }
        None
    }
}
