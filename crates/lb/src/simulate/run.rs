//! One run: the parts of a simulation, and the event loop. Each part has a state of its own and
//! returns effects; only the run knows all parts, and passes effects on.

use std::time::Duration;

use super::{
    agents::{Agents, Delivered, Missed},
    effect::Effect,
    front::Front,
    input::{SimulateError, Simulation},
    line::Line,
    queue::{Next, Queue},
    requests::{Front as Way, Requests},
    simulated::Simulated,
    step::Step,
    tally::Why,
    world::World,
};
use crate::change::Objects;

/// The time between the first SYN of a connection and the second (RFC 6298, TCP_TIMEOUT_INIT).
const SECOND_AFTER: Duration = Duration::from_secs(1);
/// The time between the second SYN and the third.
const THIRD_AFTER: Duration = Duration::from_secs(2);

/// The state of a run.
struct Run<'s> {
    input: &'s Simulation<'s>,
    queue: Queue,
    world: World<'s>,
    /// Whether no publication of changed objects is due.
    is_published: bool,
    agents: Agents,
    front: Front<'s>,
    requests: Requests<'s>,
    line: Line,
    random: fastrand::Rng,
}

impl Simulation<'_> {
    /// Runs the simulation.
    ///
    /// # Errors
    /// The Service is not reached from outside, an event cannot happen, or the simulation would
    /// take too long.
    pub fn run(&self) -> Result<Simulated, SimulateError> {
        let not_reached = || SimulateError::NotReached(self.service.clone());
        let objects = Objects::of(self.cluster, self.service).ok_or_else(not_reached)?;
        let mut world = World::new(self, objects);
        let version = world.next_version().ok_or_else(not_reached)?;
        self.check(world.machines().nodes().len())?;
        let front = Front::new(self, &version.standpoint);
        let question = front.question();
        let mut agents = Agents::new(self.proxy.silence(), self.learn.agent);
        agents.add_version(version);
        let mut run = Run {
            input: self,
            queue: Queue::default(),
            world,
            is_published: true,
            agents,
            front,
            requests: Requests::new(self),
            line: Line::default(),
            random: fastrand::Rng::with_seed(self.seed),
        };
        run.begin();
        run.go_on()?;
        let machines = run.world.machines();
        let (nodes, pods) = (machines.nodes().iter(), machines.pods().iter());
        let (nodes, pods) =
            (nodes.map(|node| node.name.clone()).collect(), pods.map(|pod| pod.name.clone()).collect());
        run.requests.end();
        let tally = run.requests.into_tally();
        Ok(Simulated {
            nodes,
            pods,
            seconds: tally.seconds,
            line: run.line.0,
            why: tally.why,
            outlived: tally.outlived,
            question,
            phases: run.front.into_phases(),
        })
    }
}

impl Run<'_> {
    /// Sets everything to a state that has lasted for long: all agents and the balancer know the
    /// objects.
    fn begin(&mut self) {
        let standpoint = &self.agents.version(0).standpoint;
        self.world.settle(standpoint);
        let machines = self.world.machines();
        self.front.meet_new_nodes(standpoint, machines.nodes(), &mut self.random);
        for (node, machine) in machines.nodes().iter().enumerate() {
            self.agents.settle(node, machine);
        }
        let question = self.front.question();
        let nodes = 0..machines.nodes().len();
        let (answers, suspicions): (Vec<_>, Vec<_>) = nodes
            .map(|node| self.agents.answer(Duration::ZERO, node, machines, question, &mut self.random))
            .unzip();
        let mut effects = self.front.begin_front(answers, &mut self.random);
        effects.extend(suspicions.into_iter().flatten());
        self.apply(Duration::ZERO, effects);
        for event in &self.input.events {
            self.queue.push(event.at, Next::Step(Step::Event(event.event.clone())));
        }
        self.send_next(0);
    }

    fn go_on(&mut self) -> Result<(), SimulateError> {
        while let Some((now, next)) = self.queue.pop() {
            if now >= self.input.load.lasts && self.requests.are_over() {
                return Ok(());
            }
            let machines = self.world.machines();
            let effects = match next {
                Next::Step(step) => {
                    self.world.step(now, step).map_err(|source| SimulateError::Event { at: now, source })?
                }
                Next::Publish => self.publish(now),
                Next::Written { node, version } => self.agents.written(now, node, machines, version),
                Next::HandedOn { version } => {
                    let standpoint = &self.agents.version(version).standpoint;
                    self.front.handed_on(now, standpoint, machines.nodes(), &mut self.random)
                }
                Next::Drained { node } => {
                    self.agents.drained(now, node, &machines.nodes()[node]).into_iter().collect()
                }
                Next::Silence { front, node } => self.agents.silence(now, front, node, machines),
                Next::Syn { front, node, is_new } => self.syn(now, front, node, is_new),
                Next::Check { node, generation } => self.check(now, node, generation),
                Next::TimedOut { node, generation } => self.front.timed_out(node, generation),
                Next::Done { number } => {
                    self.requests.done(number, |node| machines.is_there(node));
                    continue;
                }
                Next::Request { number } => self.request(now, number),
                Next::Resent { number } => self.resent(now, number),
            };
            self.apply(now, effects);
        }
        Ok(())
    }

    /// Passes effects on to the parts that they concern.
    fn apply(&mut self, now: Duration, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Note(what, node) => self.line.note(now, what, node.as_deref()),
                Effect::Later(at, next) => self.queue.push(at, next),
                Effect::Cut(why, through) => self.requests.cut(why, &through),
                Effect::Changed => {
                    // All changes of this moment are published together.
                    if std::mem::take(&mut self.is_published) {
                        self.queue.push(now, Next::Publish);
                    }
                }
                Effect::Crashed(node) => self.agents.crash(node),
                Effect::Restarted(node) => {
                    let effects = self.agents.restart(now, node, self.world.machines());
                    self.apply(now, effects);
                }
                Effect::Withdrawn(node) => {
                    let effects = self.front.withdraw(node);
                    self.apply(now, effects);
                }
                Effect::Moved(node) => self.moved(Why::CutByBalancer, |from| from == node),
                Effect::Rehashed => self.moved(Why::Rehashed, |_| true),
                Effect::Silent(node) => self.silent(now, node),
                Effect::Back(node) => {
                    self.requests.resume(node);
                    let machines = self.world.machines();
                    let mut effects = self.agents.back(now, node, machines);
                    let standpoint = &self.agents.newest().standpoint;
                    effects.extend(self.front.back(standpoint, machines.nodes()));
                    self.apply(now, effects);
                }
            }
        }
    }

    /// Lets the connections through some nodes come by those that the balancer sends to now.
    fn moved(&mut self, why: Why, from: impl Fn(usize) -> bool) {
        let Self { requests, front, agents, random, world, .. } = self;
        let machines = world.machines();
        requests.move_to(
            why,
            from,
            |number| {
                let node = front.choose(number, random)?;
                Some(Way { node: Some(node), outlives: agents.outlives_nodes(node, machines) })
            },
            |node| machines.is_there(node),
        );
    }

    /// Publishes the objects: agents and the balancer's controller learn of a version.
    fn publish(&mut self, now: Duration) -> Vec<Effect> {
        if let Some(later) = self.world.away(now) {
            return vec![Effect::Later(later, Next::Publish)];
        }
        self.is_published = true;
        let Some(version) = self.world.next_version() else { return Vec::new() };
        let version = self.agents.add_version(version);
        let mut effects = Vec::new();
        for (node, machine) in self.world.machines().nodes().iter().enumerate() {
            let moments = self.input.measured.agents.get(&machine.name);
            let measured = moments.and_then(|moments| moments.get(version - 1)).copied();
            let at = measured.unwrap_or(now + self.input.learn.agent);
            effects.push(Effect::Later(at.max(now), Next::Written { node, version }));
        }
        let handed_on = now + self.input.balancer.controller.value;
        effects.push(Effect::Later(handed_on, Next::HandedOn { version }));
        effects
    }

    /// Lets the balancer check a node.
    fn check(&mut self, now: Duration, node: usize, generation: u32) -> Vec<Effect> {
        let Some(question) = self.front.check(node, generation) else { return Vec::new() };
        let machines = self.world.machines();
        let (answer, suspicion) = self.agents.answer(now, node, machines, question, &mut self.random);
        let mut effects = self.front.answered(now, node, generation, answer);
        effects.extend(suspicion);
        effects
    }

    fn send_next(&mut self, number: u64) {
        if let Some(at) = self.requests.moment(number) {
            self.queue.push(at, Next::Request { number });
        }
    }

    /// Sends a request by the balancer to a node, and from there to a pod.
    fn request(&mut self, now: Duration, number: u64) -> Vec<Effect> {
        self.send_next(number + 1);
        let node = self.front.choose(number, &mut self.random);
        let machines = self.world.machines();
        let outlives = node.is_some_and(|node| self.agents.outlives_nodes(node, machines));
        let way = Way { node, outlives };
        let Delivered { outcome, suspicion } = match node {
            Some(node) => self.agents.deliver(now, node, self.world.machines(), &mut self.random),
            None => Delivered { outcome: Err(Missed::new(Why::NoNode)), suspicion: None },
        };
        match outcome {
            Err(Missed { pod: Some(pod), is_silent: true, .. }) if self.agents.is_tcp() => {
                let at = self.requests.waits(now, number, way, pod);
                self.queue.push(at, Next::Resent { number });
            }
            outcome => {
                if let Some(done) = self.requests.sent(now, number, way, outcome) {
                    self.queue.push(done, Next::Done { number });
                }
            }
        }
        suspicion.into_iter().collect()
    }

    /// Sends the first segment of a request again.
    fn resent(&mut self, now: Duration, number: u64) -> Vec<Effect> {
        let Some((node, pod)) = self.requests.waiting(number) else { return Vec::new() };
        let machines = self.world.machines();
        let Delivered { outcome, suspicion } =
            self.agents.deliver_again(now, (node, pod), machines, &mut self.random);
        if let Err(Missed { pod: Some(pod), is_silent: true, .. }) = outcome
            && let Some(host) = machines.pods()[pod].node
        {
            // The third one comes too late for the request, but it is counted.
            self.queue.push(now + THIRD_AFTER, Next::Syn { front: node, node: host, is_new: false });
        }
        if let Some(done) = self.requests.resent(now, number, outcome) {
            self.queue.push(done, Next::Done { number });
        }
        suspicion.into_iter().collect()
    }

    /// Lets other TCP connections begin between the other nodes and one that is silent for them.
    fn silent(&mut self, now: Duration, node: usize) {
        let machines = self.world.machines();
        if !machines.is_there(node) {
            self.agents.gone(node);
        }
        let rate = self.input.proxy.silence().other_tcp;
        if rate == 0 {
            return;
        }
        for other in (0..machines.nodes().len()).filter(|other| *other != node) {
            for (front, node) in [(other, node), (node, other)] {
                let at = now + (Duration::from_secs(1) / rate).mul_f64(self.random.f64());
                self.queue.push(at, Next::Syn { front, node, is_new: true });
            }
        }
    }

    /// Sends a SYN from a node to a silent one, and again as TCP does.
    fn syn(&mut self, now: Duration, front: usize, node: usize, is_new: bool) -> Vec<Effect> {
        if !self.agents.tries(front, node, self.world.machines()) {
            return Vec::new();
        }
        let mut effects: Vec<_> = self.agents.unanswered(now, front, node).into_iter().collect();
        let rate = self.input.proxy.silence().other_tcp;
        if is_new && rate > 0 {
            let again = Next::Syn { front, node, is_new: true };
            effects.push(Effect::Later(now + Duration::from_secs(1) / rate, again));
            for after in [SECOND_AFTER, SECOND_AFTER + THIRD_AFTER] {
                effects.push(Effect::Later(now + after, Next::Syn { front, node, is_new: false }));
            }
        }
        effects
    }
}
