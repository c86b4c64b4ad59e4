//! `status`: attachments, state of sync, maps and counters.

mod local_delivery;
mod pod_services;
mod text;

use std::{path::Path, time::Duration};

use anyhow::{Context, Result};
use clap::Args;
use serde::Serialize;
use traffic_policy_dataplane::{
    PinsLook,
    inspect::{self, Heartbeat, Link, LinkHook, Phase, Pinned, PinnedMap, Presence, ServicePort},
};
use traffic_policy_ebpf::abi::{ABI_VERSION, Address, Address4, Address6, Tuple};

use super::{
    report, services,
    view::{self, View},
};
use crate::{check, health};

/// Show the attachments, whether the maps are in sync with the cluster and the obstacles, how full
/// the maps are, and how many packets left the packet path with which outcome since the maps were
/// made.
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
    snat_ports: u32,
    flows: Flows,
    draining: Vec<Draining>,
    /// Direct delivery to pods of this node; `None` if the stack delivers everything.
    local_delivery: Option<local_delivery::LocalDelivery>,
    /// Services of pods at their devices; `None` without `--pod-services on`.
    pod_services: Option<pod_services::PodServices>,
    counters: Vec<Counter>,
    /// Warnings for the operator.
    warnings: Vec<String>,
}

#[derive(Serialize)]
struct Agent {
    running: bool,
    /// Whether the agent runs and still loads its programs: those of an earlier agent stay
    /// attached; on a first start nothing is attached yet.
    loading: bool,
    /// Process id in the agent's own PID namespace.
    pid: Option<u32>,
    started_seconds_ago: Option<f64>,
    /// Seconds since its last sign of life.
    seen_seconds_ago: Option<f64>,
    /// Seconds since the maps were last made equal to the desired state.
    synced_seconds_ago: Option<f64>,
    /// The agent's own report; `None` if it does not run or does not answer.
    report: Option<health::Report>,
}

#[derive(Serialize)]
struct Attached {
    target: String,
    hook: String,
    /// Id of the program in the kernel.
    program: Option<u32>,
    /// Whether the device or cgroup still exists.
    present: bool,
}

#[derive(Serialize)]
struct Map {
    name: String,
    /// Number of used entries; `None` for arrays.
    used: Option<u64>,
    size: u32,
    bytes: u64,
}

#[derive(Serialize)]
struct Flows {
    /// Used entries of the table, two per flow, for IPv4 and IPv6; `size` is its capacity.
    entries: [u64; 2],
    size: [u64; 2],
    /// Flows that no client has confirmed.
    unassured: [u64; 2],
    /// Seconds since a flow found no room in a table of either family; `None` if that did not
    /// happen in the last hour.
    full_seconds_ago: Option<f64>,
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
        let attached = attached(&pinned, agent.loading, &view.pin_dir, &mut warnings)?;
        // Packets to pods of this node pass the firewall as a router's would.
        for finding in check::forward_policy_drop() {
            let fix = finding.fix.map(|fix| format!(": {fix}")).unwrap_or_default();
            warnings.push(format!("{}{fix}", finding.found));
        }
        let maps_read = PinnedMap::all(&pinned)?;
        let maps = maps_read.iter().map(|map| Map {
            name: map.name.clone(),
            used: map.used,
            size: map.room,
            bytes: map.bytes,
        });
        let counters = inspect::counters(&pinned)?;
        Ok(Self {
            agent,
            layout: ABI_VERSION,
            attached,
            maps: maps.collect(),
            map_bytes: maps_read.iter().map(|map| map.bytes).sum(),
            snat_ports: pinned.config()?.snat_port_count,
            flows: Flows::read(&pinned, &maps_read)?,
            draining: draining(&pinned)?,
            local_delivery: local_delivery::LocalDelivery::read(&pinned, &view.pin_dir)?,
            pod_services: pod_services::PodServices::read(&pinned, &view.pin_dir)?,
            counters: counters
                .into_iter()
                .map(|(hook, outcome, packets)| Counter { hook, outcome: outcome.name(), packets })
                .collect(),
            warnings,
        })
    }
}

impl Agent {
    fn read(pinned: &Pinned, warnings: &mut Vec<String>) -> Result<Self> {
        let word = Heartbeat::read(pinned)?;
        let presence = Presence::read(pinned)?;
        let mut report = None;
        // An agent that is still loading has no report on the maps.
        if matches!(presence, Presence::Running { .. }) {
            match word.address().context("it has not said where it answers").and_then(report::of) {
                Ok(answer) => report = Some(answer),
                Err(error) => {
                    warnings.push(format!("the agent runs, but does not report its state: {error:#}"));
                }
            }
        }
        let seconds = |time: Option<Duration>| time.map(|time| time.as_secs_f64());
        Ok(Self {
            running: presence != Presence::Absent,
            loading: matches!(presence, Presence::Loading { .. }),
            pid: match presence {
                Presence::Absent => None,
                Presence::Loading { process } | Presence::Running { process } => Some(process),
            },
            started_seconds_ago: seconds(word.started()),
            seen_seconds_ago: seconds(word.seen()),
            synced_seconds_ago: seconds(word.synced()),
            report,
        })
    }
}

impl Flows {
    fn read(pinned: &Pinned, maps_read: &[PinnedMap]) -> Result<Self> {
        let of = |name: &str| maps_read.iter().find(|map| map.name == name);
        let used = |names: [&str; 2]| names.map(|name| of(name).and_then(|map| map.used).unwrap_or(0));
        let usage = pinned.usage()?;
        let next = usage.unassured_next;
        Ok(Self {
            entries: used(["tp_flows4", "tp_flows6"]),
            size: ["tp_flows4", "tp_flows6"].map(|name| of(name).map_or(0, |map| map.room.into())),
            unassured: [
                unassured::<Address4>(pinned, "tp_unassured4", [next[0], next[2]])?,
                unassured::<Address6>(pinned, "tp_unassured6", [next[1], next[3]])?,
            ],
            full_seconds_ago: Heartbeat::read(pinned)?.full(&usage).map(|since| since.as_secs_f64()),
        })
    }
}

/// Returns the number of flows in the queues of unassured flows, each of which has half of the map.
/// `next` are the numbers of places that were taken of each queue so far: places that never were
/// are not read.
fn unassured<A: Address>(pinned: &Pinned, name: &str, next: [u64; 2]) -> Result<u64> {
    let map = pinned.map(name)?;
    let places = map.info().entries / 2;
    let mut count = 0;
    for (first, next) in [0, places].into_iter().zip(next) {
        let taken = u32::try_from(next).map_or(places, |next| next.min(places));
        let visit = |held: Tuple<A>| count += u64::from(held.protocol != 0);
        map.elements(first..first + taken, visit)?;
    }
    Ok(count)
}

fn attached(
    pinned: &Pinned,
    loading: bool,
    pin_dir: &Path,
    warnings: &mut Vec<String>,
) -> Result<Vec<Attached>> {
    let links = Link::all(pinned)?;
    let nothing = !links
        .iter()
        .any(|link| link.present && !matches!(link.hook, LinkHook::Cgroup | LinkHook::TcDivided));
    let others = PinsLook::at(pin_dir)?.other_versions.join(", ");
    if !others.is_empty() && nothing {
        warnings.push(format!(
            "layout {others} serves until this version's maps are filled: nothing of this version is attached yet"
        ));
    } else if !others.is_empty() {
        warnings.push(format!(
            "layout {others} is not wholly replaced: the agent's log says what is in the way, and it tries again"
        ));
    } else if nothing && !(loading && links.is_empty()) {
        warnings.push(
            "the packet path is attached to no device: packets from outside do not come by it".to_owned(),
        );
    }
    for link in links.iter().filter(|link| !link.present) {
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
            present: link.present,
        })
        .collect())
}

fn draining(pinned: &Pinned) -> Result<Vec<Draining>> {
    let mut draining = Vec::new();
    for port in ServicePort::all(pinned)? {
        for reached in &port.frontends {
            if let Phase::Draining(rest) = reached.phase {
                draining.push(Draining {
                    service: port.key.to_string(),
                    address: services::reached(reached, port.key.protocol),
                    seconds: rest.as_secs_f64(),
                });
            }
        }
    }
    Ok(draining)
}
