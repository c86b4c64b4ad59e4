//! `--announce-opening`: the Leases by which a node takes part in direct forwarding.
//!
//! There are two of each node. Every node watches the first one, which says whether the node opens
//! packets: it is written only when that changes, since with N nodes each write is N events. The
//! second one is renewed while the agent runs, and nobody watches it: the nodes before this one, in
//! the ring of all names, look at it now and then ([`neighbours`]), and change the first one when
//! it is not renewed.

mod lease;
mod neighbours;
mod withdrawal;

use std::{collections::BTreeSet, net::IpAddr, time::Duration};

use kube::Client;
use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until},
};

pub use self::withdrawal::{WithdrawError, Withdrawal, try_opening};
use self::{lease::Leases, neighbours::Neighbours};
use super::{reason, watch::OwnNode};
use crate::{
    model::{DispatchChoice, object::DirectNode},
    source::chance::random,
};

/// The selector of the Leases that are watched.
pub(super) const SELECTOR: &str = crate::source::convert::DIRECT_LABEL;
/// [`Opening::period`] of agents.
const PERIOD: Duration = Duration::from_secs(20);
/// The writes a second that all nodes make together at most.
const WRITES_PER_SECOND: u32 = 25;
/// The number of periods after which a Lease that was not renewed counts no more.
const PERIODS: u32 = 4;
/// The reason for which nothing is written while this node's Node object is gone.
const NO_NODE: &str = "its Node object is gone, and its Leases with it, until there is one again";
/// The shortest and longest pause after a failure.
const PAUSES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];

/// The part that this node takes in direct forwarding.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DirectPart {
    /// The addresses that packets of this node may have as their source.
    pub addresses: BTreeSet<IpAddr>,
    /// The MAC addresses of its devices, from which it may send packets as they are.
    pub macs: BTreeSet<[u8; 6]>,
    /// Its settings that decide which endpoint it finds: `NodeInput::choice`.
    pub choice: String,
    /// Its `--dispatch`, from which follows what it opens and prefers.
    pub dispatch: DispatchChoice,
    /// The reason for which this node opens no packets; `None`: it does.
    pub why_not: Option<String>,
    /// Whether replies of SCTP can go back through the node in front, as those of TCP and UDP.
    pub tunnels_sctp: bool,
}

impl DirectPart {
    #[must_use]
    pub fn opens(&self) -> bool {
        self.why_not.is_none()
    }

    /// Whether a Lease says the same.
    #[must_use]
    pub fn is_told_by(&self, lease: &DirectNode) -> bool {
        lease.opens == self.opens()
            && (!self.opens() || self.is_opened_by(lease))
            && !lease.says_more
            && lease.choice.as_ref() == Some(&self.choice)
            && lease.macs.iter().copied().collect::<BTreeSet<_>>() == self.macs
            && lease.addresses.iter().copied().collect::<BTreeSet<_>>() == self.addresses
    }

    fn is_opened_by(&self, lease: &DirectNode) -> bool {
        lease.sctp
            && lease.tunnels
            && lease.tunnels_sctp == self.tunnels_sctp
            && lease.dispatches == self.dispatch.opened()
    }

    /// Whether another part needs no other Lease.
    fn is_same(&self, other: &Self) -> bool {
        self.opens() == other.opens()
            && self.dispatch.opened() == other.dispatch.opened()
            && (&self.macs, &self.choice) == (&other.macs, &other.choice)
            && self.tunnels_sctp == other.tunnels_sctp
            && self.addresses == other.addresses
    }
}

/// The facts that the controller tells the task which writes the Leases.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DirectNews {
    /// The part of this node; `None`: not known yet, so that an earlier agent's Lease stays.
    pub own: Option<DirectPart>,
    /// This node's Lease as it was last seen.
    pub seen: Option<DirectNode>,
    /// The nodes whose Leases this node looks at.
    pub neighbours: Vec<String>,
    /// The number of nodes that take part.
    pub nodes: usize,
}

/// The state of this node's Lease, as the task tells the controller.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DirectTold {
    /// The part that the API server holds.
    pub held: Option<DirectPart>,
    /// The reason for which the Leases are not up to date.
    pub trouble: Option<String>,
}

/// The place of the Leases, and the channels of this node's part.
#[derive(Clone, Debug)]
pub struct Opening {
    pub namespace: String,
    /// The least time between two renewals; in large clusters it is longer.
    pub period: Duration,
    pub news: watch::Sender<DirectNews>,
    pub told: watch::Sender<DirectTold>,
}

impl Opening {
    #[must_use]
    pub fn new(namespace: String) -> Self {
        Self {
            namespace,
            period: PERIOD,
            news: watch::Sender::new(DirectNews::default()),
            told: watch::Sender::new(DirectTold::default()),
        }
    }
}

/// Writes and renews this node's Leases, and looks at its neighbours'. Never returns: the end of a
/// task is a failure. `own_node`: the Node to which the Leases belong, so that they go with it.
pub(super) async fn run(
    client: Client,
    node_name: String,
    mut own_node: watch::Receiver<OwnNode>,
    opening: Opening,
) {
    let Opening { namespace, period, news, told } = opening;
    let mut receiver = news.subscribe();
    let mut task = Task {
        leases: Leases::new(client, &namespace),
        node_name,
        period,
        owner: None,
        written: None,
        seen: None,
        neighbours: Neighbours::default(),
    };
    let mut renewal = Instant::now();
    let mut pause = PAUSES[0];
    let mut said = String::new();
    loop {
        let known = receiver.borrow_and_update().clone();
        let node = own_node.borrow_and_update().clone();
        if task.follow(&node) {
            renewal = Instant::now();
        }
        let writes = task.may_write(&node);
        match task.step(&known, writes, &mut renewal).await {
            Ok(()) => {
                pause = PAUSES[0];
                said.clear();
                let trouble = (node == OwnNode::Missing && !writes).then(|| NO_NODE.to_owned());
                told.send_if_modified(|told| {
                    let held = task.written.as_ref().map(|(part, _)| part.clone());
                    let new = DirectTold { held, trouble };
                    let differs = *told != new;
                    *told = new;
                    differs
                });
                tokio::select! {
                    () = changed(&mut receiver) => {}
                    () = node_changed(&mut own_node) => {}
                    () = sleep_until(renewal), if known.own.is_some() && writes => {}
                }
            }
            Err(error) => {
                task.neighbours.forget();
                // Log each reason once.
                let reason = reason::of(&error);
                if reason != said {
                    tracing::warn!(
                        "the Lease {namespace}/{}, by which other nodes learn whether this one opens packets that they forward \
                         directly, is not up to date, trying again: {reason} (its role needs the verbs list, watch, create, patch \
                         and delete on leases there)",
                        lease::name(&task.node_name)
                    );
                    told.send_modify(|told| told.trouble = Some(reason.clone()));
                    said = reason;
                }
                tokio::select! {
                    () = changed(&mut receiver) => {}
                    () = node_changed(&mut own_node) => {}
                    // Between attempts, so that a server in trouble is not asked all the time.
                    () = sleep(pause) => {}
                }
                pause = (pause * 2).min(PAUSES[1]);
            }
        }
    }
}

async fn changed(news: &mut watch::Receiver<DirectNews>) {
    // This task holds a sender, too.
    let _ = news.changed().await;
}

async fn node_changed(node: &mut watch::Receiver<OwnNode>) {
    // The watch of Nodes is gone when the agent stops, and this task with it.
    if node.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}

struct Task {
    leases: Leases,
    node_name: String,
    period: Duration,
    /// The UID of this node's Node: with it, the Leases go when the Node goes.
    owner: Option<Box<str>>,
    /// The part that the API server holds, and the owner, as far as this task knows.
    written: Option<(DirectPart, Option<Box<str>>)>,
    /// This node's Lease as it was last seen.
    seen: Option<DirectNode>,
    neighbours: Neighbours,
}

impl Task {
    /// Whether the Leases are to be written. They are not before this node's Node was looked for,
    /// nor while one that was there is gone: Kubernetes has removed them with it, and would again.
    fn may_write(&self, node: &OwnNode) -> bool {
        match node {
            OwnNode::Unknown => false,
            OwnNode::Missing => self.owner.is_none(),
            OwnNode::Uid(_) => true,
        }
    }

    /// Follows this node's Node. Returns whether it is another one than before: Leases that name
    /// the former are about to be removed.
    fn follow(&mut self, node: &OwnNode) -> bool {
        let OwnNode::Uid(uid) = node else { return false };
        self.owner.replace(uid.clone()).is_none_or(|former| former != *uid)
    }

    /// Brings both Leases up to date, and looks at those of the neighbours if it is time.
    async fn step(
        &mut self,
        known: &DirectNews,
        writes: bool,
        renewal: &mut Instant,
    ) -> Result<(), kube::Error> {
        if !writes {
            self.written = None;
            return Ok(());
        }
        let Some(own) = &known.own else { return Ok(()) };
        let due = Instant::now() >= *renewal;
        let period = period(self.period, known.nodes);
        if due {
            // First: a neighbour may look at it as soon as this node opens packets.
            self.leases.renew(&self.node_name, self.owner.as_deref(), period * PERIODS).await?;
        }
        if self.must_write(own, known.seen.as_ref()) {
            self.leases.tell(&self.node_name, self.owner.as_deref(), own).await?;
            match &own.why_not {
                None => tracing::info!(
                    "the other nodes are told that this one opens packets that they forward directly"
                ),
                Some(why) => {
                    tracing::info!("the other nodes are told to forward nothing directly to this one: {why}");
                }
            }
            self.written = Some((own.clone(), self.owner.clone()));
        }
        if due {
            self.neighbours.look(&self.leases, &known.neighbours, period * PERIODS).await?;
            // Between 0.9 and 1.1 of the period, so that the nodes do not all write at once.
            *renewal = Instant::now() + period.mul_f64(0.9 + (random() % 200) as f64 / 1000.0);
        }
        Ok(())
    }

    /// Whether the Lease says something else, or belongs to another Node object: this node's part
    /// or Node is another one, or somebody else has changed or removed the Lease since.
    fn must_write(&mut self, own: &DirectPart, seen: Option<&DirectNode>) -> bool {
        let is_owned = |seen: &DirectNode| self.owner.is_none() || seen.owner == self.owner;
        let same = seen.is_some_and(|seen| own.is_told_by(seen) && is_owned(seen));
        let news = self.seen.as_ref() != seen;
        self.seen = seen.cloned();
        if same {
            self.written = Some((own.clone(), self.owner.clone()));
        } else if news {
            self.written = None;
        }
        let written = self.written.as_ref();
        written.is_none_or(|(written, owner)| !written.is_same(own) || *owner != self.owner)
    }
}

/// Returns the time between two renewals.
fn period(least: Duration, nodes: usize) -> Duration {
    let nodes = u32::try_from(nodes).unwrap_or(u32::MAX);
    least.max(Duration::from_secs(1) * nodes / WRITES_PER_SECOND)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{model::Dispatch, source::convert};

    /// A word that a later agent of this node has left in its Lease: the other nodes that know it
    /// would go on sending what this one does not open.
    #[test]
    fn a_lease_with_a_word_that_is_not_known_says_something_else() {
        let part = DirectPart { addresses: ["192.0.2.1".parse().unwrap()].into(), ..DirectPart::default() };
        let is_told = |part: &DirectPart, annotation: &str, value: &str| {
            let mut lease = json!({
                "metadata": {
                    "namespace": "n", "name": "traffic-policy-opens-here",
                    "labels": { "traffic-policy.io/opens": "ipip" },
                    "annotations": {
                        "traffic-policy.io/opens-from": "192.0.2.1",
                        "traffic-policy.io/opens-dispatch": "ipip,udp,l2",
                        "traffic-policy.io/opens-protocols": "tcp,udp,sctp",
                        "traffic-policy.io/opens-l2-by": "",
                        "traffic-policy.io/opens-reply": "tunnel",
                    },
                },
                "spec": { "holderIdentity": "here" },
            });
            lease["metadata"]["annotations"][format!("traffic-policy.io/{annotation}")] = value.into();
            let lease = serde_json::from_value(lease).unwrap();
            part.is_told_by(&convert::direct(&lease).unwrap().unwrap())
        };
        let is_told_with = |annotation: &str, value: &str| is_told(&part, annotation, value);
        assert!(is_told_with("opens-dispatch", "ipip,udp,l2"));
        assert!(!is_told_with("opens-dispatch", "ipip,udp,l2,gre"));
        assert!(!is_told_with("opens-protocols", "tcp,udp,sctp,dccp"));
        assert!(!is_told_with("opens-reply", "tunnel,other"));
        assert!(!is_told_with("opens-reply", "tunnel,tunnel-sctp"));
        let part = DirectPart { tunnels_sctp: true, ..part };
        assert!(is_told(&part, "opens-reply", "tunnel,tunnel-sctp"));
        assert!(!is_told(&part, "opens-reply", "tunnel"));
    }

    fn read(opens: &str, annotations: &serde_json::Value) -> DirectNode {
        let lease = json!({
            "metadata": {
                "namespace": "n", "name": "traffic-policy-opens-here",
                "labels": { "traffic-policy.io/opens": opens }, "annotations": annotations,
            },
            "spec": { "holderIdentity": "here" },
        });
        convert::direct(&serde_json::from_value(lease).unwrap()).unwrap().unwrap()
    }

    /// A node whose devices have lost their addresses would otherwise go on getting packets: a
    /// Lease that cannot be read changes nothing.
    #[test]
    fn a_node_without_addresses_opens_nothing() {
        let read =
            read("none", &json!({ "traffic-policy.io/opens-from": "", "traffic-policy.io/opens-l2-at": "" }));
        assert_eq!((read.opens, read.addresses, read.macs), (false, Vec::new(), Vec::new()));
    }

    /// Connections go on to the former, while another node has said it of the latter.
    #[test]
    fn a_node_that_opens_nothing_says_it_itself_or_not() {
        let from = "192.0.2.1";
        let itself =
            json!({ "traffic-policy.io/opens-from": from, "traffic-policy.io/opens-dispatch": "udp" });
        assert_eq!(read("none", &itself).dispatches, [Dispatch::Udp]);
        let of_another = json!({ "traffic-policy.io/opens-from": from });
        assert_eq!(read("none", &of_another).dispatches, []);
        assert_eq!(read("ipip", &of_another).dispatches, [Dispatch::Ipip], "an earlier agent");
    }

    #[test]
    fn all_nodes_together_write_no_more_than_the_limit() {
        let of = |nodes| period(PERIOD, nodes).as_secs();
        assert_eq!([of(3), of(500), of(1000), of(5000)], [20, 20, 40, 200]);
    }
}
