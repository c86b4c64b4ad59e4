//! Lints and documentation of the host's code and of the packet path, which is compiled only for
//! BPF.

use std::{env, path::Path, process::Command};

use anyhow::Result;
use traffic_policy_toolchain as toolchain;

use crate::{cargo, tally::Tally};

/// Packages with a program for BPF, and the program's name; on the host they are empty programs.
const PROGRAMS: [(&str, &str); 2] =
    [("traffic-policy-ebpf", "traffic-policy-ebpf"), ("traffic-policy-bench-ebpf", "traffic-policy-bench")];

/// Runs `cargo clippy` for the host.
pub(crate) fn clippy(_: &mut Tally) -> Result<bool> {
    succeeds(cargo::cargo().args([
        "clippy",
        "--workspace",
        "--all-targets",
        "--quiet",
        "--",
        "-D",
        "warnings",
    ]))
}

/// Runs `cargo clippy` for the BPF target.
pub(crate) fn clippy_bpf(tally: &mut Tally) -> Result<bool> {
    let Some(bpf) = Bpf::with(&["clippy", "--version"], tally) else { return Ok(true) };
    let mut command = bpf.cargo("clippy");
    for (package, _) in PROGRAMS {
        command.args(["--package", package]);
    }
    succeeds(command.args(["--bins", "--quiet", "--", "-D", "warnings"]))
}

/// Runs `cargo doc` for the host: every link must resolve.
pub(crate) fn doc(_: &mut Tally) -> Result<bool> {
    let mut command = cargo::cargo();
    command.args(["doc", "--workspace", "--no-deps", "--document-private-items", "--quiet"]);
    succeeds(command.env("RUSTDOCFLAGS", "-D warnings"))
}

/// Runs `cargo rustdoc` for the BPF target, one binary at a time, because the library has the name
/// of one of them.
pub(crate) fn doc_bpf(tally: &mut Tally) -> Result<bool> {
    let Some(bpf) = Bpf::with(&["rustdoc", "--help"], tally) else { return Ok(true) };
    for (package, name) in PROGRAMS {
        let mut command = bpf.cargo("rustdoc");
        command.args([
            "--package",
            package,
            "--bin",
            name,
            "--quiet",
            "--",
            "--document-private-items",
            "-D",
            "warnings",
        ]);
        if !succeeds(command.args(["--cfg", &Bpf::arch()]))? {
            return Ok(false);
        }
    }
    Ok(true)
}

fn succeeds(command: &mut Command) -> Result<bool> {
    Ok(cargo::status(command)?.success())
}

/// The compiler that builds the packet path, called as aya-build does.
struct Bpf {
    /// The toolchain for `rustup run`; `None` without rustup, where it is the only one.
    toolchain: Option<String>,
}

impl Bpf {
    /// Returns the compiler. `None`, with a sentence, if there is no toolchain or it lacks the
    /// programs of `probe`, which a distribution may not have.
    fn with(probe: &[&str], tally: &mut Tally) -> Option<Self> {
        let found = toolchain::find();
        let bpf =
            found.as_ref().map(|found| Self { toolchain: cargo::find("rustup").map(|_| found.name.clone()) });
        let usable = bpf.filter(|bpf| cargo::output(bpf.command().args(probe)).is_some());
        if usable.is_none() {
            let name = found.map_or("a BPF toolchain".to_owned(), |found| found.name);
            println!("SKIPPED: {name} has no `cargo {}`", probe[0]);
            tally.skipped += 1;
        }
        usable
    }

    /// Returns a command of the toolchain's cargo in the workspace.
    fn command(&self) -> Command {
        let mut command = match &self.toolchain {
            Some(name) => {
                let mut command = Command::new("rustup");
                command.args(["run", name, "cargo"]);
                command
            }
            None => Command::new("cargo"),
        };
        command.current_dir(cargo::root());
        // The cargo that started this program belongs to another toolchain.
        for variable in ["CARGO", "RUSTC", "RUSTDOC", "RUSTC_WORKSPACE_WRAPPER", "RUSTUP_TOOLCHAIN"] {
            command.env_remove(variable);
        }
        command
    }

    /// Returns a sub-command for the packet path or the bench's programs, with `core` compiled for
    /// BPF as in the build of the agent.
    fn cargo(&self, subcommand: &str) -> Command {
        let target = if cfg!(target_endian = "big") { "bpfeb-unknown-none" } else { "bpfel-unknown-none" };
        let mut command = self.command();
        command.args([subcommand, "--release", "--target", target, "-Z", "build-std=core"]);
        command.arg("--target-dir").arg(Path::new("target").join("bpf-lints"));
        command.env("RUSTC_BOOTSTRAP", "1").env("CARGO_ENCODED_RUSTFLAGS", format!("--cfg={}", Self::arch()));
        command
    }

    /// Returns the architecture that the packet path is built for, as aya-ebpf expects it.
    fn arch() -> String {
        format!("bpf_target_arch=\"{}\"", env::consts::ARCH)
    }
}
