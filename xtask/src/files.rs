//! Files and folders: written as a whole, removed whether or not they exist, and copied to places
//! whose folders are made.

use std::{fs, io, path::Path};

use anyhow::{Context, Result};

/// Writes a file in one step: readers see the old or the new content.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let unfinished = path.with_extension("unfinished");
    fs::write(&unfinished, bytes)
        .and_then(|()| fs::rename(&unfinished, path))
        .with_context(|| format!("{} cannot be written", path.display()))
}

/// Removes a file or a folder with its content, if it exists.
pub(crate) fn remove(path: &Path) -> Result<()> {
    let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("{} cannot be removed", path.display()))
        }
        _ => Ok(()),
    }
}

/// Makes a folder and those above it, unless they exist.
pub(crate) fn make_folder(path: &Path) -> Result<()> {
    fs::create_dir_all(path).with_context(|| format!("{} cannot be made", path.display()))
}

/// Copies a file to a place whose folder may not exist yet.
pub(crate) fn copy(from: &Path, to: &Path) -> Result<()> {
    if let Some(folder) = to.parent() {
        make_folder(folder)?;
    }
    fs::copy(from, to)
        .with_context(|| format!("{} cannot be copied to {}", from.display(), to.display()))
        .map(drop)
}

/// Copies a folder with its content.
pub(crate) fn copy_folder(from: &Path, to: &Path) -> Result<()> {
    make_folder(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let to = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_folder(&entry.path(), &to)?;
        } else {
            copy(&entry.path(), &to)?;
        }
    }
    Ok(())
}
