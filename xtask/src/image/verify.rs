//! `cargo xtask image --verify`: a second build of the same sources, in another folder and from
//! scratch, which must give the same bytes.
//!
//! Both builds share what is not compiled here: downloaded crates, Debian's musl, the toolchains;
//! and this program, which packs.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use anyhow::{Context, Result, bail};

use super::{Made, place::Place};
use crate::{cargo, files};

/// A copy of the sources in another folder, made before the first build, so that edits during the
/// builds have no effect.
pub(super) struct Copied {
    pub(super) place: Place,
}

impl Copied {
    /// Copies the sources.
    pub(super) fn take() -> Result<Self> {
        let folder = env::temp_dir().join(format!("traffic-policy-image-{}", std::process::id()));
        for file in sources(cargo::root())? {
            files::copy(&cargo::root().join(&file), &folder.join(&file))?;
        }
        Ok(Self { place: Place { target: folder.join("target"), sources: folder } })
    }

    /// Builds the copy with `make`, and compares the result with the first one.
    ///
    /// # Errors
    /// The build failed, or the files differ: then both are kept, and the error names them.
    pub(super) fn compare(
        &self,
        first: &Place,
        made: &Made,
        make: impl FnOnce() -> Result<Made>,
    ) -> Result<()> {
        let folder = &self.place.sources;
        println!("building again in {}, from nothing", folder.display());
        let start = Instant::now();
        for (arch, _) in &made.programs {
            let [from, to] = [first, &self.place].map(|place| place.musl(*arch));
            files::make_folder(to.parent().unwrap_or(&to))?;
            cargo::quietly(Command::new("cp").arg("--archive").arg(from).arg(&to))?;
        }
        let again = make().with_context(|| format!("the build in {} failed", folder.display()))?;
        for (first, second) in [(&made.archive, &again.archive), (&made.sbom, &again.sbom)] {
            if let Some(difference) = difference(&read(first)?, &read(second)?) {
                let (first, second) = (first.display(), second.display());
                bail!("{first} and {second} differ {difference}: the build is not reproducible");
            }
        }
        files::remove(folder)?;
        let seconds = start.elapsed().as_secs();
        println!("the same bytes from both folders, archive and SBOM (the second build took {seconds} s)");
        Ok(())
    }
}

/// Returns the current files of the project: those that git tracks, and new ones that it does not
/// ignore.
fn sources(root: &Path) -> Result<Vec<PathBuf>> {
    let mut git = Command::new("git");
    git.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]).current_dir(root);
    let listed = cargo::output(&mut git)
        .context("the sources are no checkout of git, which tells what belongs to them")?;
    let files = listed.split_terminator('\0').map(PathBuf::from);
    // git also lists a file that was deleted without a commit.
    Ok(files.filter(|file| root.join(file).is_file()).collect())
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("{} cannot be read", path.display()))
}

/// Describes the position at which two files begin to differ; `None` if they are equal.
fn difference(first: &[u8], second: &[u8]) -> Option<String> {
    if first == second {
        return None;
    }
    let at = first.iter().zip(second).position(|(one, other)| one != other);
    Some(match at {
        Some(at) => format!("from byte {at} on"),
        None => format!("in length, {} and {} bytes", first.len(), second.len()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_differ_are_told() {
        assert_eq!(difference(b"abc", b"abc"), None);
        assert_eq!(difference(b"abc", b"abd").unwrap(), "from byte 2 on");
        assert_eq!(difference(b"abc", b"ab").unwrap(), "in length, 3 and 2 bytes");
    }

    #[test]
    fn sources_are_those_of_the_project() {
        let Ok(files) = sources(cargo::root()) else { return };
        for file in ["Cargo.lock", "xtask/src/main.rs", ".cargo/config.toml"] {
            assert!(files.iter().any(|found| found == Path::new(file)), "{file}");
        }
        assert!(files.iter().all(|file| !file.starts_with("target")));
    }
}
