//! `traffic-policy-agent`.

use std::process::ExitCode;

use clap::Parser;
use traffic_policy_agent::command::Arguments;

#[cfg(not(bpf_object))]
compile_error!(
    "the packet path was not compiled, for there is no BPF toolchain: run `cargo xtask setup`, then build again"
);

fn main() -> ExitCode {
    match Arguments::parse().execute() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("traffic-policy-agent: {error:#}");
            ExitCode::FAILURE
        }
    }
}
