//! Finds what compiles for BPF. Shared by the build script, which uses it, and by `xtask setup`, which sees to it.

use std::{env, path::Path, process::Command};

/// Names another toolchain than the ones looked for: anything that `rustup run` takes.
pub(crate) const VARIABLE: &str = "TRAFFIC_POLICY_BPF_TOOLCHAIN";

/// Debian and Ubuntu install their compiler and its sources here.
const DISTRIBUTION: &str = "/usr";

/// A compiler with the sources of `core`, which is compiled for BPF.
#[derive(Clone, Debug)]
pub(crate) struct Toolchain {
    /// For `rustup run`: a name, or the root of an installation.
    pub(crate) name: String,
    /// Major version of its LLVM; bpf-linker must have the same.
    pub(crate) llvm: u32,
}

/// The first usable toolchain: the one that [`VARIABLE`] names, rustup's nightly, the distribution's.
pub(crate) fn find() -> Option<Toolchain> {
    let named = env::var(VARIABLE).ok();
    let candidates = match &named {
        Some(named) => vec![named.as_str()],
        None => vec!["nightly", DISTRIBUTION],
    };
    candidates.into_iter().find_map(|name| {
        let rustc = |arguments: &[&str]| {
            let mut command = if name == DISTRIBUTION {
                Command::new("/usr/bin/rustc")
            } else {
                let mut command = Command::new("rustup");
                command.args(["run", name, "rustc"]);
                command
            };
            // cargo's own choice must not override the one asked for.
            for variable in ["RUSTC", "RUSTUP_TOOLCHAIN"] {
                command.env_remove(variable);
            }
            let output = command.args(arguments).output().ok()?;
            output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
        };
        let sysroot = rustc(&["--print", "sysroot"])?;
        let core = Path::new(sysroot.trim()).join("lib/rustlib/src/rust/library/core/src/lib.rs");
        if !core.exists() {
            return None;
        }
        let version = rustc(&["-vV"])?;
        let llvm = version.lines().find_map(|line| line.strip_prefix("LLVM version: "))?;
        let llvm = llvm.split('.').next()?.parse().ok()?;
        Some(Toolchain { name: name.to_owned(), llvm })
    })
}

/// Whether bpf-linker can be called.
pub(crate) fn linker_found() -> bool {
    Command::new("bpf-linker").arg("--version").output().is_ok_and(|output| output.status.success())
}
