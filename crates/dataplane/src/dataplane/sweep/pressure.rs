//! Early removal of flows from a nearly full table: by class, as many as exceed the target.

use traffic_policy_ebpf::{abi::Sweep, tcp::class};

/// The share of a table, in percent, from which flows are removed early.
pub(super) const FROM_PERCENT: u64 = 75;
/// The share of a table, in percent, down to which flows are removed early.
const TO_PERCENT: u64 = 70;
/// The share of a table, in percent, beyond which UDP flows are removed before half-closed
/// connections.
const UDP_PERCENT: u64 = 25;

/// The flows that the next sweep may remove early, by [`mod@class`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pressure {
    /// The minimum idle time, in jiffies.
    pub(super) idle: [u32; class::COUNT],
    /// The maximum number of flows.
    pub(super) surplus: [u32; class::COUNT],
}

impl Pressure {
    pub(super) const NONE: Self = Self { idle: [u32::MAX; class::COUNT], surplus: [0; class::COUNT] };

    /// Returns the pressure after a sweep with this result, in a table of `size` entries.
    pub(super) fn after(result: &Sweep, size: u32) -> Self {
        let (size, percent) = (u64::from(size), |of: u64, percent: u64| of * percent / 100);
        // A flow has two entries.
        let entries = u64::from(result.entries.saturating_sub(2 * result.deleted));
        if entries < percent(size, FROM_PERCENT) {
            return Self::NONE;
        }
        let mut wanted = (entries - percent(size, TO_PERCENT).min(entries)).div_ceil(2);
        let flows = |class: usize| result.idle[class].iter().map(|flows| u64::from(*flows)).sum::<u64>();
        let udp_beyond = flows(class::UDP).saturating_sub(percent(size / 2, UDP_PERCENT));
        let mut surplus = [0; class::COUNT];
        for (class, at_most) in [
            (class::ENDED, u64::MAX),
            (class::UNASSURED, u64::MAX),
            (class::UDP, udp_beyond),
            (class::HALF_CLOSED, u64::MAX),
            (class::UDP, u64::MAX),
        ] {
            let there = flows(class) - surplus[class];
            let taken = wanted.min(at_most).min(there);
            surplus[class] += taken;
            wanted -= taken;
        }
        let mut pressure = Self::NONE;
        for class in (0..class::COUNT).filter(|class| surplus[*class] != 0) {
            pressure.idle[class] = longest_idle(&result.idle[class], surplus[class]);
            pressure.surplus[class] = u32::try_from(surplus[class]).unwrap_or(u32::MAX);
        }
        pressure
    }
}

/// Returns the idle time, a power of two, that at most `wanted` flows have reached: the rest is
/// left to a later sweep. If the flows with the longest idle time are more, returns theirs.
fn longest_idle(flows: &[u32; 32], wanted: u64) -> u32 {
    let mut reached = 0;
    let mut longest = None;
    for (magnitude, flows) in flows.iter().enumerate().rev().filter(|(_, flows)| **flows != 0) {
        reached += u64::from(*flows);
        if reached > wanted && longest.is_some() {
            break;
        }
        longest = Some(magnitude);
    }
    longest.map_or(u32::MAX, |magnitude| if magnitude == 0 { 0 } else { 1 << magnitude })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a sweep that found flows of each class, all idle for 2^10 jiffies, and established
    /// ones.
    fn found(classes: [u32; class::COUNT], established: u32) -> Sweep {
        let mut result =
            Sweep { entries: 2 * (classes.iter().sum::<u32>() + established), ..Sweep::default() };
        for (class, flows) in classes.into_iter().enumerate() {
            result.idle[class][10] = flows;
        }
        result
    }

    fn surplus(classes: [u32; class::COUNT], established: u32) -> [u32; class::COUNT] {
        Pressure::after(&found(classes, established), 200).surplus
    }

    #[test]
    fn below_three_quarters_nothing_goes() {
        assert_eq!(Pressure::after(&found([20, 20, 20, 14], 0), 200), Pressure::NONE);
        assert_eq!(surplus([20, 20, 20, 15], 0), [5, 0, 0, 0]);
        let deleted = Sweep { deleted: 5, ..found([20, 20, 20, 15], 0) };
        assert_eq!(Pressure::after(&deleted, 200), Pressure::NONE, "what it has removed is no longer there");
    }

    #[test]
    fn class_by_class_and_established_never() {
        assert_eq!(surplus([40, 30, 30, 0], 0), [30, 0, 0, 0]);
        assert_eq!(surplus([10, 50, 30, 10], 0), [10, 20, 0, 0]);
        assert_eq!(surplus([0, 0, 40, 40], 20), [0, 0, 15, 15], "UDP has a quarter of the table");
        assert_eq!(surplus([0, 0, 40, 10], 50), [0, 0, 20, 10]);
        assert_eq!(surplus([0, 0, 0, 0], 100), [0; 4]);
        assert_eq!(surplus([1, 0, 0, 0], 99), [1, 0, 0, 0]);
    }

    #[test]
    fn the_longest_idle_of_a_class_first() {
        let mut result = found([0; class::COUNT], 80);
        result.entries = 170;
        (result.idle[class::ENDED][3], result.idle[class::ENDED][12]) = (10, 15);
        let pressure = Pressure::after(&result, 200);
        assert_eq!((pressure.idle[class::ENDED], pressure.surplus[class::ENDED]), (1 << 12, 15));
        result.entries = 180;
        let pressure = Pressure::after(&result, 200);
        assert_eq!((pressure.idle[class::ENDED], pressure.surplus[class::ENDED]), (1 << 12, 20));
        result.entries = 190;
        let pressure = Pressure::after(&result, 200);
        assert_eq!((pressure.idle[class::ENDED], pressure.surplus[class::ENDED]), (1 << 3, 25));
    }
}
