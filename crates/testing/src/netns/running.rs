//! Async work inside a namespace that runs until it is stopped.

use std::panic::resume_unwind;
use std::thread::{self, JoinHandle};

use tokio::sync::watch;

use super::{Namespace, runtime};

/// Work on a thread of its own in a namespace. Dropping it tells it to stop and waits for it.
#[derive(Debug)]
pub struct Running<T> {
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<T>>,
}

/// The receiving end of [`Running`]'s wish to stop.
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
    /// Tells the work to stop and gives its result.
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
            // A panic was printed by its own thread; the owner is about to go and asked for nothing.
            thread.join().ok();
        }
    }
}

impl Stop {
    pub fn is_requested(&self) -> bool {
        *self.0.borrow()
    }

    /// Completes when the owner wants the work to end (or is gone).
    pub async fn requested(&mut self) {
        self.0.wait_for(|stop| *stop).await.ok();
    }
}
