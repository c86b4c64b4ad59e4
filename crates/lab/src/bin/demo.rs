//! `cargo xtask demo`: the cases for which this project exists, on real packets between real nodes.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Result;
use clap::Parser;
use traffic_policy_lab::demo::cluster::DemoCluster;
use traffic_policy_lab::demo::{self, local_curl};

/// Shows the effect of externalTrafficPolicy on real requests: three nodes in network namespaces,
/// an agent on each, a client and a load balancer. Takes about a minute and a half;
/// everything is removed at the end.
#[derive(Parser)]
#[command(name = "cargo xtask demo")]
struct Cli {
    /// Attach mode of the agents: tc, xdp or xdp-generic
    #[arg(long, default_value = "tc")]
    attach: String,
    /// Only fetch this address's page: a process of a node, for the demo itself
    #[arg(long, hide = true)]
    fetch: Option<SocketAddr>,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> Result<()> {
    if let Some(to) = cli.fetch {
        return local_curl::fetch(to);
    }
    let start = Instant::now();
    let cluster = DemoCluster::build(&cli.attach)?;
    demo::play(&cluster, &cli.attach)?;
    println!(
        "\nThat was all, in {:.0} s. Namespaces, programs and processes are removed now.",
        start.elapsed().as_secs_f64()
    );
    Ok(())
}
