//! Questions to `explain` of the built agent, and its answers as it prints them.

use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde_json::json;
use tempfile::NamedTempFile;

use crate::agent::{self, Agent};

/// A new flow: the first packet of a connection, or a datagram.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flow {
    pub name: String,
    pub source: SocketAddr,
    pub destination: SocketAddr,
    /// The protocol: `TCP`, `UDP` …
    pub protocol: String,
    /// The origin, where the source address does not determine it: `pod`, `node` or `external`.
    pub from: Option<&'static str>,
}

/// One line of the answer.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Answer {
    pub name: String,
    /// The verdict: `endpoints`, `reject`, `drop`, `unhandled` or `reply`.
    pub verdict: String,
    /// The outcome, by the name that `status` uses.
    pub outcome: String,
    pub endpoint: Option<SocketAddr>,
    pub candidates: Vec<SocketAddr>,
    pub masquerade: bool,
    pub source: Option<SocketAddr>,
    /// The hook that decided: `xdp`, `tc` or `socket`.
    pub hook: String,
    pub steps: Vec<String>,
}

impl Flow {
    pub fn new(protocol: &str, source: SocketAddr, destination: SocketAddr) -> Self {
        let name = format!("{source} {destination}");
        Self { name, source, destination, protocol: protocol.to_owned(), from: None }
    }

    pub fn from(mut self, place: &'static str) -> Self {
        self.from = Some(place);
        self
    }

    /// The flow as a line of input for `explain --flows`.
    pub fn line(&self) -> String {
        let Self { name, source, destination, protocol, from } = self;
        let mut line = json!({
            "name": name,
            "src": source.ip(),
            "sport": source.port(),
            "dst": destination.ip(),
            "dport": destination.port(),
            "proto": protocol,
        });
        if let Some(from) = from {
            line["from"] = json!(from);
        }
        line.to_string()
    }
}

/// Writes a file with one flow in each line; it is removed when dropped.
pub fn file(flows: &[Flow]) -> Result<NamedTempFile> {
    let mut file = NamedTempFile::new()?;
    for flow in flows {
        writeln!(file, "{}", flow.line())?;
    }
    file.flush()?;
    Ok(file)
}

/// Asks on the node of an agent, against its maps.
pub fn live(agent: &Agent, flows: &[Flow], options: &[&str]) -> Result<Vec<Answer>> {
    let file = file(flows)?;
    let path = file.path().to_string_lossy().into_owned();
    let arguments = [&["explain", "--flows", &path], options].concat();
    answers(flows, &agent.command(&arguments)?)
}

/// Asks without a node.
pub fn offline(manifests: &Path, node: &str, flows: &[Flow], options: &[&str]) -> Result<Vec<Answer>> {
    let file = file(flows)?;
    let mut command = Command::new(agent::program()?);
    command.args(["explain", "--node-name", node, "--manifests"]).arg(manifests);
    command.arg("--flows").arg(file.path()).args(options);
    answers(flows, &command.output()?)
}

/// Parses one answer for each flow, in their order; anything else is an error.
fn answers(flows: &[Flow], output: &Output) -> Result<Vec<Answer>> {
    let complaint = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "explain: {}\n{complaint}", output.status);
    let lines = String::from_utf8(output.stdout.clone())?;
    let answers: Vec<Answer> = lines
        .lines()
        .map(|line| serde_json::from_str(line).with_context(|| line.to_owned()))
        .collect::<Result<_>>()?;
    let in_order = answers.iter().map(|answer| &answer.name).eq(flows.iter().map(|flow| &flow.name));
    ensure!(in_order, "{} flows, {} answers, or not in order", flows.len(), answers.len());
    Ok(answers)
}
