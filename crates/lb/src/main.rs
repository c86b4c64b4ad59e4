//! `kubectl-traffic_policy`, the plugin of kubectl.

use std::{env, process::ExitCode};

use traffic_policy_cluster::command::view::is_broken_pipe;
use traffic_policy_lb::command::{self, FoundErrors};

fn main() -> ExitCode {
    match command::execute(&env::args_os().collect::<Vec<_>>()) {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever read the output has seen enough.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        // They stand in the output.
        Err(error) if error.is::<FoundErrors>() => ExitCode::from(3),
        Err(error) => {
            if let Some(usage) = error.downcast_ref::<clap::Error>() {
                usage.exit();
            }
            eprintln!("kubectl-traffic_policy: {error:#}");
            ExitCode::FAILURE
        }
    }
}
