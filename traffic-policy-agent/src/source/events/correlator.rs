//! Limits of the Events that an agent posts: each node of a cluster sees what one tenant does in a loop.
//!
//! client-go's correlator has the same two limits, the second one for each object: here it is for the whole agent.

use std::{
    collections::{HashMap, hash_map::Entry},
    time::Duration,
};

use tokio::time::Instant;

use super::{ObjectEvent, Subject};

/// Within this time an object has one Event of a reason; what else happens is told by one at its end.
pub(super) const WINDOW: Duration = Duration::from_secs(600);
/// Events that may be posted at once, and how long it takes until one more may.
const BURST: u32 = 25;
const REFILL: Duration = Duration::from_secs(300);
/// Objects and reasons that are remembered. Further ones are not told of until others are forgotten.
const REMEMBERED: usize = 4096;

/// Object and reason.
type Key = (Subject, String);

#[derive(Debug)]
struct Seen {
    since: Instant,
    /// Events that were not posted since then, and the last of them.
    held: Option<(u64, ObjectEvent)>,
}

/// Decides what is posted, and when.
#[derive(Debug)]
pub(super) struct Correlator {
    seen: HashMap<Key, Seen>,
    tokens: u32,
    refilled: Instant,
}

impl Correlator {
    pub(super) fn new(now: Instant) -> Self {
        Self { seen: HashMap::new(), tokens: BURST, refilled: now }
    }

    /// The Event to be posted at once: the first Event of an object and reason.
    pub(super) fn admit(&mut self, event: ObjectEvent, now: Instant) -> Option<ObjectEvent> {
        let full = self.seen.len() >= REMEMBERED;
        match self.seen.entry((event.subject.clone(), event.reason.clone())) {
            // What is no fault is over by the time that it would be told.
            Entry::Occupied(_) if !event.is_warning => None,
            Entry::Occupied(mut seen) => {
                let held = &mut seen.get_mut().held;
                let times = held.as_ref().map_or(0, |(times, _)| *times);
                *held = Some((times + 1, event));
                None
            }
            Entry::Vacant(_) if full => None,
            Entry::Vacant(place) => {
                let posted = take(&mut self.tokens, &mut self.refilled, now);
                let (post, held) = match posted {
                    true => (Some(event), None),
                    false if event.is_warning => (None, Some((1, event))),
                    false => (None, None),
                };
                place.insert(Seen { since: now, held });
                post
            }
        }
    }

    /// When [`Self::due`] has something to do.
    pub(super) fn next(&self) -> Option<Instant> {
        self.seen.values().map(|seen| seen.since + WINDOW).min()
    }

    /// Events that were held back long enough, each with how often it happened; what is quiet is forgotten.
    pub(super) fn due(&mut self, now: Instant) -> Vec<ObjectEvent> {
        let mut due = Vec::new();
        self.seen.retain(|_, seen| {
            if now < seen.since + WINDOW {
                return true;
            }
            if seen.held.is_none() {
                return false;
            }
            // Without a token it waits for another time as long, and goes on counting.
            seen.since = now;
            if take(&mut self.tokens, &mut self.refilled, now)
                && let Some((times, mut event)) = seen.held.take()
            {
                if times > 1 {
                    event.message =
                        format!("{} ({times} times within {} min)", event.message, WINDOW.as_secs() / 60);
                }
                due.push(event);
            }
            true
        });
        due
    }
}

fn take(tokens: &mut u32, refilled: &mut Instant, now: Instant) -> bool {
    while *tokens < BURST && *refilled + REFILL <= now {
        *tokens += 1;
        *refilled += REFILL;
    }
    if *tokens == BURST {
        *refilled = now;
    }
    let any = *tokens > 0;
    *tokens -= u32::from(any);
    any
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ServiceName;

    fn event(service: &str, message: &str) -> ObjectEvent {
        let name = ServiceName { namespace: "ns".to_owned(), name: service.to_owned() };
        ObjectEvent::warning(Subject::Service(name), "Misconfigured", "Program", message.to_owned())
    }

    #[test]
    fn what_repeats_is_posted_once_and_then_with_its_number() {
        let start = Instant::now();
        let mut correlator = Correlator::new(start);
        let first = correlator.admit(event("web", "bad 0"), start);
        assert_eq!(first.unwrap().message, "bad 0");
        for edit in 1..=1_000_u32 {
            let now = start + Duration::from_millis(500) * edit;
            assert_eq!(correlator.admit(event("web", &format!("bad {edit}")), now), None);
        }
        let other = ObjectEvent { reason: "NoRoom".to_owned(), ..event("web", "full") };
        assert!(correlator.admit(other, start + WINDOW / 2).is_some(), "another reason is another matter");
        let end = start + WINDOW;
        assert_eq!(correlator.next(), Some(end));
        assert_eq!(correlator.due(end - Duration::from_secs(1)), []);
        let due = correlator.due(end);
        assert_eq!(due.len(), 1);
        assert_eq!(due[0].message, "bad 1000 (1000 times within 10 min)");
        // Nothing more happened: all is forgotten, and the next one is a first one.
        assert_eq!(correlator.due(end + WINDOW), []);
        assert_eq!(correlator.next(), None);
        assert!(correlator.admit(event("web", "bad"), end + WINDOW).is_some());
    }

    /// A drain that has ended long ago is no news.
    #[test]
    fn what_is_no_fault_is_told_at_once_or_never() {
        let start = Instant::now();
        let mut correlator = Correlator::new(start);
        let drain = |message: &str| ObjectEvent { is_warning: false, ..event("web", message) };
        assert!(correlator.admit(drain("for 30 s"), start).is_some());
        assert_eq!(correlator.admit(drain("for 30 s more"), start + WINDOW / 2), None);
        assert_eq!(correlator.due(start + WINDOW), []);
        assert_eq!(correlator.next(), None);
    }

    #[test]
    fn many_objects_share_the_agents_tokens() {
        let start = Instant::now();
        let mut correlator = Correlator::new(start);
        let posted = |correlator: &mut Correlator, prefix: &str, now| {
            let admit = |i| correlator.admit(event(&format!("{prefix}{i}"), "bad"), now);
            (0..200).filter_map(admit).count()
        };
        assert_eq!(posted(&mut correlator, "a", start), 25);
        assert_eq!(posted(&mut correlator, "b", start + REFILL * 3), 3);
        // What found no token is told when there is one.
        assert!(!correlator.due(start + REFILL * 3 + WINDOW).is_empty());
        for round in 0..100 {
            posted(&mut correlator, &format!("c{round}-"), start);
        }
        assert!(correlator.seen.len() <= REMEMBERED, "{}", correlator.seen.len());
    }
}
