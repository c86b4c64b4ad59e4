//! `explain`: the command line, and its sentences.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    io::{BufWriter, Read, Write},
    net::IpAddr,
    path::PathBuf,
};

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use ipnet::IpNet;
use traffic_policy_cluster::{
    command::{api::ApiArguments, listing},
    model::{Dispatch, Index, NodeInput, Policy},
    source::Manifests,
};
use traffic_policy_dataplane::{
    DEFAULT_PINS, advice,
    explain::simulator::Simulator,
    explain::{self, Answer, Explainer, Flow, From, NodeScope, Outer, PodDevices, Verdict},
    inspect::{Nodes, Pinned},
    node::Network,
};

use super::{
    left_out,
    run::service_cidr,
    view::{self, Output},
};
use crate::controller::NodePortAddresses;

/// Print the fate of a packet and the reason, by running the programs on it; nothing on the node
/// changes.
///
/// On a node with an agent, the packet runs against its live maps. With --manifests, neither a
/// device nor an API server is needed; the next hop is then not judged. Each flow is taken as the
/// first packet of a new connection.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    // This is not a doc comment: rustdoc would take the brackets for a link.
    #[arg(
        help = "Source: ADDRESS, ADDRESS:PORT or [ADDRESS]:PORT",
        value_name = "SRC[:PORT]",
        required_unless_present = "flows",
        requires = "destination"
    )]
    source: Option<String>,
    /// Destination: ADDRESS:PORT, with /udp for UDP, /sctp for SCTP.
    #[arg(value_name = "DST:PORT[/PROTO]")]
    destination: Option<String>,
    /// Many flows as JSON, an array or one object per line: name, src, sport, dst, dport, proto,
    /// from. The answers are printed as JSON, one per line, in order. `-`: standard input.
    #[arg(long, env = "TRAFFIC_POLICY_FLOWS", value_name = "FILE|-", conflicts_with_all = ["source", "destination"])]
    flows: Option<PathBuf>,
    /// Origin of the flow. Default: derived from the source: an address of the node, one in the
    /// range of its pods, or any other.
    #[arg(long, env = "TRAFFIC_POLICY_FROM", value_name = "PLACE")]
    from: Option<From>,
    /// The flow comes within a packet of another node, which forwards it directly and has this
    /// address.
    #[arg(
        long,
        env = "TRAFFIC_POLICY_OPENED_FROM",
        value_name = "IP",
        requires = "at",
        conflicts_with_all = ["flows", "manifests", "cluster"]
    )]
    opened_from: Option<IpAddr>,
    /// The endpoint of this node to which that packet is addressed.
    #[arg(long, env = "TRAFFIC_POLICY_OPENED_AT", value_name = "IP", requires = "opened_from")]
    at: Option<IpAddr>,
    /// The dispatch of that packet: `ipip` or `udp`, as the other node's `explain` says.
    #[arg(
        long,
        env = "TRAFFIC_POLICY_OPENED_WITHIN",
        value_name = "DISPATCH",
        default_value = "ipip",
        value_parser = dispatch
    )]
    opened_within: Dispatch,
    /// What-if: the external policy of every Service.
    #[arg(long, env = "TRAFFIC_POLICY_POLICY", value_name = "POLICY", ignore_case = true)]
    policy: Option<PolicyArgument>,
    /// Output format for one flow.
    #[arg(long, env = "TRAFFIC_POLICY_OUTPUT", default_value = "table", value_name = "FORMAT")]
    output: Output,
    #[command(flatten)]
    live: LiveArguments,
    #[command(flatten)]
    offline: OfflineArguments,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum PolicyArgument {
    Cluster,
    Local,
}

/// A node with an agent.
#[derive(Debug, Args)]
#[command(next_help_heading = "On a node")]
struct LiveArguments {
    /// The folder that `run` was given.
    #[arg(long, env = "TRAFFIC_POLICY_PIN_DIR", default_value = DEFAULT_PINS, value_name = "D")]
    pin_dir: PathBuf,
    /// The device on which packets from outside arrive. Default: the one that leads to their
    /// source.
    #[arg(long, env = "TRAFFIC_POLICY_EXPLAIN_DEVICE", value_name = "DEVICE")]
    device: Option<String>,
}

/// A node that is not there.
#[derive(Debug, Args)]
#[command(next_help_heading = "Without a node")]
struct OfflineArguments {
    /// A folder of ordinary Kubernetes YAML (Service, EndpointSlice, Node, ServiceCIDR).
    #[arg(
        long,
        env = "TRAFFIC_POLICY_EXPLAIN_MANIFESTS",
        value_name = "DIR",
        requires = "node_name",
        conflicts_with_all = ["device", "cluster"]
    )]
    manifests: Option<PathBuf>,
    /// The objects that the Kubernetes API has now, reached by the flags below.
    #[arg(
        long = "api",
        env = "TRAFFIC_POLICY_EXPLAIN_API",
        requires = "node_name",
        conflicts_with = "device"
    )]
    cluster: bool,
    /// Point of view: the name of a Node object, and the nodeName of its endpoints.
    #[arg(long, env = "TRAFFIC_POLICY_NODE_NAME", value_name = "N")]
    node_name: Option<String>,
    /// An address of the node; may be repeated. Those of its Node object count in any case.
    #[arg(
        long = "local-address",
        env = "TRAFFIC_POLICY_LOCAL_ADDRESS",
        value_name = "IP",
        value_delimiter = ','
    )]
    local_addresses: Vec<IpAddr>,
    /// Same as in `run`.
    #[arg(
        long,
        env = "TRAFFIC_POLICY_NODE_PORT_ADDRESSES",
        default_value = "primary",
        value_name = "CIDR,…|primary|all|localhost"
    )]
    node_port_addresses: NodePortAddresses,
    /// Same as in `run`.
    #[arg(long = "service-cidr", env = "TRAFFIC_POLICY_SERVICE_CIDR", value_name = "C,…", value_delimiter = ',',
        value_parser = service_cidr)]
    service_cidrs: Vec<IpNet>,
    #[command(flatten)]
    api: ApiArguments,
}

fn dispatch(text: &str) -> Result<Dispatch, String> {
    Dispatch::parse(text).ok_or_else(|| "not one of ipip, udp".to_owned())
}

impl Arguments {
    pub(super) fn execute(self) -> Result<()> {
        let flows = self.flows()?;
        let many = self.flows.is_some();
        let output = self.output;
        let dispatch = self.opened_within;
        let addresses = self.opened_from.zip(self.at);
        let outer = addresses.map(|(source, destination)| Outer { source, destination, dispatch });
        let mut explainer = self.explainer()?;
        let mut out = BufWriter::new(std::io::stdout().lock());
        for flow in &flows {
            let answer = match outer {
                Some(outer) => explainer.explain_opened(flow, outer),
                None => explainer.explain(flow),
            };
            let answer = answer.with_context(|| format!("{} cannot be explained", flow.name))?;
            let mut text = Vec::new();
            match output {
                Output::Table if !many => print(&mut text, flow, &answer)?,
                _ => {
                    serde_json::to_writer(&mut text, &answer)?;
                    text.push(b'\n');
                }
            }
            out.write_all(&text)?;
        }
        Ok(out.flush()?)
    }

    fn flows(&self) -> Result<Vec<Flow>> {
        let Some(file) = &self.flows else {
            let (Some(source), Some(destination)) = (&self.source, &self.destination) else {
                bail!("name a source and a destination, or --flows");
            };
            let flow = Flow::from_arguments(source, destination, self.from);
            return Ok(vec![flow.map_err(|error| view::usage(&format!("{error:#}")))?]);
        };
        let mut text = String::new();
        if file.as_os_str() == "-" {
            std::io::stdin().read_to_string(&mut text).context("standard input cannot be read")?;
        } else {
            text = std::fs::read_to_string(file)
                .with_context(|| format!("{} cannot be read", file.display()))?;
        }
        let mut flows = explain::read(&text)?;
        for flow in &mut flows {
            flow.from = flow.from.or(self.from);
        }
        Ok(flows)
    }

    fn explainer(self) -> Result<Explainer> {
        let policy = self.policy.map(|policy| match policy {
            PolicyArgument::Cluster => Policy::Cluster,
            PolicyArgument::Local => Policy::Local,
        });
        match self.offline.cluster || self.offline.manifests.is_some() {
            true => self.offline.explainer(policy),
            false => self.live.explainer(policy),
        }
    }
}

impl LiveArguments {
    fn explainer(self, policy: Option<Policy>) -> Result<Explainer> {
        let simulator = Simulator::live(&self.pin_dir, policy)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (network, addresses, links) = runtime.block_on(async {
            let (network, _events) = Network::connect()?;
            let (addresses, links) = (network.addresses().await?, network.links().await?);
            anyhow::Ok((network, addresses, links))
        })?;
        let named = match &self.device {
            None => None,
            Some(name) => match links.iter().find(|link| link.name == *name) {
                Some(link) if simulator.entrances().iter().any(|entrance| entrance.ifindex == link.index) => {
                    Some(link.index)
                }
                Some(_) => bail!("the packet path is not attached to {name}"),
                None => bail!("there is no device {name}"),
            },
        };
        let mut known = HashMap::new();
        let route_lookup = move |source: IpAddr| {
            named.or_else(|| {
                *known.entry(source).or_insert_with(|| runtime.block_on(network.device_towards(source)))
            })
        };
        let (primary, pods) = simulator.node()?;
        let netns = simulator.netns()?;
        let scope = NodeScope { node: addresses.iter().map(|address| address.address).collect(), pods };
        let mut explainer = Explainer::new(simulator, scope, primary, Box::new(route_lookup), netns, false);
        let pinned = Pinned::open(&self.pin_dir)?;
        explainer.set_pods(PodDevices::read(&pinned, &links)?);
        let nodes = Nodes::read(&pinned)?;
        let left_out = left_out::endpoints(&pinned, &nodes).map(|endpoints| {
            let mut of_ports: BTreeMap<_, Vec<_>> = BTreeMap::new();
            for one in endpoints {
                if let Some(key) = one.key() {
                    of_ports.entry(key).or_default().push((one.address, one.node));
                }
            }
            of_ports
        });
        explainer.set_nodes(nodes, left_out);
        Ok(explainer)
    }
}

impl OfflineArguments {
    fn explainer(self, policy: Option<Policy>) -> Result<Explainer> {
        let Some(node_name) = self.node_name else {
            return Err(view::usage("name the node whose point of view is taken: --node-name").into());
        };
        let mut batch = match self.manifests {
            Some(folder) => {
                let manifests = Manifests { folder, node_name: node_name.clone() };
                manifests.read().context("the manifests are not understood")?
            }
            None => listing::cluster(&self.api.access())?,
        };
        if let Some(policy) = policy {
            batch.set_external_policy(policy);
        }
        let mut index = Index::default();
        batch.apply(&mut index);
        if self.cluster && !index.nodes().any(|node| node.name == node_name) {
            bail!("the cluster has no Node {node_name}: see `kubectl get nodes`");
        }
        let mut addresses: BTreeSet<IpAddr> = self.local_addresses.iter().copied().collect();
        addresses.extend(index.all_node_addresses(&node_name));
        // `run` resolves them in the same manner: only the Node object shows which are primary.
        let mut primary = index.node_addresses(&node_name).to_vec();
        let node_port_addresses = self.node_port_addresses.among(addresses.iter().copied(), &primary);
        let here = addresses.iter().copied();
        if let Some(concern) = self.node_port_addresses.concern(&node_name, here, &primary) {
            tracing::warn!("{concern}");
        }
        for family in [false, true] {
            if !primary.iter().any(|address| address.is_ipv6() == family) {
                primary.extend(self.local_addresses.iter().find(|address| address.is_ipv6() == family));
            }
        }
        let input = NodeInput {
            node_name: node_name.clone(),
            node_port_addresses,
            loopback_ipv4: self.node_port_addresses.loopback(false),
            loopback_ipv6: self.node_port_addresses.loopback(true),
            service_cidrs: self.service_cidrs.into_iter().collect(),
            ipv4: true,
            ipv6: true,
            ..NodeInput::default()
        };
        index.update(&input);
        for warning in &index.desired().warnings {
            tracing::warn!("{warning}");
        }
        let simulator = Simulator::offline(index.desired(), &addresses, &primary)?;
        let scope = NodeScope { node: addresses, pods: index.pod_cidrs(&node_name).to_vec() };
        Ok(Explainer::new(simulator, scope, primary, Box::new(|_| None), 1, true))
    }
}

fn print(out: &mut impl Write, flow: &Flow, answer: &Answer) -> Result<()> {
    writeln!(out, "{} → {}/{}\n", flow.source, flow.destination, flow.transport)?;
    for (number, step) in (1..).zip(&answer.steps) {
        writeln!(out, "  {number}. {step}")?;
    }
    let verdict = match answer.verdict {
        Verdict::Endpoints => format!("to {}", answer.endpoint.map_or_else(String::new, |e| e.to_string())),
        Verdict::Reject => "rejected".to_owned(),
        Verdict::Drop => "dropped".to_owned(),
        Verdict::Unhandled => "left alone".to_owned(),
    };
    writeln!(out, "\nVERDICT     {verdict} ({}, at {})", answer.outcome, answer.hook)?;
    if let Some(packet) = answer.packet {
        writeln!(out, "PACKET      {} → {}, TTL {}", packet.source, packet.destination, packet.ttl)?;
    } else if let (Some(source), Some(endpoint)) = (answer.source, answer.endpoint) {
        writeln!(out, "CONNECTION  {source} → {endpoint}")?;
    }
    if !answer.candidates.is_empty() {
        let list: Vec<_> = answer.candidates.iter().map(ToString::to_string).collect();
        writeln!(out, "CANDIDATES  {}", list.join(", "))?;
    }
    let name = answer.key.as_ref().map(|key| key.service.to_string());
    let context = advice::Context {
        service: name.as_deref(),
        frontend: answer.frontend,
        client: Some(flow.source.ip()),
        device: None,
        socket: answer.hook == "socket",
    };
    writeln!(out, "WHY         {}", advice::reason(answer.cause, &context))?;
    if let Some(fix) = advice::fix(answer.cause, &context) {
        writeln!(out, "FIX         {fix}")?;
    }
    Ok(())
}
