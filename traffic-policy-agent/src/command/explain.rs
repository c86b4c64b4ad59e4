//! `explain`: the command line, a node with an agent, and the sentences of the answer.

mod offline;

use std::{
    collections::{BTreeMap, HashMap},
    io::{BufWriter, Read, Write},
    net::IpAddr,
    path::PathBuf,
};

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use traffic_policy_cluster::model::{Dispatch, Policy};
use traffic_policy_dataplane::{
    DEFAULT_PINS, advice,
    explain::simulator::Simulator,
    explain::{self, Answer, Explainer, Flow, From, NodeScope, Outer, PodDevices, Verdict},
    inspect::{Nodes, Pinned},
    node::Network,
};

use self::offline::{BySnat, OfflineArguments};
use super::{
    left_out,
    view::{self, Output},
};

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

/// The flags of `run` that are facts about an agent: a running one has its own.
const OF_AN_AGENT: [&str; 5] =
    ["--algorithm", "--maglev-size", "--forwarding", "--dispatch", "--announce-opening"];

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
