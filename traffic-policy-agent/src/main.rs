//! The executable `traffic-policy-agent`.

use std::{env, io, process::ExitCode};

use traffic_policy_agent::command::{self, config_file::ConfigFileError};

const _: () = assert!(
    traffic_policy_dataplane::HAS_OBJECT,
    "the packet path was not compiled, for there is no BPF toolchain: run `cargo xtask setup`, then build again"
);

fn main() -> ExitCode {
    match command::execute(env::args_os().collect()) {
        Ok(()) => ExitCode::SUCCESS,
        // The reader of the output has closed it.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            if let Some(usage) = error.downcast_ref::<clap::Error>() {
                usage.exit();
            }
            eprintln!("traffic-policy-agent: {error:#}");
            // A configuration file counts as part of the command line.
            if error.is::<ConfigFileError>() { ExitCode::from(2) } else { ExitCode::FAILURE }
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let mut kinds = error.chain().filter_map(|cause| cause.downcast_ref().map(io::Error::kind));
    kinds.any(|kind| kind == io::ErrorKind::BrokenPipe)
}
