//! CLOCK_MONOTONIC, and the number of jiffies in a second.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::time::{ClockId, clock_getres, clock_gettime};

/// Returns the time of the clock of `Frontend::drain_until`, in nanoseconds.
pub fn monotonic() -> Result<u64> {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).context("clock_gettime failed")?;
    Ok(Duration::from(now).as_nanos() as u64)
}

/// Returns the jiffies per second, CONFIG_HZ. The resolution of the coarse clocks is a jiffy, also
/// where timers are finer: `posix_get_coarse_res` in
/// <https://github.com/torvalds/linux/blob/v6.1/kernel/time/posix-timers.c>
///
/// # Errors
/// The resolution is that of no tick.
pub fn hz() -> Result<u32> {
    let resolution = clock_getres(ClockId::CLOCK_MONOTONIC_COARSE).context("clock_getres failed")?;
    hz_of(resolution.into())
}

/// Returns the rate of ticks of this length, which the kernel rounds to nanoseconds.
fn hz_of(tick: Duration) -> Result<u32> {
    let hz = (tick.as_secs_f64().recip()).round();
    ensure!((1.0..=10_000.0).contains(&hz), "a coarse clock with a resolution of {tick:?} tells no tick");
    Ok(hz as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hz_of_ticks() {
        for (nanoseconds, hz) in
            [(10_000_000, 100), (4_000_000, 250), (3_333_333, 300), (1_000_000, 1000), (976_563, 1024)]
        {
            assert_eq!(hz_of(Duration::from_nanos(nanoseconds)).unwrap(), hz);
        }
        for tick in [0, 1, 5_000_000_000] {
            assert!(hz_of(Duration::from_nanos(tick)).is_err(), "{tick}");
        }
    }
}
