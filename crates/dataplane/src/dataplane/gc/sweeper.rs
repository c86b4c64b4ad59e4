//! A sweep over the flow tables by the packet path's own iterator programs, piece by piece.
//!
//! A program that the kernel runs to completion, however long that takes, keeps its CPU from
//! everything that the scheduler controls: for a full table that is a quarter of a second, in which
//! packets wait whenever the kernel has left them to a thread (ksoftirqd). An iterator's walk over
//! a table resumes where it stopped.

use std::{
    fs::File,
    io::{self, Read},
    os::fd::{AsFd, OwnedFd},
};

use anyhow::{Context, Result};
use aya::{Ebpf, programs::Iter};
use traffic_policy_ebpf::{
    abi::{Sweep, mark},
    tcp::Timeouts,
};

use super::pressure::Pressure;
use crate::dataplane::{bpf::test_run, maps::Maps, sys};

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
    walk: Option<File>,
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
            let over = piece(walk).context("sweeping a table failed")?;
            if over {
                sweep.walk = None;
            }
        } else if sweep.family == sweep.found.len() {
            return Ok(Some(sweep.found));
        } else {
            if sweep.begun == 0 {
                self.order(object, maps, &sweep)?;
            }
            if self.walkers.is_none() {
                self.walkers = Some(Walkers::new(object, maps)?);
            }
            let walkers = self.walkers.as_ref();
            match walkers
                .and_then(|walkers| walkers.of(sweep.family, sweep.mark != mark::NONE).nth(sweep.begun))
            {
                Some(walker) => {
                    sweep.walk =
                        Some(sys::walk(walker.as_fd()).context("beginning a walk over a table failed")?);
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

/// The iterators over the tables; pairs are IPv4, IPv6.
#[derive(Debug)]
struct Walkers {
    flows: [OwnedFd; 2],
    sockets: OwnedFd,
}

impl Walkers {
    fn new(object: &Ebpf, maps: &Maps) -> Result<Self> {
        let walker = |name: &str, map: &OwnedFd| -> Result<OwnedFd> {
            let program =
                object.program(name).with_context(|| format!("the packet path has no program {name}"))?;
            let program: &Iter = program.try_into()?;
            sys::iterate(program.fd()?.as_fd(), map.as_fd())
                .with_context(|| format!("{name} cannot walk over its table"))
        };
        let swept = &maps.swept;
        Ok(Self {
            flows: [walker("tp_gc_flows4", &swept.flows[0])?, walker("tp_gc_flows6", &swept.flows[1])?],
            sockets: walker("tp_gc_sockets", &swept.sockets)?,
        })
    }

    /// Returns the iterators of one family.
    fn of(&self, family: usize, mark_removed: bool) -> impl Iterator<Item = &OwnedFd> {
        [&self.flows[family]].into_iter().chain(mark_removed.then_some(&self.sockets))
    }
}

/// Continues a walk for one piece; returns whether it has reached the end.
fn piece(walk: &mut File) -> io::Result<bool> {
    // The buffer is larger than what the program writes for one piece, and only that write ends a
    // read.
    let mut marks = [0; 64];
    match walk.read(&mut marks) {
        Ok(length) => Ok(length == 0),
        // The last piece of another walk ended with its last element, and so this one ended before
        // its first.
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
        Err(error) => Err(error),
    }
}
