//! A browser process and its messages: JSON, each terminated by a zero byte.
//!
//! A crate that drives browsers would replace this file alone, and bring some 55 other crates:
//! `headless_chrome` and `chromiumoxide` compile types for the whole protocol, and connect by a TCP
//! port and WebSocket, where a pipe suffices. `fantoccini` needs chromedriver besides, and its
//! protocol, WebDriver, has no accessibility tree.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::pace::scaled;

/// The time limit for an answer.
const ANSWER: Duration = Duration::from_secs(60);
/// The time limit for the browser to exit by itself.
const END: Duration = Duration::from_secs(10);
/// The browser reads descriptor 3 and writes descriptor 4, and may print anything on the others.
const DESCRIPTORS: &str = "exec 3<&0 4>&1 0</dev/null 1>&2; exec \"$@\"";
const FLAGS: [&str; 9] = [
    "--headless",
    "--remote-debugging-pipe",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    // No host name resolves.
    "--host-resolver-rules=MAP * ~NOTFOUND",
];

#[derive(Debug)]
pub(super) struct Wire {
    child: Child,
    to: Option<ChildStdin>,
    from: Receiver<Value>,
    last: u64,
    /// Events of the protocol, which arrive without a request.
    pub(super) events: Vec<Value>,
    folder: TempDir,
}

impl Wire {
    pub(super) fn start(program: &str) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let log = File::create(folder.path().join("log"))?;
        let mut command = Command::new("sh");
        command.args(["-c", DESCRIPTORS, "sh", program]).args(FLAGS);
        command.arg(format!("--user-data-dir={}", folder.path().join("profile").display()));
        if nix::unistd::geteuid().is_root() {
            command.arg("--no-sandbox");
        }
        let mut child = command
            .arg("about:blank")
            .env("HOME", folder.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()?;
        let to = child.stdin.take();
        let mut reader = BufReader::new(child.stdout.take().context("no pipe")?);
        let (sender, from) = mpsc::channel();
        thread::spawn(move || {
            let mut message = Vec::new();
            while reader.read_until(0, &mut message).is_ok_and(|length| length > 0) {
                message.pop_if(|last| *last == 0);
                let Ok(value) = serde_json::from_slice(&message) else { return };
                if sender.send(value).is_err() {
                    return;
                }
                message.clear();
            }
        });
        Ok(Self { child, to, from, last: 0, events: Vec::new(), folder })
    }

    /// Sends a request and waits for its answer.
    pub(super) fn call(&mut self, session: Option<&str>, method: &str, parameters: &Value) -> Result<Value> {
        self.last += 1;
        let mut message = json!({"id": self.last, "method": method, "params": parameters});
        if let Some(session) = session {
            message["sessionId"] = session.into();
        }
        let mut bytes = serde_json::to_vec(&message)?;
        bytes.push(0);
        let sent = self.to.as_mut().context("it was closed").and_then(|to| Ok(to.write_all(&bytes)?));
        sent.with_context(|| format!("{method} was not heard; {}", self.log()))?;
        let id = self.last;
        let answer = self.until(method, scaled(ANSWER), |message| message["id"] == id)?;
        if !answer["error"].is_null() {
            bail!("{method}: {}", answer["error"]);
        }
        Ok(answer["result"].clone())
    }

    /// Waits for an event of this method.
    pub(super) fn wait_for(&mut self, session: &str, method: &str, limit: Duration) -> Result<()> {
        let is_it = |message: &Value| message["method"] == method && message["sessionId"] == session;
        if self.events.iter().any(is_it) {
            return Ok(());
        }
        self.until(method, limit, is_it).map(|_| ())
    }

    fn until(&mut self, what: &str, limit: Duration, is_it: impl Fn(&Value) -> bool) -> Result<Value> {
        let end = Instant::now() + limit;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match self.from.recv_timeout(left) {
                Ok(message) if is_it(&message) => return Ok(message),
                Ok(message) => self.events.push(message),
                Err(error) => bail!("waited for {what} in vain ({error}); {}", self.log()),
            }
        }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        // The browser exits when its input is closed, and takes its children along.
        self.to = None;
        let end = Instant::now() + END;
        while Instant::now() < end {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            // The interval between two looks of a poll that has a limit.
            thread::sleep(Duration::from_millis(20));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
