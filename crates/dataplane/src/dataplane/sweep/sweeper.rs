//! A sweep over the flow tables by the packet path's own programs, piece by piece.
//!
//! A program that the kernel runs to completion, however long that takes, keeps its CPU from
//! everything that the scheduler controls: for a full table that is a quarter of a second, in which
//! packets wait whenever the kernel has left them to a thread (ksoftirqd). A walk over a table
//! resumes where it stopped.

use anyhow::{Context, Result};
use aya::Ebpf;
use traffic_policy_ebpf::{
    abi::{Sweep, mark},
    tcp::Timeouts,
};

use super::{
    pressure::Pressure,
    walk::{SweptTable, Walk, Walkers},
};
use crate::dataplane::{bpf::test_run, maps::Maps};

/// The result of a sweep in one family.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// The number of entries in the table.
    pub entries: u32,
    pub snat: u32,
    pub unassured: u32,
    pub deleted: u32,
}

/// Runs sweeps and remembers what the next one must do.
#[derive(Debug)]
pub struct Sweeper {
    timeouts: Timeouts,
    pressure: [Pressure; 2],
    sizes: [u32; 2],
    walkers: Option<Walkers>,
    under_way: Option<UnderWay>,
}

/// The state of a sweep between two pieces.
#[derive(Debug)]
struct UnderWay {
    /// The mode of marking, see [`mark`].
    mark: u32,
    /// The family that is being swept, 0 or 1.
    family: usize,
    /// The number of tables of the family that have been begun.
    begun: usize,
    walk: Option<Walk>,
    found: [Found; 2],
}

impl Sweeper {
    /// Creates a sweeper with timeouts in jiffies, and sizes in entries: IPv4, IPv6.
    pub fn new(timeouts: Timeouts, sizes: [u32; 2]) -> Self {
        Self { timeouts, pressure: [Pressure::NONE; 2], sizes, walkers: None, under_way: None }
    }

    /// Sets the timeouts for the packet path, as each sweep does: even if an agent stops before its
    /// first sweep, expired flows must leave a full table.
    pub fn announce(&self, maps: &mut Maps) -> Result<()> {
        let order = Sweep { timeouts: self.timeouts, ..Sweep::default() };
        maps.sweep.set(0, order, 0).context("writing the time-outs of flows failed")
    }

    /// Sweeps both families. Returns the number of pieces that it took, and the result.
    pub fn run(&mut self, object: &Ebpf, maps: &mut Maps, mark_removed: bool) -> Result<(usize, [Found; 2])> {
        self.begin(if mark_removed { mark::TOO } else { mark::NONE });
        let mut pieces = 0;
        loop {
            pieces += 1;
            if let Some(found) = self.go_on(object, maps)? {
                return Ok((pieces, found));
            }
        }
    }

    /// Sets the timeouts for the families that are begun from now on.
    pub fn set_timeouts(&mut self, timeouts: Timeouts) {
        self.timeouts = timeouts;
    }

    /// Returns the number of entries that the tables have room for: IPv4, IPv6.
    pub fn sizes(&self) -> [u32; 2] {
        self.sizes
    }

    /// Whether the next sweep removes flows early.
    pub fn is_pressed(&self) -> bool {
        self.pressure.iter().any(|pressure| *pressure != Pressure::NONE)
    }

    /// Begins a sweep of both families, which [`Self::go_on`] continues; `mark` controls the
    /// marking of flows of removed endpoints. A sweep that is under way is abandoned.
    pub fn begin(&mut self, mark: u32) {
        let found = [Found::default(); 2];
        self.under_way = Some(UnderWay { mark, family: 0, begun: 0, walk: None, found });
    }

    /// Runs a piece of the sweep that is under way: some hundred entries, fractions of a
    /// millisecond. Returns the result with the last piece.
    ///
    /// # Errors
    /// The kernel refuses to run the program; the sweep has then ended.
    pub fn go_on(&mut self, object: &Ebpf, maps: &mut Maps) -> Result<Option<[Found; 2]>> {
        let Some(mut sweep) = self.under_way.take() else { return Ok(Some([Found::default(); 2])) };
        if let Some(walk) = &mut sweep.walk {
            if walk.piece(object, maps)? {
                sweep.walk = None;
            }
        } else if sweep.family == sweep.found.len() {
            return Ok(Some(sweep.found));
        } else {
            if sweep.begun == 0 {
                self.order(object, maps, &sweep)?;
            }
            let walkers = match self.walkers.take() {
                Some(walkers) => walkers,
                None => Walkers::new(object, maps)?,
            };
            let walkers = self.walkers.insert(walkers);
            let sockets = (sweep.mark != mark::NONE).then_some(SweptTable::Sockets);
            match [SweptTable::Flows(sweep.family)].into_iter().chain(sockets).nth(sweep.begun) {
                Some(table) => {
                    sweep.walk = Some(walkers.begin(table)?);
                    sweep.begun += 1;
                }
                None => {
                    if sweep.mark != mark::ONLY {
                        self.take_result(maps, &mut sweep)?;
                    }
                    (sweep.family, sweep.begun) = (sweep.family + 1, 0);
                }
            }
        }
        self.under_way = Some(sweep);
        Ok(None)
    }

    /// Writes the instructions for sweeping one family.
    fn order(&self, object: &Ebpf, maps: &mut Maps, sweep: &UnderWay) -> Result<()> {
        let order = Sweep {
            ipv6: sweep.family as u32,
            pressure: self.pressure[sweep.family].idle,
            surplus: self.pressure[sweep.family].surplus,
            timeouts: self.timeouts,
            mark: sweep.mark,
            ..Sweep::default()
        };
        maps.sweep.set(0, order, 0).context("ordering a sweep failed")?;
        test_run::raw_tracepoint(object, "tp_gc_begin").map(drop)
    }

    /// Takes the result of one family, all of whose tables have been walked.
    fn take_result(&mut self, maps: &mut Maps, sweep: &mut UnderWay) -> Result<()> {
        let family = sweep.family;
        let result = maps.sweep.get(&0, 0).context("reading the result of a sweep failed")?;
        sweep.found[family] = Found {
            entries: result.entries,
            snat: result.snat,
            unassured: result.unassured + result.unassured_udp,
            deleted: result.deleted,
        };
        self.pressure[family] = Pressure::after(&result, self.sizes[family]);
        Ok(())
    }
}
