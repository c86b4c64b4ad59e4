//! Requests: when they are sent, and those in flight.

use std::{collections::BTreeMap, time::Duration};

use super::{
    agents::Missed,
    effect::Through,
    input::{Load, Simulation},
    tally::{Became, Tally, Way, Why},
};

/// All requests of a run.
#[derive(Debug)]
pub(super) struct Requests<'s> {
    load: Load,
    /// The measured times at which they are sent, instead of a rate.
    measured: Option<&'s [Duration]>,
    under_way: BTreeMap<u64, Way>,
    tally: Tally,
}

impl<'s> Requests<'s> {
    pub(super) fn new(input: &'s Simulation<'s>) -> Self {
        Self {
            load: input.load,
            measured: input.measured.requests.as_deref(),
            under_way: BTreeMap::new(),
            tally: Tally::new(input.load.lasts),
        }
    }

    /// Whether no request is in flight.
    pub(super) fn are_over(&self) -> bool {
        self.under_way.is_empty()
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
        let second = usize::try_from(now.as_secs()).unwrap_or(usize::MAX);
        match delivered {
            Err(Missed { why, pod }) => {
                self.tally.count(Way { second, node, pod }, Became::Lost, Some(why));
                None
            }
            Ok(pod) => {
                let way = Way { second, node, pod: Some(pod) };
                if self.load.request.is_zero() {
                    self.tally.count(way, Became::Ok, None);
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
            self.tally.count(way, Became::Ok, None);
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
            };
            if is_cut {
                tally.count(*way, Became::Cut, Some(why));
            }
            !is_cut
        });
    }
}
