//! `check`: the command line, and its table.

use std::{
    io::{self, Write},
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use traffic_policy_cluster::source::{Access, Manifests, SERVICE_ACCOUNT};
use traffic_policy_dataplane::{
    Cgroup, DEFAULT_PINS, LocalDelivery, Mode, PodServices, PortRanges, SnatPortRange,
    inspect::{Heartbeat, Pinned},
};

use super::{
    metrics_address::MetricsAddress,
    report,
    view::{self, Output},
};
use crate::check::{self, DirectSettings, Finding, Peer, Settings, Severity};

/// Inspect this machine before the first `run`, and print what to do. Changes nothing.
///
/// It takes the flags of `run` that matter here: pass the same ones, in the network namespace in
/// which `run` will run, and leave out the others. The exit code is 1 if there is an error, because
/// of which `run` would refuse to start or no traffic would work.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// The file that `run` will be given: its settings are judged.
    #[arg(long, env = "TRAFFIC_POLICY_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// A device on which packets from outside arrive; may be repeated. Default: found as in `run`.
    #[arg(long = "device", env = "TRAFFIC_POLICY_DEVICE", value_name = "DEVICE", value_delimiter = ',')]
    devices: Vec<String>,
    /// Attach mode to check for.
    #[arg(long, env = "TRAFFIC_POLICY_ATTACH", default_value = "auto", value_name = "MODE")]
    attach: Mode,
    /// Way of packets to pods of this node.
    #[arg(long, env = "TRAFFIC_POLICY_LOCAL_DELIVERY", default_value = "stack", value_name = "stack|direct")]
    local_delivery: LocalDelivery,
    /// Whether what pods send to Services is to be translated at the host side of their devices.
    #[arg(long, env = "TRAFFIC_POLICY_POD_SERVICES", default_value = "off", value_name = "off|on")]
    pod_services: PodServices,
    /// Also check whether packets can be forwarded directly to pods of this node, and, by packets
    /// of a connection that nobody has, which no pod sees, to those of the node of this name or
    /// address.
    #[arg(long, value_name = "PEER", num_args = 0..=1, default_missing_value = "")]
    direct: Option<String>,
    /// The namespace that `run --announce-opening` is given, for --direct: whether the Lease may be
    /// written there is tried without writing it.
    #[arg(long, env = "TRAFFIC_POLICY_ANNOUNCE_OPENING", value_name = "NAMESPACE")]
    announce_opening: Option<String>,
    /// Kubeconfig for --announce-opening. Default: in-cluster, by service account.
    #[arg(long, env = "TRAFFIC_POLICY_KUBECONFIG", value_name = "F", conflicts_with = "api_server")]
    kubeconfig: Option<PathBuf>,
    /// In-cluster: a real address of the API server, for --announce-opening.
    #[arg(long, env = "TRAFFIC_POLICY_API_SERVER", value_name = "URL")]
    api_server: Option<String>,
    /// Folder on a BPF file system where programs and maps outlive the agent.
    #[arg(long, env = "TRAFFIC_POLICY_PIN_DIR", default_value = DEFAULT_PINS, value_name = "D")]
    pin_dir: PathBuf,
    /// Cgroup whose sockets' connections to Services are to be served: a folder on cgroup2, `none`,
    /// or `auto`: the cgroup2 hierarchy that is mounted here.
    #[arg(long, env = "TRAFFIC_POLICY_CGROUP", default_value = "auto", value_name = "D|none|auto")]
    cgroup: Cgroup,
    /// The cluster's range of node ports.
    #[arg(long, env = "TRAFFIC_POLICY_NODE_PORTS", default_value = "30000-32767", value_name = "R")]
    node_ports: PortRanges,
    /// Ports to use as source towards endpoints of other nodes.
    #[arg(
        long,
        alias = "pool-ports",
        env = "TRAFFIC_POLICY_SNAT_PORTS",
        default_value = "1024-65535",
        value_name = "R"
    )]
    snat_ports: PortRanges,
    /// Address of /healthz, /livez and /readyz.
    #[arg(long, env = "TRAFFIC_POLICY_HEALTHZ_ADDRESS", default_value = "0.0.0.0:10256", value_name = "A")]
    healthz_address: SocketAddr,
    /// Address of /metrics; `none`: not served.
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
    /// Also print the effects of taking over from kube-proxy here: its rules and live connections,
    /// what will differ, the steps, and how to go back.
    #[arg(long)]
    migrate: bool,
    /// kube-proxy's configuration, or the ConfigMap with it, for --migrate.
    #[arg(long, value_name = "FILE", requires = "migrate")]
    kube_proxy_config: Option<PathBuf>,
    /// Output format.
    #[arg(long, env = "TRAFFIC_POLICY_OUTPUT", default_value = "table", value_name = "FORMAT")]
    output: Output,
}

impl Arguments {
    pub(super) fn execute(self) -> Result<()> {
        let output = self.output;
        // With one thread the command stays in the network namespace in which it was called.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let migration = self.migrate.then(|| self.kube_proxy_config.clone());
        let mut findings = runtime.block_on(check::check(&self.settings()));
        if let Some(config) = migration {
            // The advice to remove its rules first applies to a start without a take-over.
            findings.retain(|finding| finding.probe != check::KUBE_PROXY);
            findings.extend(runtime.block_on(check::migration(config.as_deref()))?);
        }
        match output {
            Output::Table => view::print(|out| write(&findings, out))?,
            Output::Json => view::print_json(&findings)?,
        }
        match findings.iter().filter(|finding| finding.severity == Severity::Error).count() {
            0 => Ok(()),
            1 => bail!("one error: see above what to do about it"),
            errors => bail!("{errors} errors: see above what to do about them"),
        }
    }

    fn settings(self) -> Settings {
        let node_name = self.node_name;
        let access = match self.kubeconfig {
            Some(file) => Access::Kubeconfig(file),
            None => {
                Access::InCluster { api_server: self.api_server, service_account: SERVICE_ACCOUNT.into() }
            }
        };
        let announce = self.announce_opening.map(|namespace| (namespace, access));
        let direct = self.direct.map(|given| DirectSettings {
            peer: (!given.is_empty()).then(|| Peer { node: node_named(&given, &self.pin_dir), given }),
            announce,
        });
        Settings {
            devices: self.devices,
            attach: self.attach,
            local_delivery: self.local_delivery,
            pod_services: self.pod_services,
            direct,
            pins: self.pin_dir,
            cgroup: self.cgroup,
            snat_ports: SnatPortRange {
                ranges: self.snat_ports,
                node_ports: self.node_ports,
                ..SnatPortRange::default()
            },
            healthz: self.healthz_address,
            metrics: self.metrics_address.0,
            manifests: self.manifests.map(|folder| Manifests { folder, node_name }),
        }
    }
}

/// Returns the name of the node that has this name or address: this node's agent knows the
/// addresses of those that take part in direct forwarding.
///
/// # Errors
/// No agent runs here, this node takes no part in direct forwarding, or no Lease has the address.
/// The message is for the operator.
fn node_named(given: &str, pins: &Path) -> Result<String, String> {
    let Ok(address) = given.parse::<IpAddr>() else { return Ok(given.to_owned()) };
    let nodes = || {
        let agent = Heartbeat::read(&Pinned::open(pins)?)?.address();
        let report = report::of(agent.context("no agent runs here")?)?;
        anyhow::Ok(report.direct.context("this node takes no part in direct forwarding")?)
    };
    let nodes = nodes().map_err(|error| format!("{error:#}"))?;
    let node = nodes.addresses.iter().find(|(_, addresses)| addresses.contains(&address));
    node.map(|(name, _)| name.clone()).ok_or_else(|| "no other node's Lease has this address".to_owned())
}

/// Width in characters at which sentences are wrapped, whatever the terminal's width.
const WIDTH: usize = 120;

fn write(findings: &[Finding], out: &mut dyn Write) -> io::Result<()> {
    let longest = |text: fn(&Finding) -> &str| {
        findings.iter().map(|finding| text(finding).chars().count()).max().unwrap_or_default()
    };
    // Two columns precede the sentences, each followed by two blanks.
    let before =
        longest(|finding| finding.severity.name()) + longest(|finding| finding.probe).max("CHECK".len()) + 4;
    let mut rows = Vec::new();
    for finding in findings {
        let fix = finding.fix.as_ref().map(|fix| format!("→ {fix}"));
        let sentences = [Some(finding.found.as_str()), fix.as_deref()].into_iter().flatten();
        let lines = sentences.flat_map(|sentence| view::wrap(sentence, WIDTH - before));
        for (number, line) in lines.enumerate() {
            let names = if number == 0 { [finding.severity.name(), finding.probe] } else { [""; 2] };
            rows.push([names[0].to_owned(), names[1].to_owned(), line]);
        }
    }
    view::table(out, ["", "CHECK", "FOUND, AND WHAT TO DO"], &rows, Clone::clone)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentences_are_wrapped_in_their_column() {
        let findings =
            [Finding::ok("btf", "there"), Finding::error("mtu", "word ".repeat(30).trim_end(), "lower it")];
        let mut out = Vec::new();
        write(&findings, &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "       CHECK  FOUND, AND WHAT TO DO");
        assert_eq!(lines[1], "ok     btf    there");
        assert!(lines[2].starts_with("error  mtu    word word"), "{text}");
        assert!(lines[3].starts_with("              word"), "{text}");
        assert_eq!(lines[4], "              → lower it");
    }
}
