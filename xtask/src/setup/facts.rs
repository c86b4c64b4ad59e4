//! The state of this machine: tools, compilers, packages.

use std::{fmt, process::Command};

use traffic_policy_toolchain::{self as toolchain, Toolchain};

use super::{apt::Apt, step::Step};
use crate::{cargo, target::Target};

/// Programs that tests call, other than those that every Linux has.
const PROGRAMS: [&str; 1] = ["openssl"];
/// Subcommands of cargo that `cargo xtask test` uses.
const COMPONENTS: [&str; 2] = ["fmt", "clippy"];

/// A bpf-linker in PATH.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Linker {
    pub(super) version: String,
    /// The major version of the LLVM that it loads; `None` if it contains its own, whose version
    /// cannot be queried.
    pub(super) llvm: Option<u32>,
}

/// Tools for building for a target other than this machine's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Cross {
    pub(super) target: &'static Target,
    pub(super) standard_library: bool,
    /// Whether there is a C compiler that can also link.
    pub(super) compiler: bool,
}

impl Cross {
    fn look(target: &'static Target) -> Self {
        Self { target, standard_library: target.has_standard_library(), compiler: target.has_compiler() }
    }

    fn is_complete(&self) -> bool {
        self.standard_library && self.compiler
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct Facts {
    pub(super) toolchain: Option<Toolchain>,
    /// The toolchain that the environment names: no other is looked for.
    pub(super) named: Option<String>,
    pub(super) linker: Option<Linker>,
    /// Whether rustup has a nightly; `None` without rustup.
    pub(super) rustup: Option<bool>,
    pub(super) programs_missing: Vec<&'static str>,
    pub(super) components_missing: Vec<&'static str>,
    pub(super) root_or_sudo: bool,
    /// The tools for the requested target, unless it is this machine's own.
    pub(super) cross: Option<Cross>,
    /// The packages of apt, looked up only if something is missing.
    pub(super) apt: Option<Apt>,
    pub(super) tried: Vec<Step>,
}

impl Facts {
    /// Gathers the facts again. Attempts recorded in `before` are kept.
    pub(super) fn gather(before: &Self, target: Option<&'static Target>) -> Self {
        let has = |subcommand: &&str| {
            cargo::output(cargo::cargo().args([*subcommand, "--version"]).env_remove("RUSTC")).is_some()
        };
        let mut facts = Self {
            toolchain: toolchain::find(),
            named: std::env::var(toolchain::VARIABLE).ok(),
            linker: linker(),
            rustup: cargo::find("rustup").map(|_| nightly()),
            programs_missing: PROGRAMS.into_iter().filter(|name| cargo::find(name).is_none()).collect(),
            components_missing: COMPONENTS.into_iter().filter(|name| !has(name)).collect(),
            root_or_sudo: cargo::is_root() || cargo::find("sudo").is_some(),
            cross: target.filter(|target| !target.is_host()).map(Cross::look),
            apt: None,
            tried: before.tried.clone(),
        };
        if facts.something_missing() {
            facts.apt = Apt::look(facts.toolchain.as_ref().map(|found| found.llvm));
        }
        facts
    }

    pub(super) fn something_missing(&self) -> bool {
        !self.programs_missing.is_empty()
            || !self.components_missing.is_empty()
            || !self.compiles_for_bpf()
            || self.cross.as_ref().is_some_and(|cross| !cross.is_complete())
    }

    pub(super) fn compiles_for_bpf(&self) -> bool {
        self.toolchain.as_ref().is_some_and(|toolchain| self.linker_fits(toolchain))
    }

    /// Whether the linker can read the output of the toolchain: both must have the same LLVM.
    pub(super) fn linker_fits(&self, toolchain: &Toolchain) -> bool {
        self.linker.as_ref().is_some_and(|linker| linker.llvm.is_none_or(|llvm| llvm == toolchain.llvm))
    }
}

fn nightly() -> bool {
    cargo::output(Command::new("rustup").args(["toolchain", "list"]))
        .is_some_and(|list| list.lines().any(|line| line.starts_with("nightly")))
}

fn linker() -> Option<Linker> {
    let path = cargo::find("bpf-linker")?;
    let version = cargo::output(Command::new(&path).arg("--version"))?;
    let version = version.split_whitespace().last().unwrap_or_default().to_owned();
    let libraries = cargo::output(Command::new("ldd").arg(&path)).unwrap_or_default();
    Some(Linker { version, llvm: loaded_llvm(&libraries) })
}

/// Parses `libLLVM.so.22.1 => …` or `libLLVM-22.so.1 => …` in the output of ldd.
fn loaded_llvm(libraries: &str) -> Option<u32> {
    let name = libraries.split_whitespace().find_map(|word| word.strip_prefix("libLLVM"))?;
    let digits = name.trim_start_matches(".so").trim_start_matches(['.', '-']);
    digits.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

impl fmt::Display for Facts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.toolchain {
            Some(found) => writeln!(f, "BPF toolchain: {} (LLVM {}), with rust-src", found.name, found.llvm)?,
            None => writeln!(f, "BPF toolchain: none (a rustc with rust-src)")?,
        }
        match &self.linker {
            Some(Linker { version, llvm: Some(llvm) }) => {
                writeln!(f, "bpf-linker: {version} (LLVM {llvm})")?;
            }
            Some(Linker { version, llvm: None }) => writeln!(f, "bpf-linker: {version}")?,
            None => writeln!(f, "bpf-linker: none")?,
        }
        for name in PROGRAMS {
            let found = if self.programs_missing.contains(&name) { "none" } else { "found" };
            writeln!(f, "{name}: {found}")?;
        }
        for name in COMPONENTS {
            let found = if self.components_missing.contains(&name) { "none" } else { "found" };
            writeln!(f, "cargo {name}: {found}")?;
        }
        if let Some(Cross { target, standard_library, compiler }) = &self.cross {
            let found = |there: &bool| if *there { "found" } else { "none" };
            writeln!(f, "standard library of {}: {}", target.triple, found(standard_library))?;
            writeln!(f, "C compiler for {}: {}", target.triple, found(compiler))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llvm_of_a_linker() {
        assert_eq!(loaded_llvm("\tlibLLVM.so.22.1 => /usr/lib/libLLVM.so.22.1 (0x0)"), Some(22));
        assert_eq!(loaded_llvm("\tlibLLVM-19.so.1 => /usr/lib/libLLVM-19.so.1 (0x0)"), Some(19));
        assert_eq!(loaded_llvm("\tlibc.so.6 => /lib/libc.so.6"), None);
    }
}
