//! A flow table that is nearly full: its flows look as packets would have made them, but are
//! written by the bench.

use std::{net::Ipv4Addr, time::Instant};

use anyhow::{Context, Result};
use aya::maps::{HashMap, Map, MapData};
use traffic_policy_dataplane::{MapSizes, ToWire};
use traffic_policy_ebpf::{
    abi::{Address4, Flow, FlowKey, PROTOCOL_TCP, Packets, Ports, Tuple, kind},
    tcp::{ANSWERED, ASSURED},
};

use super::{Rows, add, changes, footprint::cpu_time, named, stage::Stage};
use crate::{
    Effort,
    report::{Report, Row, Unit},
};

pub(super) type Flows = HashMap<MapData, FlowKey<Address4>, Flow<Address4>>;

/// Highest fill level that lasts: beyond 80 % the agent removes the flows that were idle for
/// longest.
const PERCENT: u32 = 78;

const GROUP: &str = "scale, agent";

fn flows() -> u32 {
    MapSizes::default().flows4 / 2 * PERCENT / 100
}

fn name(services: u32) -> String {
    format!("CPU with 15 changes a second, {}, {}k flows", named(services), flows() / 1_000)
}

pub(super) fn rows(services: u32) -> Rows {
    let mut rows = changes::rows(services, flows());
    rows.push((GROUP, name(services)));
    rows
}

/// Measures changes, and the cost to the agent, while it sweeps such a table.
pub(super) fn measure(stage: &Stage, effort: Effort, report: &mut Report) -> Result<()> {
    let mut table: Flows = Map::HashMap(stage.map("tp_flows4")?).try_into()?;
    let of_the_stream = table.iter().next().context("the stream has no flow")??.1;
    fill(&mut table, flows(), of_the_stream.last)?;
    let (start, before) = (Instant::now(), cpu_time(stage.pid()?)?);
    let took = changes::times(stage, effort, |i| i * 7_919 % stage.services)?;
    let used = (cpu_time(stage.pid()?)? - before).as_secs_f64() / start.elapsed().as_secs_f64() * 100.0;
    changes::report_times(&took, stage.services, flows(), report);
    add(report, Row::new(GROUP, &name(stage.services), Unit::Percent, &[used]));
    Ok(())
}

/// Adds this number of TCP connections whose last packet was at `now`, in jiffies.
pub(super) fn fill(flows: &mut Flows, number: u32, now: u32) -> Result<()> {
    let node = Ipv4Addr::new(172, 18, 0, 11).to_wire();
    for i in 0..number {
        let client = Ipv4Addr::from(u32::from(Ipv4Addr::new(198, 18, 0, 1)) + i / 16_384).to_wire();
        let endpoint = Ipv4Addr::from(u32::from(Ipv4Addr::new(10, 128, 0, 1)) + i / 16_384).to_wire();
        let port = 32_768 + (i % 16_384) as u16;
        let (asked, answering) = (30_000, 8_080);
        let request = Tuple {
            source: client,
            destination: node,
            ports: Ports::from_host(port, asked),
            protocol: PROTOCOL_TCP,
        };
        let reply = Tuple {
            source: endpoint,
            destination: node,
            ports: Ports::from_host(answering, port),
            protocol: PROTOCOL_TCP,
        };
        let entry = |kind, state, becomes: Tuple<Address4>| Flow {
            source: becomes.source,
            destination: becomes.destination,
            ports: becomes.ports,
            kind,
            state,
            last: now,
            packets: Packets::of(1),
            ..Flow::default()
        };
        flows.insert(FlowKey::of(&reply), entry(kind::REPLY, ANSWERED, request.reversed()), 0)?;
        flows.insert(FlowKey::of(&request), entry(kind::FORWARD, ASSURED, reply.reversed()), 0)?;
    }
    Ok(())
}
