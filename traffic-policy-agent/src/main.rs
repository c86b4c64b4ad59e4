//! `traffic-policy-agent`.

use std::{env, process::ExitCode};

use traffic_policy_agent::command::{self, config_file::ConfigFileError};
use traffic_policy_cluster::command::view::is_broken_pipe;

const _: () = assert!(
    traffic_policy_dataplane::HAS_OBJECT,
    "the packet path was not compiled, for there is no BPF toolchain: run `cargo xtask setup`, then build again"
);

fn main() -> ExitCode {
    match command::execute(env::args_os().collect()) {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever read the output has seen enough.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            if let Some(usage) = error.downcast_ref::<clap::Error>() {
                usage.exit();
            }
            eprintln!("traffic-policy-agent: {error:#}");
            // A file is a part of the command line.
            if error.is::<ConfigFileError>() { ExitCode::from(2) } else { ExitCode::FAILURE }
        }
    }
}
