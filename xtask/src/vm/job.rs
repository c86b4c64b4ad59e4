//! Jobs: shell scripts that a machine's first process runs, and the marks by which the host follows
//! them on the console.

use std::path::PathBuf;

use super::{AGENT, Built, machine, records, wires};

/// The beginning of the line before a program's output.
const BEGIN: &str = "@@ begin ";
/// The beginning of the line after it, which has the exit code.
const END: &str = "@@ end ";

/// The factor on the waiting times of tests in an emulated machine. Without it tests measure the
/// factor themselves, but by the verifier alone, and translated user-space code is slower still.
const EMULATED_PACE: u32 = 20;

/// The suite that needs systemd as the first process.
pub(super) const SYSTEMD: &str = "systemd";
/// The variable that tells this suite that the machine's systemd is its own.
const SYSTEMD_VARIABLE: &str = "TRAFFIC_POLICY_SYSTEMD";

/// A program to run in a machine.
#[derive(Clone, Debug)]
pub(super) struct Run {
    pub(super) name: String,
    pub(super) program: PathBuf,
    pub(super) arguments: Vec<String>,
    /// The minimum number of tests that it must run, if they are selected by name.
    pub(super) selected: Option<u64>,
}

/// The meaning of a line of the console.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Mark<'a> {
    Begin(&'a str),
    End(i32),
    Output(&'a str),
}

pub(super) fn mark(line: &str) -> Mark<'_> {
    if let Some(name) = line.strip_prefix(BEGIN) {
        return Mark::Begin(name);
    }
    match line.strip_prefix(END).and_then(|code| code.parse().ok()) {
        Some(code) => Mark::End(code),
        None => Mark::Output(line),
    }
}

/// Returns a script that runs programs one after the other; as a service of systemd if the suite
/// that needs it is among them.
pub(super) fn script(built: &Built, runs: &[Run]) -> String {
    let programs = programs(built, runs);
    if runs.iter().any(|run| run.name == SYSTEMD) { under_systemd(&programs) } else { programs }
}

/// Returns a script in which the first process becomes systemd, whose only goal is a service with
/// the programs. The console belongs to them.
fn under_systemd(programs: &str) -> String {
    const PATH: &str = "/run/job";
    const UNIT: &str = "/run/systemd/system/job.service";
    let unit = format!(
        "[Unit]\nDescription=The job that the host gave\n[Service]\nExecStart=/bin/bash {PATH}\nStandardOutput=tty\nStandardError=inherit\n\
         TTYPath=/dev/console\nLimitNOFILE=524288\nTimeoutStopSec=5\n"
    );
    // Without a machine ID systemd assumes a first boot, and prompts for a time zone. Its query of
    // the terminal would be at the beginning of the first line.
    format!(
        "mkdir -p /run/systemd/system\ntr -d - </proc/sys/kernel/random/uuid >/etc/machine-id\n\
         cat >{PATH} <<'@@ job'\nexport PATH='{PROGRAMS}' HOME=/root {SYSTEMD_VARIABLE}=1\necho\n{programs}\n/sbin/busybox poweroff -f\n@@ job\n\
         cat >{UNIT} <<'@@ unit'\n{unit}@@ unit\n\
         exec /usr/lib/systemd/systemd --unit=job.service --show-status=no\n"
    )
}

/// The PATH of the first process.
const PROGRAMS: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/run/applets";

fn programs(built: &Built, runs: &[Run]) -> String {
    let mut text = environment(built);
    for Run { name, program, arguments, .. } in runs {
        let words: Vec<_> = arguments.iter().map(|word| quoted(word)).collect();
        let program = quoted(&program.display().to_string());
        text += &format!("echo '{BEGIN}{name}'\n{program} {}\necho \"{END}$?\"\n", words.join(" "));
    }
    text + &format!("sync\necho '{}'\n", machine::DONE)
}

/// Returns the environment that tests have on the host.
pub(super) fn environment(built: &Built) -> String {
    let folder = quoted(&Built::working_folder().display().to_string());
    let agent = quoted(&built.program(AGENT).display().to_string());
    let wires = quoted(&wires::description());
    let mut text = format!(
        "cd {folder}\nexport TRAFFIC_POLICY_AGENT={agent} TRAFFIC_POLICY_WIRES={wires} RUST_BACKTRACE=1\n"
    );
    if !built.arch.has_kvm() {
        text += &format!("export TRAFFIC_POLICY_TEST_PACE={EMULATED_PACE}\n");
    }
    for variable in records::VARIABLES {
        if std::env::var_os(variable).is_some() {
            text += &format!("export {variable}=1\n");
        }
    }
    text
}

/// Quotes a word for a shell.
pub(super) fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_told_from_output() {
        assert_eq!(mark("@@ begin packets"), Mark::Begin("packets"));
        assert_eq!(mark("@@ end 101"), Mark::End(101));
        assert_eq!(mark("test a ... ok"), Mark::Output("test a ... ok"));
        assert_eq!(mark("@@ end well"), Mark::Output("@@ end well"));
    }

    #[test]
    fn words_are_quoted() {
        assert_eq!(quoted("it's $HOME"), r"'it'\''s $HOME'");
    }
}
