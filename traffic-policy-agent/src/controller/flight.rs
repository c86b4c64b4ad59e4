//! One piece of work at a time: requests that arrive meanwhile are merged into one more run, after
//! it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Work of one kind that must not run twice at once, and of which one run serves all requests that
/// wait.
#[derive(Debug)]
pub(super) struct Flight<W>(Arc<Mutex<State<W>>>);

#[derive(Debug)]
struct State<W> {
    runs: bool,
    waiting: Option<W>,
}

impl<W> Default for Flight<W> {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(State { runs: false, waiting: None })))
    }
}

impl<W: Send + 'static> Flight<W> {
    /// Does the work in a thread where it may block: now, or when the run under way has ended.
    /// `merge` combines it with work that waits already.
    pub(super) fn request(&self, work: W, merge: impl FnOnce(W, W) -> W, run: impl Fn(W) + Send + 'static) {
        {
            let mut state = lock(&self.0);
            if state.runs {
                state.waiting = Some(match state.waiting.take() {
                    Some(waiting) => merge(waiting, work),
                    None => work,
                });
                return;
            }
            state.runs = true;
        }
        let flight = Landing(Arc::clone(&self.0));
        tokio::task::spawn_blocking(move || {
            let mut work = Some(work);
            while let Some(next) = work {
                run(next);
                work = flight.next();
            }
        });
    }
}

/// Starts the next run on drop, even if this one panicked.
struct Landing<W>(Arc<Mutex<State<W>>>);

impl<W> Landing<W> {
    fn next(&self) -> Option<W> {
        let mut state = lock(&self.0);
        let waiting = state.waiting.take();
        state.runs = waiting.is_some();
        waiting
    }
}

impl<W> Drop for Landing<W> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            lock(&self.0).runs = false;
        }
    }
}

fn lock<W>(state: &Mutex<State<W>>) -> MutexGuard<'_, State<W>> {
    // Each field is valid by itself, whatever a panic interrupted.
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, time::Duration};

    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    /// Waits until nothing runs. The work itself reports its end before the flight does.
    async fn landed<W>(flight: &Flight<W>) {
        let waiting = async {
            while lock(&flight.0).runs {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(LONG, waiting).await.unwrap();
    }

    #[tokio::test]
    async fn what_waits_is_done_once_and_together() {
        let flight = Flight::default();
        let (begun, begins) = mpsc::channel::<Vec<u32>>();
        let (go, goes) = mpsc::channel::<()>();
        let goes = Arc::new(Mutex::new(goes));
        let request = |number: u32| {
            let (begun, goes) = (begun.clone(), Arc::clone(&goes));
            let both = |mut waiting: Vec<u32>, work: Vec<u32>| {
                waiting.extend(work);
                waiting
            };
            flight.request(vec![number], both, move |work| {
                begun.send(work).unwrap();
                goes.lock().unwrap().recv_timeout(LONG).unwrap();
            });
        };
        request(0);
        assert_eq!(begins.recv_timeout(LONG).unwrap(), [0]);
        (1..=20).for_each(request);
        assert!(begins.try_recv().is_err(), "two at once");
        go.send(()).unwrap();
        assert_eq!(begins.recv_timeout(LONG).unwrap(), Vec::from_iter(1..=20));
        go.send(()).unwrap();
        // The next run has nothing to wait for.
        landed(&flight).await;
        request(21);
        assert_eq!(begins.recv_timeout(LONG).unwrap(), [21]);
        go.send(()).unwrap();
    }

    #[tokio::test]
    async fn a_panic_does_not_end_it() {
        let flight = Flight::default();
        let (done, ended) = mpsc::channel();
        for number in 0..2 {
            let done = done.clone();
            flight.request(
                number,
                |_, new| new,
                move |number| {
                    done.send(number).unwrap();
                    assert_ne!(number, 0, "as it should");
                },
            );
            assert_eq!(ended.recv_timeout(LONG).unwrap(), number);
            landed(&flight).await;
        }
    }
}
