//! When the data plane sweeps: a piece at a time, so that neither packets nor changes wait for a large table.

pub mod sweeper;

use std::collections::BTreeSet;

use anyhow::{Context as _, Result};

use traffic_policy_ebpf::abi::mark;

use super::{
    Dataplane,
    maps::keys::{GoneEndpoint, endpoint_key},
};

/// Sweeps that are to be done, and the one that is under way.
#[derive(Debug, Default)]
pub struct Sweeps {
    /// Endpoints that were named as gone, for which no marking sweep has begun.
    unmarked: BTreeSet<GoneEndpoint>,
    /// Those of a marking sweep that failed: tried again with the next tick.
    failed: BTreeSet<GoneEndpoint>,
    /// Endpoints that the maps had no room to name.
    unnamed: BTreeSet<GoneEndpoint>,
    /// A periodic one is due, with those that had been named when it became due.
    due: Option<BTreeSet<GoneEndpoint>>,
    /// The last one was for the sake of endpoints that are gone.
    marked_last: bool,
    under_way: Option<Kind>,
}

#[derive(Debug)]
enum Kind {
    /// For the sake of these endpoints that are gone, at once.
    Marking(BTreeSet<GoneEndpoint>),
    Periodic {
        /// Named before it was due, and marked before it began.
        gone: BTreeSet<GoneEndpoint>,
        /// The maps were written meanwhile.
        written: bool,
    },
}

impl Sweeps {
    /// For what an earlier agent had named.
    pub fn of(gone: &BTreeSet<GoneEndpoint>) -> Self {
        Self { unmarked: gone.clone(), ..Self::default() }
    }

    /// The maps were written: flows that the sweep under way has not seen may need what is no longer desired.
    pub fn written(&mut self) {
        if let Some(Kind::Periodic { written, .. }) = &mut self.under_way {
            *written = true;
        }
    }
}

impl Dataplane {
    /// Lets the next sweep be a periodic one: it removes flows that are over, and moves to fresh hops when they run out.
    ///
    /// # Errors
    /// The kernel refuses to tell the time.
    pub fn sweep(&mut self) -> Result<()> {
        let Sweeps { unmarked, failed, .. } = &mut self.sweeps;
        unmarked.append(failed);
        self.sweeps.due = Some(self.gone.clone());
        self.report_life()
    }

    /// Whether [`Self::sweep_on`] has something to do.
    pub fn is_sweeping(&self) -> bool {
        let Sweeps { unmarked, due, under_way, .. } = &self.sweeps;
        under_way.is_some() || due.is_some() || self.synced && !unmarked.is_empty()
    }

    /// Does a piece of what is to be swept, in fractions of a millisecond. Whether that was the end of a periodic sweep.
    ///
    /// # Errors
    /// The kernel refuses; the next periodic sweep tries again.
    pub fn sweep_on(&mut self) -> Result<bool> {
        if self.sweeps.under_way.is_none() && !self.begin_sweep() {
            return Ok(false);
        }
        match self.sweeper.go_on(&self.object, &mut self.tables) {
            Ok(None) => Ok(false),
            Ok(Some(found)) => match self.sweeps.under_way.take() {
                Some(Kind::Periodic { gone, written }) => {
                    tracing::trace!(?found, "swept");
                    self.found = found;
                    self.conclude(&gone, written)?;
                    Ok(true)
                }
                Some(Kind::Marking(_)) | None => Ok(false),
            },
            Err(error) => {
                if let Some(Kind::Marking(mut gone)) = self.sweeps.under_way.take() {
                    self.sweeps.failed.append(&mut gone);
                }
                Err(error)
            }
        }
    }

    /// Whether there is one to be done.
    fn begin_sweep(&mut self) -> bool {
        let Sweeps { unmarked, due, marked_last, .. } = &mut self.sweeps;
        let marking = self.synced && !unmarked.is_empty();
        // They take turns: endpoints may go as fast as a large table is swept.
        if marking && !(*marked_last && due.is_some()) {
            *marked_last = true;
            self.sweeps.under_way = Some(Kind::Marking(std::mem::take(unmarked)));
            self.sweeper.begin(mark::ONLY);
        } else if let Some(mut gone) = due.take() {
            *marked_last = false;
            // A flow of a packet that was under way may be inserted behind the first sweep's back, so endpoints are
            // forgotten after the second that marks.
            gone.retain(|endpoint| self.synced && !unmarked.contains(endpoint));
            self.sweeps.under_way = Some(Kind::Periodic { gone, written: false });
            let marks = self.synced && !self.gone.is_empty();
            self.sweeper.begin(if marks { mark::TOO } else { mark::NONE });
        } else {
            return false;
        }
        true
    }

    fn conclude(&mut self, gone: &BTreeSet<GoneEndpoint>, written: bool) -> Result<()> {
        for endpoint in gone {
            self.forget_gone(endpoint)?;
        }
        let again = std::mem::take(&mut self.sweeps.unnamed);
        self.name_gone(&again);
        if self.untidy && !written && self.found.iter().all(|found| found.entries == 0 && found.pending == 0)
        {
            self.tidy();
        }
        self.hops.renew(&mut self.tables)
    }

    /// Names endpoints that take no more new flows, for the sweeps from now on to the next periodic one: a packet that
    /// chose one of them just before may insert its flow behind the first sweep's back. What finds no room is named when
    /// others are forgotten.
    pub(super) fn name_gone(&mut self, gone: &BTreeSet<GoneEndpoint>) {
        for endpoint in gone.iter().filter(|endpoint| !self.planner.is_serving(endpoint)) {
            if let Err(error) = self.tables.gone.insert(endpoint_key(endpoint), 1, 0) {
                if self.sweeps.unnamed.is_empty() {
                    tracing::warn!(endpoint = %endpoint.endpoint, "flows of an endpoint that is gone stay for now: {error}");
                }
                self.sweeps.unnamed.insert(*endpoint);
                continue;
            }
            self.gone.insert(*endpoint);
            self.sweeps.unmarked.insert(*endpoint);
            if let Some(due) = &mut self.sweeps.due {
                due.remove(endpoint);
            }
            if let Some(Kind::Periodic { gone, .. }) = &mut self.sweeps.under_way {
                gone.remove(endpoint);
            }
        }
    }

    /// Takes off endpoints that serve again, or that a killed agent named and that serve.
    ///
    /// # Errors
    /// The map cannot be written.
    pub(super) fn forget_those_that_serve(&mut self) -> Result<()> {
        let back = self.gone.iter().filter(|endpoint| self.planner.is_serving(endpoint));
        for endpoint in back.copied().collect::<Vec<_>>() {
            self.forget_gone(&endpoint)?;
            self.sweeps.unmarked.remove(&endpoint);
        }
        Ok(())
    }

    /// Does nothing if it is not named, or no longer.
    fn forget_gone(&mut self, endpoint: &GoneEndpoint) -> Result<()> {
        if self.gone.contains(endpoint) {
            let key = endpoint_key(endpoint);
            self.tables.gone.remove(&key).context("forgetting a gone endpoint failed")?;
            self.gone.remove(endpoint);
        }
        Ok(())
    }
}
