//! Steps of the set-up, and their execution.

use std::{
    fmt,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};

use crate::cargo;

/// The release of bpf-linker that is installed.
pub(super) const LINKER: &str = "0.13.0";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Install the sources for rustup's nightly.
    NightlySources,
    /// Install a nightly with sources.
    Nightly,
    /// Install components of the toolchain in use, by their names for cargo.
    Components(Vec<&'static str>),
    /// Install the standard library of another target, for the toolchain in use.
    StandardLibrary(&'static str),
    AptUpdate,
    AptInstall(Vec<String>),
    /// Install bpf-linker for an LLVM version.
    Linker(u32),
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NightlySources => write!(f, "adding rust-src to rustup's nightly"),
            Self::Nightly => write!(f, "installing rustup's nightly with rust-src (about a minute)"),
            Self::Components(names) => write!(f, "adding {} to the toolchain in use", names.join(", ")),
            Self::StandardLibrary(triple) => {
                write!(f, "adding the standard library of {triple} (about 20 s)")
            }
            Self::AptUpdate => write!(f, "refreshing apt's lists of packages (about 10 s)"),
            Self::AptInstall(packages) => {
                write!(f, "installing {} (up to two minutes)", packages.join(" "))
            }
            Self::Linker(llvm) => {
                write!(f, "compiling bpf-linker {LINKER} for LLVM {llvm} (two to five minutes)")
            }
        }
    }
}

impl Step {
    /// Whether the step may make the packet path compile where it did not before.
    pub(super) fn concerns_bpf(&self) -> bool {
        !matches!(self, Self::Components(_) | Self::StandardLibrary(_))
    }
}

pub(super) fn carry_out(step: &Step) -> Result<()> {
    match step {
        Step::NightlySources => rustup(&["component", "add", "rust-src", "--toolchain", "nightly"]),
        Step::Nightly => {
            rustup(&["toolchain", "install", "nightly", "--profile", "minimal", "--component", "rust-src"])
        }
        Step::Components(names) => {
            let names = names.iter().map(|name| if *name == "fmt" { "rustfmt" } else { name });
            rustup(&["component", "add"].into_iter().chain(names).collect::<Vec<_>>())
        }
        Step::StandardLibrary(triple) => rustup(&["target", "add", triple]),
        Step::AptUpdate => apt(&["update"]),
        Step::AptInstall(packages) => {
            let packages = packages.iter().map(String::as_str);
            apt(&["install", "--yes", "--no-install-recommends"]
                .into_iter()
                .chain(packages)
                .collect::<Vec<_>>())
        }
        Step::Linker(llvm) => {
            let mut command = cargo::cargo();
            command.args(["install", "bpf-linker", "--version", LINKER, "--locked", "--force", "--quiet"]);
            command.args(["--no-default-features", "--features", &format!("llvm-{llvm}")]);
            command.env("LLVM_PREFIX", format!("/usr/lib/llvm-{llvm}"));
            // The build must use neither this workspace's target folder nor its configuration.
            command.env_remove("CARGO_TARGET_DIR").current_dir("/");
            quietly(&mut command)
        }
    }
}

fn rustup(arguments: &[&str]) -> Result<()> {
    quietly(Command::new("rustup").args(arguments))
}

fn apt(arguments: &[&str]) -> Result<()> {
    let mut command = cargo::privileged("apt-get").context("neither root nor sudo")?;
    quietly(command.arg("-q").args(arguments).env("DEBIAN_FRONTEND", "noninteractive"))
}

/// Runs a command and shows its output only if it fails.
fn quietly(command: &mut Command) -> Result<()> {
    let output = command.stdin(Stdio::inherit()).output().context("it cannot be started")?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let last: Vec<&str> = said.lines().filter(|line| !line.trim().is_empty()).collect();
    bail!("{}: {}", output.status, last[last.len().saturating_sub(5)..].join("\n       "))
}

/// Deletes builds that were made without the newly installed part.
pub(super) fn forget_builds() {
    // There may be no builds yet.
    let _ = cargo::cargo().args(["clean", "--quiet", "--package", "traffic-policy-dataplane"]).output();
}
