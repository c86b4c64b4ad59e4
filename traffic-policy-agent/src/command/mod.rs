//! The command line.

mod adopt;
mod check;
mod cleanup;
mod explain;
mod flows;
mod monitor;
mod run;
mod services;
mod status;
mod view;

use std::io::IsTerminal;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// A Service proxy for one Kubernetes node, by XDP, TC and socket programs, with the exact meaning of externalTrafficPolicy
/// and internalTrafficPolicy.
#[derive(Debug, Parser)]
#[command(name = "traffic-policy-agent", version, max_term_width = 100)]
pub struct Arguments {
    /// What to log: error, warn, info, debug, trace, or per module as in RUST_LOG.
    #[arg(long, global = true, env = "TRAFFIC_POLICY_LOG", default_value = "info", value_name = "LEVEL")]
    log: String,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(Box<run::Arguments>),
    Check(Box<check::Arguments>),
    Explain(explain::Arguments),
    Status(status::Arguments),
    Services(services::Arguments),
    Flows(flows::Arguments),
    Monitor(monitor::Arguments),
    Adopt(adopt::Arguments),
    Cleanup(cleanup::Arguments),
}

impl Arguments {
    /// Carries out the command.
    ///
    /// # Errors
    /// Named, with what to do about it.
    pub fn execute(self) -> Result<()> {
        tracing_subscriber::fmt()
            .with_env_filter(tracing_subscriber::EnvFilter::try_new(&self.log)?)
            .with_writer(std::io::stderr)
            // Colours are for people; a file or a log collector would keep their codes.
            .with_ansi(std::io::stderr().is_terminal())
            .with_target(false)
            .init();
        match self.command {
            Command::Run(arguments) => arguments.execute(),
            Command::Check(arguments) => arguments.execute(),
            Command::Explain(arguments) => arguments.execute(),
            Command::Status(arguments) => arguments.execute(),
            Command::Services(arguments) => arguments.execute(),
            Command::Flows(arguments) => arguments.execute(),
            Command::Monitor(arguments) => arguments.execute(),
            Command::Adopt(arguments) => arguments.execute(),
            Command::Cleanup(arguments) => arguments.execute(),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    /// A flag's name comes from that of a field, where it is not said: renaming the field must not rename the flag.
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
