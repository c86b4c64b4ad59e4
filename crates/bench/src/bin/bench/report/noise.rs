//! Trust in a figure: bounds of the spread, and the other load on the machine.

use std::{collections::HashMap, fs, thread, time::Duration};

use super::unit::Unit;

/// Fraction of a row's time that a hypervisor may give to other guests.
pub(crate) const MOST_STOLEN: f64 = 0.02;
/// Time limit for measuring rows again.
pub(super) const REPEATS: Duration = Duration::from_secs(45);
/// Fraction of all CPUs that other processes may use before the bench begins.
const MOST_BUSY: f64 = 0.05;

/// Returns the spread that is normal on a quiet machine, as a fraction of the median: half the
/// distance of the quartiles.
///
/// Below 100 ns, runs of the same program lie within 2 ns or 6 % of each other; where memory
/// decides, the placement of pages and what others have in the caches make it 10 %. Times of whole
/// exchanges depend on the scheduler.
pub(super) fn bound(unit: Unit, median: f64) -> f64 {
    match unit {
        Unit::Nanoseconds if median < 100.0 => (2.0 / median.max(1.0)).max(0.1),
        Unit::Nanoseconds | Unit::Mpps | Unit::PerSecond => 0.15,
        Unit::Microseconds | Unit::Milliseconds => 0.25,
        // The timer's interrupts cause the spread.
        Unit::Instructions => 0.02,
        Unit::Percent | Unit::Megabytes | Unit::Bytes | Unit::Packets | Unit::Count => 0.2,
    }
}

/// Jiffies of all CPUs since boot.
#[derive(Clone, Copy, Default)]
pub(super) struct Clock {
    all: u64,
    idle: u64,
    stolen: u64,
}

impl Clock {
    /// Reads the clock; zero where /proc cannot be read.
    pub(super) fn now() -> Self {
        let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
        Self::parse(&stat).unwrap_or_default()
    }

    /// Parses `cpu user nice system idle iowait irq softirq steal guest guest_nice`: proc(5).
    fn parse(stat: &str) -> Option<Self> {
        let fields: Option<Vec<u64>> =
            stat.lines().next()?.split_whitespace().skip(1).take(8).map(|field| field.parse().ok()).collect();
        let fields = fields?;
        Some(Self {
            all: fields.iter().sum(),
            idle: fields.get(3)? + fields.get(4)?,
            stolen: *fields.get(7)?,
        })
    }

    /// Returns the fraction of the non-idle time since `then` that the hypervisor gave to other
    /// guests.
    pub(super) fn stolen_since(self, then: Self) -> f64 {
        let busy = (self.all - self.idle).saturating_sub(then.all - then.idle);
        if busy == 0 { 0.0 } else { self.stolen.saturating_sub(then.stolen) as f64 / busy as f64 }
    }

    fn busy_since(self, then: Self) -> f64 {
        let all = self.all.saturating_sub(then.all);
        if all == 0 { 0.0 } else { 1.0 - self.idle.saturating_sub(then.idle) as f64 / all as f64 }
    }
}

/// Describes the processes that keep the machine busy before anything is measured.
pub(crate) fn busy() -> Option<String> {
    let (then, used) = (Clock::now(), processes());
    thread::sleep(Duration::from_millis(500));
    let busy = Clock::now().busy_since(then);
    if busy <= MOST_BUSY {
        return None;
    }
    let mut grown: Vec<_> = processes()
        .into_iter()
        .map(|(id, (name, now))| (now.saturating_sub(used.get(&id).map_or(0, |(_, before)| *before)), name))
        .filter(|(grown, _)| *grown > 0)
        .collect();
    grown.sort_by_key(|(grown, _)| std::cmp::Reverse(*grown));
    let names: Vec<_> = grown.into_iter().take(3).map(|(_, name)| name).collect();
    Some(format!(
        "{:.0} % of all CPUs are busy{}",
        busy * 100.0,
        if names.is_empty() { String::new() } else { format!(" ({})", names.join(", ")) }
    ))
}

/// Returns names and CPU time of all processes except this one.
fn processes() -> HashMap<u32, (String, u64)> {
    let Ok(entries) = fs::read_dir("/proc") else { return HashMap::new() };
    let ids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    ids.filter(|id| *id != std::process::id())
        .filter_map(|id| {
            // proc(5): the name in brackets, then the state; utime and stime are the 14th and 15th
            // field.
            let stat = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
            let (name, rest) = stat.split_once('(')?.1.rsplit_once(')')?;
            let fields: Vec<&str> = rest.split_whitespace().collect();
            let time = fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
            Some((id, (name.to_owned(), time)))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_that_is_not_idle_is_busy_or_stolen() {
        let then = Clock::parse("cpu  100 0 50 800 50 0 0 0 0 0\ncpu0 …").unwrap();
        let now = Clock::parse("cpu  160 0 60 820 50 0 0 10 0 0\n").unwrap();
        assert!((now.stolen_since(then) - 0.125).abs() < 1e-9);
        assert!((now.busy_since(then) - 0.8).abs() < 1e-9);
        assert!(Clock::parse("nothing").is_none());
    }
}
