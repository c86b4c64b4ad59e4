//! Handling of a flow table without room: a sweep at once rather than with the next period, one log
//! message per episode, and a count of episodes.

use std::time::{Duration, Instant};

use super::{pressure::FROM_PERCENT, sweeper::Found};

/// The time between sweeps that are begun for lack of room: a sweep marks what the next one
/// removes, and each scans the whole table.
const SPACING: Duration = Duration::from_secs(1);
/// The time without a lack of room after which an episode ends.
const EPISODE: Duration = Duration::from_secs(60);

/// The episodes in which new flows find no room in a main table.
#[derive(Debug)]
pub(super) struct Room {
    /// The last known value of `TableUsage::full_at`.
    full_at: u32,
    /// Whether it has changed since a sweep was last begun for it.
    unswept: bool,
    /// Whether it has changed since the last sweep ended.
    unnamed: bool,
    /// The time at which the last sweep for lack of room was begun.
    begun: Option<Instant>,
    /// The time at which a flow last found no room, in the current episode.
    last: Option<Instant>,
    /// The families that the log has named in this episode: IPv4, IPv6.
    named: [bool; 2],
    episodes: [u64; 2],
}

impl Room {
    /// Creates the state. `full_at`: the value that an earlier agent left, or the initial one.
    pub(super) fn new(full_at: u32) -> Self {
        Self {
            full_at,
            unswept: false,
            unnamed: false,
            begun: None,
            last: None,
            named: [false; 2],
            episodes: [0; 2],
        }
    }

    /// Returns the number of episodes so far: IPv4, IPv6.
    pub(super) fn episodes(&self) -> [u64; 2] {
        self.episodes
    }

    /// Whether a sweep must begin now. `busy`: one is under way, or about to begin.
    pub(super) fn look(&mut self, full_at: u32, busy: bool, now: Instant) -> bool {
        if full_at != self.full_at {
            self.full_at = full_at;
            (self.unswept, self.unnamed) = (true, true);
            self.last = Some(now);
        } else if self.last.is_some_and(|last| now.duration_since(last) >= EPISODE) {
            self.last = None;
            if self.named != [false; 2] {
                tracing::info!(
                    "{}: new flows have found room for {} s",
                    tables(self.named),
                    EPISODE.as_secs()
                );
            }
            self.named = [false; 2];
        }
        let spaced = self.begun.is_none_or(|begun| now.duration_since(begun) >= SPACING);
        if !self.unswept || busy || !spaced {
            return false;
        }
        self.unswept = false;
        self.begun = Some(now);
        true
    }

    /// Logs the tables in which a flow found no room, according to the sweep. `sizes`: the entries
    /// that they have room for.
    pub(super) fn swept(&mut self, found: &[Found; 2], sizes: [u32; 2]) {
        if !std::mem::take(&mut self.unnamed) {
            return;
        }
        let full = full(found, sizes);
        for family in 0..2 {
            if !full[family] || std::mem::replace(&mut self.named[family], true) {
                continue;
            }
            self.episodes[family] += 1;
            let flag = ["--flow-entries", "--flow-entries-v6"][family];
            tracing::warn!(
                entries = found[family].entries,
                size = sizes[family],
                unassured = found[family].unassured,
                "{} is full: new flows take the place of what is over, or of flows that are not assured; those that stand \
                 stay. If this is no flood, raise {flag} after `cleanup`; `flows` shows who holds the table",
                tables([family == 0, family == 1]),
            );
        }
    }
}

/// Returns the families whose tables have had no room, for which there is a single word: those that
/// are still nearly full, or the fuller one, from which a sweep has removed finished flows in the
/// meantime. There is none if both are less than half full: the word is also set if many flows are
/// unassured and no agent has counted them for a while.
fn full(found: &[Found; 2], sizes: [u32; 2]) -> [bool; 2] {
    let percent =
        [0, 1].map(|family| u64::from(found[family].entries) * 100 / u64::from(sizes[family].max(1)));
    match percent.map(|percent| percent >= FROM_PERCENT) {
        [false, false] if percent[0].max(percent[1]) >= 50 => {
            [percent[0] >= percent[1], percent[0] < percent[1]]
        }
        full => full,
    }
}

fn tables(families: [bool; 2]) -> &'static str {
    match families {
        [_, false] => "the flow table of IPv4",
        [false, true] => "the flow table of IPv6",
        [true, true] => "the flow tables",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: [u32; 2] = [1000, 100];

    fn found(entries: [u32; 2]) -> [Found; 2] {
        entries.map(|entries| Found { entries, ..Found::default() })
    }

    #[test]
    fn a_sweep_at_once_and_then_one_a_second() {
        let start = Instant::now();
        let after = |milliseconds| start + Duration::from_millis(milliseconds);
        let mut room = Room::new(7);
        assert!(!room.look(7, false, start), "that was before this agent");
        assert!(room.look(8, false, after(250)));
        assert!(!room.look(8, false, after(500)), "nothing new");
        assert!(!room.look(9, false, after(750)), "too soon after the last one");
        assert!(!room.look(9, true, after(1250)), "another one is under way");
        assert!(room.look(9, false, after(1500)), "not forgotten");
        assert!(!room.look(9, false, after(9000)));
        assert!(room.look(8, false, after(9250)), "the word goes round");
    }

    #[test]
    fn each_episode_is_counted_once_for_each_family() {
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        let mut room = Room::new(0);
        room.swept(&found([1000, 100]), SIZES);
        assert_eq!(room.episodes(), [0, 0], "it is full, but nobody wanted more");
        room.look(1, false, start);
        room.swept(&found([990, 10]), SIZES);
        room.look(2, false, after(40));
        room.swept(&found([990, 10]), SIZES);
        assert_eq!(room.episodes(), [1, 0]);
        room.look(3, false, after(90));
        room.swept(&found([990, 80]), SIZES);
        assert_eq!(room.episodes(), [1, 1], "the other one, too");
        room.look(3, false, after(149));
        room.look(4, false, after(149));
        room.swept(&found([990, 80]), SIZES);
        assert_eq!(room.episodes(), [1, 1], "still the same");
        room.look(4, false, after(209));
        room.look(5, false, after(210));
        room.swept(&found([990, 10]), SIZES);
        assert_eq!(room.episodes(), [2, 1]);
    }

    #[test]
    fn the_table_that_is_meant() {
        assert_eq!(full(&found([750, 74]), SIZES), [true, false]);
        assert_eq!(full(&found([0, 75]), SIZES), [false, true]);
        assert_eq!(full(&found([1000, 100]), SIZES), [true, true]);
        assert_eq!(full(&found([700, 69]), SIZES), [true, false], "a sweep has made room already");
        assert_eq!(full(&found([510, 52]), SIZES), [false, true]);
        assert_eq!(full(&found([490, 40]), SIZES), [false, false]);
    }
}
