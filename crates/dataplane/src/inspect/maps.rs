//! The usage and memory of the maps.

use std::fs;

use anyhow::{Context, Result};

use super::pinned::Pinned;
use crate::dataplane::bpf::pins;

/// A pinned map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinnedMap {
    pub name: String,
    /// The number of entries in it; `None` if that has no meaning (an array is always full).
    pub used: Option<u64>,
    pub room: u32,
    /// The bytes that the kernel charges for it.
    pub bytes: u64,
}

impl PinnedMap {
    /// Returns all maps, by name.
    pub fn all(pinned: &Pinned) -> Result<Vec<Self>> {
        let folder = pins::maps_below(pinned.root());
        let mut maps = Vec::new();
        for entry in fs::read_dir(&folder).with_context(|| format!("{} cannot be read", folder.display()))? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            let map = pinned.map(&name)?;
            let used = if map.is_hashed() { Some(map.count()?) } else { None };
            maps.push(PinnedMap { name, used, room: map.info().entries, bytes: map.bytes()? });
        }
        maps.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(maps)
    }
}
