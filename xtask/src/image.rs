//! `cargo xtask image`: the agent as an OCI archive, made without a container engine, and the list
//! of its parts.

mod archive;
mod build;
mod layer;
mod place;
mod sbom;
mod unwind;
mod verify;

use std::{collections::BTreeSet, fmt, fs, path::PathBuf, process::ExitCode};

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};

use self::{archive::Platform, layer::Layer, place::Place};
use crate::{files, setup, vm::arch::Arch};

/// The size limit of the archive in bytes: nodes pull it, and test clusters load it again and
/// again.
const LIMIT: u64 = 25 * 1024 * 1024;

/// The image's name in the objects of `deploy/`.
const NAME: &str = concat!("localhost/traffic-policy:", env!("CARGO_PKG_VERSION"));

#[derive(Args)]
pub(crate) struct Options {
    /// Architectures of the image: `all` are x86_64 and aarch64 in one archive. Default: this
    /// machine's
    #[arg(long)]
    arch: Option<Machines>,
    /// Name under which container engines load it
    #[arg(long, value_name = "NAME", default_value = NAME, value_parser = reference)]
    name: String,
    /// Compile a copy of the sources a second time, in another folder and from scratch, and fail
    /// unless both have the same bytes; takes minutes
    #[arg(long)]
    verify: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Machines {
    #[value(name = "x86_64")]
    X86_64,
    #[value(name = "aarch64")]
    Aarch64,
    All,
}

impl Machines {
    fn archs(self) -> Vec<Arch> {
        match self {
            Self::X86_64 => vec![Arch::X86_64],
            Self::Aarch64 => vec![Arch::Aarch64],
            Self::All => vec![Arch::X86_64, Arch::Aarch64],
        }
    }
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    setup::ensure()?;
    let archs = match options.arch {
        Some(machines) => machines.archs(),
        None => vec![own_arch()?],
    };
    let copied = if options.verify { Some(verify::Copied::take()?) } else { None };
    let (place, commit_time) = (Place::own()?, sbom::commit_time());
    let made = make(&place, &archs, &options.name, &commit_time)?;
    println!("{made}");
    if let Some(copied) = copied {
        copied.compare(&place, &made, || make(&copied.place, &archs, &options.name, &commit_time))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the archive of both architectures, by its ordinary name.
pub(crate) fn for_both() -> Result<PathBuf> {
    let made = make(&Place::own()?, &Machines::All.archs(), NAME, &sbom::commit_time())?;
    println!("{made}");
    Ok(made.archive)
}

fn own_arch() -> Result<Arch> {
    Arch::of_host().context("this machine is of neither architecture: say --arch")
}

/// The files that were made, with their names, digest and sizes.
struct Made {
    archive: PathBuf,
    sbom: PathBuf,
    name: String,
    digest: String,
    /// The size of each program in bytes.
    programs: Vec<(Arch, usize)>,
    /// The size of the archive in bytes.
    size: u64,
}

impl fmt::Display for Made {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.archive.display())?;
        writeln!(f, "  name     {}", self.name)?;
        writeln!(f, "  digest   {}", self.digest)?;
        for (arch, size) in &self.programs {
            writeln!(f, "  {:<8} {:.1} MB", arch.to_string(), *size as f64 / 1e6)?;
        }
        writeln!(f, "  archive  {:.1} MB", self.size as f64 / 1e6)?;
        write!(f, "  SBOM     {}", self.sbom.display())
    }
}

fn make(place: &Place, archs: &[Arch], name: &str, commit_time: &str) -> Result<Made> {
    let folder = place.images()?;
    let (mut platforms, mut parts) = (Vec::new(), BTreeSet::new());
    for arch in archs {
        let build::Built { program: built, parts: linked } = build::agent(*arch, place)?;
        parts.extend(linked);
        // Next to the archive, for a Containerfile and for users who need the program alone.
        let own = folder.join(arch.to_string());
        let program = fs::read(&built).with_context(|| format!("{} cannot be read", built.display()))?;
        let beside = own.join(layer::PROGRAM);
        // The file is replaced, because a container may run the old one.
        files::remove(&beside)?;
        files::copy(&built, &beside)?;
        platforms.push(Platform { architecture: arch.oci(), layer: Layer::of(&program)? });
    }
    let packed = archive::pack(name, &platforms)?;
    let size = packed.bytes.len() as u64;
    ensure!(size <= LIMIT, "the archive has {size} bytes, more than the {LIMIT} that it may have");
    let [archive, sbom] = ["traffic-policy.tar", "traffic-policy.spdx.json"].map(|name| folder.join(name));
    files::write(&archive, &packed.bytes)?;
    files::write(&sbom, &sbom::list(&place.sources, archs, parts, commit_time)?)?;
    let sizes = platforms.iter().map(|platform| platform.layer.program);
    let programs = archs.iter().copied().zip(sizes).collect();
    Ok(Made { archive, sbom, name: name.to_owned(), digest: packed.digest, programs, size })
}

/// Returns a name with a tag. It must include a registry (or `localhost`), because engines complete
/// short names with docker.io.
fn reference(text: &str) -> Result<String> {
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-._/:".contains(c);
    let Some((name, tag)) = text.rsplit_once(':').filter(|(_, tag)| !tag.contains('/')) else {
        bail!("`{text}` has no tag: write localhost/traffic-policy:0.1.0")
    };
    let registry = name.split_once('/').map(|(registry, _)| registry);
    let is_registry = |registry: &str| registry == "localhost" || registry.contains(['.', ':']);
    ensure!(
        registry.is_some_and(is_registry),
        "`{text}` begins with no registry, and would be loaded as one of docker.io: write localhost/{text}"
    );
    let tag_fits = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
    ensure!(
        name.chars().all(fits) && !name.ends_with('/') && !tag.is_empty() && tag.chars().all(tag_fits),
        "`{text}` is no name of an image: lower-case letters, digits, and -._/ before the tag"
    );
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_images() {
        for good in ["localhost/traffic-policy:0.1.0", "registry.example:5000/a/b:v1", "example.org/a:X_1"] {
            assert_eq!(reference(good).unwrap(), good);
        }
        for (bad, word) in [
            ("localhost/traffic-policy", "no tag"),
            ("registry.example:5000/a", "no tag"),
            ("traffic-policy:1", "docker.io"),
            ("team/traffic-policy:1", "localhost/team/traffic-policy:1"),
            ("localhost/Traffic:1", "lower-case"),
            ("localhost/a:", "no name"),
        ] {
            let refusal = reference(bad).unwrap_err().to_string();
            assert!(refusal.contains(word), "{bad}: {refusal}");
        }
    }
}
