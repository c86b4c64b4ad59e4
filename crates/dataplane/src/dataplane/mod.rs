//! The packet path as the agent sees it: maps, programs, devices. The only module that uses `aya`
//! or `unsafe`.

mod adoption;
pub mod bpf;
pub mod clock;
mod config;
pub mod counters;
mod devices;
pub mod gc;
mod heartbeat;
pub mod kernel;
pub mod maps;
mod nexthop;
mod node;
pub mod privileges;
mod replacement;
mod rivals;
mod route_mtus;
mod sockets;
mod start;
pub mod sync;
pub mod sys;
pub mod tracing_copy;
mod usage;
pub mod veth_peer;

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    path::Path,
    time::{Duration, Instant},
};

use anyhow::Result;
use aya::Ebpf;
use ipnet::IpNet;
use traffic_policy_cluster::model::{Changes, Desired, Limits};

pub use self::{
    adoption::{Adopted, adopt_pinned},
    bpf::{
        attach::{Attached, Cgroup, Interface, Mode, drivers},
        introspect,
        loader::{MapSizes, load, load_seeded, object_bytes},
        pins::{DEFAULT as DEFAULT_PINS, Look as PinsLook, OnOtherLayout, Removed},
        programs::{jump_table, jumps, load_programs},
        test_context::{sk_buff, xdp_md},
        verifier::{Refusal, try_programs},
    },
    clock::monotonic,
    config::{Config, IdleTimes, SourceCheck, Written},
    counters::Counter,
    devices::{Lost, pinned_devices},
    gc::sweeper::{Found, Sweeper},
    kernel::{Kernel, release_memory},
    maps::{
        Maps,
        keys::{FromWire, FrontendId, GoneEndpoint, ToWire, endpoint_key, from_wide, number, wide},
        reader::MapInfo,
    },
    nexthop::{Changed, NextHop},
    privileges::{check_privileges, drop_privileges, effective_capabilities, missing_privileges},
    replacement::Replaced,
    sockets::ConnectedUdp,
    start::cleanup,
    sync::budget::{Lack, LeftOut},
    sync::snat_ports::{
        LEAST as LEAST_POOL, PortRanges, Wanted as Pool, ephemeral as ephemeral_ports, ranges as port_ranges,
        reserved as reserved_ports,
    },
    usage::{DataplaneUsage, MapUsage},
};
use self::{
    bpf::{frags, pins::Pins},
    devices::Devices,
    gc::Gc,
    maps::{
        mmap::{self, table_usage},
        prefilter::Needed,
    },
    sockets::Sockets,
    sync::{
        apply,
        budget::Capacity,
        plan::{Context, Planner},
        snat_ports,
    },
};
use crate::node::RouteMtus;

/// The loaded packet path.
pub struct Dataplane {
    object: Ebpf,
    maps: Maps,
    planner: Planner,
    /// Whether a sync has failed since the planner was given the content of the maps.
    stale: bool,
    gc: Gc,
    devices: Devices,
    sockets: Sockets,
    /// Whether the prefilter may hold bits of Services that no longer exist.
    needs_prune: bool,
    /// The sizes of the maps by the flags that would set them.
    sizes: Vec<(&'static str, u32)>,
    config: Config,
    pins: Option<Pins>,
    /// Whether the links of another layout version have been taken over.
    adopted: bool,
    named: node::Named,
    /// The MTUs of routes as the maps hold them; `None` if they are unknown.
    route_mtus: Option<RouteMtus>,
    adoption: adoption::Adoption,
}

impl Dataplane {
    /// Records the address of `/healthz` and `/status`, which `status` queries.
    pub fn report_address(&mut self, address: SocketAddr) {
        heartbeat::address(&mut self.maps, address);
    }

    /// Returns the sizes of the maps by the flags that would set them: those of an earlier agent
    /// are kept.
    pub fn sizes(&self) -> impl Iterator<Item = (&'static str, u32)> + '_ {
        self.sizes.iter().copied()
    }

    /// Sets the idle times after which flows are removed, from the next sweep on.
    pub fn set_idle_times(&mut self, idle: IdleTimes) {
        if self.config.idle != idle {
            let hz = self.maps.heartbeat.load(mmap::heartbeat::hz);
            idle.warn_of_too_long(hz);
            self.gc.set_timeouts(idle.in_jiffies(hz));
            self.config.idle = idle;
        }
    }

    /// Returns the settings of the SNAT port range.
    pub fn pool(&self) -> Pool {
        self.config.pool.clone()
    }

    /// Uses these source ports, unless the ones in use still suffice.
    pub fn use_pool(&mut self, ports: Vec<u16>) {
        snat_ports::apply(&mut self.maps, ports);
    }

    /// Makes the maps equal to the desired state, processing only what `changes` names (everything,
    /// the first time).
    ///
    /// # Errors
    /// The first write that failed; the others were done. The next call compares with the maps
    /// again.
    pub fn sync(
        &mut self,
        desired: &Desired,
        changes: &Changes,
        addresses: &BTreeSet<IpAddr>,
    ) -> Result<Written> {
        if self.stale {
            self.plan_anew()?;
        }
        let mut failed = self.name_addresses(addresses).err();
        let context = Context {
            addresses,
            drain: self.config.drain,
            monotonic: monotonic()?,
            now: Instant::now(),
            adopting: self.adoption.is_pending(),
        };
        let plan = self.planner.plan(desired, changes, &context);
        let needed = apply::needed(&plan.ops, self.planner.service_cidrs());
        let mut elements = needed.add_to(&mut self.maps.prefilter);
        if !plan.ops.is_empty() {
            self.needs_prune = true;
            self.gc.written();
        }
        // Endpoints are named before the maps forget them, so that an agent that is killed here
        // leaves a record for the next one.
        let serving = |endpoint: &GoneEndpoint| self.planner.is_serving(endpoint);
        failed = failed.or(self.gc.forget_serving(&mut self.maps, serving).err());
        self.gc.name(&mut self.maps, &plan.gone, serving);
        for op in &plan.ops {
            match apply::write(&mut self.maps, op) {
                Ok(written) => elements += written,
                Err(error) => {
                    tracing::warn!("{error:#}");
                    failed.get_or_insert(error);
                }
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
        self.gc.synced();
        heartbeat::synced(&mut self.maps)?;
        Ok(Written { elements, left_out: plan.left_out })
    }

    /// Makes the planner start from the content of the maps.
    fn plan_anew(&mut self) -> Result<()> {
        self.planner = Planner::new(apply::read(&self.maps)?, self.maps.room.plan_capacity());
        self.stale = false;
        Ok(())
    }

    /// Returns the limits of the maps: the model builds no more of any one Service.
    pub fn limits(&self) -> Limits {
        let Capacity { frontends, source_ranges, slots, .. } = self.maps.room.plan_capacity();
        Limits { frontends, source_ranges, endpoints: slots }
    }

    /// Returns the time for which the next sync should wait, so that slots freed by the last one
    /// can be used again: up to a second, if long lists of endpoints change.
    pub fn pause(&self) -> Duration {
        self.planner.pause()
    }

    /// Whether the next sync compares everything, not just what changed.
    pub fn compares_all(&self) -> bool {
        self.stale || self.planner.is_first()
    }

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

    /// Makes the next sweep a periodic one: it removes flows that have expired, and moves to the
    /// other generation of next hops when they run out.
    ///
    /// # Errors
    /// The kernel refuses to report the time.
    pub fn sweep(&mut self) -> Result<()> {
        self.gc.request();
        heartbeat::beat(&mut self.maps, &self.object)
    }

    /// Whether a flow has found no room in a main table, so that a sweep must begin at once: at
    /// most once a second, and not while one is under way.
    pub fn found_no_room(&mut self) -> bool {
        self.gc.found_no_room(self.maps.usage.load(table_usage::full_at))
    }

    /// Whether [`Self::sweep_on`] has work to do.
    pub fn is_sweeping(&self) -> bool {
        self.gc.is_active()
    }

    /// Runs a piece of the sweep, in fractions of a millisecond. Returns whether it completed a
    /// periodic sweep.
    ///
    /// # Errors
    /// The kernel refuses; the next periodic sweep tries again.
    pub fn sweep_on(&mut self) -> Result<bool> {
        let serving = |endpoint: &GoneEndpoint| self.planner.is_serving(endpoint);
        let Some(swept) = self.gc.step(&self.object, &mut self.maps, serving)? else { return Ok(false) };
        if self.needs_prune && swept.no_flows && !self.stale {
            self.prune();
        }
        nexthop::renew(&mut self.maps)?;
        Ok(true)
    }

    /// Attaches the programs to a device.
    ///
    /// # Errors
    /// See [`Mode`]. A device that was attached to before is served by TC from then on.
    pub fn attach(&mut self, interface: &Interface) -> Result<Attached> {
        if let Some(root) = &self.config.pins {
            rivals::refuse(root, &interface.name, interface.ifindex)?;
        }
        self.devices.attach(&mut self.object, &mut self.maps, interface)
    }

    /// Forgets a device that is gone, or no longer wanted.
    ///
    /// # Errors
    /// A pin cannot be removed.
    pub fn detach(&mut self, ifindex: u32) -> Result<()> {
        self.devices.detach(&mut self.maps, ifindex)
    }

    /// Forgets devices and cgroups that an earlier agent attached to and that are not attached to
    /// now.
    ///
    /// # Errors
    /// A pin cannot be removed.
    pub fn forget_others(&mut self) -> Result<()> {
        self.devices.forget_others(&mut self.maps)?;
        self.pins.iter().try_for_each(|pins| frags::forget_other_kind(&pins.maps(), self.config.mode))?;
        self.sockets.forget_others()
    }

    /// Whether the programs are attached to a device as it is now, and in the configured mode.
    pub fn is_settled(&self, interface: &Interface) -> bool {
        self.devices.is_settled(interface)
    }

    /// Whether programs of another layout version serve until [`Self::adopt`].
    pub fn is_replacing(&self) -> bool {
        !self.adopted && self.has_others()
    }

    /// Whether another layout version has left programs or maps that [`Self::drop_replaced`] has
    /// not removed.
    pub fn has_others(&self) -> bool {
        self.pins.as_ref().is_some_and(|pins| !pins.others().is_empty())
    }

    /// Takes over the links of another layout version: attaching then replaces its programs with
    /// those of this version.
    ///
    /// # Errors
    /// A pin cannot be moved.
    pub fn adopt(&mut self) -> Result<()> {
        if let Some(pins) = &self.pins {
            pins.adopt()?;
        }
        self.adopted = true;
        Ok(())
    }

    /// Removes what another layout version has left.
    ///
    /// # Errors
    /// A folder cannot be removed.
    pub fn drop_replaced(&mut self) -> Result<Replaced> {
        let Some(pins) = &mut self.pins else { return Ok(Replaced::default()) };
        // Filters do not disappear with a folder of pins, and its maps list their devices.
        self.devices.detach_filters_of_others(pinned_devices(pins.root()));
        replacement::finish(pins)
    }

    /// Returns the devices whose programs other processes have detached, as far as their links
    /// show.
    pub fn lost(&self) -> Vec<Lost> {
        self.devices.lost(&self.object)
    }

    /// Returns the priority and handle of the filters that TC programs are on kernels without links
    /// for them.
    pub fn filters(&self) -> Option<(u16, u32)> {
        self.devices.filters()
    }

    /// Marks a device whose programs must be attached again, because other processes have detached
    /// them.
    pub fn unsettle(&mut self, ifindex: u32) {
        self.devices.unsettle(ifindex);
    }

    /// Returns the calls of the cgroup's processes whose programs were detached.
    ///
    /// # Errors
    /// The cgroup is gone.
    pub fn lost_calls(&self) -> Result<Vec<&'static str>> {
        self.sockets.lost(&self.object)
    }

    /// Returns the devices with the attach mode of each.
    pub fn attached(&self) -> impl ExactSizeIterator<Item = (&Interface, Attached)> {
        self.devices.attached()
    }

    /// Attaches the programs for connections of this node's processes, according to `--cgroup`.
    ///
    /// # Errors
    /// The programs cannot be attached.
    pub fn attach_cgroup(&mut self) -> Result<()> {
        self.sockets.attach(&mut self.object)
    }

    /// Returns the cgroup whose connections are translated.
    pub fn cgroup(&self) -> Option<&Path> {
        self.sockets.cgroup()
    }

    /// Returns the UDP endpoints that stopped serving since the last sweep: sockets connected to
    /// one of them must be destroyed.
    pub fn gone_udp(&self) -> BTreeSet<GoneEndpoint> {
        self.gc.gone_udp()
    }

    /// Returns the table of connected UDP sockets, for a reader in another thread.
    ///
    /// # Errors
    /// No file descriptor is available.
    pub fn connected_udp(&self) -> Result<ConnectedUdp> {
        self.sockets.connected_udp()
    }

    /// Describes the node to the packet path: the addresses that sockets without an address will
    /// probably use.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn describe_node(&mut self, primary: &[IpAddr], pod_ranges: &[IpNet]) -> Result<()> {
        node::describe(&mut self.maps, primary, pod_ranges)
    }

    /// Records that stored routes or neighbours may be wrong.
    ///
    /// # Errors
    /// The maps cannot be written.
    pub fn raise(&mut self, changed: Changed) -> Result<()> {
        nexthop::raise(&mut self.maps, changed)
    }

    /// Compares the fingerprint of the node's routes with the one that stored next hops belong to;
    /// if they differ, no agent was watching when the routes changed.
    ///
    /// # Errors
    /// The maps cannot be written.
    pub fn compare_network(&mut self, fingerprint: u32) -> Result<bool> {
        let changed = self.maps.config.load(mmap::config::network) != fingerprint;
        if changed {
            self.raise(Changed::Routes)?;
            self.note_network(fingerprint);
        }
        Ok(changed)
    }

    /// Stores the fingerprint of the routes that [`Self::raise`] was called for.
    pub fn note_network(&mut self, fingerprint: u32) {
        self.maps.config.store(mmap::config::network, fingerprint);
    }

    /// Returns the next hops in use.
    ///
    /// # Errors
    /// The maps cannot be read.
    pub fn next_hops(&self) -> Result<Vec<NextHop>> {
        nexthop::list(&self.maps)
    }

    /// Returns the usage of the maps, for which only a few words of them are read.
    pub fn usage(&self) -> DataplaneUsage {
        DataplaneUsage::read(&self.maps, &self.planner, &self.gc, self.devices.attached().len())
    }

    /// Returns a reader of the packet path's counters that may be called at any time and from any
    /// thread. Counters that are zero are included, so that the first packet of a kind is seen as
    /// growth.
    pub fn counter_reader(&self) -> impl Fn() -> Result<Vec<Counter>> + Send + Sync + 'static {
        let map = self.maps.counters.clone();
        move || counters::all(&map)
    }
}
