//! The process that destroys UDP sockets for the agent, so that only this one of the two keeps the
//! capabilities needed for it: CAP_SYS_ADMIN and CAP_SYS_PTRACE, to enter the network namespaces of
//! pods.
//!
//! It is another instance of this program, run as `end-sockets`. Questions and answers are lines of
//! JSON, through pipes. It exits when the agent does, for whatever reason, because its input then
//! ends.

use std::{
    collections::{BTreeMap, BTreeSet},
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

/// The command that runs this program as that process.
pub const COMMAND: &str = "end-sockets";

/// The arguments of [`destroy_udp`].
#[derive(Debug, Serialize, Deserialize)]
struct Question {
    cgroup: PathBuf,
    cookies: BTreeMap<u64, SocketAddr>,
}

/// A handle of that process; a clone refers to the same one.
#[derive(Clone, Debug)]
pub struct SocketEnder(Arc<Mutex<Process>>);

#[derive(Debug)]
struct Process {
    child: Child,
    questions: ChildStdin,
    answers: BufReader<ChildStdout>,
    /// The sockets that it has destroyed, with the endpoint of each: their program may keep them
    /// open, and nothing is left to do.
    ended: BTreeSet<(u64, SocketAddr)>,
}

/// The maximum number of sockets in [`Process::ended`].
const REMEMBERED: usize = 1 << 16;

impl SocketEnder {
    /// Starts the process, with the capabilities of this one.
    pub fn start() -> Result<Self> {
        Self::of(Command::new("/proc/self/exe").arg0("traffic-policy-agent").arg(COMMAND))
    }

    /// Starts the process like [`Self::start`], with this command.
    pub fn of(command: &mut Command) -> Result<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("the process that ends UDP sockets cannot be started (--cgroup none needs none)")?;
        let (questions, answers) = (child.stdin.take(), child.stdout.take());
        let (Some(questions), Some(answers)) = (questions, answers) else {
            bail!("the process that ends UDP sockets has no pipes");
        };
        let (answers, ended) = (BufReader::new(answers), BTreeSet::new());
        Ok(Self(Arc::new(Mutex::new(Process { child, questions, answers, ended }))))
    }

    /// Destroys sockets like [`destroy_udp`], in that process, except for those that were destroyed
    /// before. It blocks until that is done.
    ///
    /// # Errors
    /// See [`destroy_udp`]; also if the process has exited.
    pub fn destroy(&self, cgroup: &Path, mut cookies: BTreeMap<u64, SocketAddr>) -> Result<Destroyed> {
        // A panic in between leaves an incomplete question: the next answer is then a JSON error.
        let mut process = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        cookies.retain(|cookie, endpoint| !process.ended.contains(&(*cookie, *endpoint)));
        if cookies.is_empty() {
            return Ok(Destroyed::default());
        }
        let question = Question { cgroup: cgroup.to_owned(), cookies };
        match process.request(&serde_json::to_string(&question)?) {
            Ok(answer) => {
                let destroyed = serde_json::from_str::<Result<Destroyed, String>>(&answer)
                    .context("the process that ends UDP sockets gives an answer of another form")?
                    .map_err(anyhow::Error::msg)?;
                if process.ended.len() > REMEMBERED {
                    process.ended.clear();
                }
                let pairs =
                    question.cookies.into_iter().filter(|(cookie, _)| destroyed.cookies.contains(cookie));
                process.ended.extend(pairs);
                Ok(destroyed)
            }
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
    fn request(&mut self, question: &str) -> Result<String> {
        writeln!(self.questions, "{question}").context("asking it failed")?;
        let mut answer = String::new();
        if self.answers.read_line(&mut answer).context("its answer cannot be read")? == 0 {
            bail!("its answer is missing");
        }
        Ok(answer)
    }
}

/// Answers questions until the input ends.
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

/// Blocks signals that are meant for the agent: a terminal and systemd send them to all processes.
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

    /// Answers each question by the number of questions so far as the only cookie.
    const COUNTING: &str = r#"n=0; while read q; do n=$((n+1)); echo "{\"Ok\":{\"cookies\":[$n],\"namespaces\":1,\"failures\":[]}}"; done"#;

    fn process(script: &str) -> SocketEnder {
        SocketEnder::of(Command::new("sh").args(["-c", script])).unwrap()
    }

    #[test]
    fn what_was_destroyed_is_not_asked_for_again() {
        let ender = process(COUNTING);
        let endpoint = |port| SocketAddr::from(([192, 0, 2, 1], port));
        let ask = |cookies: &[(u64, u16)]| {
            let cookies = cookies.iter().map(|(cookie, port)| (*cookie, endpoint(*port))).collect();
            ender.destroy(Path::new("/x"), cookies).unwrap().cookies
        };
        assert_eq!(ask(&[(1, 53), (9, 53)]), BTreeSet::from([1]));
        assert_eq!(ask(&[(1, 53)]), BTreeSet::new(), "no question");
        assert_eq!(ask(&[(1, 54)]), BTreeSet::from([2]), "connected to another endpoint since");
        assert_eq!(ask(&[(1, 53), (9, 53)]), BTreeSet::from([3]));
    }

    #[test]
    fn a_process_that_is_gone_is_told_of() {
        let ender = process("exit 7");
        ender.0.lock().unwrap().child.wait().unwrap();
        let one = BTreeMap::from([(1, "192.0.2.1:53".parse().unwrap())]);
        let error = ender.destroy(Path::new("/x"), one).unwrap_err().to_string();
        for part in ["ended (exit status: 7)", "needs a restart of the agent"] {
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn a_question_of_another_form_ends_it() {
        assert!(serve(&b"{\"cgroup\": 1}\n"[..], Vec::new()).is_err());
    }
}
