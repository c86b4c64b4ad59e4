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
    let [established, foreign, fresh] =
        ["established", "none of ours", "new flow"].map(|group| report.wants(group, "per packet"));
    if !(established || foreign || fresh) {
        return Ok(());
    }
    let stand = Stand::build()?;
    stand.run(|| {
        if established {
            established::measure(&stand, effort, report)?;
        }
        if foreign {
            foreign::measure(&stand, effort, report)?;
        }
        if fresh {
            fresh::measure(&stand, effort, report)?;
        }
        Ok(())
    })
}
