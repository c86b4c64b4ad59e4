//! Targets that the agent is built for, and settings of cargo for cross-compiling to them.

use std::{env, process::Command};

use anyhow::{Result, bail};

use crate::cargo;

/// A target that the agent runs on.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Target {
    /// The target's name in rustc.
    pub(crate) triple: &'static str,
    /// The prefix of the names of the GNU toolchain's programs.
    pub(crate) gnu: &'static str,
    /// Packages of Debian and Ubuntu with a C compiler for it, and the headers and start files of
    /// its C library.
    pub(crate) packages: [&'static str; 2],
    /// The architecture's name in dpkg.
    pub(crate) debian: &'static str,
}

static TARGETS: [Target; 2] = [
    Target {
        triple: "aarch64-unknown-linux-gnu",
        gnu: "aarch64-linux-gnu",
        packages: ["gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross"],
        debian: "arm64",
    },
    Target {
        triple: "x86_64-unknown-linux-gnu",
        gnu: "x86_64-linux-gnu",
        packages: ["gcc-x86-64-linux-gnu", "libc6-dev-amd64-cross"],
        debian: "amd64",
    },
];

/// Returns the target of this name.
///
/// # Errors
/// The agent is not built for a target of this name; the message lists the possible ones.
pub(crate) fn named(triple: &str) -> Result<&'static Target> {
    if let Some(target) = TARGETS.iter().find(|target| target.triple == triple) {
        return Ok(target);
    }
    let known: Vec<&str> = TARGETS.iter().map(|target| target.triple).collect();
    bail!("the agent is not built for {triple}; these work: {}", known.join(", "))
}

impl Target {
    /// Whether this machine runs programs that are built for it, so that cross-compilation is not
    /// needed.
    pub(crate) fn is_host(&self) -> bool {
        self.triple.starts_with(env::consts::ARCH)
    }

    /// Whether the rustc in use has its standard library.
    pub(crate) fn has_standard_library(&self) -> bool {
        let mut rustc = Command::new(env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
        rustc.current_dir(cargo::root()).args(["--print", "target-libdir", "--target", self.triple]);
        cargo::output(&mut rustc).is_some_and(|folder| std::path::Path::new(folder.trim()).is_dir())
    }

    /// Whether there is a C compiler for it that can link; one without the C library's start files
    /// can only compile. A linker that the environment names is assumed to work.
    pub(crate) fn has_compiler(&self) -> bool {
        if env::var_os(self.linker_variable()).is_some() {
            return true;
        }
        // For a file that is not found, the compiler prints the bare name.
        cargo::output(Command::new(self.compiler()).arg("-print-file-name=crt1.o"))
            .is_some_and(|file| file.trim().contains('/'))
    }

    fn compiler(&self) -> String {
        format!("{}-gcc", self.gnu)
    }

    /// Returns the variable by which cargo learns the linker.
    pub(crate) fn linker_variable(&self) -> String {
        format!("CARGO_TARGET_{}_LINKER", self.triple.to_uppercase().replace('-', "_"))
    }

    /// Makes a cargo command build for it, including the C code of dependencies. For the host, the
    /// command stays as it is, so that existing builds are reused. Variables that the environment
    /// sets are kept.
    pub(crate) fn choose(&self, command: &mut Command) {
        if self.is_host() {
            return;
        }
        command.args(["--target", self.triple]);
        let underscored = self.triple.replace('-', "_");
        let variables = [
            (self.linker_variable(), self.compiler()),
            (format!("CC_{underscored}"), self.compiler()),
            (format!("AR_{underscored}"), format!("{}-ar", self.gnu)),
        ];
        for (name, value) in variables {
            if env::var_os(&name).is_none() {
                command.env(name, value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_targets_are_refused_with_those_that_work() {
        let refusal = named("riscv64gc-unknown-linux-gnu").unwrap_err().to_string();
        for target in &TARGETS {
            assert_eq!(named(target.triple).unwrap(), target);
            assert!(refusal.contains(target.triple), "{refusal}");
        }
    }

    #[test]
    fn cargo_is_told_how_to_cross() {
        let foreign = TARGETS.iter().find(|target| !target.is_host()).unwrap();
        let mut command = Command::new("cargo");
        foreign.choose(&mut command);
        let arguments: Vec<_> = command.get_args().collect();
        assert_eq!(arguments, ["--target", foreign.triple]);
        let names: Vec<_> = command.get_envs().map(|(name, _)| name.to_owned()).collect();
        let linker = foreign.linker_variable();
        assert!(names.iter().any(|name| *name == *linker) || env::var_os(&linker).is_some(), "{names:?}");
    }

    #[test]
    fn the_host_is_built_as_ever() {
        let Some(host) = TARGETS.iter().find(|target| target.is_host()) else {
            panic!("this machine is of neither target");
        };
        let mut command = Command::new("cargo");
        host.choose(&mut command);
        assert_eq!(command.get_args().count(), 0);
        assert_eq!(command.get_envs().count(), 0);
    }
}
