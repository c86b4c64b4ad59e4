//! `services`: Services as the packet path sees them.

use std::{
    collections::BTreeMap,
    io::{self, Write},
};

use anyhow::{Result, bail};
use clap::Args;
use serde::Serialize;
use traffic_policy_cluster::model::{Algorithm, Dispatch, Endpoint, Forwarding, Protocol};
use traffic_policy_dataplane::inspect::{
    Choice, Count, Counts, FormerOwners, FrontendView, Nodes, Phase, ServicePort,
};
use traffic_policy_ebpf::outcome::Outcome;

mod former;

use super::{
    left_out,
    view::{self, View},
};
use crate::health::EndpointLeftOut;

/// Show Services: frontends, policies, phases, endpoints, and packets by outcome.
///
/// Without a name, one line for each frontend; with one, all that is known of the Service.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// Only this Service: NAME, or NAMESPACE/NAME.
    #[arg(value_name = "NAME")]
    name: Option<String>,
    #[command(flatten)]
    view: View,
}

impl Arguments {
    pub(super) fn execute(self) -> Result<()> {
        let pinned = self.view.pinned()?;
        let mut ports = ServicePort::all(&pinned)?;
        if let Some(name) = &self.name {
            let all = ports.len();
            ports.retain(|port| view::is_named(&port.key, name));
            if ports.is_empty() {
                bail!(
                    "no Service {name} is in the maps, which hold {all} Service ports: see `services` for all of them"
                );
            }
        }
        let counts = Counts::read(&pinned)?;
        let nodes = Nodes::read(&pinned)?;
        // The overview names none.
        let named = self.view.json() || self.name.is_some();
        let left_out = if named { left_out::endpoints(&pinned, &nodes) } else { None };
        // A table is thousands of elements: those of all Services would take seconds.
        let slots = |port: &ServicePort| if self.name.is_some() { port.slots(&pinned) } else { Ok(None) };
        let slots = ports.iter().map(slots).collect::<Result<Vec<_>>>()?;
        let former =
            |port: &ServicePort| if self.name.is_some() { port.former_owners(&pinned) } else { Ok(None) };
        let former = ports.iter().map(former).collect::<Result<Vec<_>>>()?;
        let shown = ports.iter().zip(&slots).zip(&former).map(|((port, slots), former)| Shown {
            port,
            former: former.as_ref(),
            counts: &counts,
            nodes: &nodes,
            left_out: left_out.as_deref(),
            slots: slots.as_deref(),
        });
        if self.view.json() {
            return view::print_json(&shown.map(|shown| Document::new(&shown)).collect::<Vec<_>>());
        }
        view::print(|out| match self.name {
            Some(_) => shown.clone().try_for_each(|shown| details(out, &shown)),
            None => overview(out, &ports, &counts),
        })
    }
}

/// A Service port and what else is known of it.
#[derive(Clone, Copy)]
struct Shown<'a> {
    port: &'a ServicePort,
    counts: &'a Counts,
    nodes: &'a Nodes,
    /// The endpoints that are left out; `None` if no agent runs to tell.
    left_out: Option<&'a [EndpointLeftOut]>,
    /// The slots of each endpoint for policy Cluster in the Maglev table, if there is one.
    slots: Option<&'a [u32]>,
    /// The former owners of its slots, if any are asked.
    former: Option<&'a FormerOwners>,
}

/// A Service port, for programs.
#[derive(Serialize)]
struct Document {
    namespace: String,
    name: String,
    /// The port's name.
    port: String,
    /// `TCP`, `UDP` or `SCTP`.
    protocol: String,
    /// `IPv4` or `IPv6`.
    family: &'static str,
    external_policy: &'static str,
    internal_policy: &'static str,
    frontends: Vec<FrontendDocument>,
    /// Endpoints for both policies.
    endpoints: Vec<EndpointDocument>,
    local_endpoints: Vec<EndpointDocument>,
    /// The nodes that are dead: their endpoints are left out, of this Service as of any other.
    left_out: Vec<String>,
    /// Those of this Service port, which take no new flows; `null` if no agent runs to tell.
    endpoints_left_out: Option<Vec<LeftOutDocument>>,
    /// The choice of an endpoint: `random` or `maglev`.
    algorithm: &'static str,
    /// The slots of its Maglev table; `None` without one, also if it asks for one.
    maglev_slots: Option<u32>,
    /// The former owners of those slots that are still asked; `null` without, and unless the
    /// Service is named.
    former_owners: Option<former::Document>,
    /// The way to endpoints of other nodes: `snat`, `direct` or `tunnel`.
    forwarding: &'static str,
    /// Timeout of `sessionAffinity: ClientIP`, in seconds.
    affinity_seconds: Option<u64>,
    source_ranges: Vec<String>,
    /// Packets and bytes by name of the outcome.
    counts: BTreeMap<&'static str, CountDocument>,
    /// Number of flows in the table.
    flows: u64,
}

#[derive(Serialize)]
struct FrontendDocument {
    kind: &'static str,
    address: String,
    policy: &'static str,
    /// Phase: `active`, `draining`, `fallback`, `no-local-endpoint` or `rejecting`.
    phase: &'static str,
    /// Seconds left while draining.
    drain_seconds: Option<f64>,
}

#[derive(Serialize)]
struct EndpointDocument {
    address: String,
    /// Whether the endpoint is on this node.
    local: bool,
    /// The name of its node; `None` if it is this one, or the endpoint has no `nodeName`.
    node: Option<String>,
    /// Whether its node is dead. It is listed nevertheless if no endpoint elsewhere can take new
    /// flows, and for the moment until the agent has removed it.
    left_out: bool,
    /// The dispatch of packets that are forwarded to it directly: `ipip`, `udp`, or `l2`, without
    /// an outer packet where that can be. `None`: none is forwarded directly.
    dispatch: Option<&'static str>,
    /// The endpoint's slots in the Maglev table; `null` without one, and unless the Service is
    /// named.
    slots: Option<u32>,
}

#[derive(Serialize)]
struct LeftOutDocument {
    address: String,
    /// `None`: it has no `nodeName`, and its next hop is dead.
    node: Option<String>,
}

#[derive(Serialize)]
struct CountDocument {
    packets: u64,
    bytes: u64,
}

impl Document {
    fn new(&Shown { port, counts, nodes, left_out, slots, former }: &Shown<'_>) -> Self {
        let endpoints = |list: &[Endpoint], slots: Option<&[u32]>| {
            list.iter()
                .enumerate()
                .map(|(place, endpoint)| EndpointDocument {
                    address: endpoint.address.to_string(),
                    local: endpoint.local,
                    node: nodes.name(endpoint.node).map(str::to_owned),
                    left_out: nodes.is_dead(endpoint.node),
                    dispatch: dispatch(port.forwarding, endpoint),
                    slots: slots.and_then(|slots| slots.get(place).copied()),
                })
                .collect()
        };
        Self {
            namespace: port.key.service.namespace.clone(),
            name: port.key.service.name.clone(),
            port: port.key.port.clone(),
            protocol: port.key.protocol.to_string(),
            family: family(port),
            external_policy: view::policy(port.external_policy),
            internal_policy: view::policy(port.internal_policy),
            frontends: port
                .frontends
                .iter()
                .map(|reached| FrontendDocument {
                    kind: view::frontend_kind(reached.kind),
                    address: reached.address.to_string(),
                    policy: view::policy(reached.policy),
                    phase: phase_name(reached.phase),
                    drain_seconds: match reached.phase {
                        Phase::Draining(rest) => Some(rest.as_secs_f64()),
                        _ => None,
                    },
                })
                .collect(),
            endpoints: endpoints(&port.cluster, slots),
            local_endpoints: endpoints(&port.local, None),
            left_out: nodes.dead().iter().map(|node| node.name.clone()).collect(),
            endpoints_left_out: left_out.map(|all| {
                all.iter()
                    .filter(|one| one.key().as_ref() == Some(&port.key))
                    .map(|one| LeftOutDocument { address: one.address.to_string(), node: one.node.clone() })
                    .collect()
            }),
            algorithm: match port.choice {
                Choice::Random => Algorithm::Random,
                Choice::Maglev(_) | Choice::WithoutTable => Algorithm::Maglev,
            }
            .name(),
            maglev_slots: match port.choice {
                Choice::Maglev(table) => Some(table.len),
                Choice::Random | Choice::WithoutTable => None,
            },
            former_owners: former.map(|owners| former::Document::new(owners, nodes)),
            forwarding: port.forwarding.name(),
            affinity_seconds: port.affinity.map(|lasts| lasts.as_secs()),
            source_ranges: port.source_ranges.iter().map(ToString::to_string).collect(),
            counts: of(port, counts)
                .map(|(outcome, count)| {
                    (outcome.name(), CountDocument { packets: count.packets, bytes: count.bytes })
                })
                .collect(),
            flows: counts.flows.get(&port.index).copied().unwrap_or(0),
        }
    }
}

const fn family(port: &ServicePort) -> &'static str {
    if port.key.ipv6 { "IPv6" } else { "IPv4" }
}

/// Returns the counts of a Service port.
fn of<'a>(port: &ServicePort, counts: &'a Counts) -> impl Iterator<Item = (Outcome, &'a Count)> {
    let index = port.index;
    let from = counts.packets.range((index, Outcome::Forwarded)..);
    from.take_while(move |((of, _), _)| *of == index).map(|((_, outcome), count)| (*outcome, count))
}

const fn phase_name(phase: Phase) -> &'static str {
    match phase {
        Phase::Active => "active",
        Phase::Draining(_) => "draining",
        Phase::Fallback => "fallback",
        Phase::NoLocalEndpoint => "no-local-endpoint",
        Phase::Rejecting => "rejecting",
    }
}

pub(super) fn phase(phase: Phase) -> String {
    match phase {
        Phase::Active => "active".to_owned(),
        Phase::Draining(rest) => format!("draining, {} left", view::span(rest)),
        Phase::Fallback => "fallback".to_owned(),
        Phase::NoLocalEndpoint => "no-local-endpoint".to_owned(),
        Phase::Rejecting => "rejecting".to_owned(),
    }
}

/// Formats an address with its protocol.
pub(super) fn reached(reached: &FrontendView, protocol: Protocol) -> String {
    let protocol = protocol.to_string().to_lowercase();
    match reached.kind {
        traffic_policy_cluster::model::FrontendKind::LoopbackNodePort => {
            let address = if reached.address.is_ipv4() { "127.0.0.0/8" } else { "[::1]" };
            format!("{address}:{}/{protocol}", reached.address.port())
        }
        _ => format!("{}/{protocol}", reached.address),
    }
}

fn overview(out: &mut dyn Write, ports: &[ServicePort], counts: &Counts) -> io::Result<()> {
    let rows: Vec<_> = ports
        .iter()
        .flat_map(|port| {
            let none = port.frontends.is_empty().then_some((port, None, true));
            let frontends = port.frontends.iter().enumerate();
            none.into_iter().chain(frontends.map(move |(place, frontend)| (port, Some(frontend), place == 0)))
        })
        .collect();
    let header =
        ["SERVICE", "KIND", "ADDRESS", "POLICY", "PHASE", "ENDPOINTS", "FLOWS", "PACKETS", "DROPPED"];
    view::table(out, header, &rows, |(port, frontend, first)| {
        let here = port.cluster.iter().filter(|endpoint| endpoint.local).count();
        let (mut packets, mut dropped) = (0, 0);
        for (outcome, count) in of(port, counts) {
            packets += count.packets;
            if view::is_drop(outcome) {
                dropped += count.packets;
            }
        }
        let dash = || "–".to_owned();
        // Counts belong to the Service port, whichever frontend a packet came through.
        let once = |number: u64| if *first { number.to_string() } else { String::new() };
        [
            port.key.to_string(),
            frontend.map_or_else(dash, |reached| view::frontend_kind(reached.kind).to_owned()),
            frontend.map_or_else(dash, |frontend| reached(frontend, port.key.protocol)),
            frontend.map_or_else(dash, |reached| view::policy(reached.policy).to_owned()),
            frontend.map_or_else(dash, |reached| phase(reached.phase)),
            format!("{} ({here} here)", port.cluster.len()),
            once(counts.flows.get(&port.index).copied().unwrap_or(0)),
            once(packets),
            once(dropped),
        ]
    })
}

fn details(
    out: &mut dyn Write,
    &Shown { port, counts, nodes, left_out, slots, former }: &Shown<'_>,
) -> io::Result<()> {
    writeln!(out, "{}  {} {}", port.key, port.key.protocol, family(port))?;
    writeln!(
        out,
        "  policy      external {}, internal {}",
        view::policy(port.external_policy),
        view::policy(port.internal_policy)
    )?;
    match port.choice {
        Choice::Random => {}
        Choice::Maglev(table) => writeln!(out, "  algorithm   maglev, {} slots", table.len)?,
        Choice::WithoutTable => writeln!(out, "  algorithm   maglev, but without a table: random")?,
    }
    if port.forwarding.is_direct() {
        let remote = || port.cluster.iter().filter(|endpoint| !endpoint.local);
        let (opened, all) = (remote().filter(|endpoint| endpoint.opens.is_some()).count(), remote().count());
        let by = |is_one: fn(&Dispatch) -> bool| {
            remote().filter(|endpoint| endpoint.opens.as_ref().is_some_and(is_one)).count()
        };
        let mut ways = String::new();
        for (way, count) in [
            ("within UDP", by(|dispatch| *dispatch == Dispatch::Udp)),
            ("by MAC address", by(|dispatch| dispatch.name() == "l2")),
        ] {
            if count > 0 {
                ways += &format!(", {way} to {count}");
            }
        }
        let name = port.forwarding.name();
        writeln!(out, "  forwarding  {name}, to {opened} of {all} endpoints of other nodes{ways}")?;
    }
    if let Some(affinity) = port.affinity {
        writeln!(out, "  affinity    a client keeps its endpoint for {}", view::span(affinity))?;
    }
    if !port.source_ranges.is_empty() {
        let ranges: Vec<_> = port.source_ranges.iter().map(ToString::to_string).collect();
        writeln!(out, "  sources     {} (load balancer addresses only)", ranges.join(", "))?;
    }
    for (place, frontend) in port.frontends.iter().enumerate() {
        let title = if place == 0 { "frontends" } else { "" };
        writeln!(
            out,
            "  {title:<10}  {:<19}  {}  {}, {}",
            view::frontend_kind(frontend.kind),
            reached(frontend, port.key.protocol),
            view::policy(frontend.policy),
            phase(frontend.phase)
        )?;
    }
    list(out, "endpoints", port.forwarding, &port.cluster, nodes, slots)?;
    list(out, "local list", port.forwarding, &port.local, nodes, None)?;
    for (place, line) in
        former.map_or_else(Vec::new, |owners| former::lines(owners, nodes)).iter().enumerate()
    {
        let title = if place == 0 { "former" } else { "" };
        writeln!(out, "  {title:<10}  {line}")?;
    }
    let lines = left_out::lines(&port.key, nodes, left_out);
    for (place, line) in lines.iter().enumerate() {
        let title = if place == 0 { "left out" } else { "" };
        writeln!(out, "  {title:<10}  {line}")?;
    }
    for (place, (outcome, count)) in of(port, counts).enumerate() {
        let title = if place == 0 { "packets" } else { "" };
        writeln!(out, "  {title:<10}  {:<28} {:>12}  {} bytes", outcome.name(), count.packets, count.bytes)?;
    }
    writeln!(out, "  flows       {}\n", counts.flows.get(&port.index).copied().unwrap_or(0))
}

fn list(
    out: &mut dyn Write,
    title: &str,
    forwarding: Forwarding,
    endpoints: &[Endpoint],
    nodes: &Nodes,
    slots: Option<&[u32]>,
) -> io::Result<()> {
    let all = slots.map_or(0, |slots| slots.iter().sum::<u32>()).max(1);
    if endpoints.is_empty() {
        return writeln!(out, "  {title:<10}  none");
    }
    for (place, endpoint) in endpoints.iter().enumerate() {
        let title = if place == 0 { title } else { "" };
        let node = match nodes.name(endpoint.node) {
            _ if endpoint.local => "  (here)".to_owned(),
            Some(node) if nodes.is_dead(endpoint.node) => format!("  on {node}, left out"),
            Some(node) => format!("  on {node}"),
            None => String::new(),
        };
        let share = slots.and_then(|slots| slots.get(place)).map_or_else(String::new, |slots| {
            format!(", {:.2} % of new connections", 100.0 * f64::from(*slots) / f64::from(all))
        });
        let way = dispatch(forwarding, endpoint).map_or_else(String::new, |way| format!(", {way}"));
        writeln!(out, "  {title:<10}  {}{node}{way}{share}", endpoint.address)?;
    }
    Ok(())
}

/// Returns the dispatch of what is forwarded directly to an endpoint.
fn dispatch(forwarding: Forwarding, endpoint: &Endpoint) -> Option<&'static str> {
    endpoint.opens.filter(|_| forwarding.is_direct() && !endpoint.local).map(Dispatch::name)
}

#[cfg(test)]
mod tests;
