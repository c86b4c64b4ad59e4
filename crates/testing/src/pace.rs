//! The pace of this machine: the factor by which it is slower than the machine on which the limits
//! of tests were chosen.
//!
//! The limit of a wait for something that must happen is [`scaled`], so that a slow, busy or
//! emulated machine gets the time that it needs; a fast one waits no longer, since the wait ends
//! when the event happens. Times that a test is about are not scaled: those that users are
//! promised, and those for which silence is observed.

use std::env;
use std::fmt::Debug;
use std::sync::OnceLock;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use traffic_policy_dataplane::sys;

/// The variable that overrides the measurement: how many times slower the machine is, 1 or more.
const VARIABLE: &str = "TRAFFIC_POLICY_TEST_PACE";
/// The largest pace; a machine beyond it is not slow but stuck.
const SLOWEST: f64 = 50.0;
/// The time in which a machine that runs the suites well verifies and translates a program with
/// [`BRANCHES`] branches.
const REFERENCE: Duration = Duration::from_millis(40);
/// The number of branches. Each may be taken or not, so that the verifier keeps and compares
/// states, as it does most of its time.
const BRANCHES: usize = 3000;

/// The pause between two looks of a test. Delayed acknowledgements go out in it (40 ms).
const PAUSE: Duration = Duration::from_millis(50);

/// Scales a limit that a test chose for a fast machine to this one.
pub fn scaled(limit: Duration) -> Duration {
    limit.mul_f64(pace())
}

/// Waits until something holds, for at most this time, [`scaled`].
///
/// # Panics
/// The condition does not hold by then.
#[track_caller]
pub fn until(what: &str, limit: Duration, mut holds: impl FnMut() -> bool) {
    wait_for(what, limit, || holds().then_some(()));
}

/// Waits until `look` returns a value, for at most this time, [`scaled`], and returns it.
///
/// # Panics
/// There is no value by then.
#[track_caller]
pub fn wait_for<T>(what: &str, limit: Duration, look: impl FnMut() -> Option<T>) -> T {
    let found = look_every(PAUSE, limit, look);
    found.unwrap_or_else(|| panic!("waited for {what} in vain"))
}

/// Waits until what `look` returns is `wanted`, for at most this time, [`scaled`], and returns it.
///
/// # Panics
/// It is not by then; the message has what was seen last.
#[track_caller]
pub fn look_until<T: Debug>(
    what: &str,
    limit: Duration,
    mut look: impl FnMut() -> T,
    wanted: impl Fn(&T) -> bool,
) -> T {
    let mut last = None;
    let found = look_every(PAUSE, limit, || {
        let seen = look();
        if wanted(&seen) {
            return Some(seen);
        }
        last = Some(seen);
        None
    });
    found.unwrap_or_else(|| panic!("waited for {what} in vain, last: {last:?}"))
}

/// Looks until there is a value, for at most this time, [`scaled`]; `None` if there is none by
/// then. The pause is a short one: what is waited for in the lab itself costs each test.
pub fn poll<T>(limit: Duration, look: impl FnMut() -> Option<T>) -> Option<T> {
    look_every(Duration::from_millis(20), limit, look)
}

fn look_every<T>(pause: Duration, limit: Duration, mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let (start, limit) = (Instant::now(), scaled(limit));
    loop {
        let found = look();
        if found.is_some() || start.elapsed() >= limit {
            return found;
        }
        sleep(pause);
    }
}

/// The pace, from 1, a fast machine, to 50; measured once in each process.
///
/// # Panics
/// The variable holds anything but a number of at least 1.
pub fn pace() -> f64 {
    static PACE: OnceLock<f64> = OnceLock::new();
    *PACE.get_or_init(|| match env::var(VARIABLE) {
        Ok(text) => parse(&text).unwrap_or_else(|error| panic!("{error:#}")),
        // Without privileges no agent starts either, so nothing needs a longer wait.
        Err(_) => measure().map_or(1.0, of),
    })
}

fn parse(text: &str) -> Result<f64> {
    let pace: f64 = text.trim().parse().with_context(|| format!("{VARIABLE}={text} is no number"))?;
    ensure!(pace >= 1.0 && pace.is_finite(), "{VARIABLE}={text}: a number of at least 1 is needed");
    Ok(pace)
}

fn of(took: Duration) -> f64 {
    (took.as_secs_f64() / REFERENCE.as_secs_f64()).clamp(1.0, SLOWEST)
}

/// Times the kernel at the main work of an agent's start, whatever the build of this program:
/// verifying and translating.
fn measure() -> Result<Duration> {
    // r0 = bpf_get_prandom_u32(); r7 = 0
    let mut code = vec![[0x85, 0, 0, 0, 7, 0, 0, 0], [0xb7, 7, 0, 0, 0, 0, 0, 0]];
    // r6 = r0; r6 &= 1; if r6 != 0 { r7 += 1 }
    let branch = [
        [0xbf, 0x06, 0, 0, 0, 0, 0, 0],
        [0x57, 6, 0, 0, 1, 0, 0, 0],
        [0x15, 6, 1, 0, 0, 0, 0, 0],
        [0x07, 7, 0, 0, 1, 0, 0, 0],
    ];
    code.extend([branch; BRANCHES].concat());
    // r0 = 0; exit
    code.extend([[0xb7, 0, 0, 0, 0, 0, 0, 0], [0x95, 0, 0, 0, 0, 0, 0, 0]]);
    let start = Instant::now();
    /// `enum bpf_prog_type`: BPF_PROG_TYPE_SOCKET_FILTER
    const SOCKET_FILTER: u32 = 1;
    drop(sys::load(SOCKET_FILTER, &code, c"GPL")?);
    Ok(start.elapsed())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_machine_has_more_time_and_a_fast_one_no_less() {
        assert!((of(REFERENCE / 4) - 1.0).abs() < 1e-9);
        assert!((of(REFERENCE * 20) - 20.0).abs() < 1e-9);
        assert!((of(REFERENCE * 1000) - SLOWEST).abs() < 1e-9);
        let limit = Duration::from_secs(20);
        assert!(scaled(limit) >= limit);
    }

    #[test]
    fn only_numbers_of_at_least_one_are_taken() {
        assert!((parse(" 20\n").unwrap() - 20.0).abs() < 1e-9);
        for wrong in ["", "fast", "0.5", "-1", "NaN", "inf"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    #[should_panic(expected = "waited for two in vain, last: Some(1)")]
    fn what_was_seen_last_is_said() {
        look_until("two", Duration::ZERO, || 1, |seen| *seen == 2);
    }

    /// Prints the pace of this machine: `cargo test -p traffic-policy-tests --lib pace --
    /// --nocapture`.
    #[test]
    fn the_kernel_can_be_timed() {
        match measure() {
            Ok(took) => println!("{BRANCHES} branches in {took:?}: pace {:.2}", of(took)),
            Err(error) => crate::skipped("the_kernel_can_be_timed", format!("{error:#}")),
        }
    }
}
