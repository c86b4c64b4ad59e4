//! A watch that delivers no objects: the age of the known state, and the pause before all objects
//! are listed again.

use std::time::Duration;

use kube::Resource;
use tokio::time::Instant;
use tracing::info;

use super::{Listing, Watch};
use crate::source::{Stale, kubernetes::observe::API_SERVER};

/// Errors further apart than this belong to different outages.
const LULL: Duration = Duration::from_secs(120);

impl<K: Resource<DynamicType = ()>, T> Watch<K, T> {
    /// Notes an error, and returns the time of the first one of this outage.
    pub(super) fn failing_since(&mut self) -> Instant {
        let now = Instant::now();
        let first = self.failing.filter(|(_, last)| now - *last < LULL).map_or(now, |(first, _)| first);
        self.failing = Some((first, now));
        first
    }

    /// Reports in the status that the known state dates from `since`, until all objects are listed
    /// again after the pause.
    pub(super) fn stale(&self, since: Instant, why: &str, pause: Duration) {
        // Before the first list no state is known.
        if self.listed && !self.refused {
            let (since, due) = (since.into_std(), std::time::Instant::now() + pause);
            self.sink.status.stale(self.kind.plural, Stale { since, why: why.to_owned(), due });
        }
    }

    /// Reports that a watch did not deliver all objects; the next list uses a plain list request.
    /// `silent`: no event came in time.
    pub(super) fn stalled(&mut self, silent: bool) {
        let plural = self.kind.plural;
        let text = if silent {
            format!("the list of {plural} stopped in the middle")
        } else {
            format!("the list of {plural} did not end within {} s", self.whole.as_secs())
        };
        self.sink.status.trouble(API_SERVER, text);
        (self.listing, self.from_cache) = (Listing::Cached, Listing::Cached);
    }

    /// Returns the time that an agent with a known state waits before it requests a new one, as all
    /// other nodes do, too.
    pub(super) fn relist_delay(&self) -> Duration {
        let most = u64::try_from(self.sink.relist_within.as_millis()).unwrap_or(u64::MAX);
        if !self.listed || most == 0 {
            return Duration::ZERO;
        }
        let delay = Duration::from_millis((self.chance)() % most);
        info!(
            "the API server's history does not reach back to what is known: {} are listed anew in {} s",
            self.kind.plural,
            delay.as_secs()
        );
        delay
    }
}
