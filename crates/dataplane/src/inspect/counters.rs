//! The packet path's counters, by hook and outcome.

use anyhow::{Context as _, Result};

use super::pinned::Pinned;
use crate::dataplane::{
    bpf::pins,
    counters::{self, Counter},
};

/// Returns the counters, except zeros.
pub fn counters(pinned: &Pinned) -> Result<Vec<Counter>> {
    let path = pins::maps_below(pinned.root()).join("tp_counters");
    let all = counters::read_pinned(&path).with_context(|| format!("{} cannot be read", path.display()))?;
    Ok(all.into_iter().filter(|(.., packets)| *packets > 0).collect())
}
