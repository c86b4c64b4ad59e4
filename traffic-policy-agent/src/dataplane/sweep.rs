//! Runs the sweep program, and draws the conclusions.

use anyhow::{Context, Result};
use aya::{
    Ebpf,
    programs::{RawTracePoint, RawTracePointRunOptions, TestRun},
};
use traffic_policy_ebpf::{abi::Sweep, tcp::Timeouts};

use super::{
    tables::Tables,
    words::{state, unconfirmed},
};

/// Above this share of a table, in percent, the flows that were idle for longest go first.
const PRESSURE_PERCENT: u64 = 80;

/// The count of unconfirmed flows is set right when it is off by more than this.
const DRIFT: u64 = 1024;

/// What a sweep found in one family.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Halves in the table.
    pub entries: u32,
    pub snat: u32,
    pub unconfirmed: u32,
    pub pending: u32,
    pub deleted: u32,
}

/// Runs sweeps and remembers what the next one must do.
#[derive(Debug)]
pub struct Sweeper {
    timeouts: Timeouts,
    pressure: [u32; 2],
    sizes: [u32; 2],
    /// `Usage` words of the last sweep, where it found nothing of their kind.
    no_snat: Option<u64>,
    no_pending: Option<u64>,
}

impl Sweeper {
    /// Time-outs in jiffies, sizes in halves: IPv4, IPv6.
    pub fn new(timeouts: Timeouts, sizes: [u32; 2]) -> Self {
        Self { timeouts, pressure: [u32::MAX; 2], sizes, no_snat: None, no_pending: None }
    }

    /// Sweeps both families.
    ///
    /// # Errors
    /// The kernel refuses to run the program.
    pub fn run(&mut self, object: &Ebpf, tables: &mut Tables, mark_gone: bool) -> Result<[Found; 2]> {
        let mut found = [Found::default(); 2];
        let mut first = None;
        for (family, found) in found.iter_mut().enumerate() {
            let order = Sweep {
                ipv6: family as u32,
                pressure: self.pressure[family],
                timeouts: self.timeouts,
                mark_gone: u32::from(mark_gone),
                ..Sweep::default()
            };
            tables.sweep.set(0, order, 0).context("ordering a sweep failed")?;
            run(object, "sweep")?;
            let result = tables.sweep.get(&0, 0).context("reading the result of a sweep failed")?;
            first.get_or_insert((result.snat_created, result.pending_created));
            *found = Found {
                entries: result.entries,
                snat: result.snat,
                unconfirmed: result.unconfirmed,
                pending: result.pending,
                deleted: result.deleted,
            };
            self.pressure[family] = pressure(&result, self.sizes[family]);
            // A flow that is confirmed at the very moment it is swept counts twice, and an agent may have been killed in
            // the middle. Flows that came and went while the sweep ran make a small difference, which is none.
            let counted = u64::from(result.unconfirmed);
            if tables.usage.load(unconfirmed(family)).abs_diff(counted) > DRIFT {
                tables.usage.store(unconfirmed(family), counted);
            }
        }
        if let Some((snat_created, pending_created)) = first {
            // What was created after the sweeps began keeps the words different. A flow announced just before may have
            // been inserted behind the sweep's back, so two sweeps in a row must find nothing.
            let no_snat = found.iter().all(|found| found.snat == 0).then_some(snat_created);
            if no_snat.is_some() && no_snat == self.no_snat {
                tables.state.store(state::snat_swept, snat_created);
            }
            self.no_snat = no_snat;
            let no_pending = found.iter().all(|found| found.pending == 0).then_some(pending_created);
            if no_pending.is_some() && no_pending == self.no_pending {
                tables.state.store(state::pending_swept, pending_created);
            }
            self.no_pending = no_pending;
        }
        Ok(found)
    }
}

/// Runs a raw tracepoint program once; its return value.
///
/// # Errors
/// The kernel refuses.
pub fn run(object: &Ebpf, name: &str) -> Result<u32> {
    let program = object.program(name).with_context(|| format!("the packet path has no program {name}"))?;
    let program: &RawTracePoint = program.try_into()?;
    let result = program
        .test_run(RawTracePointRunOptions::default())
        .with_context(|| format!("running the program {name} failed"))?;
    Ok(result.return_value)
}

/// The idle time beyond which the next sweep takes flows whatever their state.
fn pressure(result: &Sweep, size: u32) -> u32 {
    let room = u64::from(size) * PRESSURE_PERCENT / 100;
    let Some(excess) = u64::from(result.entries).checked_sub(room).filter(|excess| *excess > 0) else {
        return u32::MAX;
    };
    // Two halves a flow.
    let mut wanted = excess.div_ceil(2);
    for (magnitude, flows) in result.idle.iter().enumerate().rev() {
        wanted = wanted.saturating_sub(u64::from(*flows));
        if wanted == 0 {
            return 1 << magnitude;
        }
    }
    1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longest_idle_first() {
        let mut result = Sweep { entries: 80, ..Sweep::default() };
        result.idle[10] = 5;
        result.idle[3] = 35;
        assert_eq!(pressure(&result, 100), u32::MAX, "80 % is not above 80 %");
        result.entries = 90;
        assert_eq!(pressure(&result, 100), 1 << 10, "five flows idle for 2^10 jiffies make room enough");
        result.entries = 92;
        assert_eq!(pressure(&result, 100), 1 << 3);
    }
}
