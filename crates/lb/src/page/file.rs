//! Atomic replacement of a file: readers see the old page or the new one, never a part.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
    process,
};

use anyhow::{Context, Result, bail, ensure};

/// Checks whether a page can be written there, as far as this is known before it is made.
pub fn check(path: &Path) -> Result<()> {
    target(path).map(|_| ())
}

/// The destination of the content: the file itself, behind symbolic links, or something other than
/// a file, such as a pipe.
enum Target {
    File(PathBuf),
    Other,
}

fn target(path: &Path) -> Result<Target> {
    match fs::metadata(path) {
        Ok(there) if there.is_dir() => bail!("{} is a folder; name a file in it", path.display()),
        Ok(there) if there.is_file() => Ok(Target::File(fs::canonicalize(path)?)),
        Ok(_) => Ok(Target::Other),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            ensure!(path.file_name().is_some(), "{} is no file name", path.display());
            let folder = folder(path);
            let there = fs::metadata(&folder).is_ok_and(|folder| folder.is_dir());
            ensure!(
                there,
                "there is no folder {}: make it, or name another file than {}",
                folder.display(),
                path.display()
            );
            Ok(Target::File(path.to_owned()))
        }
        Err(error) => Err(error).with_context(|| path.display().to_string()),
    }
}

fn folder(path: &Path) -> PathBuf {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
        _ => PathBuf::from("."),
    }
}

pub(super) fn replace(path: &Path, content: &str) -> Result<()> {
    let path = match target(path)? {
        Target::File(path) => path,
        // A device must not be replaced by a file.
        Target::Other => return Ok(fs::write(path, content)?),
    };
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let beside = folder(&path).join(format!(".{name}.{}.tmp", process::id()));
    let written = write(&beside, &path, content);
    if written.is_err() {
        // The file may not exist at all; the original error is returned already.
        let _ = fs::remove_file(&beside);
    }
    written
}

fn write(beside: &Path, path: &Path, content: &str) -> Result<()> {
    let mut file = File::create_new(beside).with_context(|| beside.display().to_string())?;
    file.write_all(content.as_bytes())?;
    if let Ok(old) = fs::metadata(path) {
        file.set_permissions(old.permissions())?;
    }
    file.sync_all()?;
    fs::rename(beside, path).with_context(|| format!("{} cannot be put in place", beside.display()))
}
