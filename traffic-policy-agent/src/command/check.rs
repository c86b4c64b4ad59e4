//! `check`: is this machine fit, and what is to be done first?

use std::{net::SocketAddr, path::PathBuf};

use anyhow::{Result, bail};
use clap::Args;
use comfy_table::{ContentArrangement, Table, presets::NOTHING};

use super::{run::MetricsAddress, view::Output};
use crate::{
    check::{self, Finding, Settings, Severity},
    dataplane::{Cgroup, DEFAULT_PINS, Mode, Pool, PortRanges},
    source::Manifests,
};

/// Look this machine over before the first `run`, and say what to do. Changes nothing.
///
/// It takes those flags of `run` that matter here: give it the same, in the network namespace that `run` will run in, and
/// leave out the others. Exit code 1 if there is an error, by which `run` would refuse or no traffic work.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// A device by which packets come from outside; may be repeated. Default: found as `run` does.
    #[arg(long = "device", env = "TRAFFIC_POLICY_DEVICE", value_name = "DEVICE", value_delimiter = ',')]
    devices: Vec<String>,
    /// How packets are to be taken.
    #[arg(long, env = "TRAFFIC_POLICY_ATTACH", default_value = "auto", value_name = "MODE")]
    attach: Mode,
    /// Folder on a BPF file system where programs and maps outlive the agent.
    #[arg(long, env = "TRAFFIC_POLICY_PIN_DIR", default_value = DEFAULT_PINS, value_name = "D")]
    pin_dir: PathBuf,
    /// Cgroup whose sockets' connections to Services are to be served: a folder on cgroup2, `none`, or `auto`: the cgroup2
    /// hierarchy that is mounted here.
    #[arg(long, env = "TRAFFIC_POLICY_CGROUP", default_value = "auto", value_name = "D|none|auto")]
    cgroup: Cgroup,
    /// The cluster's range of node ports.
    #[arg(long, env = "TRAFFIC_POLICY_NODE_PORTS", default_value = "30000-32767", value_name = "R")]
    node_ports: PortRanges,
    /// Ports to use as source towards endpoints of other nodes.
    #[arg(
        long = "pool-ports",
        env = "TRAFFIC_POLICY_POOL_PORTS",
        default_value = "1024-65535",
        value_name = "R"
    )]
    snat_ports: PortRanges,
    /// Where /healthz and /livez are to be answered.
    #[arg(long, env = "TRAFFIC_POLICY_HEALTHZ_ADDRESS", default_value = "0.0.0.0:10256", value_name = "A")]
    healthz_address: SocketAddr,
    /// Where metrics are to be answered; `none`: nowhere.
    #[arg(
        long,
        env = "TRAFFIC_POLICY_METRICS_ADDRESS",
        default_value = "127.0.0.1:10249",
        value_name = "A|none"
    )]
    metrics_address: MetricsAddress,
    /// A folder of Kubernetes YAML: the ports of its Services are compared with what listens here.
    #[arg(long, env = "TRAFFIC_POLICY_MANIFESTS", value_name = "DIR")]
    manifests: Option<PathBuf>,
    /// Name of this node's Node object in the manifests, whose addresses lead to its devices.
    #[arg(
        long,
        env = "TRAFFIC_POLICY_NODE_NAME",
        default_value = "",
        hide_default_value = true,
        value_name = "N"
    )]
    node_name: String,
    /// How to print.
    #[arg(long, env = "TRAFFIC_POLICY_OUTPUT", default_value = "table", value_name = "FORMAT")]
    output: Output,
}

impl Arguments {
    pub(super) fn execute(self) -> Result<()> {
        let output = self.output;
        // One thread: it stays in the network namespace that the command was called in.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let findings = runtime.block_on(check::check(&self.settings()));
        match output {
            Output::Table => println!("{}", table(&findings).trim_fmt()),
            Output::Json => println!("{}", serde_json::to_string_pretty(&findings)?),
        }
        match findings.iter().filter(|finding| finding.severity == Severity::Error).count() {
            0 => Ok(()),
            1 => bail!("one error: see above what to do about it"),
            errors => bail!("{errors} errors: see above what to do about them"),
        }
    }

    fn settings(self) -> Settings {
        let node_name = self.node_name;
        Settings {
            devices: self.devices,
            attach: self.attach,
            pins: self.pin_dir,
            cgroup: self.cgroup,
            pool: Pool { ranges: self.snat_ports, node_ports: self.node_ports },
            healthz: self.healthz_address,
            metrics: self.metrics_address.0,
            manifests: self.manifests.map(|folder| Manifests { folder, node_name }),
        }
    }
}

/// Characters: sentences are wrapped here, on a terminal of any width.
const WIDTH: u16 = 120;

fn table(findings: &[Finding]) -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING).set_content_arrangement(ContentArrangement::Dynamic).set_width(WIDTH);
    table.set_header(["", "CHECK", "FOUND, AND WHAT TO DO"]);
    for finding in findings {
        let fix = finding.fix.as_ref().map_or_else(String::new, |fix| format!("\n→ {fix}"));
        table.add_row([finding.severity.name(), finding.probe, &format!("{}{fix}", finding.found)]);
    }
    table
}
