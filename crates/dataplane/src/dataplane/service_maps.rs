//! The maps of Services, which follow the desired state.

use std::{
    collections::BTreeSet,
    net::IpAddr,
    time::{Duration, Instant},
};

use anyhow::Result;
use traffic_policy_cluster::model::{Changes, Desired, Forwarding, Limits};

use super::{
    Dataplane,
    bpf::programs::Selection,
    clock,
    config::Written,
    heartbeat,
    maps::keys::RemovedEndpoint,
    nexthop::{Changed, NextHops as _},
    sctp,
    sctp_divider::SctpReplies as _,
    sync::{
        apply,
        budget::{Capacity, Lack},
        op::Op,
        plan::{Context, Planner},
    },
};

/// The maps of Services.
pub trait ServiceMaps {
    /// Makes the maps equal to the desired state, processing only what `changes` names (everything,
    /// the first time). `addresses`: this node's own.
    ///
    /// # Errors
    /// The first bpf(2) call that failed; the other writes were done. The next call compares with
    /// the maps again.
    fn sync(&mut self, desired: &Desired, changes: &Changes, addresses: &BTreeSet<IpAddr>)
    -> Result<Written>;

    /// Whether the next sync compares everything, not just what changed.
    fn compares_all(&self) -> bool;

    /// Returns the time for which the next sync should wait, so that slots freed by the last one
    /// can be used again: up to a second, if long lists of endpoints change.
    fn pause(&self) -> Duration;

    /// Returns the limits of the maps: the model builds no more of any one Service.
    fn limits(&self) -> Limits;

    /// Returns why some packets that other nodes forward directly to endpoints here are not opened:
    /// the maps have no room, or the kernel refuses the programs; `None`: all are.
    fn opens_not_all(&self) -> Option<String>;
}

impl ServiceMaps for Dataplane {
    fn sync(
        &mut self,
        desired: &Desired,
        changes: &Changes,
        addresses: &BTreeSet<IpAddr>,
    ) -> Result<Written> {
        if self.stale {
            self.plan_anew()?;
        }
        let compares_all = self.compares_all();
        // Before any frontend of it is written.
        if sctp::is_concerned(desired, changes, &self.planner, |_| true) {
            let held = (&mut self.object, &mut self.maps, &mut self.programs);
            let with_them = |held| Selection { sctp: true, ..held };
            self.sctp.ensure(held, with_them, ["SCTP is served", "SCTP is not served"]);
        }
        // Before any node that may send is written.
        if !desired.direct_nodes.is_empty() {
            let held = (&mut self.object, &mut self.maps, &mut self.programs);
            let with_them = |held| Selection { direct: true, ..held };
            let said = ["packets of other nodes are opened", "packets of other nodes are not opened"];
            self.opening.ensure(held, with_them, said);
        }
        // Before other nodes are told that replies of SCTP can go back through them.
        self.divider.is_wanted |=
            sctp::is_concerned(desired, changes, &self.planner, |port| port.forwarding == Forwarding::Tunnel);
        self.follow_divider();
        let mut failed = self.name_addresses(addresses).err();
        let context = Context {
            tables: &|range| apply::table(&self.maps, range),
            addresses,
            drain: self.config.drain,
            monotonic: clock::monotonic()?,
            now: Instant::now(),
            adopting: self.adoption.is_pending(),
            table_size: self.config.table_size,
            sctp: self.sctp.is_in_place(),
        };
        let plan = self.planner.plan(desired, changes, &context);
        let needed = apply::needed(&plan.ops, self.planner.service_cidrs());
        let mut elements = needed.add_to(&mut self.maps.prefilter);
        if !plan.ops.is_empty() {
            self.sweeps.written();
        }
        self.needs_prune |= plan.ops.iter().any(Op::leaves_bits);
        // Endpoints are named before the maps forget them, so that an agent that is killed here
        // leaves a record for the next one.
        let serving = |endpoint: &RemovedEndpoint, from| self.planner.is_serving(endpoint, from);
        failed = failed.or(self.sweeps.forget_serving(&mut self.maps, serving).err());
        self.sweeps.name(&mut self.maps, &plan.removed, serving);
        for op in &plan.ops {
            match apply::write(&mut self.maps, op) {
                Ok(written) => elements += written,
                Err(error) => {
                    tracing::warn!("{error:#}");
                    failed.get_or_insert(error);
                }
            }
        }
        self.planner.written(Instant::now());
        // Hops that were resolved before do not know which nodes take packets as they are.
        match self.direct.sync_macs(desired, compares_all) {
            Ok(0) => {}
            Ok(written) => {
                elements += written;
                self.raise(Changed::Neighbours);
            }
            Err(error) => {
                tracing::warn!("{error:#}");
                failed.get_or_insert(error);
            }
        }
        // Last: a packet that is opened for a Service port needs its frontend.
        let direct =
            self.direct.sync(desired, changes, &self.planner, addresses, compares_all, Instant::now());
        match direct {
            Ok(written) => elements += written,
            Err(error) => {
                tracing::warn!("{error:#}");
                failed.get_or_insert(error);
            }
        }
        if let Some(error) = failed {
            // The planner considers its plan done.
            self.stale = true;
            let anew = heartbeat::failing(&mut self.maps).and_then(|()| self.plan_anew());
            if let Err(error) = anew {
                tracing::warn!("{error:#}");
            }
            return Err(error);
        }
        self.sweeps.synced();
        heartbeat::synced(&mut self.maps)?;
        let lacks_programs = plan.left_out.iter().any(|left_out| left_out.lack == Lack::Programs);
        let refused = self.sctp.refusal().filter(|_| lacks_programs).map(ToOwned::to_owned);
        Ok(Written { elements, left_out: plan.left_out, refused })
    }

    fn compares_all(&self) -> bool {
        self.stale || self.planner.is_first()
    }

    fn pause(&self) -> Duration {
        self.planner.pause()
    }

    fn limits(&self) -> Limits {
        let Capacity { frontends, source_ranges, slots, .. } = self.maps.room.plan_capacity();
        let [direct_nodes, direct_macs] = self.direct.room();
        Limits { frontends, source_ranges, endpoints: slots, direct_nodes, direct_macs }
    }

    fn opens_not_all(&self) -> Option<String> {
        if let Some(why) = self.opening.refusal() {
            return Some(format!("the kernel refuses the programs that open packets: {why}"));
        }
        self.direct.is_full().then(|| "its maps have no room for all Services and endpoints".to_owned())
    }
}

impl Dataplane {
    /// Makes the planner start from the content of the maps.
    fn plan_anew(&mut self) -> Result<()> {
        self.planner = Planner::new(apply::read(&self.maps)?, self.maps.room.plan_capacity());
        self.stale = false;
        Ok(())
    }
}
