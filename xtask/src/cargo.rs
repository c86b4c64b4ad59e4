//! Calls of cargo and other programs.

use std::{
    env,
    ffi::OsStr,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, ExitCode, ExitStatus},
};

use anyhow::{Context, Result};

/// Root of the workspace.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."))
}

/// The cargo that started us, in the workspace.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    // Of this program, not of the ones that are called: some build scripts would run again because of them.
    for (name, _) in env::vars_os() {
        let ours = name.to_str().is_some_and(|name| {
            name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_BIN_") || name == "CARGO_MANIFEST_DIR"
        });
        if ours {
            command.env_remove(&name);
        }
    }
    command
}

/// Folder of programs from `cargo install`.
fn install_folder() -> Option<PathBuf> {
    let home = env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| env::var_os("HOME").map(|home| PathBuf::from(home).join(".cargo")))?;
    Some(home.join("bin"))
}

/// Adds cargo's folder of programs to PATH for all that we start; bpf-linker is there, and not everyone has it in PATH.
pub(crate) fn complete_path() {
    let Some(folder) = install_folder() else { return };
    let path = env::var_os("PATH").unwrap_or_default();
    if env::split_paths(&path).any(|known| known == folder) {
        return;
    }
    if let Ok(longer) = env::join_paths(env::split_paths(&path).chain([folder])) {
        // SAFETY: called first thing in `main`, while this process has one thread.
        unsafe { env::set_var("PATH", longer) };
    }
}

/// The program of this name in PATH.
pub(crate) fn find(name: impl AsRef<OsStr>) -> Option<PathBuf> {
    let name = name.as_ref();
    let path = env::var_os("PATH")?;
    env::split_paths(&path).map(|folder| folder.join(name)).find(|file| {
        fs::metadata(file).is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
    })
}

/// Output of a program, if there is such a program and it succeeds.
pub(crate) fn output(command: &mut Command) -> Option<String> {
    let output = command.output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs a command with our own input and output.
pub(crate) fn status(command: &mut Command) -> Result<ExitStatus> {
    command.status().with_context(|| format!("{} cannot be started", command.get_program().display()))
}

/// As [`status`], as an exit code to leave with.
pub(crate) fn exit_code(command: &mut Command) -> Result<ExitCode> {
    let status = status(command)?;
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(code.map_or(ExitCode::FAILURE, ExitCode::from))
}

/// Whether this process may do everything.
pub(crate) fn is_root() -> bool {
    // The owner of /proc/self is the effective user.
    use std::os::unix::fs::MetadataExt;
    fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0)
}

/// A command with all privileges: through sudo unless they are there. `None` if they cannot be had.
pub(crate) fn privileged(program: impl AsRef<OsStr>) -> Option<Command> {
    if is_root() {
        return Some(Command::new(program));
    }
    let mut command = Command::new(find("sudo")?);
    command.arg("-E").arg(program);
    Some(command)
}
