//! The idle time of this machine's processors: while they idle, the queue starts more tests than it
//! has slots.

use std::{
    fs,
    time::{Duration, Instant},
};

/// The time between two looks, in which the clock of `/proc/stat` ticks a hundred times.
const LOOK: Duration = Duration::from_secs(1);

/// The time that all processors together have spent since the boot, in ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ticks {
    idle: u64,
    all: u64,
}

impl Ticks {
    fn now() -> Option<Self> {
        Self::parse(&fs::read_to_string("/proc/stat").ok()?)
    }

    /// Parses the line of all processors, see proc_stat(5): user, nice, system, idle, iowait, irq,
    /// softirq, steal. The time of guests is part of the first two. What runs in the
    /// [background][super::background] leaves its processor to any other program: its time counts
    /// as idle.
    fn parse(stat: &str) -> Option<Self> {
        let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
        let ticks: Vec<u64> = line.split_whitespace().take(8).map_while(|word| word.parse().ok()).collect();
        Some(Self { idle: ticks.get(1)? + ticks.get(3)? + ticks.get(4)?, all: ticks.iter().sum() })
    }

    /// Returns the share of idle time since an earlier look, from 0 to 1.
    fn idle_since(self, earlier: Self) -> f64 {
        let all = self.all.saturating_sub(earlier.all).max(1);
        self.idle.saturating_sub(earlier.idle) as f64 / all as f64
    }
}

/// The last look at the processors.
pub(super) struct Processors {
    looked: Instant,
    before: Option<Ticks>,
}

impl Processors {
    pub(super) fn look() -> Self {
        Self { looked: Instant::now(), before: Ticks::now() }
    }

    /// Whether they have idled for more than this share of the time since the last look. Two looks
    /// are at least a second apart, so that the second one sees what was started after the first.
    pub(super) fn idle(&mut self, share: f64) -> bool {
        if self.looked.elapsed() < LOOK {
            return false;
        }
        let earlier = std::mem::replace(self, Self::look());
        let idle = self.before.zip(earlier.before).map(|(now, before)| now.idle_since(before));
        idle.is_some_and(|idle| idle > share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_idle_share_of_all_processors() {
        let parse = |text| Ticks::parse(text).unwrap();
        let before = parse("cpu  100 10 50 790 50 0 0 0 0 0\ncpu0 1 1 1 1 1 1 1 1\n");
        assert_eq!(before, Ticks { idle: 850, all: 1000 });
        let after = parse("cpu  220 30 80 810 60 0 0 0 70 0\n");
        assert!((after.idle_since(before) - 0.25).abs() < 1e-9);
        assert!(before.idle_since(before).abs() < 1e-9);
        assert_eq!(Ticks::parse("cpu  1 2"), None);
    }

    #[test]
    fn idle_at_no_time_is_unknown() {
        assert!(!Processors::look().idle(0.0));
    }
}
