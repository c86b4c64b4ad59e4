//! How the agent keeps up with a large cluster: from a change to the maps, the first sync, what it uses, and what a sweep of
//! a full flow table does to packets.
//!
//! Changes take the real way: an API server, an agent that watches it, the pinned maps. Services have one address family
//! (IPv4), one port and ten endpoints, so that 10k of them have 100k endpoints; each tenth has a node port too.

mod changes;
mod cluster;
mod cpus;
mod delay;
mod footprint;
mod full_table;
mod stage;
mod start;
mod stream;
mod sweep;

use anyhow::Result;

use self::{stage::Stage, start::Starts};
use super::{Effort, report::Report};

/// Endpoints of each Service.
const ENDPOINTS: u32 = 10;

pub(crate) fn measure(effort: Effort, report: &mut Report) -> Result<()> {
    let sizes: &[u32] = if effort.large { &[10, 1_000, 10_000] } else { &[10, 10_000] };
    for services in sizes.iter().copied() {
        let mut stage = Stage::build(services)?;
        let stream = stage.start_stream()?;
        let mut starts = Starts::default();
        starts.take_over(&mut stage)?;
        changes::measure(&stage, effort, report)?;
        if sizes.last() == Some(&services) {
            footprint::measure(&stage, report)?;
            full_table::measure(&stage, effort, report)?;
        }
        stream.finish(services, report)?;
        for _ in 1..if effort.large { 3 } else { 1 } {
            starts.anew(&mut stage)?;
        }
        starts.report(services, report);
    }
    sweep::measure(effort, report)
}

/// "10 Services", "10k Services".
fn named(services: u32) -> String {
    if services < 1_000 { format!("{services} Services") } else { format!("{}k Services", services / 1_000) }
}
