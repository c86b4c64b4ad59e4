//! Work in the background: it has the time that the processors spend on nothing else, so that tests
//! beside it see a machine that idles.

use std::{fs, process::Command};

use anyhow::{Context, Result, bail};

/// Puts this thread, and what it starts from now on, into the background: the policy SCHED_IDLE
/// gives a processor to any other program at once, and the lowest priority has /proc/stat count the
/// time apart from that of others (sched(7), proc_stat(5): nice).
///
/// # Errors
/// The programs of util-linux are missing, or refuse. All goes on as before, with the usual
/// priority.
pub(super) fn enter() -> Result<()> {
    let thread = fs::read_link("/proc/thread-self").context("this thread has no number")?;
    let thread = thread.file_name().context("this thread has no number")?;
    run(Command::new("renice").args(["-n", "19", "-p"]).arg(thread))?;
    run(Command::new("chrt").args(["--idle", "--pid", "0"]).arg(thread))
}

fn run(command: &mut Command) -> Result<()> {
    let program = command.get_program().display().to_string();
    let output = command.output().with_context(|| format!("{program} cannot be started"))?;
    if !output.status.success() {
        bail!("{program} refused: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// Returns policy and priority of a program that this thread starts: fields 41 and 19 of
    /// /proc/PID/stat, see proc_pid_stat(5).
    fn of_a_child() -> (String, String) {
        let output = Command::new("cat").arg("/proc/self/stat").output().unwrap();
        let stat = String::from_utf8(output.stdout).unwrap();
        let (_, fields) = stat.rsplit_once(')').unwrap();
        let fields: Vec<&str> = fields.split_whitespace().collect();
        (fields[38].to_owned(), fields[16].to_owned())
    }

    #[test]
    fn programs_of_this_thread_alone_are_in_the_background() {
        let before = of_a_child();
        let inside = thread::spawn(|| {
            enter().unwrap();
            of_a_child()
        });
        // SCHED_IDLE is 5.
        assert_eq!(inside.join().unwrap(), ("5".to_owned(), "19".to_owned()));
        assert_eq!(of_a_child(), before);
    }
}
