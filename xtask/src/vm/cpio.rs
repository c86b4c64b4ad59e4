//! Archives for the initial RAM disk, made by the program cpio.

use std::{
    io::Write,
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};

/// Returns an archive of files of a folder, by their paths in it, in the format that the kernel
/// unpacks (`newc`), owned by root.
pub(super) fn archive(folder: &Path, files: &[impl AsRef<str>]) -> Result<Vec<u8>> {
    let mut child = Command::new("cpio")
        .args(["--create", "--format=newc", "--owner=+0:+0", "--quiet"])
        .current_dir(folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("cpio cannot be started")?;
    let names: String = files.iter().map(|name| format!("{}\n", name.as_ref())).collect();
    child.stdin.take().context("cpio has no input")?.write_all(names.as_bytes())?;
    let output = child.wait_with_output().context("waiting for cpio failed")?;
    ensure!(output.status.success(), "cpio failed: {}", output.status);
    Ok(output.stdout)
}
