//! `kubectl traffic-policy`: this program under the name by which kubectl finds plugins, with the commands that serve a person at a
//! cluster: they need neither a node nor an agent, or reach the agent of a node through the API.

mod complete;
mod status;

use std::{
    ffi::{OsStr, OsString},
    path::Path,
};

use anyhow::Result;
use clap::{CommandFactory as _, Parser, Subcommand};

use super::{completion, explain, lb, logging, man};
use crate::command::logging::LogFormat;

/// The name of the file; kubectl looks for `kubectl-`, and takes `_` for `-`.
const PROGRAM: &str = "kubectl-traffic_policy";
/// By which kubectl asks what could come next on a command line.
const COMPLETER: &str = "kubectl_complete-traffic_policy";
/// The command as users type it.
pub(super) const AS_TYPED: &str = "kubectl traffic-policy";

/// See what becomes of requests to the Services of a cluster, and why.
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
    Explain(Box<explain::Arguments>),
    Status(status::Arguments),
    Completion(completion::Arguments),
    Man(man::Arguments),
}

/// Its command line.
#[must_use]
pub fn command() -> clap::Command {
    Arguments::command()
}

/// The role in which this program was called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Plugin,
    Completer,
}

impl Role {
    /// By the first word of the command line; `None` for the agent itself.
    pub(super) fn of(word: Option<&OsString>) -> Option<Self> {
        let name = word.map(Path::new).and_then(Path::file_name).and_then(OsStr::to_str)?;
        match name {
            PROGRAM => Some(Self::Plugin),
            COMPLETER => Some(Self::Completer),
            _ => None,
        }
    }

    pub(super) fn execute(self, words: &[OsString]) -> Result<()> {
        match self {
            Self::Completer => complete::print(&command(), words.get(1..).unwrap_or_default()),
            Self::Plugin => {
                let arguments = Arguments::try_parse_from(words)?;
                logging::start(&arguments.log, LogFormat::Text)?;
                match arguments.command {
                    Command::Lb(arguments) => arguments.execute(),
                    Command::Explain(arguments) => arguments.of_a_cluster().execute(),
                    Command::Status(arguments) => arguments.execute(),
                    Command::Completion(arguments) => arguments.execute(command()),
                    Command::Man(arguments) => arguments.execute(command()),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_decides() {
        let role = |word: &str| Role::of(Some(&word.into()));
        assert_eq!(role("/usr/local/bin/kubectl-traffic_policy"), Some(Role::Plugin));
        assert_eq!(role("kubectl_complete-traffic_policy"), Some(Role::Completer));
        assert_eq!(role("/usr/bin/traffic-policy-agent"), None);
        assert_eq!(Role::of(None), None);
    }

    #[test]
    fn its_command_line_is_sound() {
        command().debug_assert();
    }
}
