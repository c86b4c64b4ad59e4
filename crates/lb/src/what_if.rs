//! The effect of a change: before and after, the losses in between, and the conditions for a
//! lossless change.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use serde::Serialize;
use traffic_policy_cluster::model::{DEFAULT_DRAIN, Policy, Protocol, ServiceName, health_port};

use super::{
    balancer::{Ask, Balancer, Fact, unsure},
    change::{Change, ChangeError, NodeChange, Objects},
    cluster::Cluster,
    judge::Judge,
    nodes::Who,
    overrides::Overrides,
    proxy::Proxy,
    verdict::{Fate, Judgement, PortJudgement, as_f64},
};

/// The time for which Kubernetes considers a node that vanished ready, and its pods with it:
/// `--node-monitor-grace-period`, 50 s from Kubernetes 1.32 on, 40 s before.
pub(super) const NODE_GRACE: Fact<Duration> = unsure(Duration::from_secs(50));

/// The time after which agents leave out a node that vanished: unanswered SYNs for 200 ms,
/// questions for 300 ms, and the maps are written. It takes some connections, so it is longer
/// without load.
const NOTICED: Fact<Duration> = unsure(Duration::from_millis(600));

/// A Service before and after some changes.
#[derive(Debug)]
pub struct WhatIf {
    before: Cluster,
    after: Cluster,
    name: ServiceName,
    changes: Vec<Change>,
    proxy: Proxy,
}

/// Requests that are lost, or late, until all parts have reacted to a change.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Loss {
    /// The share of all requests.
    pub share: f64,
    /// The duration, at most.
    pub seconds: f64,
    /// Whether the balancer's times are known.
    pub sure: bool,
    pub why: String,
}

impl Loss {
    fn of(share: f64, time: Fact<Duration>, why: String) -> Self {
        Self { share, seconds: time.value.as_secs_f64(), sure: time.sure, why }
    }

    /// Returns the loss in seconds of all traffic.
    #[must_use]
    pub fn weight(&self) -> f64 {
        self.share * self.seconds
    }
}

/// The cost of a change.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Cost {
    pub lost: Vec<Loss>,
    /// Requests that are answered late: a retransmission of their SYN reaches another pod, a second
    /// after the first.
    pub late: Vec<Loss>,
    /// The shares of open connections that are cut, with the reasons.
    pub cut: Vec<(f64, String)>,
    /// The value of `traffic-policy.io/drain` that makes a change to policy Local lossless, in
    /// seconds; and whether the balancer's times are known.
    pub drain: Option<(f64, bool)>,
    /// Further conditions for a lossless change, or the reasons why there are none.
    pub advice: Vec<String>,
}

impl WhatIf {
    /// Applies changes to a Service on nodes with this proxy. `None`: the Service does not exist.
    ///
    /// # Errors
    /// A change cannot be applied, because its nodes or pods do not exist.
    pub fn new(
        cluster: &Cluster,
        name: &ServiceName,
        changes: &[Change],
        proxy: Proxy,
    ) -> Result<Option<Self>, ChangeError> {
        let Some(mut objects) = Objects::of(cluster, name) else { return Ok(None) };
        if proxy.is_kube_proxy() {
            objects.forget_annotations();
        }
        let before = objects.cluster();
        for change in changes {
            objects.make(change)?;
        }
        if proxy.is_kube_proxy() {
            objects.forget_annotations();
        }
        let after = objects.cluster();
        Ok(Some(Self { before, after, name: name.clone(), changes: changes.to_vec(), proxy }))
    }

    /// Returns the judges before and after.
    #[must_use]
    pub fn judges(&self, named: Option<&'static Balancer>, overrides: &Overrides) -> [Judge<'_>; 2] {
        [&self.before, &self.after].map(|cluster| Judge::new(cluster, named, overrides.clone()))
    }

    #[must_use]
    pub fn name(&self) -> &ServiceName {
        &self.name
    }

    /// Returns the cost of the change for the first of the Service's ports.
    #[must_use]
    pub fn cost<'a>(
        &self,
        before: &(&Judge<'a>, &Judgement<'a>),
        after: &(&Judge<'a>, &Judgement<'a>),
    ) -> Cost {
        let (Some(old), Some(new)) = (before.1.ports.first(), after.1.ports.first()) else {
            return Cost::default();
        };
        let between = Between {
            old: by_node(before.0, old),
            new: by_node(after.0, new),
            judgement: before.1,
            after: after.1,
            port: old,
            changes: &self.changes,
            proxy: self.proxy,
        };
        let mut cost = Cost::default();
        between.vanished(&mut cost);
        between.switched(&mut cost);
        between.went_unhealthy(&mut cost);
        cost
    }
}

/// A node before or after.
#[derive(Clone, Copy, Debug)]
struct Seen {
    takes: bool,
    share: f64,
    fate: Fate,
    pods: usize,
}

fn by_node<'a>(judge: &Judge<'a>, port: &PortJudgement<'a>) -> BTreeMap<&'a str, Seen> {
    let mut seen = BTreeMap::new();
    for row in &port.rows {
        let each =
            Seen { takes: row.takes, share: row.share / as_f64(row.count), fate: row.fate, pods: row.pods };
        match row.who {
            Who::Node(name) => _ = seen.insert(name, each),
            Who::Others(_) => {
                seen.extend(judge.names(port, row, row.count).into_iter().map(|name| (name, each)));
            }
        }
    }
    seen
}

/// The inputs of the comparison.
struct Between<'b, 'a> {
    old: BTreeMap<&'a str, Seen>,
    new: BTreeMap<&'a str, Seen>,
    judgement: &'b Judgement<'a>,
    after: &'b Judgement<'a>,
    port: &'b PortJudgement<'a>,
    changes: &'b [Change],
    proxy: Proxy,
}

impl Between<'_, '_> {
    fn balancer(&self) -> &Balancer {
        &self.judgement.balancer
    }

    fn gone(&self) -> impl Iterator<Item = &str> {
        self.changes.iter().filter_map(|change| match change {
            Change::Node(name, NodeChange::Gone) => Some(name.as_str()),
            _ => None,
        })
    }

    /// Adds the cost of nodes that vanished without notice.
    fn vanished(&self, cost: &mut Cost) {
        let notices = self.balancer().notices_silence(self.judgement.policy);
        for name in self.gone() {
            let sent = self.old.get(name).map_or(0.0, |seen| seen.share);
            if sent > 0.0 {
                cost.lose(
                    sent,
                    notices,
                    format!("requests that are sent to {name} until the balancer gives it up"),
                );
                if !self.judgement.outlives_nodes() {
                    cost.cut.push((sent, format!("connections by {name}")));
                }
            }
            // Other nodes keep choosing its pods until their agents leave it out or, with
            // kube-proxy, until Kubernetes considers it lost.
            let pods: f64 =
                self.port.pods.iter().filter(|pod| pod.node == Some(name)).map(|pod| pod.share).sum();
            let own = match self.old.get(name).map(|seen| (seen.share, seen.fate)) {
                Some((share, Fate::Served { here, of })) => share * as_f64(here) / as_f64(of.max(1)),
                _ => 0.0,
            };
            if own > 0.0 && self.judgement.outlives_nodes() {
                cost.cut.push((own, format!("connections by {name} to its own pods")));
            }
            let others = pods - own;
            if others > 1e-9 {
                match self.agents_leave_out(name) {
                    Ok(()) => cost.late.push(Loss::of(
                        others,
                        NOTICED,
                        format!("connections that other nodes forward to its pods until their agents leave {name} out: a second SYN reaches another pod"),
                    )),
                    Err(why) => cost.lose(
                        others,
                        NODE_GRACE,
                        format!(
                            "requests that other nodes forward to its pods until Kubernetes takes {name} for lost{why}"
                        ),
                    ),
                }
                cost.cut.push((others, format!("connections by other nodes to pods of {name}")));
            }
        }
    }

    /// Whether the agents of other nodes leave out a node that vanished, as soon as connections to
    /// its pods are not answered; else the reason why not, for the end of a sentence.
    fn agents_leave_out(&self, name: &str) -> Result<(), &'static str> {
        let silence = self.proxy.silence();
        if silence.suspect_syns == 0 {
            return Err("");
        }
        if self.port.keys.iter().any(|key| key.protocol != Protocol::Tcp) {
            return Err(": only TCP raises a suspicion, that of other Services too");
        }
        let hosts: BTreeSet<&str> = self.port.pods.iter().filter_map(|pod| pod.node).collect();
        let gone: Vec<_> = self.gone().filter(|node| hosts.contains(node)).collect();
        if hosts.iter().all(|node| gone.contains(node)) {
            return Err(": there is no pod elsewhere");
        }
        // A node without pods counts itself besides: it may leave out one more.
        let most = hosts.len() * usize::from(silence.max_left_out) / 100;
        if gone.iter().position(|node| *node == name).is_none_or(|place| place >= most) {
            return Err(": more nodes are gone than agents leave out (--max-left-out)");
        }
        Ok(())
    }

    /// Adds the cost of a change from Cluster to Local.
    fn switched(&self, cost: &mut Cost) {
        if (self.judgement.policy, self.after.policy) != (Policy::Cluster, Policy::Local) {
            return;
        }
        if self.after.service.external_fallback {
            cost.advice.push(
                "no drain is needed: the annotation traffic-policy.io/external-fallback lets nodes without a pod go on forwarding"
                    .to_owned(),
            );
            return;
        }
        let share = self.newly_unhealthy(|seen| seen.fate == Fate::Dropped);
        let balancer = self.balancer();
        let asks_traffic = balancer.local.ask.value == Ask::TrafficPort
            || balancer.local.ask.value == Ask::ServiceHealth && health_port(self.after.service).is_none();
        if asks_traffic {
            if share > 0.0 {
                cost.lose(
                    share,
                    balancer.notices_silence(Policy::Local),
                    "requests that are sent to nodes without a pod until the balancer's check of the traffic port has failed"
                        .to_owned(),
                );
                cost.advice.push(
                    "no drain makes this lossless: the traffic port answers as long as it lasts, so the balancer notices only \
                     afterwards. Let it ask the healthCheckNodePort; the annotation traffic-policy.io/health-check-node-port gives a Service of \
                     type NodePort one"
                        .to_owned(),
                );
            }
            return;
        }
        let needed = balancer.drain();
        // kube-proxy has none.
        let has_drain = !self.proxy.is_kube_proxy();
        cost.drain = has_drain.then_some((needed.value.as_secs_f64(), needed.sure));
        let drain = self.after.service.drain.unwrap_or(DEFAULT_DRAIN);
        if let Some(rest) = needed.value.checked_sub(drain).filter(|rest| !rest.is_zero())
            && share > 0.0
        {
            cost.lose(
                share,
                Fact { value: rest, sure: needed.sure },
                "requests that are sent to nodes without a pod after their drain is over, until the balancer has given them up"
                    .to_owned(),
            );
        }
        if !has_drain {
            return;
        }
        cost.advice.push(
            "kube-proxy has no drain: with it the whole time is lost, by the share of the nodes without a pod".to_owned(),
        );
    }

    /// Adds the cost of nodes that turn unhealthy because their last pod goes, under policy Local.
    fn went_unhealthy(&self, cost: &mut Cost) {
        let both_local = (self.judgement.policy, self.after.policy) == (Policy::Local, Policy::Local);
        let share = self.newly_unhealthy(|_| true);
        let go_on = self.judgement.outlives_nodes() && self.after.outlives_nodes();
        if share > 0.0 && self.balancer().cuts.value && !go_on {
            cost.cut.push((
                share,
                format!("connections by nodes that turn unhealthy: {} cuts them", self.balancer().name),
            ));
        }
        // With the fallback, requests that still arrive are forwarded.
        if !both_local || self.after.service.external_fallback {
            return;
        }
        let emptied =
            self.newly_unhealthy(|seen| !matches!(seen.fate, Fate::Served { .. }) || seen.pods == 0);
        if emptied == 0.0 {
            return;
        }
        let asks_traffic = self.balancer().local.ask.value == Ask::TrafficPort;
        let balancer = self.balancer();
        let notices = if asks_traffic {
            balancer.notices_silence(Policy::Local)
        } else {
            balancer.notices_refusal(Policy::Local)
        };
        cost.lose(
            emptied,
            notices,
            "requests to a node whose last pod goes, if that pod stops at once, until the balancer gives the node up".to_owned(),
        );
        let seconds = notices.value.as_secs_f64();
        cost.advice.push(if balancer.local.ask.value == Ask::Nothing {
            format!(
                "{} announces a node as long as an endpoint there is ready or serving, a terminating one too, so requests come until it stops: no \
                 time of grace makes this lossless; keep a second pod on the node, or move pods one node at a time",
                balancer.name
            )
        } else if asks_traffic {
            "the check of the traffic port fails only when requests do: no time of grace makes this lossless".to_owned()
        } else {
            format!(
                "nothing of that is lost if a pod goes on serving for {seconds:.0} s after its deletion (a preStop hook that sleeps, within \
                 terminationGracePeriodSeconds): the health port says 503 at once, and what still comes is served"
            )
        });
    }

    /// Returns the share of nodes, except those that vanished, that had traffic and get none now.
    fn newly_unhealthy(&self, which: impl Fn(&Seen) -> bool) -> f64 {
        let stays =
            self.old.iter().filter(|(name, seen)| seen.takes && self.gone().all(|gone| gone != **name));
        stays
            .filter_map(|(name, old)| {
                let new = self.new.get(name)?;
                (!new.takes && which(new)).then_some(old.share)
            })
            .sum()
    }
}

impl Cost {
    fn lose(&mut self, share: f64, time: Fact<Duration>, why: String) {
        self.lost.push(Loss::of(share, time, why));
    }

    /// Returns the total loss in seconds of all traffic.
    #[must_use]
    pub fn weight(&self) -> f64 {
        self.lost.iter().map(Loss::weight).sum()
    }
}
