//! The clock of time-outs.

use std::time::{Duration, Instant};

use traffic_policy_testing::harness;

/// The agent learns the length of a jiffy from it.
#[test]
fn jiffies_go_by() {
    harness::with(|harness| {
        let (start, first) = (Instant::now(), harness.now());
        // The rate is measured over this time.
        std::thread::sleep(Duration::from_millis(200));
        let rate = f64::from(harness.now().wrapping_sub(first)) / start.elapsed().as_secs_f64();
        assert!((90.0..1100.0).contains(&rate), "{rate} jiffies per second");
    });
}
