//! Former owners of the slots of Maglev tables.

use anyhow::Result;
use traffic_policy_cluster::model::maglev::TableSize;
use traffic_policy_dataplane::Words;
use traffic_policy_ebpf::abi::{IndexRange, maglev};

use super::loaded::ELEMENTS;

/// Writes tables of former owners: each names one of them in all slots, so frontends share them.
pub(super) fn write_former(tables: &mut Words, size: TableSize, count: u32) -> Result<IndexRange> {
    let len = maglev::elements(size.slots());
    let base = ELEMENTS - count * len;
    for nth in 0..count {
        let places = vec![nth as u16; size.slots() as usize];
        tables.write(base + nth * len, &maglev::pack(&places).collect::<Vec<_>>())?;
    }
    Ok(IndexRange { base, len: count })
}
