//! Exclusive runs: a machine that is busy with other tests looks like a network that loses packets.

use std::sync::{Mutex, MutexGuard, PoisonError};

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Waits until no other test of this process measures loss. A test harness starts as many tests as
/// there are CPUs, whatever these do; five thousand datagrams a second of each of them, and the
/// agents that they start, can hold up the softirqs of another for longer than the 256 frames for
/// which the receive ring of a veth has room. `cargo xtask test` starts a process for each test,
/// and a second one only while half of the processors idle.
pub fn alone() -> MutexGuard<'static, ()> {
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}
