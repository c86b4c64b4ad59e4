//! Commands for developers of this project. Each command checks the set-up first.

mod bench;
mod build;
mod cargo;
mod files;
mod image;
mod lab;
mod lint;
mod setup;
mod tally;
mod target;
mod test;
mod vm;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Builds, tests, measures and shows traffic-policy")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Find or install everything that building and testing need; does nothing if all is there
    Setup(setup::Options),
    /// Build the agent
    Build(build::Options),
    /// Make a container image of the agent, without a container engine
    Image(image::Options),
    /// Check style and run all tests
    Test(test::Options),
    /// Measure the packet path against a bare floor and other implementations (`cargo xtask bench
    /// --help`)
    #[command(disable_help_flag = true)]
    Bench(bench::Options),
    /// Open a small cluster's network in namespaces, to try things by hand (`cargo xtask lab
    /// --help`)
    #[command(disable_help_flag = true)]
    Lab(lab::Options),
    /// Show what traffic-policy does on real packets: three nodes, both policies, a load balancer
    #[command(disable_help_flag = true)]
    Demo(lab::Options),
    /// Run random packets through the programs and a reference model (`cargo xtask fuzz --for 10m
    /// --seed 1`)
    #[command(disable_help_flag = true)]
    Fuzz(lab::Options),
    /// Run machines with other kernels: test on them, open one, or three as nodes
    Vm(vm::Options),
    #[command(hide = true)]
    RunTest(test::Program),
}

fn main() -> ExitCode {
    cargo::complete_path();
    let done = match Cli::parse().command {
        Command::Setup(options) => setup::run(&options),
        Command::Build(options) => build::run(&options),
        Command::Image(options) => image::run(&options),
        Command::Test(options) => test::run(&options),
        Command::Bench(options) => bench::run(&options),
        Command::Lab(options) => lab::run("lab", &options),
        Command::Demo(options) => lab::run("demo", &options),
        Command::Fuzz(options) => lab::run("fuzz", &options),
        Command::Vm(options) => vm::run(&options),
        Command::RunTest(program) => test::run_test(&program),
    };
    match done {
        Ok(code) => code,
        Err(error) => {
            eprintln!("Error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
