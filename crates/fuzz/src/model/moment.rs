//! Moments of a run, by two clocks: the model's, which waits advance, and this machine's.

use std::time::Instant;

/// Maximum number of real jiffies in a millisecond: no kernel has more of them.
const PER_MILLISECOND: u64 = 1;

/// A moment of a run: the model's clock, and this machine's just before a packet was given to a
/// program, which may have seen it at any time since.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    pub clock: u64,
    pub given: Instant,
}

impl Moment {
    /// Returns the most jiffies that programs can have seen pass until now, when the model's clock
    /// shows `clock`.
    pub fn most(self, clock: u64) -> u64 {
        // One more tick may have been due.
        clock - self.clock + self.given.elapsed().as_millis() as u64 * PER_MILLISECOND + 1
    }

    /// Whether programs have seen at least this number of jiffies pass until now; `None` if that is
    /// undetermined.
    pub fn is_past(self, jiffies: u64, clock: u64) -> Option<bool> {
        if clock - self.clock >= jiffies {
            Some(true)
        } else if self.most(clock) < jiffies {
            Some(false)
        } else {
            None
        }
    }
}
