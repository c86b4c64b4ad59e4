//! Shares of the maps for all Services together: as long as they ask for no more than twice what
//! the maps take, all of them are built, and the data plane reports what fits. Beyond that the
//! oldest are built, and no Service port of the others is kept: the memory of the desired state is
//! bounded, however many Services a tenant creates. Their objects are kept all the same.
//!
//! An admitted Service keeps its reservation: a Service that grows beyond the room is itself left
//! out, however old it is. Its reservation remains, so it is served again with the demand it had
//! before.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Limits, ServiceName,
    capacity::{Demand, TIMES},
};

/// Creation time (seconds since 1970) and name, so that the oldest Services sort first.
type Key = (i64, ServiceName);

/// The room that each Service asks for, and whether it is admitted.
#[derive(Clone, Debug, Default)]
pub(super) struct Shares {
    claims: BTreeMap<Key, Claim>,
    /// Services that are left out.
    out: BTreeSet<Key>,
    /// The sum of all reservations.
    held: Demand,
    /// Whether a reservation has shrunk since the Services that are left out were last judged.
    freed: bool,
    /// The number of Services that were judged, for tests.
    #[cfg(test)]
    pub(super) judged: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct Claim {
    demand: Demand,
    /// The reservation: the demand with which it was last admitted.
    held: Demand,
}

impl Claim {
    /// Admits the demand if it fits beside the reservations of all others.
    fn admit(&mut self, all: &mut Demand, room: &Demand) -> bool {
        let with = all.minus(&self.held).plus(&self.demand);
        let fits = self.demand.fits(&self.held) || with.fits(room);
        if fits {
            (*all, self.held) = (with, self.demand);
        }
        fits
    }
}

impl Shares {
    /// Replaces the demand of a Service, and returns whether it is left out. `old` and `new` give
    /// its creation time in seconds since 1970; `None`: it did not exist, or does not exist now.
    pub(super) fn set(
        &mut self,
        name: &ServiceName,
        old: Option<i64>,
        new: Option<(i64, Demand)>,
        limits: &Limits,
    ) -> bool {
        let before = self.held;
        if let Some(created) = old.filter(|created| new.is_none_or(|(new, _)| new != *created)) {
            let key = (created, name.clone());
            let gone = self.claims.remove(&key).unwrap_or_default();
            self.held = self.held.minus(&gone.held);
            self.out.remove(&key);
        }
        let out = new.is_some_and(|(created, demand)| {
            let key = (created, name.clone());
            let claim = self.claims.entry(key.clone()).or_default();
            claim.demand = demand;
            let out = !claim.admit(&mut self.held, &Demand::room(limits, TIMES));
            if out {
                self.out.insert(key);
            } else {
                self.out.remove(&key);
            }
            out
        });
        self.freed |= !before.fits(&self.held);
        out
    }

    /// Gives freed room to Services that are left out: first to those with a reservation, then to
    /// the oldest. Returns those that are admitted now.
    pub(super) fn judge(&mut self, limits: &Limits) -> Vec<ServiceName> {
        if !std::mem::take(&mut self.freed) {
            return Vec::new();
        }
        let room = Demand::room(limits, TIMES);
        let mut admitted = Vec::new();
        for has_place in [true, false] {
            for key in &self.out {
                #[cfg(test)]
                {
                    self.judged += 1;
                }
                if let Some(claim) = self.claims.get_mut(key)
                    && (claim.held != Demand::default()) == has_place
                    && claim.admit(&mut self.held, &room)
                {
                    admitted.push(key.clone());
                }
            }
            for key in &admitted {
                self.out.remove(key);
            }
        }
        admitted.into_iter().map(|(_, name)| name).collect()
    }

    /// Judges all Services by age alone. Returns those whose admission changed, and whether they
    /// are left out.
    pub(super) fn judge_anew(&mut self, limits: &Limits) -> Vec<(ServiceName, bool)> {
        let room = Demand::room(limits, TIMES);
        self.freed = false;
        // The ordinary case: there is room for all Services.
        if self.out.is_empty() && self.held.fits(&room) {
            return Vec::new();
        }
        self.held = Demand::default();
        let mut changed = Vec::new();
        for (key, claim) in &mut self.claims {
            #[cfg(test)]
            {
                self.judged += 1;
            }
            claim.held = Demand::default();
            let out = !claim.admit(&mut self.held, &room);
            let news = if out { self.out.insert(key.clone()) } else { self.out.remove(key) };
            if news {
                changed.push((key.1.clone(), out));
            }
        }
        changed
    }
}
