//! The idle time of this machine's processors, by which the queue starts more tests than its slots.

use std::{
    fs,
    time::{Duration, Instant},
};

/// The interval between two measurements: the clock of `/proc/stat` has a hundred ticks a second.
const LOOK: Duration = Duration::from_secs(1);
/// The share of idle time above which another test has room: on two processors it would get half of
/// one.
const ROOM: f64 = 0.25;

/// Sums over all processors since boot, in ticks: idle ones, and all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ticks {
    idle: u64,
    all: u64,
}

impl Ticks {
    fn now() -> Option<Self> {
        Self::parse(&fs::read_to_string("/proc/stat").ok()?)
    }

    /// Parses the values of proc_stat(5): user, nice, system, idle, iowait, irq, softirq, steal;
    /// guest times are included in the first two.
    fn parse(stat: &str) -> Option<Self> {
        let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
        let ticks: Vec<u64> = line.split_whitespace().take(8).map_while(|word| word.parse().ok()).collect();
        Some(Self { idle: ticks.get(3)? + ticks.get(4)?, all: ticks.iter().sum() })
    }

    /// Returns the idle share since `earlier`, from 0 to 1.
    fn idle_since(self, earlier: Self) -> f64 {
        let all = self.all.saturating_sub(earlier.all).max(1);
        self.idle.saturating_sub(earlier.idle) as f64 / all as f64
    }
}

/// A periodic measurement of the processors.
pub(super) struct Processors {
    looked: Instant,
    before: Option<Ticks>,
}

impl Processors {
    pub(super) fn look() -> Self {
        Self { looked: Instant::now(), before: Ticks::now() }
    }

    /// Whether they were idle enough since the last measurement; never true twice within a second,
    /// so that the effect of started tests is measured.
    pub(super) fn have_room(&mut self) -> bool {
        if self.looked.elapsed() < LOOK {
            return false;
        }
        let earlier = std::mem::replace(self, Self::look());
        let idle = self.before.zip(earlier.before).map(|(now, before)| now.idle_since(before));
        idle.is_some_and(|idle| idle > ROOM)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_idle_share_of_all_processors() {
        let parse = |text| Ticks::parse(text).unwrap();
        let before = parse("cpu  100 0 50 800 50 0 0 0 0 0\ncpu0 1 1 1 1 1 1 1 1\n");
        assert_eq!(before, Ticks { idle: 850, all: 1000 });
        let after = parse("cpu  220 0 80 840 60 0 0 0 70 0\n");
        assert!((after.idle_since(before) - 0.25).abs() < 1e-9);
        assert!(before.idle_since(before).abs() < 1e-9);
        assert_eq!(Ticks::parse("cpu  1 2"), None);
    }

    #[test]
    fn no_room_at_once() {
        assert!(!Processors::look().have_room());
    }
}
