//! Probes of other nodes: where nobody has chosen the dispatch (`--dispatch auto`), this node asks
//! what arrives there, and the answers choose it.

mod former;
mod questions;
mod words;

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::Path,
    sync::Arc,
    time::Duration,
};

use tokio::{
    task::JoinSet,
    time::{Instant, sleep_until},
};
use traffic_policy_cluster::model::{DirectTarget, DispatchChoice, Index, Way, Ways};

use self::words::{InWords, family, report};
use super::{Settings, service_sync::ServiceSync};

/// The time from when the other nodes are told this one's addresses until they are asked: they open
/// packets of nodes that they know alone.
const HEARD: Duration = Duration::from_secs(2);
/// The least time between two looks at the endpoints.
const FRESH: Duration = Duration::from_secs(1);
/// The time after which a node is asked again that has answered some question.
const AGAIN: Duration = Duration::from_secs(600);
/// The same for one of whose answers some are missing for the first time.
const CONFIRM: Duration = Duration::from_secs(3);
/// The same for one that has answered none.
const SILENT: Duration = Duration::from_secs(30);
/// A quarter of the time until a Service that has changed counts as known to all nodes: see
/// [`Index::age_services`].
const AGE: Duration = Duration::from_secs(20);
/// The most nodes that are asked at once, each family counted by itself.
const AT_ONCE: usize = 16;

/// A node and an address family.
type Other = (String, bool);
/// The MAC addresses of other nodes, and whether each takes packets that are sent to it as they
/// are.
pub(super) type Macs = BTreeMap<[u8; 6], bool>;
/// The way to ask these nodes: a test answers itself.
pub(super) type Ask = Arc<dyn Fn(&[Other], &[DirectTarget], &Macs) -> io::Result<Vec<Way>> + Send + Sync>;
/// The answers of these nodes.
pub(super) type Answers = (Vec<Other>, io::Result<Vec<Way>>);

/// An occurrence.
#[derive(Debug)]
pub(super) enum Happening {
    /// Some node is to be asked, or endpoints are to be looked at.
    Due,
    Answered(Answers),
    /// Services are older by [`AGE`].
    Aged,
}

/// The state of the questions to one node.
#[derive(Clone, Copy, Debug)]
struct Asked {
    /// The destination of its questions; `None`: there is no endpoint by which it can be asked.
    target: Option<DirectTarget>,
    due: Instant,
    /// Whether the last answers were fewer than what is taken to get there: one may have been lost.
    doubted: bool,
}

/// The ways to the other nodes, and the questions by which they are found out.
pub(super) struct DirectWays {
    /// `None`: nobody is asked.
    by: Option<Ask>,
    nodes: BTreeMap<Other, Asked>,
    ways: Ways,
    asking: JoinSet<Answers>,
    /// The time since which nodes may be asked; `None`: they may not know this one.
    since: Option<Instant>,
    /// Whether endpoints may have changed since they were looked at, and when that was.
    is_stale: bool,
    looked: Option<Instant>,
    /// The time at which the first node is due.
    next: Option<Instant>,
    /// The time at which Services are next older by [`AGE`]; `None`: their age does not count, for
    /// somebody has chosen.
    ages: Option<Instant>,
}

impl DirectWays {
    pub(super) fn new(settings: &Settings) -> Self {
        let is_on = settings.opening.is_some() && settings.dispatch.is_left_to_the_network();
        let mut ways = Ways::default();
        ways.hold([is_on; 2]);
        let pins = settings.dataplane.pins.clone();
        let by = move |others: &[Other], targets: &[DirectTarget], macs: &Macs| {
            questions::ask(others, targets, macs, pins.as_deref())
        };
        Self {
            by: is_on.then(|| Arc::new(by) as Ask),
            ages: (is_on && settings.dispatch == DispatchChoice::Auto).then(|| Instant::now() + AGE),
            nodes: BTreeMap::new(),
            ways,
            asking: JoinSet::new(),
            since: None,
            is_stale: true,
            looked: None,
            next: None,
        }
    }

    /// Goes on with what an earlier agent has found, by its maps.
    pub(super) fn resume(&mut self, pins: Option<&Path>, services: &mut ServiceSync) {
        let mut known = BTreeSet::new();
        match pins.filter(|_| self.by.is_some()).map(former::find) {
            Some(Ok(found)) => {
                self.ways = found.ways;
                self.ways.hold([true; 2]);
                known = found.by_mac;
            }
            Some(Err(error)) => {
                tracing::debug!("no earlier agent has found out what gets to other nodes: {error:#}");
            }
            None => {}
        }
        if self.ages.is_some() {
            services.follow_recent(known);
        }
        services.set_ways(self.ways());
    }

    /// The ways, as far as they are known.
    fn ways(&self) -> Arc<Ways> {
        Arc::new(self.ways.clone())
    }

    /// Notes that endpoints may have changed.
    pub(super) fn endpoints_changed(&mut self) {
        self.is_stale = true;
    }

    /// Notes whether the other nodes know this one.
    pub(super) fn follow(&mut self, is_known: bool, now: Instant) {
        self.since = if is_known { self.since.or(Some(now + HEARD)) } else { None };
    }

    /// Waits for the next occurrence. Cancel-safe.
    pub(super) async fn next(&mut self) -> Happening {
        let due = self.due();
        tokio::select! {
            Some(Ok(answers)) = self.asking.join_next() => Happening::Answered(answers),
            () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => Happening::Due,
            () = sleep_until(self.ages.unwrap_or_else(Instant::now)), if self.ages.is_some() => Happening::Aged,
            else => std::future::pending().await,
        }
    }

    fn due(&self) -> Option<Instant> {
        let since = self.since.filter(|_| self.by.is_some() && self.asking.is_empty())?;
        let look = self.is_stale.then(|| self.looked.map_or(since, |looked| looked + FRESH));
        self.next.into_iter().chain(look).min().map(|due| due.max(since))
    }

    /// Follows an occurrence. Returns whether the maps are to be written.
    pub(super) fn follow_up(&mut self, happening: Happening, services: &mut ServiceSync) -> bool {
        if matches!(happening, Happening::Aged) {
            self.ages = Some(Instant::now() + AGE);
            return services.age();
        }
        let differs = self.take(happening, services.index(), Instant::now());
        if differs {
            services.set_ways(self.ways());
        }
        differs
    }

    /// Judges an occurrence. Returns whether a way is another one.
    fn take(&mut self, happening: Happening, index: &Index, now: Instant) -> bool {
        let differs = self.judge(happening, index, now);
        let asked = self.nodes.values().filter(|asked| asked.target.is_some());
        self.next = asked.map(|asked| asked.due).min();
        differs
    }

    fn judge(&mut self, happening: Happening, index: &Index, now: Instant) -> bool {
        match happening {
            Happening::Due => {
                let is_due = self.is_stale && self.looked.is_none_or(|looked| now >= looked + FRESH);
                let differs = is_due && self.look(index, now);
                self.ask(&index.desired().direct_macs, now);
                differs
            }
            Happening::Aged => false,
            Happening::Answered((others, Ok(ways))) => self.hear(&others, &ways, now),
            Happening::Answered((others, Err(error))) if !questions::are_refused(&error) => {
                tracing::warn!("other nodes cannot be asked what gets there, trying again: {error}");
                let asked = self.nodes.iter_mut().filter(|(other, _)| others.contains(other));
                asked.for_each(|(_, asked)| asked.due = now + SILENT);
                false
            }
            Happening::Answered((_, Err(error))) => {
                tracing::warn!(
                    "other nodes cannot be asked what gets there ({error}), so their Leases alone decide: give CAP_NET_RAW and AF_PACKET, or --dispatch ipip or udp"
                );
                self.by = None;
                self.nodes.clear();
                std::mem::take(&mut self.ways) != Ways::default()
            }
        }
    }

    /// Looks for an endpoint of each node by which it can be asked. Returns whether a way is no
    /// longer known.
    fn look(&mut self, index: &Index, now: Instant) -> bool {
        (self.is_stale, self.looked) = (false, Some(now));
        let mut targets = index.direct_targets();
        let leases: BTreeSet<_> = index.direct_leases().map(|lease| lease.node.as_str()).collect();
        // While no packet is forwarded directly, the first one is to wait for an answer.
        let can_ask = |ipv6| targets.of.keys().any(|other| other.1 == ipv6);
        let held = [false, true].map(|ipv6| can_ask(ipv6) || !targets.is_used[usize::from(ipv6)]);
        let differs = self.ways.hold(held);
        self.nodes.retain(|(node, ipv6), asked| {
            let target = targets.of.remove(&(node.clone(), *ipv6));
            let of = |target: &Option<DirectTarget>| target.map(|target| (target.frontend, target.by_table));
            if target.is_some() && of(&target) != of(&asked.target) {
                // A network may treat it otherwise.
                asked.due = now;
            }
            asked.target = target;
            leases.contains(node.as_str())
        });
        let new = |(other, target)| (other, Asked { target: Some(target), due: now, doubted: false });
        self.nodes.extend(targets.of.into_iter().map(new));
        // Of nodes that cannot be asked it is not known whether that still holds.
        let forgets = self.ways.retain(|node, ipv6| self.nodes.contains_key(&(node.to_owned(), ipv6)));
        forgets || differs
    }

    /// Asks the nodes that are due, in a thread of its own: it waits for answers that are lost.
    fn ask(&mut self, macs: &Macs, now: Instant) {
        let Some(by) = self.by.clone().filter(|_| self.asking.is_empty()) else { return };
        let due = self.nodes.iter().filter(|(_, asked)| asked.due <= now);
        let mut due: Vec<_> =
            due.filter_map(|(other, asked)| Some((asked.due, other, asked.target?))).collect();
        // Those that answer nothing are due often, and must not keep others waiting.
        due.sort_by_key(|(due, ..)| *due);
        due.truncate(AT_ONCE);
        let (others, targets): (Vec<_>, Vec<_>) =
            due.into_iter().map(|(_, other, target)| (other.clone(), target)).unzip();
        if !others.is_empty() {
            let macs = macs.clone();
            self.asking.spawn_blocking(move || {
                let answers = by(&others, &targets, &macs);
                (others, answers)
            });
        }
    }

    /// Takes answers. One that is missing, and was not before, is asked for once more before that
    /// counts. Returns whether a way is another one.
    fn hear(&mut self, others: &[Other], ways: &[Way], now: Instant) -> bool {
        let mut news: BTreeMap<(Way, bool), Vec<&str>> = BTreeMap::new();
        let mut differs = false;
        for ((node, ipv6), way) in others.iter().zip(ways) {
            let Some(asked) = self.nodes.get_mut(&(node.clone(), *ipv6)) else { continue };
            let known = self.ways.known(node, *ipv6);
            let by_mac = asked.target.is_some_and(|target| target.by_table.is_some());
            let expected = known.unwrap_or(Way { by_mac, ..Way::OPEN });
            let is_less = expected.and(*way) != expected;
            if is_less && !asked.doubted {
                (asked.doubted, asked.due) = (true, now + CONFIRM);
                continue;
            }
            asked.doubted = false;
            asked.due = now + if *way == Way::CLOSED { SILENT } else { AGAIN };
            if self.ways.set(node, *ipv6, *way) {
                differs = true;
                if known.unwrap_or(Way::OPEN) != *way {
                    news.entry((*way, *ipv6)).or_default().push(node);
                }
            }
        }
        for ((way, ipv6), nodes) in news {
            report(way, ipv6, &nodes);
        }
        differs
    }

    /// The nodes to which not everything gets, each with what does.
    pub(super) fn lacking(&self) -> BTreeMap<String, String> {
        let mut lacking = BTreeMap::<_, String>::new();
        let ways = self.ways.iter().filter(|(.., way)| !way.is_open());
        let asked = ways.filter(|(node, ipv6, _)| self.nodes.contains_key(&((*node).to_owned(), *ipv6)));
        for (node, ipv6, way) in asked {
            let text = lacking.entry(node.to_owned()).or_default();
            let and = if text.is_empty() { "" } else { "; " };
            *text = format!("{text}{and}{}: {}", family(ipv6), InWords(way));
        }
        lacking
    }
}

#[cfg(test)]
mod tests {
    use traffic_policy_cluster::model::Passing;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Two nodes that are to be asked in IPv4.
    fn ways(now: Instant) -> (DirectWays, [Other; 2]) {
        let others = ["a", "b"].map(|node| (node.to_owned(), false));
        let target = DirectTarget {
            endpoint: "198.51.100.1".parse().unwrap(),
            frontend: "203.0.113.9:80".parse().unwrap(),
            by_table: None,
        };
        let asked = Asked { target: Some(target), due: now, doubted: false };
        let ways = DirectWays {
            by: Some(Arc::new(|_, targets, _| Ok(vec![Way::OPEN; targets.len()]))),
            nodes: others.iter().map(|other| (other.clone(), asked)).collect(),
            ways: Ways::default(),
            asking: JoinSet::new(),
            since: Some(now),
            is_stale: false,
            looked: Some(now),
            next: Some(now),
            ages: None,
        };
        (ways, others)
    }

    /// One lost answer changes nothing; what is more than before counts at once.
    #[test]
    fn what_no_longer_gets_there_is_asked_for_twice() {
        let start = Instant::now();
        let (mut ways, [a, b]) = ways(start);
        let udp = Passing { within_udp: true, ..Passing::NONE };
        let udp = Way { direct: udp, tunnel: udp, by_mac: false };
        assert!(!ways.hear(std::slice::from_ref(&a), &[udp], start));
        assert_eq!((ways.ways.known("a", false), ways.nodes[&a].due), (None, start + CONFIRM));
        assert!(ways.hear(std::slice::from_ref(&a), &[udp], start + CONFIRM));
        assert_eq!((ways.ways.known("a", false), ways.nodes[&a].due), (Some(udp), start + CONFIRM + AGAIN));
        assert_eq!(ways.lacking(), BTreeMap::from([("a".to_owned(), "IPv4: within UDP, not IP".to_owned())]));

        assert!(ways.hear(&[a.clone(), b.clone()], &[Way::OPEN; 2], start));
        assert!(ways.lacking().is_empty());
        let both = [a.clone(), b.clone()];
        assert!(!ways.hear(&both, &[Way::OPEN, Way::CLOSED], start));
        assert!(!ways.hear(&both, &[Way::CLOSED, Way::OPEN], start), "each by itself");
        assert!(ways.hear(std::slice::from_ref(&a), &[Way::CLOSED], start));
        assert_eq!((ways.nodes[&a].due, ways.nodes[&b].due), (start + SILENT, start + AGAIN));

        // So does what no longer gets there by MAC address.
        let by_mac = Way { by_mac: true, ..Way::OPEN };
        assert!(ways.hear(std::slice::from_ref(&b), &[by_mac], start));
        assert!(!ways.hear(std::slice::from_ref(&b), &[Way::OPEN], start));
        assert_eq!((ways.ways.known("b", false), ways.nodes[&b].due), (Some(by_mac), start + CONFIRM));
        assert!(ways.hear(std::slice::from_ref(&b), &[Way::OPEN], start));

        // Nor does the first missing answer count of a node that was never asked before.
        let target = ways.nodes[&b].target.unwrap();
        let target = DirectTarget { by_table: Some(target.frontend), ..target };
        let asked = Asked { target: Some(target), due: start, doubted: false };
        let c = ("c".to_owned(), false);
        ways.nodes.insert(c.clone(), asked);
        assert!(!ways.hear(std::slice::from_ref(&c), &[Way::OPEN], start));
        assert_eq!((ways.ways.known("c", false), ways.nodes[&c].due), (None, start + CONFIRM));
        assert!(ways.hear(std::slice::from_ref(&c), &[Way::OPEN], start));
        assert_eq!((ways.ways.known("c", false), ways.nodes[&c].due), (Some(Way::OPEN), start + AGAIN));
    }

    #[tokio::test]
    async fn nodes_are_asked_once_they_know_this_one() {
        let start = Instant::now();
        let (mut ways, [a, b]) = ways(start);
        ways.follow(false, start);
        assert_eq!(ways.due(), None, "this node is not known");
        ways.follow(true, start);
        ways.follow(true, start + SECOND);
        assert_eq!(ways.due(), Some(start + HEARD));
        let index = Index::default();
        ways.is_stale = false;
        assert!(!ways.take(Happening::Due, &index, start + HEARD));
        assert_eq!(ways.due(), None, "the answers are awaited");
        let Happening::Answered(answers) = ways.next().await else { panic!("no answers") };
        assert_eq!(answers.0, [a.clone(), b]);
        assert!(ways.take(Happening::Answered(answers), &index, start + HEARD));
        assert_eq!(ways.due(), Some(start + HEARD + AGAIN));

        // Neither has a Lease any longer.
        assert!(ways.look(&index, start + HEARD));
        assert!(ways.nodes.is_empty() && ways.ways().iter().next().is_none());
        assert!(!ways.ways.hold([true; 2]), "a first Service waits for an answer");
    }

    /// One that answers nothing is due again before the others have been asked at all.
    #[tokio::test]
    async fn nobody_waits_for_the_silent_ones() {
        let start = Instant::now();
        let (mut ways, [a, _]) = ways(start);
        let asked = ways.nodes[&a];
        let all = (0..2 * AT_ONCE).map(|number| ((format!("{number:02}"), false), asked));
        ways.nodes = all.collect();
        ways.by = Some(Arc::new(|_, targets, _| Ok(vec![Way::CLOSED; targets.len()])));
        let mut now = start;
        let mut heard = BTreeSet::new();
        for _ in 0..2 {
            ways.take(Happening::Due, &Index::default(), now);
            let Happening::Answered(answers) = ways.next().await else { panic!("no answers") };
            heard.extend(answers.0.clone());
            now += CONFIRM;
            ways.take(Happening::Answered(answers), &Index::default(), now - CONFIRM);
        }
        assert_eq!(heard.len(), 2 * AT_ONCE);
    }

    /// The Leases decide where the capability is missing, and it is said once.
    #[tokio::test]
    async fn who_may_not_ask_goes_by_the_leases() {
        let start = Instant::now();
        let (mut ways, [a, _]) = ways(start);
        ways.ways.set("a", false, Way::CLOSED);
        let index = Index::default();
        let failed = |code| Happening::Answered((vec![a.clone()], Err(io::Error::from_raw_os_error(code))));
        assert!(!ways.take(failed(libc::EMFILE), &index, start));
        assert_eq!(ways.nodes[&a].due, start + SILENT, "there may be room later");
        assert!(ways.take(failed(libc::EPERM), &index, start));
        ways.follow(true, start + SECOND);
        assert!(ways.due().is_none() && *ways.ways() == Ways::default());
    }
}
