//! Calls of cargo and other programs.

use std::{
    env,
    ffi::OsStr,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, ExitCode, ExitStatus},
};

use anyhow::{Context, Result, bail};

/// Returns the root of the workspace.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."))
}

/// The folders of suites, from the root of the workspace.
pub(crate) const SUITES: [&str; 2] = ["crates/packets/tests", "tests/tests"];

/// Returns a command of the cargo that started this program, in the workspace.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    // These variables are this program's own; some build scripts would run again because of them.
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

/// Returns the folder of programs from `cargo install`.
fn install_folder() -> Option<PathBuf> {
    let home = env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| env::var_os("HOME").map(|home| PathBuf::from(home).join(".cargo")))?;
    Some(home.join("bin"))
}

/// Adds cargo's folder of programs to PATH for all child processes; bpf-linker is there, and not
/// every user has it in PATH.
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

/// Returns the path of a program in PATH.
pub(crate) fn find(name: impl AsRef<OsStr>) -> Option<PathBuf> {
    let name = name.as_ref();
    let path = env::var_os("PATH")?;
    env::split_paths(&path).map(|folder| folder.join(name)).find(|file| {
        fs::metadata(file).is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
    })
}

/// Returns the output of a program, if the program exists and succeeds.
pub(crate) fn output(command: &mut Command) -> Option<String> {
    let output = command.output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs a command with this program's own input and output.
pub(crate) fn status(command: &mut Command) -> Result<ExitStatus> {
    command.status().with_context(|| format!("{} cannot be started", command.get_program().display()))
}

/// Runs a command like [`status`], and returns its exit code for this program to exit with.
pub(crate) fn exit_code(command: &mut Command) -> Result<ExitCode> {
    Ok(code_of(status(command)?))
}

/// Returns the exit code of a program that has ended; that of a failure if a signal ended it.
pub(crate) fn code_of(status: ExitStatus) -> ExitCode {
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    code.map_or(ExitCode::FAILURE, ExitCode::from)
}

/// Runs a program silently; its output is shown if it fails.
pub(crate) fn quietly(command: &mut Command) -> Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| format!("{name} cannot be started"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let lines: Vec<_> = said.lines().filter(|line| !line.trim().is_empty()).collect();
    bail!("{name}: {}: {}", output.status, lines[lines.len().saturating_sub(5)..].join("\n"));
}

/// Whether this process has all privileges.
pub(crate) fn is_root() -> bool {
    // The owner of /proc/self is the effective user.
    use std::os::unix::fs::MetadataExt;
    fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0)
}

/// Returns a command with all privileges: through sudo unless this process has them. `None` if they
/// are not available.
pub(crate) fn privileged(program: impl AsRef<OsStr>) -> Option<Command> {
    if is_root() {
        return Some(Command::new(program));
    }
    let mut command = Command::new(find("sudo")?);
    command.arg("-E").arg(program);
    Some(command)
}
