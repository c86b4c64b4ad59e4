//! Random numbers for moments at which not all nodes of a cluster shall do the same.

use std::hash::{BuildHasher, Hasher, RandomState};

pub(super) fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
