//! Events that happen to a cluster, each at its time.

use std::{fmt, str::FromStr, time::Duration};

use traffic_policy_cluster::model::{Forwarding, Policy, parse_duration};

use crate::change::{Change, NodeChange};

/// An event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A change as in `lb what-if`; pods that are moved or added take their time.
    Change(Change),
    /// A rollout: every pod is replaced, one after the other; the new one is ready before the old
    /// one is deleted.
    Rollout,
    /// A crash of a node's agent: what it has written stays in effect. It is restarted.
    Crash(String),
    /// A node is there, and reaches neither another node nor the API; the balancer reaches it.
    CutOff(String),
    /// A node that was gone or cut off is there again, with its pods.
    Back(String),
    /// A node's agent has notice that the node will go.
    Notice(String),
    /// An outage of the API for this time, during which changes are not propagated.
    Outage(Duration),
    /// A step in the life of a pod, at a measured time.
    Pod(String, PodEvent),
}

/// A change of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodEvent {
    /// The objects report a new pod on this node as ready.
    Ready(String),
    /// The objects report the pod as terminating; it still serves.
    Terminating,
    /// The pod accepts no more connections.
    Stopped,
    /// The objects no longer contain the pod.
    Removed,
}

/// An event and its time since the start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timed {
    pub at: Duration,
    pub event: Event,
}

/// The syntax of events, for messages.
const FORMS: &str = "policy=Local|Cluster, drain=TIME, forwarding=snat|direct|tunnel, \
                     algorithm=random|maglev, node=NAME=gone|back|cut-off|notice|drained|added, pod=NAME, \
                     scale=N, spread, rollout, crash=NODE or outage=TIME";

const NODE_FORM: &str = "node=NAME=gone, back, cut-off, notice, drained or added";

/// Parses a time and an event: `5s policy=Local`, `10s node=n3=gone`. Events are the flags of `lb
/// what-if` without their dashes, and `node=NAME=back|cut-off|notice`, `rollout`, `crash=NODE`,
/// `outage=TIME`.
impl FromStr for Timed {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let (time, event) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        let at = parse_duration(time)
            .ok_or_else(|| format!("`{time}` is not a time: an event is written as '5s policy=Local'"))?;
        if event.trim().is_empty() {
            return Err(format!("`{text}` does not say what happens: {FORMS}"));
        }
        Ok(Self { at, event: event.trim().parse()? })
    }
}

impl FromStr for Event {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (key, value) = match text.split_once('=') {
            Some((key, value)) => (key, Some(value.trim())),
            None => (text, None),
        };
        let named = |what: &str| match value {
            Some(value) if !value.is_empty() && !value.contains(char::is_whitespace) => Ok(value.to_owned()),
            _ => Err(format!("`{text}` does not name a {what}: {key}=NAME")),
        };
        let time = || {
            let value = value.unwrap_or("");
            parse_duration(value).ok_or_else(|| format!("`{value}` is not a time: write {key}=30s"))
        };
        match key {
            "policy" => match value.unwrap_or("").to_ascii_lowercase().as_str() {
                "local" => Ok(Self::Change(Change::Policy(Policy::Local))),
                "cluster" => Ok(Self::Change(Change::Policy(Policy::Cluster))),
                other => Err(format!("`{other}` is not a policy: Local or Cluster")),
            },
            "drain" => Ok(Self::Change(Change::Drain(time()?))),
            "forwarding" => Ok(Self::Change(Change::Forwarding(
                Forwarding::parse(value.unwrap_or(""))
                    .ok_or_else(|| format!("`{text}` is not forwarding=snat, direct or tunnel"))?,
            ))),
            "algorithm" => Ok(Self::Change(Change::Algorithm(
                value.unwrap_or("").parse().map_err(|error| format!("`{text}`: {error}"))?,
            ))),
            "node" => {
                let (name, change) = value
                    .and_then(|value| value.split_once('='))
                    .filter(|(name, _)| !name.is_empty())
                    .ok_or_else(|| format!("`{text}` is not {NODE_FORM}"))?;
                let name = name.to_owned();
                Ok(match change {
                    "back" => Self::Back(name),
                    "cut-off" => Self::CutOff(name),
                    "notice" => Self::Notice(name),
                    change => {
                        let change = change.parse().map_err(|_| format!("`{change}` is not {NODE_FORM}"))?;
                        Self::Change(Change::Node(name, change))
                    }
                })
            }
            "pod" => Ok(Self::Change(Change::PodDeleted(named("pod")?))),
            "scale" => {
                let count: u16 = value
                    .and_then(|value| value.parse().ok())
                    .ok_or_else(|| format!("`{text}` is not scale=N, a number of pods"))?;
                Ok(Self::Change(Change::Scale(count.into())))
            }
            "spread" if value.is_none() => Ok(Self::Change(Change::Spread)),
            "rollout" if value.is_none() => Ok(Self::Rollout),
            "crash" => Ok(Self::Crash(named("node")?)),
            "outage" => Ok(Self::Outage(time()?)),
            "spread" | "rollout" => Err(format!("`{text}`: {key} takes no value")),
            _ => Err(format!("`{text}` is no event: {FORMS}")),
        }
    }
}

/// Formats a sentence for the time line.
impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Change(Change::Policy(policy)) => write!(f, "externalTrafficPolicy {policy:?}"),
            Self::Change(Change::Drain(drain)) => {
                write!(f, "annotation traffic-policy.io/drain: {}s", drain.as_secs_f64())
            }
            Self::Change(Change::Forwarding(way)) => {
                write!(f, "annotation traffic-policy.io/forwarding: {}", way.name())
            }
            Self::Change(Change::Algorithm(algorithm)) => {
                write!(f, "annotation traffic-policy.io/algorithm: {algorithm}")
            }
            Self::Change(Change::Node(_, NodeChange::Gone)) => f.write_str("gone without a word"),
            Self::Change(Change::Node(_, NodeChange::Drained)) => {
                f.write_str("drained, its pods are evicted")
            }
            Self::Change(Change::Node(_, NodeChange::Added)) => f.write_str("a new node"),
            Self::Change(Change::PodDeleted(pod)) => write!(f, "pod {pod} is deleted"),
            Self::Change(Change::Scale(count)) => write!(f, "scaled to {count} pods"),
            Self::Change(Change::Spread) => f.write_str("pods are spread evenly"),
            Self::Rollout => f.write_str("rolling update begins"),
            Self::Crash(_) => f.write_str("the agent crashes; what it has written goes on"),
            Self::CutOff(_) => f.write_str("reaches neither the other nodes nor the API"),
            Self::Back(_) => f.write_str("is there again"),
            Self::Notice(_) => f.write_str("has notice that it will go"),
            Self::Outage(time) => write!(f, "the API is away for {}s", time.as_secs_f64()),
            Self::Pod(pod, PodEvent::Ready(_)) => write!(f, "pod {pod} is ready"),
            Self::Pod(pod, PodEvent::Terminating) => write!(f, "pod {pod} terminates"),
            Self::Pod(pod, PodEvent::Stopped) => write!(f, "pod {pod} has stopped"),
            Self::Pod(pod, PodEvent::Removed) => write!(f, "pod {pod} is no endpoint any more"),
        }
    }
}

impl Event {
    /// Returns the node that the event concerns.
    pub(super) fn node(&self) -> Option<&str> {
        match self {
            Self::Change(Change::Node(node, _))
            | Self::CutOff(node)
            | Self::Back(node)
            | Self::Notice(node)
            | Self::Crash(node)
            | Self::Pod(_, PodEvent::Ready(node)) => Some(node),
            _ => None,
        }
    }

    /// Whether the event needs the API server.
    pub(super) const fn needs_api(&self) -> bool {
        match self {
            Self::Change(Change::Node(_, NodeChange::Gone))
            | Self::CutOff(_)
            | Self::Back(_)
            | Self::Notice(_)
            | Self::Crash(_)
            | Self::Outage(_) => false,
            Self::Pod(_, step) => !matches!(step, PodEvent::Stopped),
            _ => true,
        }
    }
}
