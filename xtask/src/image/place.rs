//! A folder with the project's sources, and the place where cargo builds them: `--verify` has two.

use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::{build, cargo, files, vm::arch::Arch};

#[derive(Debug)]
pub(super) struct Place {
    pub(super) sources: PathBuf,
    /// The target folder of cargo.
    pub(super) target: PathBuf,
}

impl Place {
    /// Returns the place of this workspace.
    pub(super) fn own() -> Result<Self> {
        Ok(Self { sources: cargo::root().to_owned(), target: build::target_folder()? })
    }

    /// Returns the folder of images and of the files they are built from.
    pub(super) fn images(&self) -> Result<PathBuf> {
        let folder = self.target.join("image");
        files::make_folder(&folder)?;
        Ok(folder)
    }

    /// Returns the folder of the libraries of one architecture.
    pub(super) fn libraries(&self, arch: Arch) -> PathBuf {
        self.target.join("image/build").join(arch.to_string())
    }

    /// Returns the folder with Debian's unpacked musl.
    pub(super) fn musl(&self, arch: Arch) -> PathBuf {
        self.libraries(arch).join("musl")
    }

    /// Removes the sources' own path, which must not influence the names of symbols.
    pub(super) fn relative(&self, folder: &Path) -> PathBuf {
        folder.strip_prefix(&self.sources).unwrap_or(folder).to_owned()
    }
}
