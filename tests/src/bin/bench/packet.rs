//! What one packet costs, by BPF_PROG_TEST_RUN.

mod established;
pub(crate) mod flows;
mod foreign;
pub(crate) mod frame;
mod fresh;
mod loaded;
pub(crate) mod stand;

use anyhow::Result;

use self::stand::Stand;
use super::{Effort, report::Report};

pub(crate) fn measure(effort: Effort, report: &mut Report) -> Result<()> {
    let stand = Stand::build()?;
    stand.run(|| {
        established::measure(&stand, effort, report)?;
        foreign::measure(&stand, effort, report)?;
        fresh::measure(&stand, effort, report)
    })
}
