//! The programs that packets run through.

use traffic_policy_testing::{harness::Hook, lab::Family};

/// A program under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path {
    /// Hook: XDP or TC ingress.
    pub hook: Hook,
    pub family: Family,
}

impl Path {
    pub fn all() -> impl Iterator<Item = Self> {
        Hook::INGRESS.into_iter().flat_map(|hook| Family::BOTH.map(|family| Self { hook, family }))
    }
}
