//! Async work inside a namespace that runs until it is stopped.

use std::panic::resume_unwind;
use std::thread::{self, JoinHandle};

use tokio::sync::watch;

use super::{Namespace, runtime};

/// Work on a thread of its own in a namespace. Dropping it requests a stop and waits for the end of
/// the work.
#[derive(Debug)]
pub struct Running<T> {
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<T>>,
}

/// The receiving end of the stop request of [`Running`].
#[derive(Clone, Debug)]
pub struct Stop(watch::Receiver<bool>);

impl Namespace {
    /// Starts async work inside; it should return soon after [`Stop::requested`] does.
    pub fn start<T: Send + 'static>(
        &self,
        what: &str,
        work: impl AsyncFnOnce(Stop) -> T + Send + 'static,
    ) -> Running<T> {
        let (stop, wish) = watch::channel(false);
        let namespace = self.clone();
        let thread = thread::Builder::new().name(format!("{what} {}", self.name)).spawn(move || {
            namespace.enter().unwrap_or_else(|error| panic!("{error:#}"));
            runtime().block_on(work(Stop(wish)))
        });
        let thread = thread.unwrap_or_else(|error| panic!("no thread for {what}: {error}"));
        Running { stop, thread: Some(thread) }
    }
}

impl<T> Running<T> {
    /// Requests a stop and returns the result of the work.
    pub fn finish(self) -> T {
        self.stop.send_replace(true);
        self.wait()
    }

    /// Waits until the work ends by itself.
    pub fn wait(mut self) -> T {
        let thread = self.thread.take().expect("only wait and drop take the thread");
        thread.join().unwrap_or_else(|panic| resume_unwind(panic))
    }

    pub fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl<T> Drop for Running<T> {
    fn drop(&mut self) {
        self.stop.send_replace(true);
        if let Some(thread) = self.thread.take() {
            // The thread printed its panic itself; the owner is being dropped and needs no result.
            thread.join().ok();
        }
    }
}

impl Stop {
    pub fn is_requested(&self) -> bool {
        *self.0.borrow()
    }

    /// Completes when the owner requests a stop, or is gone.
    pub async fn requested(&mut self) {
        self.0.wait_for(|stop| *stop).await.ok();
    }
}
