//! Random numbers, so that the nodes of a cluster do not all do the same at the same moment. Not for secrets.

use std::hash::{BuildHasher, Hasher, RandomState};

/// A random number of 64 bits, by the keys of a new hasher.
pub(super) fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
