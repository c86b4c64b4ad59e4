//! What one packet costs, by BPF_PROG_TEST_RUN.

mod established;
mod floor;
mod foreign;
mod fresh;
mod refused;

use anyhow::Result;
use traffic_policy_tests::bench::Stand;

use super::{Effort, report::Report};

pub(crate) fn measure(effort: Effort, report: &mut Report) -> Result<()> {
    let floor = floor::wanted(effort, report);
    let established = established::wanted(effort, report);
    let fresh = fresh::wanted(effort, report);
    let refused = refused::wanted(effort, report);
    let foreign = foreign::wanted(report);
    if floor.is_empty()
        && established.is_empty()
        && fresh.is_empty()
        && refused.is_empty()
        && foreign.is_empty()
    {
        return Ok(());
    }
    let stand = Stand::build()?;
    stand.run(|| {
        floor::measure(&floor, &stand, effort, report)?;
        established::measure(&established, &stand, effort, report)?;
        fresh::measure(&fresh, &stand, effort, report)?;
        refused::measure(&refused, &stand, effort, report)?;
        foreign::measure(&foreign, &stand, effort, report)
    })
}
