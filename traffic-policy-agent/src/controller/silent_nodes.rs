//! Silent nodes within the run loop: suspicions of the packet path become questions, and answers
//! become endpoints that are left out.

use std::{
    collections::{BTreeSet, VecDeque},
    pin::Pin,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{task::JoinSet, time::sleep_until};
use traffic_policy_cluster::{
    model::{Index, Silent},
    source::{Heartbeat, NodeAddresses, ObjectEvent, Source, Subject},
};
use traffic_policy_dataplane::{
    NodeSilence, PacketPath, Suspect,
    node::{Answer, Asker, HopAddress, Network, Question},
};

use super::{
    Settings,
    service_sync::ServiceSync,
    silent_hops::{Look, SilentHops},
};
use crate::{
    health::ProxyHealth,
    metrics::Metrics,
    silent_nodes::{Effect, Heard, SilentNodes, Subject as Asked},
};

/// The interval at which time is told to the judgement, and after which the nodes with endpoints
/// are looked up again.
const TICK: Duration = Duration::from_millis(250);
const FRESH: Duration = Duration::from_secs(1);
/// The time for which a node that was found alive is not suspected again.
const AGAIN: Duration = Duration::from_secs(1);
/// The most endpoints of each protocol that are asked.
const ENDPOINTS: usize = 3;

/// The port of /healthz of other nodes, if this one's was left to chance.
const HEALTH_PORT: u16 = 10256;

/// The way to ask a node: a test of the loop answers itself.
pub(super) type Ask = Arc<dyn Fn(Question) -> Pin<Box<dyn Future<Output = Answer> + Send>> + Send + Sync>;

/// Returns the way that asks through the network.
fn by_network() -> Ask {
    let asker = Asker::default();
    Arc::new(move |question| {
        let asker = asker.clone();
        Box::pin(async move { asker.ask(question).await })
    })
}

/// An occurrence that concerns a silent node.
#[derive(Debug)]
pub(super) enum Happening {
    Suspected(Suspect),
    /// Routes to endpoints were looked up.
    Routed(Look),
    Heard(Asked, Heard),
    /// The Node of a dead node was read.
    Read(String, Option<Heartbeat>),
    Time,
    /// One that was found alive may be suspected again.
    Again(Suspect),
}

/// Questions that are under way, and what follows from the answers.
pub(super) struct NodeWatch {
    health: ProxyHealth,
    metrics: Metrics,
    judgement: SilentNodes,
    hops: SilentHops,
    /// Whether suspicions are taken at all.
    is_on: bool,
    by: Ask,
    questions: JoinSet<Happening>,
    /// The addresses of nodes, once the source has started.
    addresses: Option<NodeAddresses>,
    network: Network,
    health_port: u16,
    /// The names of those that are left out.
    left_out: BTreeSet<String>,
    /// Those that were found alive, and when they may be suspected again: one of their endpoints
    /// may be what does not answer.
    cleared: VecDeque<(Instant, Suspect)>,
    /// The last time at which the nodes with endpoints were looked up.
    looked: Option<Instant>,
    ticked: Instant,
}

impl NodeWatch {
    pub(super) fn new(settings: &Settings, network: Network, health: ProxyHealth, metrics: Metrics) -> Self {
        let (own, silence, port) = (settings.node_name.clone(), settings.silence, settings.healthz.port());
        Self {
            health,
            metrics,
            judgement: SilentNodes::new(own, silence.max_left_out),
            hops: SilentHops::new(),
            is_on: silence.suspect_syns > 0 && silence.max_left_out > 0,
            by: by_network(),
            questions: JoinSet::new(),
            addresses: None,
            network,
            health_port: if port == 0 { HEALTH_PORT } else { port },
            left_out: BTreeSet::new(),
            cleared: VecDeque::new(),
            looked: None,
            ticked: Instant::now(),
        }
    }

    /// Sets another way to ask.
    #[cfg(test)]
    pub(super) fn ask_by(&mut self, by: Ask, ways: super::silent_hops::Ways) {
        self.by = by;
        self.hops.route_by(ways);
    }

    /// Takes neighbours that the kernel has asked in vain: who is behind them is suspected.
    pub(super) fn neighbours_failed(&mut self, failed: BTreeSet<HopAddress>, index: &Index) {
        if self.is_on && !failed.is_empty() {
            self.hops.fail(failed, index, Instant::now());
        }
    }

    pub(super) fn follow(&mut self, source: &Source) {
        self.addresses = Some(source.node_addresses());
    }

    /// Waits for the next occurrence. Cancel-safe.
    pub(super) async fn next(&mut self, path: &mut impl NodeSilence) -> Happening {
        let again = self.cleared.front().map(|(at, _)| *at);
        let again_at = again.unwrap_or_else(Instant::now);
        tokio::select! {
            () = sleep_until(again_at.into()), if again.is_some() => {
                match self.cleared.pop_front() {
                    Some((_, suspect)) => Happening::Again(suspect),
                    None => Happening::Time,
                }
            }
            suspect = path.suspected(), if self.is_on => Happening::Suspected(suspect),
            Some(routes) = self.hops.next() => Happening::Routed(routes),
            Some(Ok(happening)) = self.questions.join_next() => happening,
            () = sleep_until((self.ticked + TICK).into()), if self.judgement.is_active() => Happening::Time,
            else => std::future::pending().await,
        }
    }

    /// Judges an occurrence, and asks the nodes that the judgement names. Returns the effects to
    /// log and to post.
    fn take(&mut self, happening: Happening, index: &Index, now: Instant) -> Vec<Effect> {
        let mut effects = Vec::new();
        if !matches!(happening, Happening::Routed(_)) {
            let (judgement, left_out) = (&self.judgement, &self.left_out);
            let in_question = |name: &str| judgement.is_in_question(name) || left_out.contains(name);
            if self.hops.refresh(in_question, index, now) {
                self.looked = None;
            }
        }
        if self.looked.is_none_or(|looked| now.saturating_duration_since(looked) >= FRESH) {
            self.looked = Some(now);
            effects.extend(self.follow_endpoints(index));
        }
        effects.extend(match happening {
            Happening::Suspected(Suspect::Hop(hop)) => {
                self.hops.suspect(hop, index, now);
                Vec::new()
            }
            Happening::Suspected(node @ Suspect::Node(_)) => self.suspect(node, now),
            Happening::Routed(look) => {
                let suspects = self.hops.take(look, now);
                let mut effects = self.follow_endpoints(index);
                for suspect in suspects {
                    effects.extend(self.suspect(suspect, now));
                }
                // Others may have been suspected meanwhile.
                self.hops.look_again(index, now);
                effects
            }
            Happening::Heard(asked, heard) => self.judgement.hear(&asked, heard, now),
            Happening::Read(node, Some(heartbeat)) => self.judgement.heartbeat(&node, heartbeat, now),
            Happening::Again(_) | Happening::Read(_, None) => Vec::new(),
            Happening::Time => {
                self.ticked = now;
                self.judgement.tick(now)
            }
        });
        let (questions, told): (Vec<_>, Vec<_>) =
            effects.into_iter().partition(|effect| matches!(effect, Effect::Ask(_) | Effect::Look(_)));
        for question in questions {
            match question {
                Effect::Ask(asked) => self.ask(asked, index),
                Effect::Look(node) => self.look_at(node),
                _ => {}
            }
        }
        told
    }

    /// Takes over who has endpoints now.
    fn follow_endpoints(&mut self, index: &Index) -> Vec<Effect> {
        let mut names = index.nodes_of_endpoints();
        names.extend(self.hops.names());
        self.judgement.follow(&names)
    }

    fn suspect(&mut self, suspect: Suspect, now: Instant) -> Vec<Effect> {
        let name = suspect.to_string();
        tracing::debug!(node = name, "connections to its endpoints are not answered: asking it");
        let effects = self.judgement.suspect(&name, now);
        if !self.judgement.is_in_question(&name) {
            // Its endpoints are new, or nobody can be judged: later perhaps.
            self.cleared.push_back((now + AGAIN, suspect));
        }
        effects
    }

    /// Returns the one whom the judgement knows by a name.
    fn named(&self, name: &str) -> Suspect {
        match self.hops.get(name) {
            Some(hop) => Suspect::Hop(hop.address),
            None => Suspect::Node(name.to_owned()),
        }
    }

    /// Asks in a task of its own: it may take a second to learn the node's addresses.
    fn ask(&mut self, asked: Asked, index: &Index) {
        let (by, network, health_port) = (Arc::clone(&self.by), self.network.clone(), self.health_port);
        let mut question = Question { health_port, ..Question::default() };
        match asked {
            Asked::Gateway => {
                self.questions.spawn(async move {
                    let heard = match network.default_gateways().await {
                        Ok(gateways) if gateways.is_empty() => Heard::Absent,
                        Ok(gateways) => {
                            question.addresses = gateways.into_iter().collect();
                            heard(by(question).await)
                        }
                        Err(error) => heard(Answer::Unjudged(format!("{error:#}"))),
                    };
                    Happening::Heard(Asked::Gateway, heard)
                });
            }
            Asked::Node(node) => {
                if let Some(hop) = self.hops.get(&node) {
                    question.hop = Some(hop.address);
                    question.endpoints = index.endpoints_at(&hop.behind, ENDPOINTS);
                    let asked = async move { Happening::Heard(Asked::Node(node), heard(by(question).await)) };
                    self.questions.spawn(asked);
                    return;
                }
                question.addresses = index.all_node_addresses(&node).to_vec();
                question.endpoints = index.endpoints_of(&node, ENDPOINTS);
                let addresses = self.addresses.clone();
                // When a node dies, thousands look for witnesses at the same moment: the API server
                // is not asked for those.
                let look_up = self.judgement.is_in_question(&node);
                self.questions.spawn(async move {
                    if let (true, Some(addresses)) = (question.addresses.is_empty(), addresses) {
                        question.addresses =
                            if look_up { addresses.of(&node).await } else { addresses.known_of(&node) };
                    }
                    let heard = heard(by(question).await);
                    Happening::Heard(Asked::Node(node), heard)
                });
            }
        }
    }

    /// Reads the Node of a dead node.
    fn look_at(&mut self, node: String) {
        // A next hop has no Node.
        if let Some(addresses) = self.addresses.clone().filter(|_| self.hops.get(&node).is_none()) {
            self.questions.spawn(async move {
                let heartbeat = addresses.heartbeat(&node).await;
                Happening::Read(node, heartbeat)
            });
        }
    }

    /// Takes over who is to be left out, and returns those that came or went.
    fn changed(&mut self) -> Vec<(Suspect, bool)> {
        let left_out: BTreeSet<_> =
            self.judgement.left_out().iter().map(|node| node.node.to_owned()).collect();
        let changed = self.left_out.symmetric_difference(&left_out);
        let changed = changed.map(|name| (self.named(name), left_out.contains(name))).collect();
        self.left_out = left_out;
        changed
    }

    /// Returns whose endpoints are to be left out.
    fn silent(&self) -> Silent {
        let mut silent = Silent::default();
        for name in &self.left_out {
            match self.hops.get(name) {
                Some(hop) => silent.addresses.extend(&hop.behind),
                None => drop(silent.nodes.insert(name.clone())),
            }
        }
        silent
    }

    /// Follows an occurrence that concerns a silent node. Returns whether the maps are to be
    /// written.
    pub(super) fn follow_up(
        &mut self,
        happening: Happening,
        path: &mut impl PacketPath,
        services: &mut ServiceSync,
        source: &Source,
    ) -> bool {
        if let Happening::Again(suspect) = &happening {
            path.suspect_again(suspect);
            return false;
        }
        let effects = self.take(happening, services.index(), Instant::now());
        for effect in effects {
            self.tell(&effect, source);
            if let Effect::Cleared(node) = effect {
                let suspect = self.named(&node);
                self.cleared.push_back((Instant::now() + AGAIN, suspect));
            }
        }
        let judgement = &self.judgement;
        let left_out = judgement.left_out();
        let left_out = left_out.iter().map(|node| (node.node.to_owned(), node.since, node.asked.to_owned()));
        self.health.set_silence(judgement.is_cut_off(), left_out.collect());
        let changed = self.changed();
        if !changed.is_empty() {
            self.metrics.nodes_left_out(self.left_out.len());
        }
        for (suspect, dead) in changed {
            path.set_dead(&suspect, dead);
        }
        services.leave_out(self.silent())
    }

    /// Logs, counts and posts an effect.
    fn tell(&self, effect: &Effect, source: &Source) {
        let post = |is_warning, reason: &str, message: String| {
            source.events().post(ObjectEvent {
                is_warning,
                ..ObjectEvent::normal(Subject::Node, reason, "LeaveOut", message)
            });
        };
        match effect {
            Effect::Ask(_) | Effect::Look(_) => {}
            Effect::Cleared(node) => {
                self.metrics.suspicion(false);
                tracing::debug!(node, "it is alive");
            }
            Effect::Died { node, silent, asked } => {
                self.metrics.suspicion(true);
                let silent = silent.as_millis();
                tracing::warn!(
                    node,
                    silent_ms = silent,
                    asked,
                    "the node is dead: its endpoints are left out"
                );
                post(
                    true,
                    "NodeLeftOut",
                    format!("{} does not answer ({asked}): its endpoints are left out", who(node)),
                );
            }
            Effect::Returned { node, after, unheard } => {
                let after = after.as_secs();
                let why = if *unheard { "has a newer heartbeat" } else { "answers again" };
                tracing::info!(node, after_s = after, "the node {why}: its endpoints are used");
                post(
                    false,
                    "NodeBack",
                    format!("{} {why} after {after} s: its endpoints are used", who(node)),
                );
            }
            Effect::Removed(node) => {
                tracing::info!(node, "the dead node has no usable endpoint any more");
            }
            Effect::CutOff => {
                tracing::warn!(
                    "no other node answers: this node is cut off; it leaves out none, and /healthz says 503"
                );
                post(true, "CutOff", "no other node answers: this node says 503 until one does".to_owned());
            }
            Effect::Rejoined(after) => {
                let after = after.as_secs();
                tracing::info!(after_s = after, "somebody answers: this node is not cut off any more");
                post(false, "Rejoined", format!("somebody answers again after {after} s"));
            }
            Effect::TooMany { dead, most } => tracing::warn!(
                dead,
                most,
                "too many nodes are dead: only those that have been for longest are left out (--max-left-out)"
            ),
        }
    }
}

/// Begins a sentence about one that the judgement knows by this name.
fn who(name: &str) -> String {
    match name.strip_prefix("next hop ") {
        Some(address) => format!("Next hop {address}"),
        None => format!("Node {name}"),
    }
}

fn heard(answer: Answer) -> Heard {
    tracing::debug!(?answer, "asked for a sign of life");
    match answer {
        Answer::Alive(_) => Heard::Alive,
        Answer::Silent(asked) => {
            let asked: Vec<_> = asked.iter().map(ToString::to_string).collect();
            Heard::Silent(asked.join(", "))
        }
        Answer::Unjudged(_) => Heard::Nothing,
    }
}
