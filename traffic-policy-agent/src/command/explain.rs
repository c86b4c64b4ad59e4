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
    model::{
        Algorithm, Dispatch, DispatchChoice, Forwarding, Index, NodeInput, Policy, ServicePortKey,
        maglev::TableSize,
    },
    source::{Manifests, WholeCluster},
};
use traffic_policy_dataplane::{
    DEFAULT_PINS, advice,
    explain::simulator::Simulator,
    explain::{self, Answer, Explainer, Flow, From, NodeScope, Outer, PodDevices, Verdict},
    inspect::{Nodes, Pinned},
    node::Network,
};

use super::{
    endpoint_choice::{self, forwarding, of_endpoints},
    left_out,
    run::service_cidr,
    view::{self, Output},
};
use crate::controller::NodePortAddresses;

/// Print the fate of a packet and the reason, by running the programs on it; nothing on the node
/// changes.
///
/// On a node with an agent, the packet runs against its live maps. With --manifests, neither a
/// device nor an API server is needed; the next hop is then not judged. Each flow is taken as one
/// that this node does not know: by the first packet of a new connection, or with --later by a
/// segment of one that began on another node.
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
    /// from, later. The answers are printed as JSON, one per line, in order. `-`: standard input.
    #[arg(long, env = "TRAFFIC_POLICY_FLOWS", value_name = "FILE|-", conflicts_with_all = ["source", "destination"])]
    flows: Option<PathBuf>,
    /// Origin of the flow. Default: derived from the source: an address of the node, one in the
    /// range of its pods, or any other.
    #[arg(long, env = "TRAFFIC_POLICY_FROM", value_name = "PLACE")]
    from: Option<From>,
    /// A later segment of TCP in place of a SYN: its connection began through another node, and
    /// this one does not know it.
    #[arg(long, env = "TRAFFIC_POLICY_LATER", conflicts_with = "flows")]
    later: bool,
    /// The flow comes within a packet of another node, which forwards it directly, or sends it
    /// back as a reply (SRC is the frontend then, and DST the client), and has this address.
    #[arg(
        long,
        env = "TRAFFIC_POLICY_OPENED_FROM",
        value_name = "IP",
        requires = "at",
        conflicts_with_all = ["flows", "manifests", "cluster"]
    )]
    opened_from: Option<IpAddr>,
    /// The endpoint of this node to which that packet is addressed; of a reply, this node's own
    /// address.
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
    /// A folder of ordinary Kubernetes YAML (Service, EndpointSlice, Node, ServiceCIDR, Lease).
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
    /// Same as in `run`.
    #[arg(long, env = "TRAFFIC_POLICY_ALGORITHM", default_value_t, value_name = "random|maglev")]
    algorithm: Algorithm,
    /// Same as in `run`.
    #[arg(long, env = "TRAFFIC_POLICY_MAGLEV_SIZE", default_value_t, value_name = "N")]
    maglev_size: TableSize,
    /// Same as in `run`. With --api, a node without a Lease of its own uses `snat`.
    #[arg(long, env = "TRAFFIC_POLICY_FORWARDING", default_value = "snat", value_name = "snat|direct|tunnel",
        value_parser = forwarding)]
    forwarding: Forwarding,
    /// Same as in `run`. What gets to other nodes is not asked: with `auto`, their Leases decide.
    #[arg(long, env = "TRAFFIC_POLICY_DISPATCH", default_value = "auto", value_name = "auto|ipip|udp|l2",
        value_parser = endpoint_choice::dispatch)]
    dispatch: DispatchChoice,
    /// The namespace of the Leases by which nodes say that they open packets, as in `run`. Default:
    /// those of all namespaces count. With --manifests the Leases are files.
    #[arg(long, env = "TRAFFIC_POLICY_ANNOUNCE_OPENING", value_name = "NAMESPACE",
        value_parser = clap::builder::NonEmptyStringValueParser::new())]
    announce_opening: Option<String>,
    #[command(flatten)]
    api: ApiArguments,
}

/// The flags of `run` that are facts about an agent: a running one has its own.
const OF_AN_AGENT: [&str; 5] =
    ["--algorithm", "--maglev-size", "--forwarding", "--dispatch", "--announce-opening"];

/// The reason for which nothing is forwarded directly although a Service wants it.
struct BySnat {
    ports: BTreeSet<ServicePortKey>,
    why: String,
}

fn dispatch(text: &str) -> Result<Dispatch, String> {
    Dispatch::parse(text).ok_or_else(|| "not one of ipip, udp".to_owned())
}

impl Arguments {
    /// Answers. `given`: the flags of the command line itself, without environment variables, which
    /// an agent's pod has for the agent.
    pub(super) fn execute(self, given: &[String]) -> Result<()> {
        self.check(given)?;
        let flows = self.flows()?;
        let many = self.flows.is_some();
        let output = self.output;
        let dispatch = self.opened_within;
        let addresses = self.opened_from.zip(self.at);
        let outer = addresses.map(|(source, destination)| Outer { source, destination, dispatch });
        let (mut explainer, by_snat) = self.explainer()?;
        let mut out = BufWriter::new(std::io::stdout().lock());
        for flow in &flows {
            let answer = match outer {
                Some(outer) => explainer.explain_opened(flow, outer),
                None => explainer.explain(flow),
            };
            let mut answer = answer.with_context(|| format!("{} cannot be explained", flow.name))?;
            let concerns = |lack: &&BySnat| answer.key.as_ref().is_some_and(|key| lack.ports.contains(key));
            if let Some(BySnat { why, .. }) = by_snat.as_ref().filter(concerns) {
                answer.steps.push(format!("direct forwarding: none, {why}"));
            }
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
            let flow = flow.and_then(|flow| if self.later { flow.into_later() } else { Ok(flow) });
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

    /// Refuses flags that say of an agent what a running one, or a folder, says itself.
    fn check(&self, given: &[String]) -> Result<()> {
        let (offline, is_folder) = (&self.offline, self.offline.manifests.is_some());
        let given = |flag: &str| given.iter().any(|given| given == flag);
        if !offline.cluster
            && !is_folder
            && let Some(flag) = OF_AN_AGENT.into_iter().find(|flag| given(flag))
        {
            let why = format!(
                "{flag} is for --api and --manifests: here the maps of the running agent are asked, which has its own"
            );
            return Err(view::usage(&why).into());
        }
        if is_folder && given("--announce-opening") {
            return Err(view::usage(
                "--announce-opening is for --api: with --manifests the Leases are files",
            )
            .into());
        }
        Ok(())
    }

    fn explainer(self) -> Result<(Explainer, Option<BySnat>)> {
        let policy = self.policy.map(|policy| match policy {
            PolicyArgument::Cluster => Policy::Cluster,
            PolicyArgument::Local => Policy::Local,
        });
        match self.offline.cluster || self.offline.manifests.is_some() {
            true => self.offline.explainer(policy),
            false => Ok((self.live.explainer(policy)?, None)),
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
    fn explainer(self, policy: Option<Policy>) -> Result<(Explainer, Option<BySnat>)> {
        let Some(node_name) = self.node_name else {
            return Err(view::usage("name the node whose point of view is taken: --node-name").into());
        };
        let WholeCluster { mut batch, no_leases } = match self.manifests {
            Some(folder) => {
                let manifests = Manifests { folder, node_name: node_name.clone() };
                let batch = manifests.read().context("the manifests are not understood")?;
                WholeCluster { batch, no_leases: None }
            }
            None => listing::cluster(&self.api.access(), self.announce_opening.as_deref())?,
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
        let why_snat = match no_leases {
            Some(why) => Some(format!(
                "for the Leases of direct forwarding may not be listed (list on leases.coordination.k8s.io is needed): {why}"
            )),
            None if self.cluster => lacks_lease(&index, &node_name),
            None => None,
        };
        let input = NodeInput {
            node_name: node_name.clone(),
            algorithm: self.algorithm,
            forwarding: self.forwarding,
            dispatch: self.dispatch,
            choice: of_endpoints(self.forwarding, self.algorithm, self.maglev_size),
            hold_direct: why_snat.is_some(),
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
        let desired = index.desired();
        let simulator = Simulator::offline(desired, &addresses, &primary, self.maglev_size)?;
        let scope = NodeScope { node: addresses, pods: index.pod_cidrs(&node_name).to_vec() };
        let explainer = Explainer::new(simulator, scope, primary, Box::new(|_| None), 1, true);
        let wanting = desired.ports.iter().filter(|(_, port)| port.forwarding.is_direct());
        let ports = wanting.map(|(key, _)| key.clone()).collect();
        Ok((explainer, why_snat.map(|why| BySnat { ports, why })))
    }
}

/// Returns why a node takes no part in direct forwarding, by the API: its agent would have a Lease.
/// Leases of several namespaces are a warning, for agents heed those of one.
fn lacks_lease(index: &Index, node_name: &str) -> Option<String> {
    let namespaces: BTreeSet<_> = index.direct_leases().map(|lease| &lease.name.namespace).collect();
    if namespaces.len() > 1 {
        let namespaces: Vec<_> = namespaces.into_iter().map(String::as_str).collect();
        tracing::warn!(
            "Leases of direct forwarding are in the namespaces {}, and all count: name that of the agents by --announce-opening",
            namespaces.join(", ")
        );
    }
    let has_one = index.direct_leases().any(|lease| lease.node == node_name);
    (!has_one)
        .then(|| format!("for {node_name} has no Lease by which its agent takes part (--announce-opening)"))
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
        Verdict::Reply => format!("on to the client {}", flow.destination),
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
