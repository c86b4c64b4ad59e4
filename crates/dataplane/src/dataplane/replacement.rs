//! Replacement of a packet path of another layout version, without manual steps and without a gap.
//!
//! The other version's programs serve on their own maps until this version's maps are filled. Then
//! each of its links gets this version's program in one step, and its maps are removed. Its flows
//! cannot be taken over, because their layout differs.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::{
    bpf::pins::{self, Pins},
    maps::reader::Reader,
};

/// The result and cost of a replacement.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Replaced {
    /// The replaced versions, as `v2`; there are several if a replacement was interrupted.
    pub versions: Vec<String>,
    /// The number of flows that the other version tracked, as far as they can be counted.
    pub flows: u64,
}

/// Removes what another version left, whose links have other programs by now.
///
/// # Errors
/// A folder cannot be removed.
pub fn finish(pins: &mut Pins) -> Result<Replaced> {
    let name = |folder: &PathBuf| folder.file_name().map(|name| name.to_string_lossy().into_owned());
    let versions = pins.others().iter().filter_map(name).collect();
    let flows = pins.others().iter().map(|folder| flows(&pins::maps_of(folder))).sum();
    pins.drop_others()?;
    Ok(Replaced { versions, flows })
}

/// Returns the number of flows in tables of any layout: a flow has two entries.
fn flows(maps: &Path) -> u64 {
    let count = |name| Reader::open(maps, name).and_then(|reader| reader.count()).unwrap_or(0);
    // The tables are called `FLOWS4` and `FLOWS6` before version 3.
    let entries: u64 = ["tp_flows4", "tp_flows6", "FLOWS4", "FLOWS6"].into_iter().map(count).sum();
    entries / 2
}
