//! Disks of machines, each made with the content of a folder.

use std::{fs, os::unix::fs::PermissionsExt, path::Path, process::Command};

use anyhow::{Context, Result};

use crate::{cargo, files};

/// Makes a disk with the content of a folder, and `free` free mebibytes.
pub(super) fn make(folder: &Path, file: &Path, free: u64) -> Result<()> {
    let size = cargo::output(Command::new("du").args(["--summarize", "--block-size=1M"]).arg(folder));
    let size = size.and_then(|size| size.split_whitespace().next()?.parse::<u64>().ok());
    let size = size.context("du failed")?;
    // The file system itself needs room, too.
    let size = size + size / 8 + free;
    let part = file.with_extension("part");
    files::remove(&part)?;
    let mut command = Command::new("/usr/sbin/mke2fs");
    command.args(["-q", "-t", "ext4", "-O", "^has_journal", "-E", "root_owner=0:0", "-d"]);
    cargo::quietly(command.arg(folder).arg(&part).arg(format!("{size}M")))?;
    fs::rename(part, file).with_context(|| format!("{} cannot be put in place", file.display()))
}

/// Writes a script that can be executed.
pub(super) fn script(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text)?;
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(0o755))?)
}
