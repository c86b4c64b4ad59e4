//! CLOCK_MONOTONIC, and the number of jiffies in a second.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::time::{ClockId, clock_gettime};

/// Returns the time of the clock of `Frontend::drain_until`, in nanoseconds.
pub fn monotonic() -> Result<u64> {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).context("clock_gettime failed")?;
    Ok(Duration::from(now).as_nanos() as u64)
}

/// Measures the jiffies per second: no interface reports CONFIG_HZ.
pub fn sample_hz(mut jiffies: impl FnMut() -> Result<u32>) -> Result<u32> {
    let (start, first) = (Instant::now(), jiffies()?);
    std::thread::sleep(Duration::from_millis(60));
    let (elapsed, last) = (start.elapsed(), jiffies()?);
    let measured = f64::from(last.wrapping_sub(first)) / elapsed.as_secs_f64();
    let known = [100u32, 250, 300, 1000];
    known.into_iter().min_by_key(|hz| (f64::from(*hz) - measured).abs() as u64).context("no known tick rate")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hz_from_a_clock() {
        for hz in [100u32, 250, 1000] {
            let start = Instant::now();
            let found = sample_hz(|| Ok((start.elapsed().as_secs_f64() * f64::from(hz)) as u32)).unwrap();
            assert_eq!(found, hz);
        }
    }
}
