//! Removal of pins: all of them, those of a layout version, or one link.

use std::{
    fs::{self, File},
    io::ErrorKind,
    path::Path,
};

use anyhow::{Context as _, Result};
use nix::fcntl::{Flock, FlockArg};

use super::{LINKS, MAPS, PROGRAMS, list, versions};
use crate::dataplane::{bpf::attach::release::Lowered, sys};

/// The names of the removed pins.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// The links of programs detached from devices and cgroups: hook, number and name of the
    /// device.
    pub links: Vec<String>,
    pub programs: Vec<String>,
    pub maps: Vec<String>,
}

/// Removes every pin below `root`, of any layout version, after calling `first`, which may still
/// read the maps. Returns `None` if there was no such folder.
///
/// # Errors
/// Another agent is running, or a pin cannot be removed.
pub fn cleanup(root: &Path, first: impl FnOnce()) -> Result<Option<Removed>> {
    if !root.exists() {
        return Ok(None);
    }
    let file = File::open(root).with_context(|| format!("{} cannot be opened", root.display()))?;
    let _lock = Flock::lock(file, FlockArg::LockExclusiveNonblock)
        .map_err(|_| anyhow::anyhow!("a traffic-policy-agent is using {}: stop it first", root.display()))?;
    first();
    let mut removed = Removed::default();
    for version in versions(root)? {
        let names = |folder: &str| -> Result<Vec<String>> {
            let pins = list(&root.join(&version).join(folder))?.into_iter();
            Ok(pins.filter_map(|pin| Some(pin.file_name()?.to_string_lossy().into_owned())).collect())
        };
        removed.links.extend(names(LINKS)?);
        removed.programs.extend(names(PROGRAMS)?);
        removed.maps.extend(names(MAPS)?);
    }
    removed.links.sort();
    removed.programs.sort();
    removed.maps.sort();
    remove_all(root)?;
    Ok(Some(removed))
}

pub(super) fn remove_all(root: &Path) -> Result<()> {
    for version in versions(root)? {
        remove_version(&root.join(version))?;
    }
    // The folder stays if it is a mount point, or holds files that are not ours.
    match fs::remove_dir(root) {
        Err(error) if !matches!(error.kind(), ErrorKind::DirectoryNotEmpty | ErrorKind::ResourceBusy) => {
            Err(error).with_context(|| format!("{} cannot be removed", root.display()))
        }
        _ => Ok(()),
    }
}

pub(super) fn remove_version(version: &Path) -> Result<()> {
    // Links come first: no program may run on maps that are half removed.
    for link in list(&version.join(LINKS))? {
        remove_link(&link)?;
    }
    match fs::remove_dir_all(version) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("{} cannot be removed", version.display()))
        }
        _ => Ok(()),
    }
}

/// Detaches a program from its device and removes the pin of its link, if there is one.
pub fn remove_link(path: &Path) -> Result<()> {
    let lowered = Lowered::for_link(path);
    // Without its pin the link would be released too, but some time later.
    sys::detach_link(path);
    drop(lowered);
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("{} cannot be removed", path.display()))
        }
        _ => Ok(()),
    }
}
