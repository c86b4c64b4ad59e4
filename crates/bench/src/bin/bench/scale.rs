//! The agent in a large cluster: the time from a change to the maps, the first sync, its resource
//! usage, and the effect of a sweep of a full flow table on packets.
//!
//! Changes pass through real components: an API server, an agent that watches it, the pinned maps.
//! Services have one address family (IPv4), one port and ten endpoints, so that 10k of them have
//! 100k endpoints; every tenth also has a node port.

mod changes;
mod cluster;
mod cpus;
mod delay;
mod footprint;
mod full_table;
mod maglev;
mod stage;
mod start;
mod stream;
mod sweep;

use anyhow::Result;

use self::{stage::Stage, start::Starts};
use super::{
    Effort,
    report::{Report, Row},
};

/// Number of endpoints of each Service.
const ENDPOINTS: u32 = 10;

pub(crate) fn measure(effort: Effort, report: &mut Report) -> Result<()> {
    let sizes: &[u32] = if effort.full { &[10, 1_000, 10_000] } else { &[10, 10_000] };
    for services in sizes.iter().copied() {
        of_size(services, sizes.last() == Some(&services), effort, report)?;
    }
    maglev::measure(effort, report)?;
    sweep::measure(effort, report)
}

fn of_size(services: u32, largest: bool, effort: Effort, report: &mut Report) -> Result<()> {
    let changing = wants(report, &changes::rows(services, 0));
    let filled = largest && wants(report, &full_table::rows(services));
    let footprint = largest && wants(report, &footprint::rows(services));
    let starting = wants(report, &start::rows(services));
    let streaming = wants(report, &stream::rows(services));
    if ![changing, filled, footprint, starting, streaming].contains(&true) {
        return Ok(());
    }
    let mut stage = Stage::build(services)?;
    report.note("agent", "release profile");
    let stream = stage.start_stream()?;
    let mut starts = Starts::default();
    starts.take_over(&mut stage)?;
    if changing {
        changes::measure(&stage, effort, report)?;
    }
    if footprint {
        footprint::measure(&stage, report)?;
    }
    if filled {
        full_table::measure(&stage, effort, report)?;
    }
    stream.finish(services, report)?;
    if starting {
        for _ in 1..if effort.full { 5 } else { 2 } {
            starts.anew(&mut stage)?;
        }
    }
    starts.report(services, report);
    Ok(())
}

/// Group and name of rows that are measured together.
type Rows = Vec<(&'static str, String)>;

fn wants(report: &mut Report, rows: &Rows) -> bool {
    rows.iter().fold(false, |any, (group, name)| report.wants(group, name) || any)
}

/// Adds a row if it is wanted: it may have been measured only together with another one.
fn add(report: &mut Report, row: Row) {
    if report.wants(&row.group, &row.name) {
        report.add(row);
    }
}

/// Returns a name such as "10 Services" or "10k Services".
fn named(services: u32) -> String {
    if services < 1_000 { format!("{services} Services") } else { format!("{}k Services", services / 1_000) }
}
