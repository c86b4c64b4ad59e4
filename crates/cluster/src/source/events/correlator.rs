//! Limits on the Events that an agent posts: each node of a cluster sees what one tenant does in a
//! loop.
//!
//! Window, burst and refill are those of client-go's EventCorrelator. There each object has tokens
//! of its own; here all objects of the agent share them.

use std::{
    collections::{HashMap, VecDeque, hash_map::Entry},
    time::Duration,
};

use tokio::time::Instant;

use super::{ObjectEvent, Subject};

/// The time within which an object gets one Event per reason; further ones are combined into one
/// Event at its end.
pub(super) const WINDOW: Duration = Duration::from_secs(600);
/// The number of Events that may be posted at once. The refill time below adds one more.
const BURST: u32 = 25;
const REFILL: Duration = Duration::from_secs(300);
/// The number of objects and reasons that are remembered. Others are not reported until some are
/// forgotten.
pub(super) const REMEMBERED: usize = 4096;
/// The number of first Events without a token that are posted within one [`WINDOW`]; further ones
/// are posted in the next. So thousands of faults of a tenant cost the API server of 5,000 nodes
/// 5,000 × 50 Events in 600 s, about 400 a second, and not 34,000 ([`REMEMBERED`]).
const LATE: usize = 50;
/// The number of different texts about one object and reason in one Event: the last ones.
const TEXTS: usize = 3;
/// The longest note of an Event, in bytes, that the API server takes (`NoteLengthLimit`,
/// pkg/apis/core/validation/events.go).
const NOTE: usize = 1024;

/// Shortens a text so that with `end`, which is kept whole, it has at most [`NOTE`] bytes.
pub(super) fn note(mut text: String, end: &str) -> String {
    let room = text.len().min(NOTE.saturating_sub(end.len()));
    let cut = (0..=room).rev().find(|cut| text.is_char_boundary(*cut));
    text.truncate(cut.unwrap_or(0));
    text + end
}

/// An object and a reason.
type Key = (Subject, String);

#[derive(Debug)]
struct Seen {
    /// The time to post the held Events or, if there are none, to forget the object and reason.
    due: Instant,
    /// Whether an Event has been posted.
    posted: bool,
    held: Option<Held>,
}

/// Events that have not been posted yet.
#[derive(Debug)]
struct Held {
    times: u64,
    last: ObjectEvent,
    /// The last different texts, at most [`TEXTS`], in the order in which they came.
    texts: VecDeque<String>,
}

impl Held {
    fn new(event: ObjectEvent) -> Self {
        Self { times: 1, texts: VecDeque::from([event.message.clone()]), last: event }
    }

    fn add(&mut self, event: ObjectEvent) {
        self.times += 1;
        self.texts.retain(|text| *text != event.message);
        self.texts.push_back(event.message.clone());
        if self.texts.len() > TEXTS {
            self.texts.pop_front();
        }
        self.last = event;
    }

    /// Combines all of them into one Event with a note of at most [`NOTE`] bytes.
    fn combined(mut self) -> ObjectEvent {
        let texts = self.texts.make_contiguous().join("; ");
        let times = match self.times {
            1 => String::new(),
            times => format!(" ({times} times within {} min)", WINDOW.as_secs() / 60),
        };
        ObjectEvent { message: note(texts, &times), ..self.last }
    }
}

/// The state that decides what is posted, and when.
#[derive(Debug)]
pub(super) struct Correlator {
    seen: HashMap<Key, Seen>,
    tokens: u32,
    refilled: Instant,
    /// The source of random numbers.
    chance: fn() -> u64,
}

impl Correlator {
    pub(super) fn new(now: Instant, chance: fn() -> u64) -> Self {
        Self { seen: HashMap::new(), tokens: BURST, refilled: now, chance }
    }

    /// Returns the Event to be posted at once: the first one of an object and reason, as long as
    /// there are tokens. Without a token it is posted at a random moment of this window or of a
    /// later one: all nodes see the same, and must not post at the same time.
    pub(super) fn admit(&mut self, event: ObjectEvent, now: Instant) -> Option<ObjectEvent> {
        let full = self.seen.len() >= REMEMBERED;
        let windows = self.seen.values().filter(|seen| !seen.posted && seen.held.is_some()).count() / LATE;
        match self.seen.entry((event.subject.clone(), event.reason.clone())) {
            // A repetition that is not a fault would be outdated by the time it is posted.
            Entry::Occupied(_) if !event.is_warning => None,
            Entry::Occupied(mut seen) => {
                match &mut seen.get_mut().held {
                    Some(held) => held.add(event),
                    none => *none = Some(Held::new(event)),
                }
                None
            }
            Entry::Vacant(_) if full => None,
            Entry::Vacant(place) => {
                if take(&mut self.tokens, &mut self.refilled, now) {
                    place.insert(Seen { due: now + WINDOW, posted: true, held: None });
                    return Some(event);
                }
                if event.is_warning {
                    let window = u64::try_from(WINDOW.as_millis()).unwrap_or(u64::MAX);
                    let windows = WINDOW * u32::try_from(windows).unwrap_or(u32::MAX);
                    let due = now + windows + Duration::from_millis((self.chance)() % window);
                    place.insert(Seen { due, posted: false, held: Some(Held::new(event)) });
                } else {
                    place.insert(Seen { due: now + WINDOW, posted: false, held: None });
                }
                None
            }
        }
    }

    /// Returns when [`Self::due`] next has something to do.
    pub(super) fn next(&self) -> Option<Instant> {
        self.seen.values().map(|seen| seen.due).min()
    }

    /// Returns the held Events that are due, each with its number of occurrences; objects and
    /// reasons without new ones are forgotten.
    pub(super) fn due(&mut self, now: Instant) -> Vec<ObjectEvent> {
        let mut due = Vec::new();
        self.seen.retain(|_, seen| {
            if now < seen.due {
                return true;
            }
            let Some(held) = seen.held.take() else { return false };
            seen.due = now + WINDOW;
            // The first Event is posted even without a token. A repetition without one waits for
            // another window, and is counted further.
            if take(&mut self.tokens, &mut self.refilled, now) || !seen.posted {
                seen.posted = true;
                due.push(held.combined());
            } else {
                seen.held = Some(held);
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

    /// A source of random numbers that gives the last moment of a window.
    const LAST: fn() -> u64 = || u64::MAX / WINDOW.as_millis() as u64 * WINDOW.as_millis() as u64 - 1;

    fn event(service: &str, message: &str) -> ObjectEvent {
        let name = ServiceName { namespace: "ns".to_owned(), name: service.to_owned() };
        ObjectEvent::warning(Subject::Service(name), "Misconfigured", "Program", message.to_owned())
    }

    #[test]
    fn what_repeats_is_posted_once_and_then_with_its_number() {
        let start = Instant::now();
        let mut correlator = Correlator::new(start, LAST);
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
        assert_eq!(due[0].message, "bad 998; bad 999; bad 1000 (1000 times within 10 min)");
        // Nothing more happened: everything is forgotten, and the next Event is a first one.
        assert_eq!(correlator.due(end + WINDOW), []);
        assert_eq!(correlator.next(), None);
        assert!(correlator.admit(event("web", "bad"), end + WINDOW).is_some());
    }

    /// A Service may have several mistakes at once.
    #[test]
    fn each_text_is_told_and_no_longer_than_an_event_may_be() {
        let start = Instant::now();
        let mut correlator = Correlator::new(start, LAST);
        let posted = ["one", "two", "three", "two"].map(|text| correlator.admit(event("web", text), start));
        assert_eq!(posted.iter().flatten().count(), 1);
        assert_eq!(correlator.due(start + WINDOW)[0].message, "three; two (3 times within 10 min)");

        let long = "\u{e4}".repeat(400);
        for text in ["one", &format!("1{long}"), &format!("2{long}")] {
            let _ = correlator.admit(event("long", text), start);
        }
        let due = correlator.due(start + WINDOW);
        assert!(
            due[0].message.len() <= NOTE && due[0].message.ends_with("(2 times within 10 min)"),
            "{due:?}"
        );
    }

    /// A drain that ended long ago is not worth an Event.
    #[test]
    fn what_is_no_fault_is_told_at_once_or_never() {
        let start = Instant::now();
        let mut correlator = Correlator::new(start, LAST);
        let drain = |message: &str| ObjectEvent { is_warning: false, ..event("web", message) };
        assert!(correlator.admit(drain("for 30 s"), start).is_some());
        assert_eq!(correlator.admit(drain("for 30 s more"), start + WINDOW / 2), None);
        assert_eq!(correlator.due(start + WINDOW), []);
        assert_eq!(correlator.next(), None);
    }

    #[test]
    fn each_object_is_told_of_also_without_tokens_and_so_many_in_a_window() {
        let start = Instant::now();
        let mut correlator = Correlator::new(start, || 1_234_567);
        let at_once: Vec<_> =
            (0..200).filter_map(|i| correlator.admit(event(&format!("a{i}"), "bad"), start)).collect();
        assert_eq!(at_once.len(), 25);
        // The moment that the random number gives.
        let moment = start + Duration::from_millis(1_234_567 % 600_000);
        assert_eq!(correlator.next(), Some(moment));
        assert_eq!(correlator.due(moment - Duration::from_millis(1)), []);
        let mut posted: std::collections::BTreeSet<_> =
            at_once.iter().map(|event| format!("{:?}", event.subject)).collect();
        for (window, most) in (0..4).zip([50, 50, 50, 25]) {
            let later = correlator.due(moment + WINDOW * window);
            assert_eq!((later.len(), &*later[0].message), (most, "bad"));
            posted.extend(later.iter().map(|event| format!("{:?}", event.subject)));
        }
        assert_eq!(posted.len(), 200);
        // Repetitions need a token; objects that are forgotten by now have first Events again.
        let end = moment + WINDOW * 3;
        for i in 0..200 {
            let _ = correlator.admit(event(&format!("a{i}"), "bad again"), end);
        }
        // Those that were forgotten, one window's worth, and as many repetitions as there are
        // tokens: at most two.
        let posted = correlator.due(end + WINDOW).len();
        assert!((LATE..=LATE + 2).contains(&posted), "{posted}");
    }

    #[test]
    fn a_token_comes_back_each_five_minutes() {
        let start = Instant::now();
        let mut correlator = Correlator::new(start, LAST);
        let mut number = 0;
        let mut admitted = |now, of: u32| {
            let mut next = || {
                number += 1;
                correlator.admit(event(&format!("a{number}"), "bad"), now)
            };
            (0..of).filter_map(|_| next()).count()
        };
        assert_eq!(admitted(start, 30), 25);
        assert_eq!(admitted(start + REFILL - Duration::from_millis(1), 5), 0);
        assert_eq!(admitted(start + REFILL, 5), 1);
        assert_eq!(admitted(start + REFILL * 4, 5), 3);
        assert_eq!(admitted(start + REFILL * 100, 30), 25, "no more than at the start");
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let start = Instant::now();
        let mut correlator = Correlator::new(start, LAST);
        for i in 0..20_000 {
            let _ = correlator.admit(event(&format!("c{i}"), "bad"), start);
        }
        assert_eq!(correlator.seen.len(), REMEMBERED);
        assert!(correlator.due(start + WINDOW).len() <= REMEMBERED);
    }
}
