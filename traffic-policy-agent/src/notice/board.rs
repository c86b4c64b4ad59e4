//! The board on which the sources of news write, and from which all others read: whether this node
//! is about to go.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::watch;
use traffic_policy_cluster::source::Leaving;

/// The reports of all sources. It is cheap to clone; all clones share one state.
#[derive(Clone, Debug, Default)]
pub struct Board(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    reports: Mutex<Reports>,
    /// The news of all sources together.
    news: watch::Sender<Option<Leaving>>,
    /// Whether the API server holds this node's announcement; `None`: nobody is told.
    told: Mutex<Option<watch::Sender<bool>>>,
}

impl Default for Shared {
    fn default() -> Self {
        Self { reports: Mutex::default(), news: watch::channel(None).0, told: Mutex::default() }
    }
}

#[derive(Debug, Default)]
struct Reports {
    leaving: BTreeMap<String, Leaving>,
    /// The reasons for which news of a source may be missed.
    troubles: BTreeMap<String, String>,
}

impl Board {
    /// Returns the place of one source on the board.
    #[must_use]
    pub fn reporter(&self, source: &str) -> Reporter {
        Reporter { source: source.to_owned(), board: self.clone() }
    }

    /// Returns the news if this node is about to go: the reasons of all sources, and the earliest
    /// time.
    #[must_use]
    pub fn leaving(&self) -> Option<Leaving> {
        self.0.news.borrow().clone()
    }

    /// Returns a receiver of the news.
    #[must_use]
    pub fn news(&self) -> watch::Receiver<Option<Leaving>> {
        self.0.news.subscribe()
    }

    /// Returns the channel by which the board learns whether other nodes have been told. From now
    /// on they are to be told.
    #[must_use]
    pub fn tell_others(&self) -> watch::Sender<bool> {
        let told = watch::channel(false).0;
        *self.0.told.lock().unwrap_or_else(PoisonError::into_inner) = Some(told.clone());
        told
    }

    /// Returns the sources whose news may be missed, with the reasons.
    #[must_use]
    pub fn troubles(&self) -> BTreeMap<String, String> {
        self.reports().troubles.clone()
    }

    fn reports(&self) -> MutexGuard<'_, Reports> {
        // Each entry is valid by itself, whatever a panic interrupted.
        self.0.reports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut BTreeMap<String, Leaving>)) {
        let mut reports = self.reports();
        change(&mut reports.leaving);
        let together = together(&reports.leaving);
        self.0.news.send_if_modified(|news| {
            let differs = *news != together;
            match (&news, &together) {
                (None, Some(leaving)) => tracing::warn!("this node is about to go: {}", leaving.reason),
                (Some(_), None) => tracing::info!("this node stays"),
                _ => {}
            }
            *news = together;
            differs
        });
    }
}

fn together(reports: &BTreeMap<String, Leaving>) -> Option<Leaving> {
    if reports.is_empty() {
        return None;
    }
    let reasons: Vec<_> = reports.iter().map(|(source, said)| format!("{source}: {}", said.reason)).collect();
    let gone_by = reports.values().filter_map(|said| said.gone_by).min();
    Some(Leaving { reason: reasons.join("; "), gone_by })
}

/// The place of one source on a [`Board`].
#[derive(Clone, Debug)]
pub struct Reporter {
    source: String,
    board: Board,
}

impl Reporter {
    /// Reports what the source says: that this node is about to go, or, by `None`, that it stays.
    pub fn say(&self, leaving: Option<Leaving>) {
        self.board.change(|all| match leaving {
            Some(leaving) => drop(all.insert(self.source.clone(), leaving)),
            None => drop(all.remove(&self.source)),
        });
    }

    /// Reports that the source is heard.
    pub fn well(&self) {
        if self.board.reports().troubles.remove(&self.source).is_some() {
            tracing::info!("news from {} are heard", self.source);
        }
    }

    /// Reports why news of the source may be missed; what it said last stays. Each reason is logged
    /// once.
    pub fn trouble(&self, trouble: String) {
        let mut reports = self.board.reports();
        if reports.troubles.get(&self.source) != Some(&trouble) {
            tracing::warn!("news from {} may be missed, trying again: {trouble}", self.source);
            reports.troubles.insert(self.source.clone(), trouble);
        }
    }

    /// Waits until the other nodes have been told, if they are to be told at all.
    pub async fn told(&self) {
        let sender = self.board.0.told.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let told = sender.map(|sender| sender.subscribe());
        if let Some(mut told) = told {
            // An error means that the agent is stopping.
            let _ = told.wait_for(|told| *told).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaving(reason: &str, second: Option<i64>) -> Option<Leaving> {
        let gone_by = second.map(|second| jiff::Timestamp::from_second(second).unwrap());
        Some(Leaving { reason: reason.to_owned(), gone_by })
    }

    #[tokio::test]
    async fn the_news_of_all_sources_together() {
        let board = Board::default();
        let (file, cloud) = (board.reporter("file"), board.reporter("gce"));
        let mut news = board.news();
        file.say(None);
        assert!(!news.has_changed().unwrap(), "nothing new");
        file.say(leaving("drained", None));
        cloud.say(leaving("preempted", Some(30)));
        assert_eq!(board.leaving(), leaving("file: drained; gce: preempted", Some(30)));
        file.say(leaving("drained", Some(20)));
        assert_eq!(board.leaving().unwrap().gone_by, leaving("", Some(20)).unwrap().gone_by, "the earliest");
        cloud.trouble("no answer".to_owned());
        assert!(board.leaving().unwrap().reason.contains("preempted"), "its last word stays");
        assert_eq!(board.troubles()["gce"], "no answer");
        cloud.well();
        assert!(board.troubles().is_empty());
        cloud.say(None);
        assert_eq!(board.leaving(), leaving("file: drained", Some(20)));
        news.mark_unchanged();
        file.say(None);
        assert!(news.has_changed().unwrap() && board.leaving().is_none());
    }

    #[tokio::test]
    async fn nobody_is_waited_for_unless_others_are_to_be_told() {
        let board = Board::default();
        let reporter = board.reporter("logind");
        reporter.told().await;
        let told = board.tell_others();
        let mut waiting = std::pin::pin!(reporter.told());
        assert!(futures_now(waiting.as_mut()).await.is_none(), "not told yet");
        told.send_replace(true);
        waiting.await;
    }

    /// Polls a future once.
    async fn futures_now<F: Future>(future: F) -> Option<F::Output> {
        tokio::select! {
            biased;
            output = future => Some(output),
            () = std::future::ready(()) => None,
        }
    }
}
