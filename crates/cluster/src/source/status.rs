//! The status of a source. Errors are logged when they begin and when they end, not at each attempt
//! in between.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Instant, SystemTime},
};

use tokio::sync::watch;
use tracing::{info, warn};

/// The status of a source at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// Whether all objects have been delivered once.
    pub synced: bool,
    /// Kinds of objects, or the folder, that have not been read yet.
    pub waiting: BTreeSet<&'static str>,
    /// The time of the source's last success: a response of the API, or a good reading of the
    /// folder.
    pub last_contact: Option<SystemTime>,
    /// Current errors by subject ("API server", "Services", a file).
    pub errors: BTreeMap<String, String>,
    /// Kinds of objects that wait to be listed again.
    pub stale: BTreeMap<&'static str, Stale>,
}

/// A kind of objects whose known state dates from `since`: later changes are missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stale {
    pub since: Instant,
    /// The reason, as a sentence.
    pub why: String,
    /// The time when all objects are requested again.
    pub due: Instant,
}

impl fmt::Display for Stale {
    /// Formats the reason, and the time until the next list begins.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.due.saturating_duration_since(Instant::now()).as_millis().div_ceil(1000) {
            0 => write!(f, "{}; they are being listed anew", self.why),
            seconds => write!(f, "{}; they are listed anew in {seconds} s", self.why),
        }
    }
}

impl Status {
    /// Whether there may be Services that the source does not know: the API or the folder does not
    /// answer, or cannot be understood.
    #[must_use]
    pub fn is_blind(&self) -> bool {
        let about_services = |subject: &String| {
            ["API server", "Services", "manifests"].iter().any(|what| subject.starts_with(what))
        };
        self.errors.keys().any(about_services)
    }
}

/// Batches that wait for the run loop, by the time when they were sent.
type Unread = Arc<Mutex<VecDeque<Instant>>>;

fn lock(unread: &Unread) -> MutexGuard<'_, VecDeque<Instant>> {
    // A queue of times is valid at whatever point a panic interrupted it.
    unread.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A reader of the [`Status`] of a source.
#[derive(Clone, Debug)]
pub struct StatusReader(watch::Receiver<Status>, Unread);

impl StatusReader {
    /// Returns since when the oldest batch that the run loop has not taken has been waiting.
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

    /// Reads the status without a copy. The source waits meanwhile.
    pub fn read<T>(&self, look: impl FnOnce(&Status) -> T) -> T {
        look(&self.0.borrow())
    }

    /// Waits until the status satisfies `condition`, and returns it. `None` if the source stopped
    /// before.
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

    /// Notes that a batch is about to be sent: from now on it waits.
    pub(super) fn sending(&self) {
        lock(&self.1).push_back(Instant::now());
    }

    pub(super) fn synced(&self) {
        self.0.send_if_modified(|status| {
            status.waiting.clear();
            !std::mem::replace(&mut status.synced, true)
        });
    }

    /// Notes that the objects of kind `what` are outstanding.
    pub(super) fn waiting(&self, what: &'static str) {
        self.0.send_modify(|status| {
            status.waiting.insert(what);
        });
    }

    /// Notes that the objects of kind `what` have been delivered once.
    pub(super) fn listed(&self, what: &'static str) {
        self.0.send_if_modified(|status| status.waiting.remove(what));
    }

    /// Notes that the objects of a kind are known as of `since`, or as of the time given by an
    /// earlier call; the other fields are always replaced.
    pub(super) fn stale(&self, what: &'static str, mut stale: Stale) {
        self.0.send_modify(|status| {
            if let Some(earlier) = status.stale.get(what) {
                stale.since = earlier.since;
            }
            status.stale.insert(what, stale);
        });
    }

    /// Notes that the objects of a kind are listed, or will not be because the API server refuses
    /// them: nothing waits.
    pub(super) fn followed(&self, what: &'static str) {
        self.0.send_if_modified(|status| status.stale.remove(what).is_some());
    }

    pub(super) fn contact(&self) {
        self.0.send_modify(|status| status.last_contact = Some(SystemTime::now()));
    }

    /// Notes an error of `subject`. Logged if it is new.
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

    /// Works like [`Self::trouble`], but logs each time the text differs: for mistakes that a
    /// person corrects step by step. Returns whether it is new.
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

    /// Notes that `subject` is well. Logged if something was wrong.
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

    /// The text may be formatted long after the error, and while the list takes its time.
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

    /// A stalled run loop must be noticed without the loop's help.
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
