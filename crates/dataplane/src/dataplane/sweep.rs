//! Sweeps of the flow tables: the sweep that is due runs piece by piece, so that neither packets
//! nor changes wait for a large table.

pub mod milestones;
mod pressure;
mod room;
pub mod sweeper;
pub mod sweeps;
mod walk;

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result};
use aya::Ebpf;
use traffic_policy_ebpf::abi::mark;

use self::{
    room::Room,
    sweeper::{Found, Sweeper},
};
use super::maps::{
    Maps,
    keys::{Removal, RemovedEndpoint, endpoint_key},
};

/// The pending sweeps, the one that is under way, and the endpoints whose flows they mark.
#[derive(Debug)]
pub struct Sweeps {
    sweeper: Sweeper,
    /// The endpoints in `tp_removed_eps`, whose flows are being marked.
    removed: BTreeMap<RemovedEndpoint, Removal>,
    /// The result of the last periodic sweep: IPv4, IPv6.
    found: [Found; 2],
    room: Room,
    /// Whether the maps have been made equal to the desired state: before, it is unknown which of
    /// `removed` serve.
    synced: bool,
    /// The endpoints that were named as removed, and for which no marking sweep has begun.
    unmarked: BTreeSet<RemovedEndpoint>,
    /// The endpoints of a marking sweep that failed: it is retried with the next tick.
    failed: BTreeSet<RemovedEndpoint>,
    /// The endpoints that the maps had no room to name.
    unnamed: BTreeMap<RemovedEndpoint, Removal>,
    /// The endpoints that had been named when a periodic sweep became due; `None` if none is due.
    due: Option<BTreeSet<RemovedEndpoint>>,
    /// The number of periodic sweeps that followed another at once because the table is nearly
    /// full.
    hurried: u32,
    /// Whether the last sweep marked the flows of removed endpoints.
    marked_last: bool,
    under_way: Option<Kind>,
}

#[derive(Debug)]
enum Kind {
    /// An immediate sweep for the sake of these removed endpoints.
    Marking(BTreeSet<RemovedEndpoint>),
    Periodic {
        /// The endpoints that were named before the sweep was due, and marked before it began.
        removed: BTreeSet<RemovedEndpoint>,
        /// Whether the maps were written in the meantime.
        written: bool,
    },
}

/// The result of a completed periodic sweep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Swept {
    /// Whether there are no flows, and writes to the maps in the meantime cannot have created any.
    pub no_flows: bool,
}

impl Sweeps {
    /// Creates the state. `removed`: the endpoints that an earlier agent had named; `full_at`: the
    /// current value of [`traffic_policy_ebpf::abi::TableUsage::full_at`].
    pub fn new(sweeper: Sweeper, removed: BTreeMap<RemovedEndpoint, Removal>, full_at: u32) -> Self {
        Self {
            sweeper,
            unmarked: removed.keys().copied().collect(),
            removed,
            found: Default::default(),
            room: Room::new(full_at),
            synced: false,
            failed: BTreeSet::new(),
            unnamed: BTreeMap::new(),
            due: None,
            hurried: 0,
            marked_last: false,
            under_way: None,
        }
    }

    /// Returns the result of the last periodic sweep: IPv4, IPv6.
    pub fn found(&self) -> [Found; 2] {
        self.found
    }

    /// Returns the number of episodes in which a flow found no room: IPv4, IPv6.
    pub fn episodes(&self) -> [u64; 2] {
        self.room.episodes()
    }

    /// Returns the endpoints whose flows are being marked.
    pub fn removed(&self) -> &BTreeMap<RemovedEndpoint, Removal> {
        &self.removed
    }

    /// Records that the maps have been made equal to the desired state.
    pub fn synced(&mut self) {
        self.synced = true;
    }

    /// Records that the maps were written: flows that the sweep under way has not seen may need
    /// entries that are no longer desired.
    pub fn written(&mut self) {
        if let Some(Kind::Periodic { written, .. }) = &mut self.under_way {
            *written = true;
        }
    }

    /// Makes the next sweep a periodic one.
    pub fn request(&mut self) {
        self.unmarked.append(&mut self.failed);
        self.due = Some(self.removed.keys().copied().collect());
    }

    /// Runs a piece of the sweep, in fractions of a millisecond; returns the result of a periodic
    /// sweep that the piece completed. `serving`: whether a Service port names an endpoint as
    /// serving again, or still.
    ///
    /// # Errors
    /// The programs of the sweep cannot be run, or `tp_removed_eps` cannot be written; the next
    /// periodic sweep tries again.
    pub fn step(
        &mut self,
        object: &Ebpf,
        maps: &mut Maps,
        serving: impl Fn(&RemovedEndpoint, Removal) -> bool,
    ) -> Result<Option<Swept>> {
        if self.under_way.is_none() && !self.begin() {
            return Ok(None);
        }
        match self.sweeper.go_on(object, maps) {
            Ok(None) => Ok(None),
            Ok(Some(found)) => match self.under_way.take() {
                Some(Kind::Periodic { removed, written }) => {
                    tracing::trace!(?found, "swept");
                    self.found = found;
                    self.room.swept(&found, self.sweeper.sizes());
                    for endpoint in &removed {
                        self.forget(maps, endpoint)?;
                    }
                    let again = std::mem::take(&mut self.unnamed);
                    self.name(maps, &again, serving);
                    // A flow is noticed, marked and deleted in successive sweeps, which do not wait
                    // a period each.
                    if self.sweeper.is_pressed() && self.hurried < 2 {
                        self.hurried += 1;
                        self.request();
                    } else {
                        self.hurried = 0;
                    }
                    let none = found.iter().all(|found| found.entries == 0);
                    Ok(Some(Swept { no_flows: none && !written }))
                }
                Some(Kind::Marking(_)) | None => Ok(None),
            },
            Err(error) => {
                if let Some(Kind::Marking(mut removed)) = self.under_way.take() {
                    self.failed.append(&mut removed);
                }
                Err(error)
            }
        }
    }

    /// Begins the next sweep; returns whether there is one.
    fn begin(&mut self) -> bool {
        let marking = self.synced && !self.unmarked.is_empty();
        // The two kinds alternate: endpoints may be removed as fast as a large table is swept.
        if marking && !(self.marked_last && self.due.is_some()) {
            self.marked_last = true;
            self.under_way = Some(Kind::Marking(std::mem::take(&mut self.unmarked)));
            self.sweeper.begin(mark::ONLY);
        } else if let Some(mut removed) = self.due.take() {
            self.marked_last = false;
            // The flow of a packet that was under way may be inserted behind the first sweep, so
            // endpoints are forgotten after the second sweep that marks.
            removed.retain(|endpoint| self.synced && !self.unmarked.contains(endpoint));
            self.under_way = Some(Kind::Periodic { removed, written: false });
            let marks = self.synced && !self.removed.is_empty();
            self.sweeper.begin(if marks { mark::TOO } else { mark::NONE });
        } else {
            return false;
        }
        true
    }

    /// Names endpoints that accept no new flows, for the sweeps from now on to the next periodic
    /// one: a packet that chose one of them just before may insert its flow behind the first sweep.
    /// An endpoint that finds no room is named when others are forgotten.
    pub fn name(
        &mut self,
        maps: &mut Maps,
        removed: &BTreeMap<RemovedEndpoint, Removal>,
        serving: impl Fn(&RemovedEndpoint, Removal) -> bool,
    ) {
        for (endpoint, from) in removed.iter().filter(|(endpoint, from)| !serving(endpoint, **from)) {
            let from = self.removed.get(endpoint).map_or(*from, |held| *from.min(held));
            if let Err(error) = maps.removed.insert(endpoint_key(endpoint), from.value(), 0) {
                if self.unnamed.is_empty() {
                    tracing::warn!(endpoint = %endpoint.endpoint, "flows of a removed endpoint stay for now: {error}");
                }
                self.unnamed.insert(*endpoint, from);
                continue;
            }
            self.removed.insert(*endpoint, from);
            self.unmarked.insert(*endpoint);
            if let Some(due) = &mut self.due {
                due.remove(endpoint);
            }
            if let Some(Kind::Periodic { removed, .. }) = &mut self.under_way {
                removed.remove(endpoint);
            }
        }
    }

    /// Removes the names of endpoints that serve again, or that a killed agent had named and that
    /// serve.
    pub fn forget_serving(
        &mut self,
        maps: &mut Maps,
        serving: impl Fn(&RemovedEndpoint, Removal) -> bool,
    ) -> Result<()> {
        let back = self.removed.iter().filter(|(endpoint, from)| serving(endpoint, **from));
        let back: Vec<_> = back.map(|(endpoint, _)| *endpoint).collect();
        for endpoint in back {
            self.forget(maps, &endpoint)?;
            self.unmarked.remove(&endpoint);
        }
        Ok(())
    }

    /// Removes the name of an endpoint; does nothing if it is not named.
    fn forget(&mut self, maps: &mut Maps, endpoint: &RemovedEndpoint) -> Result<()> {
        if self.removed.contains_key(endpoint) {
            let key = endpoint_key(endpoint);
            maps.removed.remove(&key).context("forgetting a removed endpoint failed")?;
            self.removed.remove(endpoint);
        }
        Ok(())
    }
}
