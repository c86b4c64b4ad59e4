//! The clock of time-outs.

use std::time::{Duration, Instant};

use traffic_policy_dataplane::clock;
use traffic_policy_testing::harness;

/// The agent converts times to jiffies, and back, by the rate that the kernel reports.
#[test]
fn jiffies_go_by_at_the_rate_that_the_kernel_reports() {
    harness::with(|harness| {
        let hz = f64::from(clock::hz().unwrap());
        let read = || (Instant::now(), harness.now(), Instant::now());
        let (before, first, after) = read();
        // Long enough for a tick more or less to be 1 % of the ticks at 100 Hz.
        std::thread::sleep(Duration::from_secs(1));
        let (until, last, end) = read();
        let ticks = f64::from(last.wrapping_sub(first));
        // Each was read at some time between two looks at the other clock, which a busy machine
        // may hold apart.
        let least = (until - after).as_secs_f64() * hz - 1.0;
        let most = (end - before).as_secs_f64() * hz + 1.0;
        assert!((least..=most).contains(&ticks), "{ticks} of {least} to {most}, {hz} each second");
    });
}
