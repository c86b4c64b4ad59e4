//! A watch while objects do not come: the age of what is known, and the time when all are asked for anew.

use std::time::Duration;

use kube::Resource;
use tokio::time::Instant;
use tracing::info;

use super::{Listing, Watch};
use crate::source::kubernetes::observe::API_SERVER;

/// Errors further apart than this are not of one outage.
const LULL: Duration = Duration::from_secs(120);

impl<K: Resource<DynamicType = ()>, T> Watch<K, T> {
    /// When the errors began of which the last one is of now.
    pub(super) fn failing_since(&mut self) -> Instant {
        let now = Instant::now();
        let first = self.failing.filter(|(_, last)| now - *last < LULL).map_or(now, |(first, _)| first);
        self.failing = Some((first, now));
        first
    }

    /// The state that is known is of `since`, until they are listed anew after a pause.
    pub(super) fn stale(&self, since: Instant, why: &str, pause: Duration) {
        // Before the first list there is none.
        if self.listed && !self.refused {
            let why = format!("{why}; they are listed anew {} s later", pause.as_secs());
            self.sink.status.stale(self.kind.plural, since.into_std(), why);
        }
    }

    /// A watch did not give all objects.
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

    /// Time that an agent which knows a state waits before it asks for another one, which all others want, too.
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
