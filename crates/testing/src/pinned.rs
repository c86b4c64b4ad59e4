//! Snapshots of an agent's pinned maps, by which a test checks that nothing changed.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

pub use crate::bpf_map::Entries;
use crate::bpf_map::{BpfMap, Kind};

/// The plain hashes and arrays below an agent's `--pin-dir`, by name. The agent writes them, except
/// those that the packet path fills.
pub fn maps(pin_dir: &Path) -> Result<BTreeMap<String, Entries>> {
    those(pin_dir, |kind| matches!(kind, Kind::Hash | Kind::Array))
}

/// All maps below an agent's `--pin-dir`, by name, with the content that [`BpfMap::read`] returns.
pub fn all(pin_dir: &Path) -> Result<BTreeMap<String, Entries>> {
    those(pin_dir, |_| true)
}

/// The path of the pin of a map below an agent's `--pin-dir`.
pub fn path(pin_dir: &Path, name: &str) -> Result<PathBuf> {
    let found = pins(pin_dir)?.into_iter().find(|pin| pin.file_name().is_some_and(|found| found == name));
    found.with_context(|| format!("no map {name} below {}", pin_dir.display()))
}

/// Deletes all entries of a pinned hash.
pub fn empty(pin: &Path) -> Result<()> {
    BpfMap::pinned(pin)?.empty()
}

/// Sets all elements of a pinned array to zero.
pub fn renew(pin: &Path) -> Result<()> {
    BpfMap::pinned(pin)?.renew(u32::MAX)
}

fn those(pin_dir: &Path, wanted: impl Fn(Kind) -> bool) -> Result<BTreeMap<String, Entries>> {
    let mut maps = BTreeMap::new();
    for path in pins(pin_dir)? {
        let map = BpfMap::pinned(&path)?;
        if !wanted(map.kind()) {
            continue;
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let entries = map.read().with_context(|| format!("reading {name}"))?;
        maps.insert(name, entries);
    }
    ensure!(!maps.is_empty(), "no maps below {}", pin_dir.display());
    Ok(maps)
}

fn pins(pin_dir: &Path) -> Result<Vec<PathBuf>> {
    let mut pins = Vec::new();
    for version in fs::read_dir(pin_dir)? {
        for pin in fs::read_dir(version?.path().join("maps"))? {
            pins.push(pin?.path());
        }
    }
    Ok(pins)
}
