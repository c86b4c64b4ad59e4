//! The command line.

mod adopt;
mod agent_request;
mod bugtool;
mod check;
mod cleanup;
pub mod config_file;
mod end_sockets;
mod endpoint_choice;
mod explain;
mod file_limit;
mod flows;
mod left_out;
mod line;
mod map_sizes;
mod metrics_address;
mod monitor;
mod reload;
mod report;
mod run;
mod services;
mod silent_nodes;
mod started_again;
mod status;
mod veth_peer;
mod view;

use std::ffi::OsString;

use anyhow::Result;
use clap::{CommandFactory as _, Parser, Subcommand};
use traffic_policy_cluster::command::{
    completion,
    logging::{self, LogFormat},
    man,
};
use traffic_policy_dataplane::node::socket_ender::COMMAND;

use self::{config_file::Note, line::Line, reload::Reloader};

/// The answer to `lb`, which was a command of this program once.
const MOVED: &str = "`lb` is a program of its own, which needs no node: `kubectl traffic-policy lb`, or `kubectl-traffic_policy lb`";

/// A Service proxy for one Kubernetes node, by XDP, TC and socket programs, with the exact meaning
/// of externalTrafficPolicy and internalTrafficPolicy.
#[derive(Debug, Parser)]
#[command(name = "traffic-policy-agent", version, max_term_width = 100)]
pub struct Arguments {
    /// Log filter: error, warn, info, debug, trace, or per module as in RUST_LOG.
    #[arg(long, global = true, env = "TRAFFIC_POLICY_LOG", default_value = "info", value_name = "LEVEL")]
    log: String,
    /// Log format: human-readable lines, or one JSON object per line.
    #[arg(
        long,
        global = true,
        env = "TRAFFIC_POLICY_LOG_FORMAT",
        default_value = "text",
        value_name = "FORMAT"
    )]
    log_format: LogFormat,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(Box<run::Arguments>),
    Check(Box<check::Arguments>),
    Explain(Box<explain::Arguments>),
    Status(status::Arguments),
    Services(services::Arguments),
    Flows(flows::Arguments),
    Monitor(monitor::Arguments),
    Bugtool(bugtool::Arguments),
    Adopt(adopt::Arguments),
    Cleanup(cleanup::Arguments),
    VethPeer(veth_peer::Arguments),
    Completion(completion::Arguments),
    Man(man::Arguments),
}

/// Executes a command line; its first word is the program's name.
///
/// # Errors
/// The error names what failed and the remedy. Wrong usage is a [`clap::Error`], or a
/// [`config_file::ConfigFileError`].
pub fn execute(words: Vec<OsString>) -> Result<()> {
    // The command is internal to `run` and not for users: no page and no completion lists it.
    if words.get(1).is_some_and(|word| word == COMMAND) {
        return end_sockets::execute();
    }
    if words.get(1).is_some_and(|word| word == "lb") {
        return Err(view::usage(MOVED).into());
    }
    let line = Line::parse(&words)?;
    let level = logging::start(&line.arguments.log, line.arguments.log_format)?;
    let (in_effect, given) = (line.in_effect(), line.given());
    let Line { arguments, file, .. } = line;
    for note in file.iter().flat_map(|file| &file.notes) {
        match note {
            Note::Unknown { .. } => tracing::warn!("--config: {note}"),
            Note::Ignored { .. } | Note::NodePorts => tracing::info!("--config: {note}"),
        }
    }
    match arguments.command {
        Command::Run(arguments) => {
            let reloader = Reloader::new(words, in_effect.clone(), file, level);
            arguments.execute(in_effect, reloader)
        }
        Command::Check(arguments) => arguments.execute(),
        Command::Explain(arguments) => arguments.execute(&given),
        Command::Status(arguments) => arguments.execute(),
        Command::Services(arguments) => arguments.execute(),
        Command::Flows(arguments) => arguments.execute(),
        Command::Monitor(arguments) => arguments.execute(),
        Command::Bugtool(arguments) => arguments.execute(),
        Command::Adopt(arguments) => arguments.execute(),
        Command::Cleanup(arguments) => arguments.execute(),
        Command::VethPeer(arguments) => arguments.execute(),
        Command::Completion(arguments) => arguments.execute(Arguments::command()),
        Command::Man(arguments) => arguments.execute(Arguments::command()),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    /// A flag without an explicit name takes that of its field: renaming the field must not rename
    /// the flag.
    #[test]
    fn flags_are_called_as_their_variables() {
        let program = Arguments::command();
        let commands = std::iter::once(&program).chain(program.get_subcommands());
        let mut flags = 0;
        for argument in commands.flat_map(clap::Command::get_arguments) {
            let (Some(flag), Some(variable)) = (argument.get_long(), argument.get_env()) else { continue };
            let variable = variable.to_str().unwrap();
            let name = format!("_{}", flag.to_uppercase().replace('-', "_"));
            assert!(
                variable.starts_with("TRAFFIC_POLICY_") && variable.ends_with(&name),
                "--{flag}: {variable}"
            );
            flags += 1;
        }
        assert!(flags > 30, "{flags}");
    }
}
