//! `traffic-policy-agent`.

use std::{io, process::ExitCode};

use clap::Parser;
use traffic_policy_agent::command::Arguments;

#[cfg(not(bpf_object))]
compile_error!(
    "the packet path was not compiled, for there is no BPF toolchain: run `cargo xtask setup`, then build again"
);

fn main() -> ExitCode {
    match Arguments::parse().execute() {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever read the output has seen enough.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            if let Some(usage) = error.downcast_ref::<clap::Error>() {
                usage.exit();
            }
            eprintln!("traffic-policy-agent: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let mut kinds = error.chain().filter_map(|cause| cause.downcast_ref().map(io::Error::kind));
    kinds.any(|kind| kind == io::ErrorKind::BrokenPipe)
}
