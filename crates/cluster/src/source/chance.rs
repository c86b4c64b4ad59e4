//! Random numbers that keep the nodes of a cluster from acting at the same moment. Not for secrets.

use std::hash::{BuildHasher, Hasher, RandomState};

/// Returns a random number of 64 bits, derived from the keys of a new hasher.
pub(super) fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
