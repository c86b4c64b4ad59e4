//! `run`: the agent itself.

use std::{collections::BTreeSet, net::SocketAddr, path::PathBuf, time::Duration};

use anyhow::{Context, Result};
use clap::Args;
use ipnet::IpNet;
use traffic_policy_cluster::{
    model::address::parse_cidr,
    source::{Access, Announcement, Kubernetes, Manifests, Opening, SERVICE_ACCOUNT},
};
use traffic_policy_dataplane::{
    Cgroup, Config, DEFAULT_PINS, Extras, Mode, OnOtherLayout, PortRanges, SnatPortRange, SourceCheck,
    drop_privileges, node::socket_ender::SocketEnder, return_large_blocks,
};

use super::{
    endpoint_choice::ChoiceArguments,
    file_limit,
    map_sizes::{self, ServiceArguments, TableArguments, duration},
    metrics_address::MetricsAddress,
    reload::Reloader,
    silent_nodes::SilenceArguments,
    started_again, view,
};
use crate::{
    controller::{self, Live, NodePortAddresses, Origin, Settings},
    in_effect::InEffect,
    notice::{self, Board},
    systemd::Notifier,
};

/// Keep the packet path equal to the state of the cluster, and answer health checks.
///
/// Attaches XDP and TC programs to the node's devices, follows Services, EndpointSlices and Nodes,
/// and writes what changed. Killing it stops nothing: programs and maps stay, and the next `run`
/// takes them over without losing a packet.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// A file of kind KubeProxyConfiguration, such as the config.conf of kubeadm's ConfigMap
    /// kube-proxy. Its settings apply where neither a flag nor its environment variable is given;
    /// docs/configuration.md lists the fields.
    #[arg(long, env = "TRAFFIC_POLICY_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// Name of this node's Node object; endpoints with this nodeName are local. Required, unless
    /// the file of --config sets it as hostnameOverride.
    #[arg(long, env = "TRAFFIC_POLICY_NODE_NAME", value_name = "N")]
    node_name: Option<String>,
    /// A device on which packets arrive from outside, or to and from other nodes' pods (an
    /// overlay's device); may be repeated. Default: the devices of the default route, of the Node's
    /// addresses and of routes to other nodes' pods, followed as they change.
    #[arg(long = "device", env = "TRAFFIC_POLICY_DEVICE", value_name = "DEVICE", value_delimiter = ',')]
    devices: Vec<String>,
    #[command(flatten)]
    source: SourceArguments,
    /// Attach mode: XDP in the driver, XDP in the stack, or TC. `auto`: XDP on devices with a real
    /// wire, TC on veth and other virtual ones.
    #[arg(long, env = "TRAFFIC_POLICY_ATTACH", default_value = "auto", value_name = "MODE")]
    attach: Mode,
    /// Folder on a BPF file system where programs and maps outlive the agent.
    #[arg(long, env = "TRAFFIC_POLICY_PIN_DIR", default_value = DEFAULT_PINS, value_name = "D")]
    pin_dir: PathBuf,
    /// Action on programs and maps that an agent of another layout version left in --pin-dir.
    /// `replace`: they serve until this version's maps are filled, then its programs take their
    /// places; flows end. `refuse`: do not start.
    #[arg(long, env = "TRAFFIC_POLICY_ON_OTHER_LAYOUT", default_value = "replace", value_name = "ACTION")]
    on_other_layout: OnOtherLayout,
    /// Cgroup2 folder whose processes' connections to Services are served: the node's processes and
    /// its pods; `none`: no process, only packets from outside; `auto`: the cgroup2 hierarchy that
    /// is mounted here.
    #[arg(long, env = "TRAFFIC_POLICY_CGROUP", default_value = "auto", value_name = "D|none|auto")]
    cgroup: Cgroup,
    /// Addresses of this node on which node ports are reached: `primary` (the Node object's),
    /// `all`, CIDRs, or several of them. The node itself also reaches them on loopback, unless
    /// CIDRs are given without it; `localhost` adds it.
    #[arg(
        long,
        env = "TRAFFIC_POLICY_NODE_PORT_ADDRESSES",
        default_value = "primary",
        value_name = "CIDR,…|primary|all"
    )]
    node_port_addresses: NodePortAddresses,
    /// Ranges of the cluster's ClusterIPs, in addition to those of ServiceCIDR objects. Packets to
    /// an address of these ranges that belongs to no Service are dropped.
    #[arg(long = "service-cidr", env = "TRAFFIC_POLICY_SERVICE_CIDR", value_name = "C,…", value_delimiter = ',',
        value_parser = service_cidr)]
    service_cidrs: Vec<IpNet>,
    /// Time for which a node without an endpoint still forwards new connections after a change from
    /// policy Cluster to Local, so that load balancers can notice. 0: not at all. The annotation
    /// traffic-policy.io/drain of a Service overrides it.
    #[arg(long, env = "TRAFFIC_POLICY_DRAIN", default_value = "30s", value_name = "TIME", value_parser = duration)]
    drain: Duration,
    /// Sources that new connections from outside may have. `martian`: all but impossible ones,
    /// which are this node's own addresses and pods, addresses and ports of Services, and networks
    /// that are no source (0/8, 127/8, multicast, 240/4; ::, ::1); `strict`: of these, only those
    /// to which this node's routes lead through the device on which the packet arrived; `off`: any.
    #[arg(
        long,
        env = "TRAFFIC_POLICY_SOURCE_CHECK",
        default_value = "martian",
        value_name = "off|martian|strict"
    )]
    source_check: SourceCheck,
    /// Take over, from conntrack, the connections that kube-proxy has begun, so that its rules can
    /// be removed without losing them. Nothing happens where there are none: the flag may stay.
    #[arg(long, env = "TRAFFIC_POLICY_ADOPT")]
    adopt: bool,
    /// Ports to use as source towards endpoints of other nodes. Node ports,
    /// net.ipv4.ip_local_port_range and ports of this node's sockets are left out.
    #[arg(long, alias = "pool-ports", env = "TRAFFIC_POLICY_SNAT_PORTS", default_value = "1024-65535", value_name = "R", value_parser = ranges)]
    snat_ports: PortRanges,
    /// The cluster's range of node ports.
    #[arg(long, env = "TRAFFIC_POLICY_NODE_PORTS", default_value = "30000-32767", value_name = "R", value_parser = ranges)]
    node_ports: PortRanges,
    /// Address of /healthz, /livez and /readyz.
    #[arg(long, env = "TRAFFIC_POLICY_HEALTHZ_ADDRESS", default_value = "0.0.0.0:10256", value_name = "A")]
    healthz_address: SocketAddr,
    /// Address of /metrics, /proxyMode and /configz; `none`: not served.
    #[arg(
        long,
        env = "TRAFFIC_POLICY_METRICS_ADDRESS",
        default_value = "127.0.0.1:10249",
        value_name = "A|none"
    )]
    metrics_address: MetricsAddress,
    /// A source of news that this node is about to go, upon which load balancers are told not to
    /// send here; may be repeated. `logind`: the machine's shutdown; `gce`, `aws`, `azure`: the
    /// cloud's metadata server, at URL if it is given; `node`: deletion of the Node object, or the
    /// cluster autoscaler's taint; `file:PATH`: such a file exists.
    #[arg(
        long = "notice",
        env = "TRAFFIC_POLICY_NOTICE",
        value_name = "logind|gce[=URL]|aws[=URL]|azure[=URL]|node|file:PATH",
        value_delimiter = ','
    )]
    notices: Vec<notice::Source>,
    #[command(flatten)]
    choice: ChoiceArguments,
    #[command(flatten)]
    services: ServiceArguments,
    #[command(flatten)]
    table: TableArguments,
    #[command(flatten)]
    silence: SilenceArguments,
}

/// Source of Services.
#[derive(Debug, Args)]
struct SourceArguments {
    /// A folder of ordinary Kubernetes YAML (Service, EndpointSlice, Node, ServiceCIDR, Lease),
    /// followed as it changes, instead of the API.
    #[arg(long, env = "TRAFFIC_POLICY_MANIFESTS", value_name = "DIR", conflicts_with_all = ["kubeconfig", "api_server"])]
    manifests: Option<PathBuf>,
    /// Kubeconfig for the Kubernetes API. Without it, and without --manifests: in-cluster, by
    /// service account.
    #[arg(long, env = "TRAFFIC_POLICY_KUBECONFIG", value_name = "F", conflicts_with = "api_server")]
    kubeconfig: Option<PathBuf>,
    /// In-cluster: a real address of the API server, https://HOST:PORT. Its ClusterIP may be one
    /// that this agent itself must serve.
    #[arg(long, env = "TRAFFIC_POLICY_API_SERVER", value_name = "URL")]
    api_server: Option<String>,
    /// Remove the taint with this key, of any effect, from this node's Node object once the maps
    /// are filled. This requires a role with the verb patch on nodes. Not with --manifests.
    #[arg(
        long,
        env = "TRAFFIC_POLICY_REMOVE_STARTUP_TAINT",
        value_name = "KEY",
        conflicts_with = "manifests"
    )]
    remove_startup_taint: Option<String>,
    /// Report in the condition ServiceProxyReady of this node's Node object whether the maps are in
    /// sync, and the obstacles. This requires a role with the verb patch on nodes/status. Not with
    /// --manifests.
    #[arg(long, env = "TRAFFIC_POLICY_NODE_CONDITION", conflicts_with = "manifests")]
    node_condition: bool,
    /// Tell the agents of other nodes when this one is about to go (--notice), by a Lease in this
    /// namespace, and heed theirs: new flows avoid endpoints of such nodes. This requires a role
    /// there: list, watch, create, patch and delete leases. Not with --manifests.
    #[arg(
        long,
        env = "TRAFFIC_POLICY_ANNOUNCE_LEAVING",
        value_name = "NAMESPACE",
        conflicts_with = "manifests",
        value_parser = clap::builder::NonEmptyStringValueParser::new()
    )]
    announce_leaving: Option<String>,
}

/// Parses a CIDR of `--service-cidr`.
pub(super) fn service_cidr(text: &str) -> Result<IpNet, String> {
    match parse_cidr(text) {
        Some(cidr) if cidr.prefix_len() > 0 => Ok(cidr),
        Some(_) => Err(format!("`{text}` is every address: packets to all of them would be dropped")),
        None => Err(format!("`{text}` is not a CIDR such as 10.96.0.0/12")),
    }
}

fn ranges(text: &str) -> Result<PortRanges, String> {
    text.parse()
}

/// Grace period at the end for work that is under way in other threads.
const GRACE: Duration = Duration::from_secs(2);

impl Arguments {
    pub(super) fn execute(self, in_effect: InEffect, reloader: Reloader) -> Result<()> {
        let Some(node_name) = self.node_name.clone().filter(|name| !name.is_empty()) else {
            return Err(view::usage(
                "the name of this node's Node object is not known: give --node-name (TRAFFIC_POLICY_NODE_NAME; in a pod, the field \
                 spec.nodeName), or hostnameOverride in the file of --config",
            )
            .into());
        };
        started_again::if_the_kernel_is_mistaken();
        // The socket ender keeps the privileges that are dropped here.
        let socket_ender = match self.cgroup {
            Cgroup::None => None,
            _ => Some(SocketEnder::start()?),
        };
        // Privileges are dropped before there are other threads, which would keep theirs.
        let raw_packets = self.choice.asks_nodes();
        drop_privileges(Extras { low_ports: self.has_low_ports(), raw_packets })?;
        file_limit::raise();
        return_large_blocks();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .context("starting the runtime failed")?;
        let ended = runtime.block_on(async {
            let notifier = Notifier::from_environment();
            // The handler is installed from the beginning: SIGHUP ends a process that does not wait
            // for it.
            let reloads = reloader.follow(notifier.clone())?;
            controller::run(self.settings(node_name, in_effect, socket_ender), reloads, notifier).await
        });
        // A file system that does not answer would hold the process beyond the termination grace
        // period of its pod, and dropping the runtime waits without limit.
        runtime.shutdown_timeout(GRACE);
        ended
    }

    /// Returns the settings that are applied without a restart.
    pub(super) fn live(&self) -> Live {
        Live { idle: self.table.idle(), node_port_addresses: self.node_port_addresses.clone() }
    }

    /// Whether any port to listen on may be below 1024.
    fn has_low_ports(&self) -> bool {
        let is_low = |address: &SocketAddr| (1..1024).contains(&address.port());
        is_low(&self.healthz_address)
            || self.metrics_address.0.as_ref().is_some_and(is_low)
            // Health-check ports of Services are taken from these ranges, too.
            || self.node_ports.0.iter().any(|range| *range.start() < 1024)
    }

    fn settings(self, node_name: String, in_effect: InEffect, socket_ender: Option<SocketEnder>) -> Settings {
        let board = Board::default();
        let opening = self.choice.announce_opening.clone().map(Opening::new);
        let origin = match (self.source.manifests, self.source.kubeconfig) {
            (Some(folder), _) => Origin::Manifests(Manifests { folder, node_name: node_name.clone() }),
            (None, kubeconfig) => {
                let access = match kubeconfig {
                    Some(file) => Access::Kubeconfig(file),
                    None => Access::InCluster {
                        api_server: self.source.api_server,
                        service_account: SERVICE_ACCOUNT.into(),
                    },
                };
                Origin::Kubernetes(Kubernetes {
                    startup_taint: self.source.remove_startup_taint,
                    node_condition: self.source.node_condition,
                    announcement: self.source.announce_leaving.map(|namespace| Announcement {
                        namespace,
                        news: board.news(),
                        told: board.tell_others(),
                    }),
                    opening: opening.clone(),
                    ..Kubernetes::new(access, &node_name)
                })
            }
        };
        Settings {
            node_name,
            devices: self.devices,
            origin,
            node_port_addresses: self.node_port_addresses,
            service_cidrs: BTreeSet::from_iter(self.service_cidrs),
            forwarding: self.choice.forwarding,
            dispatch: self.choice.dispatch,
            choice: self.choice.of_endpoints(),
            opening,
            algorithm: self.choice.algorithm,
            healthz: self.healthz_address,
            metrics: self.metrics_address.0,
            in_effect,
            adopt: self.adopt,
            socket_ender,
            silence: self.silence.silence(),
            notices: self.notices,
            board,
            dataplane: Config {
                pins: Some(self.pin_dir),
                on_other_layout: self.on_other_layout,
                sizes: map_sizes::sizes(&self.services, &self.table, self.choice.maglev_entries),
                idle: self.table.idle(),
                snat_ports: SnatPortRange {
                    ranges: self.snat_ports,
                    node_ports: self.node_ports,
                    own: [Some(self.healthz_address), self.metrics_address.0]
                        .into_iter()
                        .flatten()
                        .map(|address| address.port())
                        .collect(),
                },
                drain: self.drain,
                mode: self.attach,
                cgroup: self.cgroup,
                source_check: self.source_check,
                local_delivery: self.choice.local_delivery,
                pod_services: self.choice.pod_services,
                table_size: self.choice.maglev_size,
            },
        }
    }
}
