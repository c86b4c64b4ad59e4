//! Exclusive runs: a machine that is busy with other tests looks like a network that loses packets.

use std::sync::{Mutex, MutexGuard, PoisonError};

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Waits until no other test of this binary measures loss. A test harness starts as many tests as
/// there are CPUs; five thousand datagrams a second of one of them, and the agents that it starts,
/// would hold up the softirqs of another for longer than the 256 frames for which the receive ring
/// of a veth has room.
pub fn alone() -> MutexGuard<'static, ()> {
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}
