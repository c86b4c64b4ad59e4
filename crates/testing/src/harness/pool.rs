//! Values that are expensive to make, lent to one user at a time.

use std::sync::{Mutex, PoisonError};

/// The values that are not lent at the moment.
pub(super) struct Pool<T>(Mutex<Vec<T>>);

impl<T> Pool<T> {
    pub(super) const fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    /// Lends a value to `work`; makes a new one if all are lent. A value is not returned if `work`
    /// panics.
    pub(super) fn lend<R>(&self, make: impl FnOnce() -> T, work: impl FnOnce(T) -> (T, R)) -> R {
        let idle = self.idle().pop();
        let (value, done) = work(idle.unwrap_or_else(make));
        self.idle().push(value);
        done
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<T>> {
        // Nothing panics while the lock is held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
