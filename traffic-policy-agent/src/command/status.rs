//! `status`: is it attached, in step, and what became of the packets so far?

use std::{
    io::{self, Read, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use clap::Args;
use serde::Serialize;
use traffic_policy_ebpf::abi::ABI_VERSION;

use super::{
    services,
    view::{self, View},
};
use crate::{
    check,
    dataplane::{self, LinkHook, MapFill, Phase, Pinned},
    health,
};

/// Show what is attached where, whether the maps are in step with the cluster and what is in the way, how full the maps
/// are, and how many packets left the packet path in which way since the maps were made.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    view: View,
}

impl Arguments {
    pub(super) fn execute(self) -> Result<()> {
        let document = Document::read(&self.view)?;
        if self.view.json() {
            return view::print_json(&document);
        }
        view::print(|out| document.write(out))
    }
}

/// The state of the node, for programs.
#[derive(Serialize)]
struct Document {
    agent: Agent,
    /// Version of the maps' layout.
    layout: u32,
    attached: Vec<Attached>,
    maps: Vec<Map>,
    /// Bytes of all maps.
    map_bytes: u64,
    /// Source ports towards endpoints of other nodes.
    pool_ports: u32,
    flows: Flows,
    draining: Vec<Draining>,
    counters: Vec<Counter>,
    /// What a person should look at.
    warnings: Vec<String>,
}

#[derive(Serialize)]
struct Agent {
    running: bool,
    /// In its own PID namespace.
    pid: Option<u32>,
    started_seconds_ago: Option<f64>,
    /// Its last sign of life.
    seen_seconds_ago: Option<f64>,
    /// Since the maps were last made equal to what the cluster wants.
    synced_seconds_ago: Option<f64>,
    /// What the agent itself says; `None` if it does not run or does not answer.
    report: Option<health::Report>,
}

#[derive(Serialize)]
struct Attached {
    target: String,
    hook: String,
    /// The kernel's number.
    program: Option<u32>,
    /// The device or cgroup still exists.
    alive: bool,
}

#[derive(Serialize)]
struct Map {
    name: String,
    /// `None` for arrays.
    used: Option<u64>,
    room: u32,
    bytes: u64,
}

#[derive(Serialize)]
struct Flows {
    /// Halves in the table and room for them; IPv4, IPv6.
    entries: [u64; 2],
    room: [u64; 2],
    /// Flows that no client has confirmed.
    unconfirmed: [u64; 2],
    /// Halves in the tables for flows that a flood has pushed out.
    pending: [u64; 2],
}

#[derive(Serialize)]
struct Draining {
    service: String,
    address: String,
    seconds: f64,
}

#[derive(Serialize)]
struct Counter {
    hook: &'static str,
    outcome: &'static str,
    packets: u64,
}

impl Document {
    fn read(view: &View) -> Result<Self> {
        let pinned = view.pinned()?;
        let mut warnings = Vec::new();
        let agent = Agent::read(&pinned, &mut warnings)?;
        let attached = attached(&pinned, &mut warnings)?;
        // Packets to pods of this node pass the firewall as a router's would.
        for finding in check::forward_policy_drop() {
            let cure = finding.cure.map(|cure| format!(": {cure}")).unwrap_or_default();
            warnings.push(format!("{}{cure}", finding.found));
        }
        let fills = pinned.maps()?;
        let maps = fills.iter().map(|fill| Map {
            name: fill.name.clone(),
            used: fill.used,
            room: fill.room,
            bytes: fill.bytes,
        });
        let counters = dataplane::pinned_counters(&view.pin_dir)?;
        Ok(Self {
            agent,
            layout: ABI_VERSION,
            attached,
            maps: maps.collect(),
            map_bytes: fills.iter().map(|fill| fill.bytes).sum(),
            pool_ports: pinned.state()?.pool_len,
            flows: Flows::read(&pinned, &fills)?,
            draining: draining(&pinned)?,
            counters: counters
                .into_iter()
                .map(|(hook, outcome, packets)| Counter { hook, outcome: outcome.name(), packets })
                .collect(),
            warnings,
        })
    }

    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        self.agent.write(out)?;
        for warning in &self.warnings {
            writeln!(out, "warning     {warning}")?;
        }
        let [flows4, flows6] = self.flows.entries.map(|halves| halves.div_ceil(2));
        let unconfirmed: u64 = self.flows.unconfirmed.iter().sum();
        let pending: u64 = self.flows.pending.iter().map(|halves| halves.div_ceil(2)).sum();
        writeln!(
            out,
            "flows       {flows4} IPv4, {flows6} IPv6 ({unconfirmed} unconfirmed, {pending} pending)"
        )?;
        writeln!(out, "pool        {} source ports towards endpoints of other nodes", self.pool_ports)?;
        for draining in &self.draining {
            let rest = Duration::from_secs_f64(draining.seconds);
            writeln!(
                out,
                "draining    {} at {}: new connections are forwarded for {} more",
                draining.service,
                draining.address,
                view::span(rest)
            )?;
        }
        writeln!(out)?;
        view::table(out, ["ATTACHED TO", "HOOK", "PROGRAM"], &self.attached, |attached| {
            let program = attached.program.map_or_else(|| "–".to_owned(), |program| program.to_string());
            [attached.target.clone(), attached.hook.clone(), program]
        })?;
        writeln!(out)?;
        let hashed: Vec<_> = self.maps.iter().filter(|map| map.used.is_some()).collect();
        view::table(out, ["MAP", "USED", "ROOM", "FILL", "KB"], &hashed, |map| {
            let used = map.used.unwrap_or(0);
            let percent = used as f64 * 100.0 / f64::from(map.room.max(1));
            let kilobytes = map.bytes.div_ceil(1024);
            [
                map.name.clone(),
                used.to_string(),
                map.room.to_string(),
                format!("{percent:.0} %"),
                kilobytes.to_string(),
            ]
        })?;
        writeln!(out, "all {} maps: {} KB\n", self.maps.len(), self.map_bytes.div_ceil(1024))?;
        view::table(out, ["HOOK", "OUTCOME", "PACKETS"], &self.counters, |counter| {
            [counter.hook.to_owned(), counter.outcome.to_owned(), counter.packets.to_string()]
        })
    }
}

impl Agent {
    fn read(pinned: &Pinned, warnings: &mut Vec<String>) -> Result<Self> {
        let word = pinned.report()?;
        let running = pinned.is_held()?;
        let mut report = None;
        if running {
            match word.address().context("it has not said where it answers").and_then(ask) {
                Ok(answer) => report = Some(answer),
                Err(error) => {
                    warnings.push(format!("the agent runs, but does not say how it fares: {error:#}"));
                }
            }
        }
        let seconds = |time: Option<Duration>| time.map(|time| time.as_secs_f64());
        Ok(Self {
            running,
            pid: running.then(|| word.pid()),
            started_seconds_ago: seconds(word.started()),
            seen_seconds_ago: seconds(word.seen()),
            synced_seconds_ago: seconds(word.synced()),
            report,
        })
    }

    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let ago = |seconds: Option<f64>| {
            seconds.map_or_else(
                || "never".to_owned(),
                |s| format!("{} ago", view::span(Duration::from_secs_f64(s))),
            )
        };
        match self.pid {
            Some(pid) => writeln!(
                out,
                "agent       running, process {pid}, started {}",
                ago(self.started_seconds_ago)
            )?,
            None => writeln!(
                out,
                "agent       not running, last seen {}; the packet path goes on with what it last wrote",
                ago(self.seen_seconds_ago)
            )?,
        }
        let synced = ago(self.synced_seconds_ago);
        let Some(report) = &self.report else { return writeln!(out, "state       last in step {synced}") };
        if report.in_step {
            writeln!(out, "state       in step with the cluster, last change written {synced}")?;
        } else {
            writeln!(out, "state       NOT in step, last sync {synced}; in the way:")?;
            for block in &report.blocked_by {
                writeln!(out, "            - {block}")?;
            }
        }
        if !report.node_eligible {
            writeln!(
                out,
                "node        load balancers are told not to send here: the Node object is not known, is being deleted, or is marked by the autoscaler"
            )?;
        }
        for (subject, trouble) in &report.troubles {
            writeln!(out, "trouble     {subject}: {trouble}")?;
        }
        Ok(())
    }
}

impl Flows {
    fn read(pinned: &Pinned, fills: &[MapFill]) -> Result<Self> {
        let of = |name: &str| fills.iter().find(|fill| fill.name == name);
        let used = |names: [&str; 2]| names.map(|name| of(name).and_then(|fill| fill.used).unwrap_or(0));
        Ok(Self {
            entries: used(["FLOWS4", "FLOWS6"]),
            room: ["FLOWS4", "FLOWS6"].map(|name| of(name).map_or(0, |fill| fill.room.into())),
            unconfirmed: pinned.usage()?.unconfirmed,
            pending: used(["PENDING4", "PENDING6"]),
        })
    }
}

fn attached(pinned: &Pinned, warnings: &mut Vec<String>) -> Result<Vec<Attached>> {
    let links = pinned.links()?;
    if !links.iter().any(|link| link.alive && link.hook != LinkHook::Cgroup) {
        warnings.push(
            "the packet path is attached to no device: packets from outside do not come by it".to_owned(),
        );
    }
    for link in links.iter().filter(|link| !link.alive) {
        warnings.push(format!("{} is gone: what was attached to it sees no packet", link.target));
    }
    Ok(links
        .into_iter()
        .map(|link| Attached {
            target: link.target,
            hook: match link.call {
                Some(call) => format!("{} {call}", link.hook.name()),
                None => link.hook.name().to_owned(),
            },
            program: link.program,
            alive: link.alive,
        })
        .collect())
}

fn draining(pinned: &Pinned) -> Result<Vec<Draining>> {
    let mut draining = Vec::new();
    for port in pinned.services()? {
        for reached in &port.frontends {
            if let Phase::Draining(rest) = reached.phase {
                draining.push(Draining {
                    service: view::service(&port.key),
                    address: services::reached(reached, port.key.protocol),
                    seconds: rest.as_secs_f64(),
                });
            }
        }
    }
    Ok(draining)
}

const PATIENCE: Duration = Duration::from_secs(2);

/// Asks the agent of this node.
fn ask(address: SocketAddr) -> Result<health::Report> {
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    let address = SocketAddr::new(ip, address.port());
    let answer = exchange(address).with_context(|| format!("{address} does not answer"))?;
    let Some((head, body)) = answer.split_once("\r\n\r\n") else { bail!("{address} does not speak HTTP") };
    if !head.starts_with("HTTP/1.1 200 ") {
        bail!("{address} answers `{}`", head.lines().next().unwrap_or_default());
    }
    serde_json::from_str(body).with_context(|| format!("{address} answers with something else"))
}

fn exchange(address: SocketAddr) -> io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    write!(stream, "GET /status HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document() -> Document {
        Document {
            agent: Agent {
                running: true,
                pid: Some(42),
                started_seconds_ago: Some(100.0),
                seen_seconds_ago: Some(1.0),
                synced_seconds_ago: None,
                report: Some(health::Report {
                    blocked_by: vec!["waiting for the first look at Services".to_owned()],
                    ..health::Report::default()
                }),
            },
            layout: ABI_VERSION,
            attached: vec![Attached {
                target: "eth0".to_owned(),
                hook: "tcx ingress".to_owned(),
                program: Some(7),
                alive: true,
            }],
            maps: vec![
                Map { name: "FLOWS4".to_owned(), used: Some(64), room: 128, bytes: 16_384 },
                Map { name: "STATE".to_owned(), used: None, room: 1, bytes: 4096 },
            ],
            map_bytes: 20_480,
            pool_ports: 31_000,
            flows: Flows { entries: [64, 0], room: [128, 128], unconfirmed: [3, 0], pending: [0, 0] },
            draining: vec![Draining {
                service: "shop/web:http".to_owned(),
                address: "172.18.0.11:30080/tcp".to_owned(),
                seconds: 28.4,
            }],
            counters: vec![Counter { hook: "ingress", outcome: "forwarded", packets: 5 }],
            warnings: vec!["eth1 is gone: what was attached to it sees no packet".to_owned()],
        }
    }

    fn text(document: &Document) -> String {
        let mut out = Vec::new();
        document.write(&mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn says_what_is_in_the_way() {
        let text = text(&document());
        for line in [
            "agent       running, process 42, started 1m40s ago",
            "state       NOT in step, last sync never; in the way:",
            "            - waiting for the first look at Services",
            "node        load balancers are told not to send here",
            "warning     eth1 is gone",
            "flows       32 IPv4, 0 IPv6 (3 unconfirmed, 0 pending)",
            "draining    shop/web:http at 172.18.0.11:30080/tcp: new connections are forwarded for 28s more",
            "FLOWS4    64   128  50 %",
            "all 2 maps: 20 KB",
            "ingress  forwarded        5",
        ] {
            assert!(text.contains(line), "no {line:?} in\n{text}");
        }
        assert!(!text.contains("\nSTATE"), "arrays are always full\n{text}");
    }

    #[test]
    fn of_a_dead_agent() {
        let mut document = document();
        document.agent = Agent {
            running: false,
            pid: None,
            synced_seconds_ago: Some(7_300.0),
            report: None,
            ..document.agent
        };
        let text = text(&document);
        assert!(
            text.starts_with("agent       not running, last seen 1s ago; the packet path goes on"),
            "{text}"
        );
        assert!(text.contains("state       last in step 2h01m ago\n"), "{text}");
    }
}
