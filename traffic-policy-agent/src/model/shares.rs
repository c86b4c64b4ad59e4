//! Room for all Services together: as long as they ask for no more than twice what the maps take, all of them are
//! built, and the data plane says what fits. Beyond that the oldest are built, and no Service port of the others is
//! kept: the memory of the desired state is bounded, however many Services a tenant makes. Their objects are held all
//! the same.

use std::collections::BTreeMap;

use super::{Limits, ServiceName, limits::Demand};

/// All Services together may ask for so many times what the maps take.
const TIMES: u64 = 2;

/// The room that each Service asks for, by its age and name, and whether it may have it.
#[derive(Clone, Debug, Default)]
pub(super) struct Shares {
    /// By creation (seconds since 1970) and name: the oldest first.
    asked: BTreeMap<(i64, ServiceName), Asked>,
    /// Of all of them, those that are left out included.
    sum: Demand,
    /// Number of Services that are left out.
    out: usize,
}

#[derive(Clone, Copy, Debug)]
struct Asked {
    demand: Demand,
    out: bool,
}

impl Shares {
    /// Replaces the demand of a Service. `old` and `new` give its creation in seconds since 1970; `None`: it was, or
    /// is, not there.
    pub(super) fn set(&mut self, name: &ServiceName, old: Option<i64>, new: Option<(i64, Demand)>) {
        let old = old.and_then(|created| self.asked.remove(&(created, name.clone())));
        if let Some(old) = &old {
            self.sum = self.sum.minus(&old.demand);
            self.out -= usize::from(old.out);
        }
        if let Some((created, demand)) = new {
            let out = old.is_some_and(|old| old.out);
            self.sum = self.sum.plus(&demand);
            self.out += usize::from(out);
            self.asked.insert((created, name.clone()), Asked { demand, out });
        }
    }

    /// Judges anew who may have what it asks for. Returns those for whom that changed, and whether they are left out.
    pub(super) fn judge(&mut self, limits: &Limits) -> Vec<(ServiceName, bool)> {
        let room = Demand::room(limits, TIMES);
        // The ordinary case: there is room for all.
        if self.out == 0 && self.sum.fits(&room) {
            return Vec::new();
        }
        let mut had = Demand::default();
        let mut changed = Vec::new();
        self.out = 0;
        for ((_, name), asked) in &mut self.asked {
            let with = had.plus(&asked.demand);
            let out = !with.fits(&room);
            if out {
                self.out += 1;
            } else {
                had = with;
            }
            if asked.out != out {
                asked.out = out;
                changed.push((name.clone(), out));
            }
        }
        changed
    }

    /// Whether a Service, made at this time, is left out.
    pub(super) fn is_out(&self, name: &ServiceName, created: i64) -> bool {
        self.out > 0 && self.asked.get(&(created, name.clone())).is_some_and(|asked| asked.out)
    }
}
