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

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::Pool;

    #[test]
    fn what_comes_back_is_lent_again() {
        let (pool, made) = (Pool::new(), Cell::new(0));
        let make = || {
            made.set(made.get() + 1);
            made.get()
        };
        let meanwhile = pool.lend(make, |first| (first, pool.lend(make, |second| (second, (first, second)))));
        assert_eq!(meanwhile, (1, 2), "two at a time");
        pool.lend(make, |value| (value, ()));
        assert_eq!(made.get(), 2);
    }

    #[test]
    fn what_was_lent_to_a_panic_does_not_come_back() {
        let pool = Pool::new();
        let broken =
            catch_unwind(AssertUnwindSafe(|| pool.lend(|| 1, |_| -> (i32, ()) { panic!("a test fails") })));
        assert!(broken.is_err());
        assert_eq!(pool.lend(|| 2, |value| (value, value)), 2);
    }
}
