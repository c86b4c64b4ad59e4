//! Child processes inside a namespace that cannot outlive their owner.

use std::io::{Seek, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Output, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};
use std::{fs, io, thread};

use anyhow::{Context, Result, ensure};
use nix::sched::{CloneFlags, setns};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, setsid};

use super::Namespace;

/// A child process, killed when dropped, and when this process dies for whatever reason.
#[derive(Debug)]
pub struct Process(Child);

impl Namespace {
    /// Starts a command inside.
    pub fn spawn(&self, mut command: Command) -> Result<Process> {
        let what = format!("starting {:?} in {}", command.get_program(), self.name);
        self.enter_on_exec(&mut command);
        // SAFETY: prctl is async-signal-safe.
        unsafe { command.pre_exec(|| Ok(set_pdeathsig(Signal::SIGKILL)?)) };
        Ok(Process(spawn_from_lasting_thread(command).context(what)?))
    }

    /// Runs a command inside until it exits, and returns its exit status and output.
    pub fn output(&self, command: Command) -> Result<Output> {
        self.output_of(command, Stdio::null())
    }

    fn output_of(&self, mut command: Command, input: Stdio) -> Result<Output> {
        command.stdin(input).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = self.spawn(command)?;
        let (stdout, stderr) = (process.0.stdout.take(), process.0.stderr.take());
        // The guard stays with the child while its pipes are drained, so both must be read here at
        // once.
        let stderr = thread::spawn(move || read_all(stderr));
        let stdout = read_all(stdout)?;
        let stderr = stderr.join().expect("reading a pipe does not panic")?;
        Ok(Output { status: process.0.wait()?, stdout, stderr })
    }

    /// Runs a program inside that reads `text` from its standard input.
    pub fn feed(&self, program: &str, arguments: &[&str], text: &str) -> Result<()> {
        // No shell is involved: that of busybox prefers its own `ip` to any in PATH.
        let mut input = tempfile::tempfile().context("making a file for the input")?;
        input.write_all(text.as_bytes())?;
        input.rewind()?;
        let mut command = Command::new(program);
        command.args(arguments);
        let output =
            self.output_of(command, input.into()).with_context(|| format!("{program} cannot be started"))?;
        ensure!(output.status.success(), "{program}: {}\n{text}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    }

    /// Starts a command inside that outlives this process, and returns its pid.
    pub fn spawn_detached(&self, mut command: Command) -> Result<u32> {
        let what = format!("starting {:?} in {}", command.get_program(), self.name);
        self.enter_on_exec(&mut command);
        // SAFETY: setsid is async-signal-safe.
        unsafe { command.pre_exec(|| Ok(setsid().map(drop)?)) };
        Ok(command.stdin(Stdio::null()).spawn().context(what)?.id())
    }

    /// Replaces this process by the command, inside. Returns only if that failed.
    pub fn exec(&self, mut command: Command) -> io::Error {
        self.enter_on_exec(&mut command);
        command.exec()
    }

    /// Makes a command start inside when it is spawned, for callers that manage the process
    /// themselves.
    pub fn enter_on_exec(&self, command: &mut Command) {
        let file = self.file.clone();
        // SAFETY: setns is a bare system call; the closure allocates nothing after fork.
        unsafe { command.pre_exec(move || Ok(setns(&*file, CloneFlags::CLONE_NEWNET)?)) };
    }
}

impl Process {
    pub fn id(&self) -> u32 {
        self.0.id()
    }

    pub fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_raw(self.0.id().try_into()?);
        kill(pid, signal).with_context(|| format!("sending {signal} to {pid}"))
    }

    /// The standard input and output of the child, if they are pipes; available once.
    pub fn pipes(&mut self) -> Option<(ChildStdin, ChildStdout)> {
        self.0.stdin.take().zip(self.0.stdout.take())
    }

    /// Sends SIGKILL and waits until the process is gone.
    pub fn kill(&mut self) -> Result<ExitStatus> {
        self.0.kill()?;
        Ok(self.0.wait()?)
    }

    pub fn wait(&mut self) -> Result<ExitStatus> {
        Ok(self.0.wait()?)
    }

    pub fn try_wait(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.0.try_wait()?)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill().ok();
    }
}

/// Whether a process exists and is not merely waiting to be reaped.
pub fn is_running(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
    // The state follows the name, which may itself contain anything.
    stat.is_ok_and(|stat| !stat.rsplit(") ").next().unwrap_or_default().starts_with('Z'))
}

fn read_all(pipe: Option<impl io::Read>) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if let Some(mut pipe) = pipe {
        pipe.read_to_end(&mut bytes)?;
    }
    Ok(bytes)
}

/// Starts children from a thread that never ends, as the parent-death signal is sent when the
/// *thread* that forked ends.
fn spawn_from_lasting_thread(command: Command) -> io::Result<Child> {
    type Request = (Command, Sender<io::Result<Child>>);
    static SPAWNER: OnceLock<Sender<Request>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (requests, receiver) = channel::<Request>();
        let work = move || {
            for (mut command, answer) in receiver {
                answer.send(command.spawn()).ok();
            }
        };
        thread::Builder::new().name("spawner".to_owned()).spawn(work).expect("a thread for child processes");
        requests
    });
    let (answer, child) = channel();
    spawner.send((command, answer)).expect("the spawner never ends");
    child.recv().expect("the spawner answers each request")
}
