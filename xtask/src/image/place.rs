//! A folder with the project's sources, and where cargo builds them: `--verify` has two.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use crate::{build, cargo, vm::arch::Arch};

#[derive(Debug)]
pub(super) struct Place {
    pub(super) sources: PathBuf,
    /// cargo's target folder.
    pub(super) target: PathBuf,
}

impl Place {
    /// This workspace.
    pub(super) fn own() -> Result<Self> {
        Ok(Self { sources: cargo::root().to_owned(), target: build::target_folder()? })
    }

    /// Folder of images and of what they are built from.
    pub(super) fn images(&self) -> Result<PathBuf> {
        let folder = self.target.join("image");
        fs::create_dir_all(&folder).with_context(|| format!("{} cannot be made", folder.display()))?;
        Ok(folder)
    }

    /// Folder of the libraries of one architecture.
    pub(super) fn libraries(&self, arch: Arch) -> PathBuf {
        self.target.join("image/build").join(arch.to_string())
    }

    /// musl as Debian has it, unpacked.
    pub(super) fn musl(&self, arch: Arch) -> PathBuf {
        self.libraries(arch).join("musl")
    }

    /// Without the sources' own path, which must not be part of what symbols are named by.
    pub(super) fn relative(&self, folder: &Path) -> PathBuf {
        folder.strip_prefix(&self.sources).unwrap_or(folder).to_owned()
    }
}
