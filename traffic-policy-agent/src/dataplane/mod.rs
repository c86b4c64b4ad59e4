//! The packet path as the agent sees it: maps, programs, devices. The only module that names `aya` or says `unsafe`.

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
use crate::{
    model::{Changes, Desired, Limits},
    node::RouteMtus,
};

/// The loaded packet path.
pub struct Dataplane {
    object: Ebpf,
    maps: Maps,
    planner: Planner,
    /// A sync has failed since the planner was given what the maps hold.
    stale: bool,
    gc: Gc,
    devices: Devices,
    sockets: Sockets,
    /// The prefilter may hold bits of Services that are gone.
    needs_prune: bool,
    /// Sizes of the maps by the flags that would set them.
    sizes: Vec<(&'static str, u32)>,
    config: Config,
    pins: Option<Pins>,
    /// The links of another layout version are ours by now.
    adopted: bool,
    named: node::Named,
    /// MTUs of routes as the maps have them; `None`: not known.
    route_mtus: Option<RouteMtus>,
    adoption: adoption::Adoption,
}

impl Dataplane {
    /// Records the address of `/healthz` and `/status`, for `status` to ask.
    pub fn report_address(&mut self, address: SocketAddr) {
        heartbeat::address(&mut self.maps, address);
    }

    /// Sizes of the maps by the flags that would set them: those of an earlier agent are kept.
    pub fn sizes(&self) -> impl Iterator<Item = (&'static str, u32)> + '_ {
        self.sizes.iter().copied()
    }

    /// Lets flows go after these times from the next sweep on.
    pub fn set_idle_times(&mut self, idle: IdleTimes) {
        if self.config.idle != idle {
            let hz = self.maps.heartbeat.load(mmap::heartbeat::hz);
            idle.warn_of_too_long(hz);
            self.gc.set_timeouts(idle.in_jiffies(hz));
            self.config.idle = idle;
        }
    }

    /// Settings of the source port pool.
    pub fn pool(&self) -> Pool {
        self.config.pool.clone()
    }

    /// Uses these source ports, unless those in use will do.
    pub fn use_pool(&mut self, ports: Vec<u16>) {
        snat_ports::apply(&mut self.maps, ports);
    }

    /// Makes the maps equal to what is desired, touching only what `changes` name (everything, the first time).
    ///
    /// # Errors
    /// The first write that failed; the others were done. The next call compares with the maps anew.
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
        // Named before the maps forget them: an agent that is killed here leaves word for the next one.
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
            // The planner takes what it planned for done.
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

    /// Lets the planner begin with what the maps hold.
    fn plan_anew(&mut self) -> Result<()> {
        self.planner = Planner::new(apply::read(&self.maps)?, self.maps.room.plan_capacity());
        self.stale = false;
        Ok(())
    }

    /// The room of the maps: the model builds no more of any one Service.
    pub fn limits(&self) -> Limits {
        let Capacity { frontends, source_ranges, slots, .. } = self.maps.room.plan_capacity();
        Limits { frontends, source_ranges, endpoints: slots }
    }

    /// Time that the next sync had better wait, so that slots freed by the last one can be used again: up to a second, where
    /// long lists of endpoints change.
    pub fn pause(&self) -> Duration {
        self.planner.pause()
    }

    /// Whether the next sync compares everything, not just what changed.
    pub fn compares_all(&self) -> bool {
        self.stale || self.planner.is_first()
    }

    /// Takes bits of Services that are gone off the prefilter.
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

    /// Lets the next sweep be a periodic one: it removes flows that have expired, and moves to the other generation of next
    /// hops when they run out.
    ///
    /// # Errors
    /// The kernel refuses to tell the time.
    pub fn sweep(&mut self) -> Result<()> {
        self.gc.request();
        heartbeat::beat(&mut self.maps, &self.object)
    }

    /// Whether a flow has found no room in a main table, so that a sweep is to begin at once: not more than once a second, and not
    /// while one is under way.
    pub fn found_no_room(&mut self) -> bool {
        self.gc.found_no_room(self.maps.usage.load(table_usage::full_at))
    }

    /// Whether [`Self::sweep_on`] has something to do.
    pub fn is_sweeping(&self) -> bool {
        self.gc.is_active()
    }

    /// Does a piece of what is to be swept, in fractions of a millisecond. Whether that was the end of a periodic sweep.
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

    /// Forgets a device: it is gone, or not wanted any more.
    ///
    /// # Errors
    /// A pin that cannot be removed.
    pub fn detach(&mut self, ifindex: u32) -> Result<()> {
        self.devices.detach(&mut self.maps, ifindex)
    }

    /// Forgets devices and cgroups that an earlier agent attached to and that are not attached to now.
    ///
    /// # Errors
    /// A pin that cannot be removed.
    pub fn forget_others(&mut self) -> Result<()> {
        self.devices.forget_others(&mut self.maps)?;
        self.pins.iter().try_for_each(|pins| frags::forget_other_kind(&pins.maps(), self.config.mode))?;
        self.sockets.forget_others()
    }

    /// Whether a device is attached to as it is now, and in the way that was asked for.
    pub fn is_settled(&self, interface: &Interface) -> bool {
        self.devices.is_settled(interface)
    }

    /// Programs of another layout version serve until [`Self::adopt`].
    pub fn is_replacing(&self) -> bool {
        !self.adopted && self.has_others()
    }

    /// Another layout version has left programs or maps, which [`Self::drop_replaced`] has not freed.
    pub fn has_others(&self) -> bool {
        self.pins.as_ref().is_some_and(|pins| !pins.others().is_empty())
    }

    /// Takes over the links of another layout version: to attach puts this version's programs into their places.
    ///
    /// # Errors
    /// A pin that cannot be moved.
    pub fn adopt(&mut self) -> Result<()> {
        if let Some(pins) = &self.pins {
            pins.adopt()?;
        }
        self.adopted = true;
        Ok(())
    }

    /// Frees what another layout version has left.
    ///
    /// # Errors
    /// A folder that cannot be removed.
    pub fn drop_replaced(&mut self) -> Result<Replaced> {
        let Some(pins) = &mut self.pins else { return Ok(Replaced::default()) };
        // Filters do not go with a folder of pins, and its maps say where they are.
        self.devices.detach_filters_of_others(pinned_devices(pins.root()));
        replacement::finish(pins)
    }

    /// Devices whose programs others have detached, as far as their links tell.
    pub fn lost(&self) -> Vec<Lost> {
        self.devices.lost(&self.object)
    }

    /// Priority and handle of the filters that TC programs are where there are no links for them.
    pub fn filters(&self) -> Option<(u16, u32)> {
        self.devices.filters()
    }

    /// A device is to be attached to anew: others have detached its programs.
    pub fn unsettle(&mut self, ifindex: u32) {
        self.devices.unsettle(ifindex);
    }

    /// Calls of the cgroup's processes whose programs were detached.
    ///
    /// # Errors
    /// The cgroup is gone.
    pub fn lost_calls(&self) -> Result<Vec<&'static str>> {
        self.sockets.lost(&self.object)
    }

    /// Devices with the way each is attached.
    pub fn attached(&self) -> impl ExactSizeIterator<Item = (&Interface, Attached)> {
        self.devices.attached()
    }

    /// Serves the connections that processes of this node make, as `--cgroup` says.
    ///
    /// # Errors
    /// The programs cannot be attached.
    pub fn attach_cgroup(&mut self) -> Result<()> {
        self.sockets.attach(&mut self.object)
    }

    /// The cgroup whose connections are served.
    pub fn cgroup(&self) -> Option<&Path> {
        self.sockets.cgroup()
    }

    /// UDP endpoints that stopped serving since the last sweep: sockets connected to one of them must be destroyed.
    pub fn gone_udp(&self) -> BTreeSet<GoneEndpoint> {
        self.gc.gone_udp()
    }

    /// The table of connected UDP sockets, to be read elsewhere.
    ///
    /// # Errors
    /// No descriptor is free.
    pub fn connected_udp(&self) -> Result<ConnectedUdp> {
        self.sockets.connected_udp()
    }

    /// Describes the node to the packet path: what sockets without an address will probably use.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn describe_node(&mut self, primary: &[IpAddr], pod_ranges: &[IpNet]) -> Result<()> {
        node::describe(&mut self.maps, primary, pod_ranges)
    }

    /// Says that stored routes or neighbours may be wrong.
    ///
    /// # Errors
    /// The maps cannot be written.
    pub fn raise(&mut self, changed: Changed) -> Result<()> {
        nexthop::raise(&mut self.maps, changed)
    }

    /// Compares the fingerprint of the node's routes with the one that stored next hops belong to; if it is another,
    /// no agent watched when they changed.
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

    /// Remembers the fingerprint of routes that [`Self::raise`] was called for.
    pub fn note_network(&mut self, fingerprint: u32) {
        self.maps.config.store(mmap::config::network, fingerprint);
    }

    /// Next hops that packets take now.
    ///
    /// # Errors
    /// The maps cannot be read.
    pub fn next_hops(&self) -> Result<Vec<NextHop>> {
        nexthop::list(&self.maps)
    }

    /// Usage of the maps: reads only a few words of them.
    pub fn usage(&self) -> DataplaneUsage {
        DataplaneUsage::read(&self.maps, &self.planner, &self.gc, self.devices.attached().len())
    }

    /// Reads the packet path's counters, at any time and from any thread: with zeros, so that the first packet of a kind is
    /// seen as growth.
    pub fn counter_reader(&self) -> impl Fn() -> Result<Vec<Counter>> + Send + Sync + 'static {
        let map = self.maps.counters.clone();
        move || counters::all(&map)
    }
}
