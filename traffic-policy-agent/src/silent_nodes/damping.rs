//! The damping of nodes that die and return again and again: each time they must answer longer
//! before they count as healthy.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

/// The answers in a row after a first death, and the most that are ever needed.
const LEAST: u32 = 2;
const MOST: u32 = 64;
/// The time after a return for which a death counts as another one of a row.
const MEMORY: Duration = Duration::from_secs(600);

/// The nodes that have returned lately.
#[derive(Debug, Default)]
pub(super) struct Damping(BTreeMap<String, Flapping>);

#[derive(Debug)]
struct Flapping {
    needed: u32,
    /// The time of the last return; `None` while it is dead.
    returned: Option<Instant>,
}

impl Damping {
    /// Records a death; returns the answers in a row that end it.
    pub(super) fn needed(&mut self, node: &str, now: Instant) -> u32 {
        let before = self.0.get(node).filter(|flapping| !flapping.is_over(now));
        let needed = before.map_or(LEAST, |flapping| (flapping.needed * 2).min(MOST));
        self.0.insert(node.to_owned(), Flapping { needed, returned: None });
        needed
    }

    /// Records a return.
    pub(super) fn returned(&mut self, node: &str, now: Instant) {
        if let Some(flapping) = self.0.get_mut(node) {
            flapping.returned = Some(now);
        }
    }

    /// Forgets nodes that have been healthy for long.
    pub(super) fn forget(&mut self, now: Instant) {
        self.0.retain(|_, flapping| !flapping.is_over(now));
    }
}

impl Flapping {
    fn is_over(&self, now: Instant) -> bool {
        self.returned.is_some_and(|returned| now.saturating_duration_since(returned) >= MEMORY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_death_soon_after_a_return_doubles_what_is_needed() {
        let mut now = Instant::now();
        let mut damping = Damping::default();
        for needed in [2, 4, 8, 16, 32, 64, 64] {
            assert_eq!(damping.needed("far", now), needed);
            damping.returned("far", now);
            now += MEMORY - Duration::from_secs(1);
            damping.forget(now);
        }
        assert_eq!(damping.needed("near", now), 2);
        now += Duration::from_secs(1);
        assert_eq!(damping.needed("far", now), 2, "healthy for long");
        damping.returned("far", now);
        damping.forget(now + MEMORY);
        assert_eq!(damping.0.keys().collect::<Vec<_>>(), ["near"], "which never returned");
    }
}
