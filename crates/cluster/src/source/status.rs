//! Status of a source. Errors are logged when they begin and when they end, not at each attempt between.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Instant, SystemTime},
};

use tokio::sync::watch;
use tracing::{info, warn};

/// Status of a source at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// All objects have been given once.
    pub synced: bool,
    /// Kinds of objects, or the folder, that have not been read yet.
    pub waiting: BTreeSet<&'static str>,
    /// When the source last had an answer: a response of the API, a good look at the folder.
    pub last_contact: Option<SystemTime>,
    /// Current errors by subject ("the API", "Services", a file).
    pub errors: BTreeMap<String, String>,
    /// Kinds of objects that wait to be listed anew.
    pub stale: BTreeMap<&'static str, Stale>,
}

/// A kind of objects whose known state is as old as `since`: changes after that are yet to come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stale {
    pub since: Instant,
    /// The reason, as a sentence.
    pub why: String,
    /// When all objects are asked for anew.
    pub due: Instant,
}

impl fmt::Display for Stale {
    /// The reason, and when the next list begins.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.due.saturating_duration_since(Instant::now()).as_millis().div_ceil(1000) {
            0 => write!(f, "{}; they are being listed anew", self.why),
            seconds => write!(f, "{}; they are listed anew in {seconds} s", self.why),
        }
    }
}

impl Status {
    /// Whether there may be Services that it does not know: what it looks at does not answer, or is not understood.
    #[must_use]
    pub fn is_blind(&self) -> bool {
        let about_services = |subject: &String| {
            ["API server", "Services", "manifests"].iter().any(|what| subject.starts_with(what))
        };
        self.errors.keys().any(about_services)
    }
}

/// Batches that wait for the run loop, by when they were given.
type Unread = Arc<Mutex<VecDeque<Instant>>>;

fn lock(unread: &Unread) -> MutexGuard<'_, VecDeque<Instant>> {
    // A queue of times is valid whatever a panic interrupted.
    unread.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads the [`Status`] of a source.
#[derive(Clone, Debug)]
pub struct StatusReader(watch::Receiver<Status>, Unread);

impl StatusReader {
    /// Since when the oldest batch has been waiting that the run loop has not taken.
    #[must_use]
    pub fn unread_since(&self) -> Option<Instant> {
        lock(&self.1).front().copied()
    }

    pub(super) fn taken(&self) {
        lock(&self.1).pop_front();
    }

    #[must_use]
    pub fn get(&self) -> Status {
        self.0.borrow().clone()
    }

    /// Reads it without a copy. The source waits meanwhile.
    pub fn read<T>(&self, look: impl FnOnce(&Status) -> T) -> T {
        look(&self.0.borrow())
    }

    /// Waits until the status satisfies `condition`, and returns it. `None` if the source stopped before.
    pub async fn wait_for(&mut self, condition: impl FnMut(&Status) -> bool) -> Option<Status> {
        self.0.wait_for(condition).await.ok().map(|status| status.clone())
    }
}

#[derive(Clone, Debug)]
pub(super) struct StatusWriter(Arc<watch::Sender<Status>>, Unread);

impl StatusWriter {
    pub(super) fn new() -> (Self, StatusReader) {
        let (sender, receiver) = watch::channel(Status::default());
        let unread = Unread::default();
        (Self(Arc::new(sender), Arc::clone(&unread)), StatusReader(receiver, unread))
    }

    /// A batch is about to be sent: from now on it waits.
    pub(super) fn sending(&self) {
        lock(&self.1).push_back(Instant::now());
    }

    pub(super) fn synced(&self) {
        self.0.send_if_modified(|status| {
            status.waiting.clear();
            !std::mem::replace(&mut status.synced, true)
        });
    }

    /// All of `what` are to come.
    pub(super) fn waiting(&self, what: &'static str) {
        self.0.send_modify(|status| {
            status.waiting.insert(what);
        });
    }

    /// They have been given once.
    pub(super) fn listed(&self, what: &'static str) {
        self.0.send_if_modified(|status| status.waiting.remove(what));
    }

    /// The objects of a kind are known as of `since`, or of the moment that an earlier call gave; the rest is always
    /// replaced.
    pub(super) fn stale(&self, what: &'static str, mut stale: Stale) {
        self.0.send_modify(|status| {
            if let Some(earlier) = status.stale.get(what) {
                stale.since = earlier.since;
            }
            status.stale.insert(what, stale);
        });
    }

    /// The objects of a kind are listed, or will not be, for the API server does not give them: nothing waits.
    pub(super) fn followed(&self, what: &'static str) {
        self.0.send_if_modified(|status| status.stale.remove(what).is_some());
    }

    pub(super) fn contact(&self) {
        self.0.send_modify(|status| status.last_contact = Some(SystemTime::now()));
    }

    /// Something is wrong with `subject`. Logged if it is news.
    pub(super) fn trouble(&self, subject: &str, what: impl Into<String>) {
        let what = what.into();
        self.0.send_if_modified(|status| {
            let old = status.errors.insert(subject.to_owned(), what.clone());
            if old.as_ref() == Some(&what) {
                return false;
            }
            // A retry may fail in another way (refused, then timed out): that is the same trouble.
            if old.is_none() {
                warn!(subject, "{what}");
            }
            true
        });
    }

    /// Like [`Self::trouble`], but logged each time the text differs: for what a person mends step by step. Returns
    /// whether it is news.
    pub(super) fn mistake(&self, subject: &str, what: impl Into<String>) -> bool {
        let what = what.into();
        let news = self.0.borrow().errors.get(subject) != Some(&what);
        if news {
            warn!(subject, "{what}");
            self.0.send_modify(|status| {
                status.errors.insert(subject.to_owned(), what);
            });
        }
        news
    }

    /// All is well with `subject`. Logged if something was wrong.
    pub(super) fn well(&self, subject: &str, message: &str) {
        self.0.send_if_modified(|status| {
            let ended = status.errors.remove(subject).is_some();
            if ended {
                info!(subject, "{message}");
            }
            ended
        });
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::Stale;
    use crate::source::Manifests;

    /// It may be asked for long after the error, and while the list takes its time.
    #[test]
    fn a_list_that_is_due_is_said_by_the_time_that_is_left() {
        let since = Instant::now();
        let stale = Stale { since, why: "the list failed".to_owned(), due: since + Duration::from_secs(22) };
        assert_eq!(stale.to_string(), "the list failed; they are listed anew in 22 s");
        let soon = Stale { due: since + Duration::from_millis(900), ..stale.clone() };
        assert_eq!(soon.to_string(), "the list failed; they are listed anew in 1 s");
        let over = Stale { due: since, ..stale };
        assert_eq!(over.to_string(), "the list failed; they are being listed anew");
    }

    /// A loop that takes nothing must be noticed by who does not ask the loop.
    #[tokio::test]
    async fn a_batch_waits_until_it_is_taken() {
        let folder = tempfile::tempdir().unwrap();
        let manifests = Manifests { folder: folder.path().to_owned(), node_name: "here".to_owned() };
        let mut source = manifests.start();
        let mut reader = source.status();
        assert!(reader.wait_for(|status| status.synced).await.is_some());
        assert!(reader.unread_since().is_some());
        assert!(source.next().await.is_some());
        assert_eq!(reader.unread_since(), None);
    }
}
