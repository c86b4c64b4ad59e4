//! Finds the BPF toolchain for build scripts, which use it, and `xtask setup`, which checks it.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

/// The variable that selects another toolchain than the default ones: any name that `rustup run`
/// accepts.
pub const VARIABLE: &str = "TRAFFIC_POLICY_BPF_TOOLCHAIN";

/// The prefix under which distributions install their compiler and its sources.
const DISTRIBUTION: &str = "/usr";
/// The folder in which Ubuntu installs compilers newer than its default one, as `rust-1.91`.
const SIDE_BY_SIDE: &str = "/usr/lib";

/// A compiler with the sources of `core`, which is compiled for BPF.
#[derive(Clone, Debug)]
pub struct Toolchain {
    /// The argument of `rustup run`: a name, or the root of an installation.
    pub name: String,
    /// The major version of its LLVM; bpf-linker must have the same.
    pub llvm: u32,
}

/// Returns the first usable toolchain: the one that [`VARIABLE`] names, rustup's nightly, the
/// distribution's.
#[must_use]
pub fn find() -> Option<Toolchain> {
    let candidates = match env::var(VARIABLE) {
        Ok(named) => vec![named],
        Err(_) => {
            let mut known = vec!["nightly".to_owned()];
            known.extend(side_by_side());
            known.push(DISTRIBUTION.to_owned());
            known
        }
    };
    candidates.into_iter().find_map(|name| {
        let rustc = |arguments: &[&str]| {
            let mut command = if Path::new(&name).is_absolute() {
                Command::new(Path::new(&name).join("bin/rustc"))
            } else {
                let mut command = Command::new("rustup");
                command.args(["run", &name, "rustc"]);
                command
            };
            // The environment of an outer cargo must not override the toolchain under test.
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
        Some(Toolchain { name, llvm })
    })
}

/// Ubuntu's compilers, the newest first.
fn side_by_side() -> Vec<String> {
    let minor =
        |path: &PathBuf| -> Option<u32> { path.file_name()?.to_str()?.strip_prefix("rust-1.")?.parse().ok() };
    let entries = fs::read_dir(SIDE_BY_SIDE).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> =
        entries.map(|entry| entry.path()).filter(|path| minor(path).is_some()).collect();
    found.sort_by_key(|path| std::cmp::Reverse(minor(path)));
    found.into_iter().filter_map(|path| path.into_os_string().into_string().ok()).collect()
}

/// Whether bpf-linker can be called.
#[must_use]
pub fn linker_found() -> bool {
    Command::new("bpf-linker").arg("--version").output().is_ok_and(|output| output.status.success())
}
