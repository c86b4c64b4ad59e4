//! How full the maps are, and what they cost.

use std::fs;

use anyhow::{Context, Result};
use aya::maps::MapType;

use super::Pinned;
use crate::dataplane::pins;

/// A map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapFill {
    pub name: String,
    /// Entries in it; `None` where that has no meaning (an array is always full).
    pub used: Option<u64>,
    pub room: u32,
    /// That the kernel charges for it.
    pub bytes: u64,
}

impl Pinned {
    /// All maps, by name.
    ///
    /// # Errors
    /// A map cannot be read.
    pub fn maps(&self) -> Result<Vec<MapFill>> {
        let folder = pins::maps_below(&self.root);
        let mut maps = Vec::new();
        for entry in fs::read_dir(&folder).with_context(|| format!("{} cannot be read", folder.display()))? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            let map = self.map(&name)?;
            let kind = map.info().kind;
            let hashed =
                [MapType::Hash, MapType::LruHash, MapType::LpmTrie].iter().any(|h| *h as u32 == kind);
            let used = if hashed { Some(map.count()?) } else { None };
            maps.push(MapFill { name, used, room: map.info().entries, bytes: map.bytes()? });
        }
        maps.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(maps)
    }
}
