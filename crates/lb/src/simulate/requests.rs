//! Requests in flight.

use std::time::Duration;

use super::{
    agents::Missed,
    queue::Next,
    run::Run,
    tally::{Became, Way, Why},
};

impl Run<'_> {
    /// Returns the time at which a request is sent.
    fn moment(&self, number: u64) -> Option<Duration> {
        let load = &self.input.load;
        let at = match &self.input.measured.requests {
            Some(moments) => *moments.get(usize::try_from(number).ok()?)?,
            None => {
                let nanoseconds = u128::from(number) * 1_000_000_000 / u128::from(load.rate.max(1));
                Duration::from_nanos(u64::try_from(nanoseconds).ok()?)
            }
        };
        (at < load.lasts && load.rate > 0).then_some(at)
    }

    pub(super) fn send_next(&mut self, number: u64) {
        if let Some(at) = self.moment(number) {
            self.queue.push(at, Next::Request { number });
        }
    }

    pub(super) fn request(&mut self, now: Duration, number: u64) {
        self.send_next(number + 1);
        let second = usize::try_from(now.as_secs()).unwrap_or(usize::MAX);
        let node = self.choose(number);
        let delivered = match node {
            Some(node) => self.deliver(now, node),
            None => Err(Missed { why: Why::NoNode, pod: None }),
        };
        match delivered {
            Err(Missed { why, pod }) => self.tally.count(Way { second, node, pod }, Became::Lost, Some(why)),
            Ok(pod) => {
                let way = Way { second, node, pod: Some(pod) };
                if self.input.load.request.is_zero() {
                    self.tally.count(way, Became::Ok, None);
                } else {
                    self.under_way.insert(number, way);
                    self.queue.push(now + self.input.load.request, Next::Done { number });
                }
            }
        }
    }

    /// Completes a request, unless it was cut before.
    pub(super) fn done(&mut self, number: u64) {
        if let Some(way) = self.under_way.remove(&number) {
            self.tally.count(way, Became::Ok, None);
        }
    }

    /// Cuts the requests in flight through a node or pod that no longer exists.
    pub(super) fn cut(&mut self, why: Why, which: impl Fn(&Way) -> bool) {
        let tally = &mut self.tally;
        self.under_way.retain(|_, way| {
            let is_cut = which(way);
            if is_cut {
                tally.count(*way, Became::Cut, Some(why));
            }
            !is_cut
        });
    }
}
