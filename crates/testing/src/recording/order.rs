//! The order of a change and of a check that overlapped with it: no clock shows it, but the check's
//! answer does.

use std::time::{Duration, Instant};

/// An event at an unknown moment between two known ones.
#[derive(Clone, Copy, Debug)]
pub(super) struct Happening {
    pub(super) from: Instant,
    pub(super) to: Instant,
    /// The moment that the simulator is given.
    pub(super) at: Instant,
}

/// One check, and the moment at which the simulator is to make it.
#[derive(Clone, Copy, Debug)]
pub(super) struct TimedCheck {
    pub(super) began: Instant,
    pub(super) ended: Instant,
    pub(super) healthy: bool,
    pub(super) at: Instant,
}

/// Places checks of these nodes before or after an event, as their answers show. Moments are moved
/// only within the time in which the event, or the check, may have happened. A node with the same
/// answer before and after gives no evidence.
pub(super) fn settle(what: &mut Happening, until: Instant, checks: &mut [Vec<TimedCheck>], nodes: &[usize]) {
    let (mut earliest, mut latest) = (what.from, what.to);
    let mut doubtful = Vec::new();
    for node in nodes {
        let checks = &checks[*node];
        let before = checks.iter().rfind(|check| check.ended < what.from);
        let after = checks.iter().find(|check| check.began > until);
        let (Some(before), Some(after)) = (before, after) else { continue };
        if before.healthy == after.healthy {
            continue;
        }
        for (number, check) in checks.iter().enumerate() {
            if check.ended < what.from || check.began > until {
                continue;
            }
            let knows = check.healthy == after.healthy;
            if knows {
                latest = latest.min(check.ended);
            } else {
                earliest = earliest.max(check.began);
            }
            doubtful.push((*node, number, knows));
        }
    }
    // A health port lags slightly behind the maps: a check without the change then began after the
    // moment that the agent reports.
    what.at = if earliest <= latest { what.at.clamp(earliest, latest) } else { latest };
    for (node, number, knows) in doubtful {
        let check = &mut checks[node][number];
        check.at =
            if knows { check.at.max(what.at) } else { check.at.min(what.at - Duration::from_nanos(1)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A row, in milliseconds: for each check, when it began and ended, and whether its answer
    /// shows the change.
    type Row = (&'static str, [(u64, u64, bool); 3], [u64; 2], &'static str);

    /// The change is made between 1000 and 1010, and noticed by 1260.
    const ROWS: &[Row] = &[
        (
            "no check is near",
            [(0, 5, false), (500, 505, false), (2000, 2005, true)],
            [1000, 1010],
            "1005: -- -- +0",
        ),
        (
            "it began before, and knows",
            [(0, 5, false), (998, 1002, true), (2000, 2005, true)],
            [1000, 1010],
            "1002: -- +4 +0",
        ),
        (
            "it began before, and does not",
            [(0, 5, false), (998, 1012, false), (2000, 2005, true)],
            [1000, 1010],
            "1005: -- -- +0",
        ),
        (
            "it began within, and does not",
            [(0, 5, false), (1008, 1012, false), (2000, 2005, true)],
            [1000, 1010],
            "1008: -- -- +0",
        ),
        (
            "it began within, and knows",
            [(0, 5, false), (1001, 1003, true), (2000, 2005, true)],
            [1000, 1010],
            "1003: -- +2 +0",
        ),
        (
            "it knows, for it waited until its end",
            [(0, 5, false), (999, 1999, true), (2000, 2005, true)],
            [1000, 1010],
            "1005: -- +6 +0",
        ),
        (
            "the health port is late",
            [(0, 5, false), (1030, 1035, false), (2000, 2005, true)],
            [1000, 1010],
            "1010: -- -- +0",
        ),
        (
            "it tells nothing",
            [(0, 5, true), (1001, 1003, true), (2000, 2005, true)],
            [1000, 1010],
            "1005: -- -- +0",
        ),
    ];

    #[test]
    fn answers_tell_which_came_first() {
        let zero = Instant::now() + Duration::from_secs(10);
        let at = |ms: u64| zero + Duration::from_millis(ms);
        for (what, checks, [from, to], wanted) in ROWS {
            let mut change = Happening { from: at(*from), to: at(*to), at: at(from.midpoint(*to)) };
            let checks = checks.map(|(began, ended, healthy)| TimedCheck {
                began: at(began),
                ended: at(ended),
                healthy,
                at: at(began),
            });
            let mut all = [checks.to_vec()];
            settle(&mut change, at(to + 250), &mut all, &[0]);
            let mut found = format!("{}:", change.at.duration_since(zero).as_millis());
            for check in &all[0] {
                // The time before the change, or the time after its own beginning.
                let moved = check.at.saturating_duration_since(check.began).as_millis();
                found += &if check.at < change.at { " --".to_owned() } else { format!(" +{moved}") };
            }
            assert_eq!(found, *wanted, "{what}");
        }
    }
}
