//! `cargo xtask lab`: a lab for manual experiments, which stays up between commands.

use std::env;
use std::fs::File;
use std::net::IpAddr;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::{Args, Parser, Subcommand};
use traffic_policy_testing::agent::{self, Agent};
use traffic_policy_testing::lab::{Cni, Lab, Pod, persistent};
use traffic_policy_testing::object::Manifests;
use traffic_policy_testing::traffic::server::{self, Identity};

#[derive(Parser)]
#[command(name = "cargo xtask lab", about = "A small cluster's network in namespaces, to try things by hand")]
struct Cli {
    #[command(subcommand)]
    command: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Make a lab, with a server in each pod, and leave it up
    Up(Up),
    /// Run a command (by default a shell) on one of its machines
    Exec {
        /// Name of the lab
        #[arg(long, default_value = "main")]
        name: String,
        /// client, router, node-1, pod-1-1 …
        machine: String,
        /// The command and its arguments
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
    /// Send an ICMP echo to find whether a machine reaches an address (not every system has a ping
    /// command)
    Ping {
        /// Name of the lab
        #[arg(long, default_value = "main")]
        name: String,
        /// client, router, node-1, pod-1-1 …
        machine: String,
        /// Destination address
        address: IpAddr,
    },
    /// Remove a lab and everything that runs in it
    Down {
        /// Name of the lab
        #[arg(long, default_value = "main")]
        name: String,
    },
    /// Show the labs that are up
    List,
    /// Serve as a pod, in the calling process's namespace
    #[command(hide = true)]
    Serve {
        pod: String,
        node: String,
        #[arg(long)]
        port: u16,
    },
}

#[derive(Args)]
struct Up {
    /// A name, to have several labs at once
    #[arg(long, default_value = "main")]
    name: String,
    /// Number of nodes
    #[arg(long, default_value_t = 3)]
    nodes: u8,
    /// Number of pods on each node
    #[arg(long, default_value_t = 1)]
    pods: u8,
    /// The port of the servers in the pods, TCP and UDP
    #[arg(long, default_value_t = 8080)]
    port: u16,
    /// Route pod traffic between nodes by VXLAN instead of plain routes
    #[arg(long)]
    overlay: bool,
    /// node-1 gets a second uplink, which its default route uses
    #[arg(long)]
    two_uplinks: bool,
    /// Set up nodes and pods as a network plugin does: kindnet, flannel-vxlan, flannel-host-gw,
    /// calico-vxlan, bridge, aws-secondary-eni, and where the kernel has the modules calico-ipip
    /// and wireguard
    #[arg(long, value_name = "NAME", value_parser = Cni::parse, conflicts_with_all = ["overlay", "two_uplinks"])]
    cni: Option<Cni>,
    /// Leave checksum and segmentation offload on, as TC meets it in practice (XDP needs it off)
    #[arg(long)]
    offloads: bool,
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("Error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(verb: Verb) -> Result<()> {
    match verb {
        Verb::Up(options) => up(&options),
        Verb::Exec { name, machine, command } => exec(&name, &machine, &command),
        Verb::Ping { name, machine, address } => {
            let took = persistent::namespace(&name, &machine)?.ping(address, Duration::from_secs(2))?;
            println!("{address} answered in {took:?}");
            Ok(())
        }
        Verb::Down { name } => persistent::down(&name),
        Verb::List => list(),
        Verb::Serve { pod, node, port } => {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(server::serve(port, Identity { pod, node }))
        }
    }
}

fn up(options: &Up) -> Result<()> {
    let Up { name, port, .. } = options;
    ensure!(
        !persistent::exists(name)?,
        "lab {name} is up already; `cargo xtask lab down --name {name}` removes it"
    );
    let mut builder = Lab::builder().nodes(options.nodes).pods_per_node(options.pods).persistent(name);
    if options.overlay {
        builder = builder.overlay();
    }
    if options.two_uplinks {
        builder = builder.two_uplinks();
    }
    builder = builder.wire_offloads(options.offloads);
    if let Some(cni) = options.cni {
        builder = builder.cni(cni);
    }
    let lab = builder.build()?;
    Manifests::of(&lab)?;
    let processes = lab.pods().map(|pod| serve(&lab, pod, *port)).collect::<Result<Vec<_>>>()?;
    print!("{lab}");
    explain(&lab, name, *port);
    persistent::keep(lab, &processes)
}

fn serve(lab: &Lab, pod: &Pod, port: u16) -> Result<u32> {
    let log = File::create(lab.logs().join(format!("{}.log", pod.name)))?;
    let mut command = Command::new(env::current_exe()?);
    command.args(["serve", &pod.name, &pod.node, "--port", &port.to_string()]);
    command.stdout(log.try_clone()?).stderr(log);
    pod.netns().spawn_detached(command)
}

fn explain(lab: &Lab, name: &str, port: u16) {
    let option = if name == "main" { String::new() } else { format!(" --name {name}") };
    let node = lab.node(1);
    println!(
        "\nEvery pod serves HTTP and UDP on port {port}. Node objects are in {}.",
        lab.manifests().display()
    );
    println!("Try:");
    if let Some(pod) = node.pods.first() {
        let url = format!("http://{}:{port}/", pod.addresses.v4);
        println!("  cargo xtask lab exec{option} node-2 -- curl -s {url}    # a node reaches a pod");
        println!("  cargo xtask lab exec{option} client -- curl -sm1 {url}  # the client does not");
    }
    println!("  cargo xtask lab ping{option} client {}", node.addresses.v6);
    let agent = agent::program().unwrap_or_else(|_| "traffic-policy-agent".into());
    let command = Agent::builder(lab, node).command_line().join(" ");
    println!("  cargo xtask lab exec{option} node-1 -- {} {command}", agent.display());
    println!("  cargo xtask lab down{option}");
}

fn exec(name: &str, machine: &str, command: &[String]) -> Result<()> {
    let namespace = persistent::namespace(name, machine)?;
    let shell = env::var("SHELL").unwrap_or_else(|_| "/bin/sh".to_owned());
    let (program, arguments) =
        command.split_first().map_or((&shell, &[][..]), |(program, rest)| (program, rest));
    let mut command = Command::new(program);
    command.args(arguments);
    Err(namespace.exec(command)).with_context(|| format!("running {program} on {machine}"))
}

fn list() -> Result<()> {
    let labs = persistent::list();
    if labs.is_empty() {
        println!("no lab is up");
    }
    for name in labs {
        println!("lab {name}\n{}", persistent::drawing(&name)?);
    }
    Ok(())
}
