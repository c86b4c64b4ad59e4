//! The sweeps as the run loop drives them: when one is due, and each piece of it.

use std::{collections::BTreeSet, time::Instant};

use anyhow::Result;
use traffic_policy_cluster::model::Protocol;

use crate::dataplane::{
    Dataplane,
    config::IdleTimes,
    heartbeat,
    maps::{
        keys::{Removal, RemovedEndpoint},
        mmap::{heartbeat::hz, table_usage::full_at},
        prefilter::Needed,
    },
    nexthop,
};

/// The sweeps of the flow tables.
pub trait FlowSweeps {
    /// Sets the idle times after which flows are removed, from the next sweep on.
    fn set_idle_times(&mut self, idle: IdleTimes);

    /// Makes the next sweep a periodic one: it removes flows that have expired, and moves to the
    /// other generation of next hops when they run out. Forgets nodes that take part in direct
    /// forwarding no more.
    ///
    /// # Errors
    /// The kernel does not run the program that reports the time in jiffies (BPF_PROG_TEST_RUN), or
    /// keeps a node in a map, which the next sync tries again.
    fn sweep(&mut self) -> Result<()>;

    /// Whether a flow has found no room in a main table since a sweep was last begun for it, so
    /// that a sweep must begin at once: at most once a second, and not while one is under way.
    fn found_no_room(&mut self) -> bool;

    /// Whether [`Self::sweep_on`] has work to do.
    fn is_sweeping(&self) -> bool;

    /// Runs a piece of the sweep, in fractions of a millisecond. Returns whether it completed a
    /// periodic sweep.
    ///
    /// # Errors
    /// The programs of the sweep cannot be run, or a map cannot be written; the next periodic sweep
    /// tries again.
    fn sweep_on(&mut self) -> Result<bool>;

    /// Returns the UDP endpoints that stopped serving since the last sweep: sockets connected to
    /// one of them must be destroyed.
    fn removed_udp(&self) -> BTreeSet<RemovedEndpoint>;
}

impl FlowSweeps for Dataplane {
    fn set_idle_times(&mut self, idle: IdleTimes) {
        if self.config.idle != idle {
            let hz = self.maps.heartbeat.load(hz);
            idle.warn_of_too_long(hz);
            self.sweeps.sweeper.set_timeouts(idle.in_jiffies(hz));
            self.config.idle = idle;
        }
    }

    fn sweep(&mut self) -> Result<()> {
        self.sweeps.request();
        heartbeat::beat(&mut self.maps, &self.object)?;
        self.direct.forget_nodes(Instant::now())
    }

    fn found_no_room(&mut self) -> bool {
        let busy = self.sweeps.under_way.is_some() || self.sweeps.due.is_some();
        self.sweeps.room.look(self.maps.usage.load(full_at), busy, Instant::now())
    }

    fn is_sweeping(&self) -> bool {
        let sweeps = &self.sweeps;
        sweeps.under_way.is_some() || sweeps.due.is_some() || sweeps.synced && !sweeps.unmarked.is_empty()
    }

    fn sweep_on(&mut self) -> Result<bool> {
        let serving = |endpoint: &RemovedEndpoint, from| self.planner.is_serving(endpoint, from);
        let Some(swept) = self.sweeps.step(&self.object, &mut self.maps, serving)? else { return Ok(false) };
        if self.needs_prune && swept.no_flows && !self.stale {
            self.prune();
        }
        if let Some(generation) = nexthop::renew(&mut self.maps)? {
            self.silence.forget_hops(generation);
        }
        Ok(true)
    }

    fn removed_udp(&self) -> BTreeSet<RemovedEndpoint> {
        // Endpoints that an earlier agent had named may serve again by now: this is unknown before
        // the first sync.
        if !self.sweeps.synced {
            return BTreeSet::new();
        }
        let over = self.sweeps.removed.iter().filter(|(_, removal)| **removal == Removal::Service);
        over.map(|(endpoint, _)| *endpoint).filter(|endpoint| endpoint.protocol == Protocol::Udp).collect()
    }
}

impl Dataplane {
    /// Removes bits of Services that no longer exist from the prefilter.
    fn prune(&mut self) {
        let mut needed = Needed::default();
        for (id, frontend) in self.planner.frontends() {
            needed.frontend(id.address, frontend);
        }
        self.planner.cluster_ips().iter().for_each(|address| needed.address(*address));
        needed.service_cidrs = Some(self.planner.service_cidrs().clone());
        needed.replace_all(&mut self.maps.prefilter);
        self.needs_prune = false;
    }
}
