//! When the data plane sweeps: a piece at a time, so that neither packets nor changes wait for a large table.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result};

use super::{Dataplane, GoneEndpoint, tables::endpoint_key};

/// Sweeps that are to be done, and the one that is under way.
#[derive(Debug, Default)]
pub struct Sweeps {
    /// Endpoints were named as gone after the last sweep began.
    mark: bool,
    /// A periodic one is due.
    due: bool,
    under_way: Option<Kind>,
}

#[derive(Debug)]
enum Kind {
    /// For the sake of endpoints that are gone, at once.
    Marking,
    Periodic {
        /// Named before it began.
        gone: BTreeSet<GoneEndpoint>,
        /// The maps were written meanwhile.
        written: bool,
    },
}

impl Sweeps {
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
        self.sweeps.due = true;
        self.report_life()
    }

    /// Whether [`Self::sweep_on`] has something to do.
    pub fn is_sweeping(&self) -> bool {
        self.sweeps.under_way.is_some() || self.sweeps.mark || self.sweeps.due
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
                Some(Kind::Marking) | None => Ok(false),
            },
            Err(error) => {
                self.sweeps.under_way = None;
                Err(error)
            }
        }
    }

    /// Whether there is one to be done.
    fn begin_sweep(&mut self) -> bool {
        let gone = if self.synced { self.gone.clone() } else { BTreeSet::new() };
        let marks = !gone.is_empty();
        // A flow of a packet that was under way may be inserted behind the first one's back, so a periodic one, which
        // forgets the endpoints, comes after it.
        self.sweeps.under_way = if std::mem::take(&mut self.sweeps.mark) {
            Some(Kind::Marking)
        } else if std::mem::take(&mut self.sweeps.due) {
            Some(Kind::Periodic { gone, written: false })
        } else {
            return false;
        };
        self.sweeper.begin(marks);
        true
    }

    fn conclude(&mut self, gone: &BTreeSet<GoneEndpoint>, written: bool) -> Result<()> {
        for endpoint in gone {
            self.forget_gone(endpoint)?;
        }
        if self.untidy && !written && self.found.iter().all(|found| found.entries == 0 && found.pending == 0)
        {
            self.tidy();
        }
        self.hops.renew(&mut self.tables)
    }

    /// Names endpoints that take no more new flows, for the sweeps from now on to the next periodic one: a packet that
    /// chose one of them just before may insert its flow behind the first sweep's back. Endpoints that serve again, or
    /// that a killed agent named and that serve, are taken off.
    pub(super) fn name_gone(&mut self, gone: &BTreeSet<GoneEndpoint>) -> Result<()> {
        let back = self.gone.iter().filter(|endpoint| self.planner.is_serving(endpoint));
        for endpoint in back.copied().collect::<Vec<_>>() {
            self.forget_gone(&endpoint)?;
        }
        for endpoint in gone {
            let key = endpoint_key(endpoint);
            self.tables.gone.insert(key, 1, 0).context("naming a gone endpoint failed")?;
            self.gone.insert(*endpoint);
            if let Some(Kind::Periodic { gone, .. }) = &mut self.sweeps.under_way {
                gone.remove(endpoint);
            }
        }
        self.sweeps.mark |= !self.gone.is_empty();
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
