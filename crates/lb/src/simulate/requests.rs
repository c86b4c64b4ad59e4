//! Requests: when they are sent, and those in flight.

use std::{collections::BTreeMap, time::Duration};

use super::{
    agents::Missed,
    effect::Through,
    input::{Load, Simulation},
    tally::{Became, Tally, Way, Why},
};

/// The time after which a client sends its first segment again (RFC 6298, TCP_TIMEOUT_INIT). One
/// that is not answered then either is lost: the next comes 2 s later, when clients give up.
const RESENT_AFTER: Duration = Duration::from_secs(1);

/// All requests of a run.
#[derive(Debug)]
pub(super) struct Requests<'s> {
    load: Load,
    /// The measured times at which they are sent, instead of a rate.
    measured: Option<&'s [Duration]>,
    under_way: BTreeMap<u64, Way>,
    /// Those whose first segment had no answer, until it is sent again.
    waiting: BTreeMap<u64, Way>,
    tally: Tally,
}

impl<'s> Requests<'s> {
    pub(super) fn new(input: &'s Simulation<'s>) -> Self {
        Self {
            load: input.load,
            measured: input.measured.requests.as_deref(),
            under_way: BTreeMap::new(),
            waiting: BTreeMap::new(),
            tally: Tally::new(input.load.lasts),
        }
    }

    /// Whether no request is in flight.
    pub(super) fn are_over(&self) -> bool {
        self.under_way.is_empty() && self.waiting.is_empty()
    }

    pub(super) fn into_tally(self) -> Tally {
        self.tally
    }

    /// Returns the time at which a request is sent; `None` after the last one.
    pub(super) fn moment(&self, number: u64) -> Option<Duration> {
        let load = &self.load;
        let at = match self.measured {
            Some(moments) => *moments.get(usize::try_from(number).ok()?)?,
            None => {
                let nanoseconds = u128::from(number) * 1_000_000_000 / u128::from(load.rate.max(1));
                Duration::from_nanos(u64::try_from(nanoseconds).ok()?)
            }
        };
        (at < load.lasts && load.rate > 0).then_some(at)
    }

    /// Notes a request that is sent to a node, and the pod that takes it. Returns the time at which
    /// it has its whole answer, if it is in flight until then.
    pub(super) fn sent(
        &mut self,
        now: Duration,
        number: u64,
        node: Option<usize>,
        delivered: Result<usize, Missed>,
    ) -> Option<Duration> {
        self.went(now, number, begun(now, node), delivered)
    }

    /// Notes a request whose first segment a node has forwarded to a silent pod. Returns the time
    /// at which its client sends it again.
    pub(super) fn waits(&mut self, now: Duration, number: u64, node: Option<usize>, pod: usize) -> Duration {
        self.waiting.insert(number, Way { pod: Some(pod), is_delayed: true, ..begun(now, node) });
        now + RESENT_AFTER
    }

    /// Returns the node and pod that a request went to whose first segment had no answer.
    pub(super) fn waiting(&self, number: u64) -> Option<(usize, usize)> {
        let way = self.waiting.get(&number)?;
        way.node.zip(way.pod)
    }

    /// Notes what became of the first segment when it was sent again, as [`Self::sent`].
    pub(super) fn resent(
        &mut self,
        now: Duration,
        number: u64,
        delivered: Result<usize, Missed>,
    ) -> Option<Duration> {
        let way = self.waiting.remove(&number)?;
        self.went(now, number, way, delivered)
    }

    fn went(
        &mut self,
        now: Duration,
        number: u64,
        way: Way,
        delivered: Result<usize, Missed>,
    ) -> Option<Duration> {
        match delivered {
            Err(Missed { why, pod, .. }) => {
                self.tally.count(Way { pod, ..way }, Became::Lost, Some(why));
                None
            }
            Ok(pod) => {
                let way = Way { pod: Some(pod), ..way };
                if self.load.request.is_zero() {
                    self.tally.count(way, way.answered(), None);
                    return None;
                }
                self.under_way.insert(number, way);
                Some(now + self.load.request)
            }
        }
    }

    /// Completes a request, unless it was cut before.
    pub(super) fn done(&mut self, number: u64) {
        if let Some(way) = self.under_way.remove(&number) {
            self.tally.count(way, way.answered(), None);
        }
    }

    /// Cuts the requests in flight through a node or pod that no longer exists, or no longer gets
    /// requests.
    pub(super) fn cut(&mut self, why: Why, through: &Through) {
        let tally = &mut self.tally;
        self.under_way.retain(|_, way| {
            let is_cut = match through {
                Through::Node(node) => way.node == Some(*node),
                Through::Pods(pods) => way.pod.is_some_and(|pod| pods.contains(&pod)),
                Through::Forwarded { node, pods } => {
                    (way.node == Some(*node)) != way.pod.is_some_and(|pod| pods.contains(&pod))
                }
            };
            if is_cut {
                tally.count(*way, Became::Cut, Some(why));
            }
            !is_cut
        });
    }
}

fn begun(now: Duration, node: Option<usize>) -> Way {
    let second = usize::try_from(now.as_secs()).unwrap_or(usize::MAX);
    Way { second, node, pod: None, is_delayed: false }
}
