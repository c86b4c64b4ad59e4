//! `traffic-policy-agent`.

use std::{env, io, process::ExitCode};

use traffic_policy_agent::command::{self, FoundErrors, config_file::ConfigFileError};

#[cfg(not(bpf_object))]
compile_error!(
    "the packet path was not compiled, for there is no BPF toolchain: run `cargo xtask setup`, then build again"
);

fn main() -> ExitCode {
    match command::execute(env::args_os().collect()) {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever read the output has seen enough.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        // They stand in the output.
        Err(error) if error.is::<FoundErrors>() => ExitCode::from(3),
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

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let mut kinds = error.chain().filter_map(|cause| cause.downcast_ref().map(io::Error::kind));
    kinds.any(|kind| kind == io::ErrorKind::BrokenPipe)
}
