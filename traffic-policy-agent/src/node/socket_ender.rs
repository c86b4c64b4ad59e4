//! The process that destroys UDP sockets for the agent, so that of the two only this one keeps the capabilities which
//! that takes: CAP_SYS_ADMIN and CAP_SYS_PTRACE, to enter the network namespaces of pods.
//!
//! It is this program once more, as `end-sockets`. Questions and answers are lines of JSON, by pipes. It ends when the
//! agent does, however that ends, for its input ends then.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Write},
    net::SocketAddr,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::{Arc, Mutex, PoisonError},
};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{SigSet, Signal};
use serde::{Deserialize, Serialize};

use super::sockets::{Destroyed, destroy_udp};

/// The command by which this program is that process.
pub const COMMAND: &str = "end-sockets";

/// What [`destroy_udp`] is given.
#[derive(Debug, Serialize, Deserialize)]
struct Question {
    cgroup: PathBuf,
    cookies: BTreeMap<u64, SocketAddr>,
}

/// The other end of that process; a copy is the same one.
#[derive(Clone, Debug)]
pub struct SocketEnder(Arc<Mutex<Process>>);

#[derive(Debug)]
struct Process {
    child: Child,
    questions: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl SocketEnder {
    /// Starts the process, with the capabilities that this one has.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start() -> Result<Self> {
        let mut child = Command::new("/proc/self/exe")
            .arg0("traffic-policy-agent")
            .arg(COMMAND)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("the process that ends UDP sockets cannot be started (--cgroup none needs none)")?;
        let (questions, answers) = (child.stdin.take(), child.stdout.take());
        let (Some(questions), Some(answers)) = (questions, answers) else {
            bail!("the process that ends UDP sockets has no pipes");
        };
        Ok(Self(Arc::new(Mutex::new(Process { child, questions, answers: BufReader::new(answers) }))))
    }

    /// As [`destroy_udp`], in that process. Blocks until it is done.
    ///
    /// # Errors
    /// As there; or the process has ended.
    pub fn destroy(&self, cgroup: &Path, cookies: BTreeMap<u64, SocketAddr>) -> Result<Destroyed> {
        if cookies.is_empty() {
            return Ok(Destroyed::default());
        }
        let question = serde_json::to_string(&Question { cgroup: cgroup.to_owned(), cookies })?;
        // A panic in between leaves half a question: the next answer then is an error of its JSON.
        let mut process = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match process.ask(&question) {
            Ok(answer) => serde_json::from_str::<Result<Destroyed, String>>(&answer)
                .context("the process that ends UDP sockets gives an answer of another form")?
                .map_err(anyhow::Error::msg),
            Err(error) => {
                let ended = process.child.try_wait().ok().flatten();
                let state =
                    ended.map_or_else(|| "does not answer".to_owned(), |state| format!("ended ({state})"));
                bail!(
                    "the process that ends UDP sockets {state}, and a new one needs a restart of the agent: {error:#}"
                )
            }
        }
    }
}

impl Process {
    fn ask(&mut self, question: &str) -> Result<String> {
        writeln!(self.questions, "{question}").context("asking it failed")?;
        let mut answer = String::new();
        if self.answers.read_line(&mut answer).context("its answer cannot be read")? == 0 {
            bail!("its answer is missing");
        }
        Ok(answer)
    }
}

/// Answers questions until the input ends.
///
/// # Errors
/// A question is of another form, or an answer cannot be written.
pub fn serve(questions: impl BufRead, mut answers: impl Write) -> Result<()> {
    for question in questions.lines() {
        let Question { cgroup, cookies } =
            serde_json::from_str(&question.context("no question can be read")?)?;
        let answer = destroy_udp(&cgroup, &cookies).map_err(|error| format!("{error:#}"));
        writeln!(answers, "{}", serde_json::to_string(&answer)?).context("an answer cannot be written")?;
        answers.flush().context("an answer cannot be written")?;
    }
    Ok(())
}

/// Leaves signals that are meant for the agent to it: a terminal and systemd send them to all processes.
///
/// # Errors
/// The kernel refuses.
pub fn block_signals() -> Result<()> {
    let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP]);
    signals.thread_block().context("signals cannot be blocked")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_question_has_one_answer() {
        let cookies = BTreeMap::from([(1 << 40, "[2001:db8::1]:53".parse().unwrap())]);
        let question = Question { cgroup: "/nonexistent".into(), cookies };
        let none = Question { cookies: BTreeMap::new(), cgroup: "/nonexistent".into() };
        let lines =
            [question, none].map(|question| serde_json::to_string(&question).unwrap() + "\n").concat();
        let mut answers = Vec::new();
        serve(lines.as_bytes(), &mut answers).unwrap();
        let answers: Vec<Result<Destroyed, String>> =
            answers.lines().map(|line| serde_json::from_str(&line.unwrap()).unwrap()).collect();
        let [Err(refused), Ok(nothing)] = answers.as_slice() else { panic!("{answers:?}") };
        assert!(refused.contains("/nonexistent") && refused.contains("cgroup2"), "{refused}");
        assert_eq!(*nothing, Destroyed::default());
    }

    #[test]
    fn a_question_of_another_form_ends_it() {
        assert!(serve(&b"{\"cgroup\": 1}\n"[..], Vec::new()).is_err());
    }
}
