//! The agent as one static program, linked with musl.
//!
//! rustup has no standard library for musl where only the registry of crates is reachable. So std
//! is compiled with the toolchain that compiles for BPF and has std's sources. The C library is
//! Debian's, of a fixed release, unpacked into a folder and not installed; the GNU toolchain links.
//! `trim-paths` keeps paths of this machine out of the program.

use std::{
    collections::BTreeSet,
    fs::File,
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};
use flate2::read::GzDecoder;
use traffic_policy_toolchain as toolchain;

use super::{
    place::Place,
    sbom::Part,
    unwind::{self, Compiler},
};
use crate::{
    cargo,
    setup::programs,
    target::{self, Target},
    vm::{arch::Arch, archive::Archive},
};

/// The name of the profile in the workspace's `Cargo.toml`.
const PROFILE: &str = "shipped";
/// The package of musl, from the Debian release with which programs are linked.
const MUSL: &str = "musl-dev/trixie";

/// The program, and the linked parts that are not crates.
pub(super) struct Built {
    pub(super) program: PathBuf,
    pub(super) parts: BTreeSet<Part>,
}

/// Builds the agent.
pub(super) fn agent(arch: Arch, place: &Place) -> Result<Built> {
    let target = target::named(arch.target())?;
    compilers(target)?;
    let toolchain = toolchain::find().context("no BPF toolchain was found: run `cargo xtask setup`")?;
    let (folder, musl) = (place.libraries(arch), place.musl(arch));
    if !musl.join("usr").exists() {
        let archive = Archive::open(&place.images()?.join("build"), arch)?;
        archive.unpack(&[MUSL.to_owned()], &musl).with_context(|| format!("{MUSL} cannot be unpacked"))?;
    }
    let sysroot = cargo::output(tool(&toolchain.name, "rustc", place).args(["--print", "sysroot"]));
    let sysroot = sysroot.context("the BPF toolchain's rustc cannot be started")?;
    let include = found_by(target, "include")?;
    let headers = ["-nostdinc", "-isystem", &format!("{}/usr/include/{arch}-linux-musl", musl.display())];
    let mut headers: Vec<String> = headers.map(str::to_owned).to_vec();
    headers.extend(["-isystem".to_owned(), include]);
    let compiler = Compiler { gnu: target.gnu, headers };
    unwind::library(Path::new(sysroot.trim()), &compiler, &folder.join("lib"))?;

    let triple = format!("{arch}-unknown-linux-musl");
    let underscored = triple.replace('-', "_");
    let mut command = tool(&toolchain.name, "cargo", place);
    command.args(["build", "--locked", "--package", "traffic-policy-agent", "--profile", PROFILE]);
    command.args(["--target", &triple, "-Z", "build-std=std,panic_unwind"]);
    command.env("RUSTC_BOOTSTRAP", "1");
    // This also applies to the packet path, which the agent's build script compiles with the
    // profile `release`.
    command.env("CARGO_UNSTABLE_TRIM_PATHS", "true");
    for profile in [PROFILE, "release"] {
        command.env(format!("CARGO_PROFILE_{}_TRIM_PATHS", profile.to_uppercase()), "all");
    }
    command.env(format!("CC_{underscored}"), format!("{}-gcc", target.gnu));
    command.env(format!("AR_{underscored}"), format!("{}-ar", target.gnu));
    command.env(format!("CFLAGS_{underscored}"), compiler.headers.join(" "));
    command.env("CARGO_ENCODED_RUSTFLAGS", linking(target, &place.relative(&folder), arch)?.join("\x1f"));
    if !cargo::status(&mut command)?.success() {
        bail!("the build for {triple} failed");
    }
    let built = place.target.join(&triple).join(PROFILE);
    let rustc = cargo::output(tool(&toolchain.name, "rustc", place).arg("--version")).unwrap_or_default();
    Ok(Built { program: built.join(super::layer::PROGRAM), parts: parts(&rustc, target, &musl)? })
}

/// Returns the parts that are not crates. `rustc` is the compiler's description of its version.
fn parts(rustc: &str, target: &Target, musl: &Path) -> Result<BTreeSet<Part>> {
    let part = |name: &str, version: String, licence: &str, purl: String| Part {
        name: name.to_owned(),
        version,
        licence: licence.to_owned(),
        purl: Some(purl),
    };
    let rustc = rustc.split_whitespace().nth(1).unwrap_or("unknown").to_owned();
    let gcc = cargo::output(Command::new(format!("{}-gcc", target.gnu)).arg("-dumpversion"));
    let gcc = gcc.unwrap_or_default().trim().to_owned();
    let musl = musl_version(musl)?;
    Ok(BTreeSet::from([
        part("rust-std", rustc.clone(), "MIT OR Apache-2.0", format!("pkg:github/rust-lang/rust@{rustc}")),
        part(
            "libunwind",
            rustc.clone(),
            "Apache-2.0 WITH LLVM-exception",
            format!("pkg:github/rust-lang/rust@{rustc}#src/llvm-project/libunwind"),
        ),
        part(
            "libgcc",
            gcc.clone(),
            "GPL-3.0-or-later WITH GCC-exception-3.1",
            format!("pkg:generic/gcc@{gcc}"),
        ),
        part("musl", musl.clone(), "MIT", format!("pkg:deb/debian/musl@{musl}")),
    ]))
}

/// Returns the version in the first line of Debian's changelog: `musl (1.2.5-3) unstable;
/// urgency=medium`.
fn musl_version(musl: &Path) -> Result<String> {
    let path = musl.join("usr/share/doc/musl-dev/changelog.Debian.gz");
    let file = File::open(&path).with_context(|| format!("{} cannot be read", path.display()))?;
    let first = BufReader::new(GzDecoder::new(file)).lines().next().transpose()?.unwrap_or_default();
    let version = first.split_once('(').and_then(|(_, rest)| rest.split_once(')'));
    version
        .map(|(version, _)| version.to_owned())
        .with_context(|| format!("{} begins with no version", path.display()))
}

/// Returns the flags of rustc that link with musl: musl's start files enclose those of the
/// compiler, as in a position-independent program.
fn linking(target: &Target, folder: &Path, arch: Arch) -> Result<Vec<String>> {
    let musl = format!("{}/musl/usr/lib/{arch}-linux-musl", folder.display());
    let (begin, end) = (found_by(target, "crtbeginS.o")?, found_by(target, "crtendS.o")?);
    let mut flags = vec![
        "-Clink-self-contained=no".to_owned(),
        format!("-Clinker={}-gcc", target.gnu),
        format!("-Zpre-link-args=-nostartfiles {musl}/rcrt1.o {musl}/crti.o {begin}"),
        format!("-Clink-arg={end}"),
        format!("-Clink-arg={musl}/crtn.o"),
        format!("-Lnative={}/lib", folder.display()),
        format!("-Lnative={musl}"),
    ];
    if arch == Arch::Aarch64 {
        // rustc links static programs this way for x86_64, but for a fixed address for this target:
        // the start files above would then read whatever lies at their own address as the table of
        // relocations.
        flags.push("-Clink-arg=-static-pie".to_owned());
    }
    Ok(flags)
}

/// Installs missing packages of the GNU toolchain for this target; C++ is needed for libunwind.
fn compilers(target: &Target) -> Result<()> {
    let names = ["gcc", "g++", "ar"].map(|name| format!("{}-{name}", target.gnu));
    let packages = if target.is_host() {
        ["gcc", "g++", "binutils"].map(str::to_owned)
    } else {
        let gnu = target.gnu.replace('_', "-");
        [format!("gcc-{gnu}"), format!("g++-{gnu}"), format!("binutils-{gnu}")]
    };
    let wanted: Vec<_> = names.iter().zip(&packages).map(|(name, package)| (&**name, &**package)).collect();
    let missing = programs::prepare(&wanted, "there is no image");
    if missing.is_empty() {
        return Ok(());
    }
    bail!("{} is missing: install {} (as Debian calls the packages)", missing.join(", "), packages.join(" "))
}

/// Returns the path of a file that belongs to the compiler.
fn found_by(target: &Target, file: &str) -> Result<String> {
    let name = format!("{}-gcc", target.gnu);
    let found = cargo::output(Command::new(&name).arg(format!("-print-file-name={file}")));
    let found = found.filter(|found| found.contains('/'));
    found.map(|found| found.trim().to_owned()).with_context(|| format!("{name} has no {file}"))
}

/// Returns a command for a program of a toolchain, run in the folder of the sources.
fn tool(toolchain: &str, program: &str, place: &Place) -> Command {
    let mut command = if Path::new(toolchain).is_absolute() {
        Command::new(Path::new(toolchain).join("bin").join(program))
    } else {
        let mut command = Command::new("rustup");
        command.args(["run", toolchain, program]);
        command
    };
    command.current_dir(&place.sources).env("CARGO_TARGET_DIR", &place.target);
    // The cargo that started this program belongs to another toolchain.
    for variable in ["CARGO", "RUSTC", "RUSTDOC", "RUSTC_WORKSPACE_WRAPPER", "RUSTUP_TOOLCHAIN", "RUSTFLAGS"]
    {
        command.env_remove(variable);
    }
    command
}
