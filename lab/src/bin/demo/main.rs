//! `cargo xtask demo`: the stories that this project exists for, on real packets between real nodes.

mod cluster;
mod foretell;
mod local_curl;
mod node_port;
mod policies;
mod preemption;
mod share;
mod switch;

use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Result;
use clap::Parser;
use cluster::DemoCluster;

/// Shows what externalTrafficPolicy does to real requests: three nodes in network namespaces, an agent on each, a client
/// and a load balancer. Takes about a minute; everything is removed at the end.
#[derive(Parser)]
#[command(name = "cargo xtask demo")]
struct Cli {
    /// How the agents take packets: tc, xdp or xdp-generic
    #[arg(long, default_value = "tc")]
    attach: String,
    /// Only fetches this address's page: a process of a node, for the demo itself
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
    cluster.introduce();
    policies::show(&cluster)?;
    local_curl::show(&cluster)?;
    preemption::show(&cluster)?;
    switch::show(&cluster)?;
    share::show(&cluster)?;
    node_port::show(&cluster)?;
    println!(
        "\nThat was all, in {:.0} s. Namespaces, programs and processes are removed now.",
        start.elapsed().as_secs_f64()
    );
    Ok(())
}
