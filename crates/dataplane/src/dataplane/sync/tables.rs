//! Maglev tables in `tp_maglev`: the place of each, kept or newly allocated.
//!
//! A table gives places in one list of endpoints, and both are replaced by the same write, that of
//! the frontend: a changed table is therefore written as a whole into a range that no program
//! reads. It would differ in most slots anyway, since the places of all endpoints behind a changed
//! one do. Tables of Service ports whose endpoints did not change are neither computed nor written.

use std::time::{Duration, Instant};

use traffic_policy_cluster::model::{
    Algorithm, ServicePort, ServicePortKey,
    maglev::{Member, TableSize, digest, table},
};
use traffic_policy_ebpf::abi::{Frontend, IndexRange, maglev};

use super::{budget::Lack, former::Former, op::Op, ranges::Ranges};

/// The least quarantine of a table, while no other room is left. It is that short because many
/// tables may share little room, and a change of any Service would wait for it: the run loop leaves
/// as much between two writes in any case.
///
/// A packet reads a table within a microsecond of the frontend that names it. If its CPU stops for
/// longer between the two, the place that it reads is another table's: one beyond the list is not
/// taken, and any other is an endpoint of the same Service.
const REST: Duration = Duration::from_millis(50);

/// Reads the table at a range, the place in a list for each slot, as the map holds it.
pub type ReadTable<'a> = dyn Fn(IndexRange) -> anyhow::Result<Vec<u16>> + 'a;

/// A table in the map; the default is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Table {
    /// The first element, and the number of slots.
    pub range: IndexRange,
    /// The check word of the table's members.
    pub digest: u32,
}

impl Table {
    /// Returns the table that a frontend names.
    pub fn of(frontend: &Frontend) -> Self {
        Self { range: frontend.maglev, digest: frontend.digest }
    }

    /// Returns the place in the list for each slot, if `ops` writes the table.
    pub fn written_by(self, ops: &[Op]) -> Option<Vec<u16>> {
        ops.iter().rev().find_map(|op| match op {
            Op::Table { base, elements } if *base == self.range.base => {
                Some(maglev::unpack(elements, self.range.len).collect())
            }
            _ => None,
        })
    }

    /// Returns the elements of the map that it takes.
    fn elements(self) -> IndexRange {
        elements(self.range)
    }
}

/// Returns the elements of the map that tables of former owners take.
fn of_former(former: &Former) -> IndexRange {
    IndexRange { base: former.tables.base, len: former.tables.len * maglev::elements(former.slots) }
}

fn elements(range: IndexRange) -> IndexRange {
    IndexRange { base: range.base, len: maglev::elements(range.len) }
}

/// The free elements.
#[derive(Debug)]
pub struct Tables {
    ranges: Ranges,
    used: u64,
    /// The number of elements that the current plan writes.
    written: u32,
    /// The time of that plan.
    planned: Option<Instant>,
}

impl Tables {
    /// Starts from the content of the maps. `size`: the elements of `tp_maglev`.
    pub fn new<'a>(size: u32, frontends: impl Iterator<Item = &'a Frontend>) -> Self {
        let taken = |frontend: &Frontend| [elements(frontend.maglev), of_former(&Former::of(frontend))];
        let ranges = Ranges::new(size, frontends.flat_map(taken));
        Self { used: (size - ranges.unused()).into(), ranges, written: 0, planned: None }
    }

    /// Returns the table for the list of policy Cluster, which `ops` writes unless it is the old
    /// one; none for a Service port without one.
    ///
    /// # Errors
    /// The table finds no room, or the endpoints outnumber its slots: they are to be chosen at
    /// random.
    pub fn place(
        &mut self,
        old: Table,
        key: &ServicePortKey,
        port: &ServicePort,
        size: TableSize,
        now: Instant,
        ops: &mut Vec<Op>,
    ) -> Result<Table, Lack> {
        if port.algorithm != Algorithm::Maglev || port.cluster.is_empty() {
            return Ok(Table::default());
        }
        let members = port.cluster.iter();
        let members: Vec<Member> = members
            .map(|endpoint| Member::new(endpoint.address, key.protocol, endpoint.weight.into()))
            .collect();
        let digest = digest(&members, size);
        if old.range.len == size.slots() && old.digest == digest {
            return Ok(old);
        }
        let Some(places) = table(&members, size) else {
            return Err(Lack::TableSlots { endpoints: members.len(), slots: size.slots() });
        };
        let taken = self.take(maglev::elements(size.slots()), now).ok_or(Lack::Tables)?;
        ops.push(Op::Table { base: taken.base, elements: maglev::pack(&places).collect() });
        Ok(Table { range: IndexRange { base: taken.base, len: size.slots() }, digest })
    }

    fn take(&mut self, len: u32, now: Instant) -> Option<IndexRange> {
        let taken = self.ranges.take_early(len, REST, now)?;
        self.used += u64::from(taken.len);
        self.written += taken.len;
        Some(taken)
    }

    /// Frees the elements of a table.
    pub fn free(&mut self, table: Table, now: Instant) {
        let elements = table.elements();
        self.used = self.used.saturating_sub(elements.len.into());
        self.ranges.release(elements, now);
    }

    /// Returns the tables of former owners, which `ops` writes; `None`: they find no room.
    pub fn place_former(
        &mut self,
        tables: &[Vec<u16>],
        slots: u32,
        now: Instant,
        ops: &mut Vec<Op>,
    ) -> Option<IndexRange> {
        let len = tables.len() as u32;
        let taken = self.take(len * maglev::elements(slots), now)?;
        let mut elements = Vec::with_capacity(taken.len as usize);
        tables.iter().for_each(|table| elements.extend(maglev::pack(table)));
        ops.push(Op::Table { base: taken.base, elements });
        Some(IndexRange { base: taken.base, len })
    }

    /// Frees the elements of tables of former owners.
    pub fn free_former(&mut self, former: &Former, now: Instant) {
        if former.tables.len > 0 {
            let elements = of_former(former);
            self.used = self.used.saturating_sub(elements.len.into());
            self.ranges.release(elements, now);
        }
    }

    /// Begins a plan.
    pub fn begin(&mut self, now: Instant) {
        self.planned = Some(now);
        self.written = 0;
    }

    /// Notes that the last plan is in the maps: no frontend names what it freed.
    pub fn written(&mut self, now: Instant) {
        if let Some(planned) = self.planned {
            self.ranges.written(planned, now);
        }
    }

    /// Returns the time for which the next plan should wait: `REST` if the tables that were
    /// written took more than half of what was free, so that those that they replace are free then.
    pub fn pause(&self) -> Duration {
        if self.written > self.ranges.unused() { REST } else { Duration::ZERO }
    }

    /// Returns the number of elements in use.
    pub fn used(&self) -> u64 {
        self.used
    }
}
