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
        front: Front,
        delivered: Result<usize, Missed>,
    ) -> Option<Duration> {
        self.went(now, number, begun(now, front), delivered)
    }

    /// Notes a request whose first segment a node has forwarded to a silent pod. Returns the time
    /// at which its client sends it again.
    pub(super) fn waits(&mut self, now: Duration, number: u64, front: Front, pod: usize) -> Duration {
        self.waiting.insert(number, Way { pod: Some(pod), is_delayed: true, ..begun(now, front) });
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

    /// Completes a request, unless it was cut before. One whose node is gone waits for another.
    pub(super) fn done(&mut self, number: u64, is_there: impl Fn(usize) -> bool) {
        let Some(way) = self.under_way.get_mut(&number) else { return };
        if way.node.is_none_or(is_there) {
            let way = *way;
            self.under_way.remove(&number);
            self.tally.count(way, way.answered(), None);
        } else {
            way.is_due = true;
        }
    }

    /// Lets the requests through a node that is there again go on.
    pub(super) fn resume(&mut self, node: usize) {
        let tally = &mut self.tally;
        self.under_way.retain(|_, way| {
            let is_over = way.node == Some(node) && way.is_due;
            if is_over {
                tally.count(*way, way.answered(), None);
            }
            !is_over
        });
    }

    /// Moves each request in flight through the nodes of `from` to the node that `to` returns.
    /// Counts as cut what the new node does not know. If the balancer moves an address, requests
    /// that do not outlive their node are left alone: [`Balancer::cuts`](crate::Balancer) decides
    /// on them.
    pub(super) fn move_to(
        &mut self,
        why: Why,
        from: impl Fn(usize) -> bool,
        mut to: impl FnMut(u64) -> Option<Front>,
        is_there: impl Fn(usize) -> bool,
    ) {
        let tally = &mut self.tally;
        self.under_way.retain(|number, way| {
            let Some(node) = way.node.filter(|node| from(*node)) else { return true };
            let front = to(*number);
            if front.is_some_and(|front| front.node == Some(node)) {
                return true;
            }
            if why != Why::Rehashed && !way.outlives_node {
                return true;
            }
            let Some(front) = front.filter(|front| front.outlives && way.outlives_node) else {
                tally.count(*way, Became::Cut, Some(why));
                return false;
            };
            (way.node, way.is_moved) = (front.node, true);
            let is_over = way.is_due && front.node.is_none_or(&is_there);
            if is_over {
                tally.count(*way, way.answered(), None);
            }
            !is_over
        });
    }

    /// Cuts the requests that still wait for a node at the end.
    pub(super) fn end(&mut self) {
        for (_, way) in std::mem::take(&mut self.under_way) {
            self.tally.count(way, Became::Cut, Some(Why::NodeGone));
        }
    }

    /// Cuts the requests in flight through a node or pod that no longer exists, or no longer gets
    /// requests. Those that outlive a node wait until the balancer moves their address.
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
            if is_cut && why == Why::NodeGone && way.outlives_node {
                way.is_delayed = true;
                return true;
            }
            if is_cut {
                tally.count(*way, Became::Cut, Some(why));
            }
            !is_cut
        });
    }
}

/// The node that a request is sent to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Front {
    /// `None` if the balancer has none.
    pub(super) node: Option<usize>,
    /// Whether the node knows a version of the objects in which connections outlive nodes.
    pub(super) outlives: bool,
}

fn begun(now: Duration, front: Front) -> Way {
    Way {
        second: usize::try_from(now.as_secs()).unwrap_or(usize::MAX),
        first: front.node,
        node: front.node,
        pod: None,
        is_delayed: false,
        outlives_node: front.outlives,
        is_moved: false,
        is_due: false,
    }
}
