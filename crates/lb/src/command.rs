//! `kubectl traffic-policy`: a plugin of kubectl for cluster administrators. Its commands need
//! neither a node nor an agent, or reach the agent of a node through the API.

mod complete;
mod lb;
mod status;

use std::{
    ffi::{OsStr, OsString},
    path::Path,
};

use anyhow::Result;
use clap::{CommandFactory as _, Parser, Subcommand};
use traffic_policy_cluster::command::{
    completion,
    logging::{self, LogFormat},
    man, view,
};

/// The program's file name; kubectl looks for `kubectl-`, and treats `_` as `-`.
const PROGRAM: &str = "kubectl-traffic_policy";
/// The file name under which kubectl asks for completions.
const COMPLETER: &str = "kubectl_complete-traffic_policy";
/// The command as users type it.
const AS_TYPED: &str = "kubectl traffic-policy";

/// The answer to `explain`, which runs the packet path's programs and so needs a Linux machine and
/// root.
const EXPLAIN: &str = "`explain` runs the programs of the packet path: call `traffic-policy-agent explain --api --node-name NODE`, as root on any Linux";

/// An error for findings of level error that have been printed: exit code 3.
#[derive(Debug, thiserror::Error)]
#[error("{count} findings of level error")]
pub struct FoundErrors {
    pub count: usize,
}

/// Show what happens to requests to the Services of a cluster, and why.
#[derive(Debug, Parser)]
#[command(name = PROGRAM, bin_name = AS_TYPED, version, max_term_width = 100)]
struct Arguments {
    /// Log filter: error, warn, info, debug, trace, or per module as in RUST_LOG.
    #[arg(long, global = true, env = "TRAFFIC_POLICY_LOG", default_value = "info", value_name = "LEVEL")]
    log: String,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Lb(Box<lb::Arguments>),
    Status(status::Arguments),
    Completion(completion::Arguments),
    Man(man::Arguments),
}

/// Returns the command line.
#[must_use]
pub fn command() -> clap::Command {
    Arguments::command()
}

/// The role in which this program was called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Plugin,
    Completer,
}

impl Role {
    /// Returns the role for the first word of the command line: called through a link, the program
    /// completes for kubectl.
    fn of(word: Option<&OsString>) -> Self {
        let name = word.map(Path::new).and_then(Path::file_name).and_then(OsStr::to_str);
        if name == Some(COMPLETER) { Self::Completer } else { Self::Plugin }
    }
}

/// Executes a command line; its first word is the program's name.
///
/// # Errors
/// The error names the problem and the remedy. Wrong usage is a [`clap::Error`]; findings of level
/// error are [`FoundErrors`].
pub fn execute(words: &[OsString]) -> Result<()> {
    if Role::of(words.first()) == Role::Completer {
        return complete::print(&command(), words.get(1..).unwrap_or_default());
    }
    if words.get(1).is_some_and(|word| word == "explain") {
        return Err(view::usage(EXPLAIN).into());
    }
    let arguments = Arguments::try_parse_from(words)?;
    logging::start(&arguments.log, LogFormat::Text)?;
    match arguments.command {
        Command::Lb(arguments) => arguments.execute(),
        Command::Status(arguments) => arguments.execute(),
        Command::Completion(arguments) => arguments.execute(command()),
        Command::Man(arguments) => arguments.execute(command()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_decides() {
        let role = |word: &str| Role::of(Some(&word.into()));
        assert_eq!(role("/usr/local/bin/kubectl-traffic_policy"), Role::Plugin);
        assert_eq!(role("/usr/local/bin/kubectl_complete-traffic_policy"), Role::Completer);
        assert_eq!(Role::of(None), Role::Plugin);
    }

    #[test]
    fn its_command_line_is_sound() {
        command().debug_assert();
    }
}
