//! The packet path as the agent sees it: maps, programs, devices. The only room that names `aya` or says `unsafe`.

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
pub mod privileges;
mod sockets;
pub mod sync;
pub mod sys;
pub mod tracing_copy;
mod usage;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow};
use aya::Ebpf;

use self::{
    bpf::{attach::clsact, loader, pins, pins::Pins, programs, test_run, verifier},
    gc::Sweeps,
    maps::{
        mmap::{agent, pool_port, state},
        prefilter::{self, Array, Bits, Needed},
    },
    nexthop::Arena,
    sync::{
        apply,
        plan::{self, Context, Planner},
        snat_ports,
    },
};
pub use self::{
    bpf::{
        attach::{Attached, Cgroup, Interface, Mode, drivers},
        introspect,
        loader::{Sizes, load, object_bytes},
        pins::{DEFAULT as DEFAULT_PINS, Look as PinsLook, Removed},
        programs::{jumps, load_programs},
        verifier::{Refusal, try_programs},
    },
    clock::monotonic,
    config::{Config, IdleTimes, Written},
    counters::Counter,
    devices::pinned_devices,
    gc::sweeper::{Found, Sweeper},
    kernel::{Kernel, release_memory},
    maps::{
        Tables,
        keys::{FromWire, FrontendId, GoneEndpoint, ToWire, endpoint_key, from_wide, number, wide},
    },
    nexthop::{Changed, NextHop},
    privileges::{check_privileges, effective_capabilities, missing_privileges},
    sockets::ConnectedUdp,
    sync::snat_ports::{
        LEAST as LEAST_POOL, PortRanges, Wanted as Pool, bound as bound_ports, ephemeral as ephemeral_ports,
    },
    usage::{Fill, Levels},
};
use crate::model::{Desired, ServicePortKey};

/// Service ports, and slots of each family: as the maps are declared.
pub const PLAN_SIZES: plan::Sizes = plan::Sizes { slots: 262_144, services: 65_536 };
/// A hop is resolved again after this time, whatever the agent noticed.
const HOP_MAX_AGE: Duration = Duration::from_secs(60);
/// Answers (ICMP errors, RST) that each CPU may make in a second.
const ANSWERS_PER_SECOND: u32 = 1000;
/// Unconfirmed flows may hold this share of the main table.
const UNCONFIRMED_SHARE: u32 = 16;

/// The loaded packet path.
pub struct Dataplane {
    object: Ebpf,
    tables: Tables,
    planner: Planner,
    sweeper: Sweeper,
    sweeps: Sweeps,
    hops: Arena,
    attached: BTreeMap<u32, (Interface, Attached)>,
    /// The filter may hold bits of Services that are gone.
    untidy: bool,
    /// Endpoints in `GONE`: their flows are being marked.
    gone: BTreeSet<GoneEndpoint>,
    /// What the last periodic sweep found: IPv4, IPv6.
    found: [Found; 2],
    /// The maps have been made equal to what is desired: before, nobody can say which of `gone` serve.
    synced: bool,
    /// The cgroup that `config` means.
    cgroup: Option<PathBuf>,
    config: Config,
    kernel: Kernel,
    pins: Option<Pins>,
}

impl Dataplane {
    /// Loads the packet path, or takes over what an earlier agent left. Nothing is written that is right already.
    ///
    /// # Errors
    /// Missing privileges, an unfit kernel, no bpffs, a second agent, pins of another version, too few ports.
    pub fn open(config: Config) -> Result<Self> {
        check_privileges()?;
        let kernel = Kernel::running()?;
        let ports = config.pool.ports()?;
        let cgroup = config.cgroup.folder()?;
        let pins = config.pins.as_deref().map(Pins::open).transpose()?;
        match Self::load(config, kernel, pins.as_ref()) {
            Ok(mut dataplane) => {
                dataplane.set_pool(ports);
                dataplane.pins = pins;
                dataplane.cgroup = cgroup;
                Ok(dataplane)
            }
            Err(error) => {
                undo(pins.as_ref());
                Err(error)
            }
        }
    }

    fn load(config: Config, kernel: Kernel, pins: Option<&Pins>) -> Result<Self> {
        let maps = pins.map(Pins::maps);
        let (mut object, btf) = loader::open(config.sizes, maps.as_deref(), &kernel)?;
        let mut tables = Tables::take(&mut object)?;
        let word = heartbeat::say_loading(&mut tables);
        if let Err(error) = verifier::load(&mut object, &btf) {
            heartbeat::take_back(&mut tables, word);
            return Err(with_fix(error));
        }
        drop(btf);
        #[cfg(feature = "log")]
        bpf::log::follow(&mut object)?;
        jumps(&object, &mut tables)?;
        if let Some(pins) = pins {
            programs::pin(&mut object, &pins.programs())?;
        }
        let hz = clock::sample_hz(|| test_run::raw_tracepoint(&object, "clock"))?;
        let flows = [tables.v4.size, tables.v6.size];
        let sweeper = Sweeper::new(config.idle.in_jiffies(hz), flows);
        let planner = Planner::new(apply::read(&tables)?, PLAN_SIZES);
        let gone = apply::gone(&tables)?;
        let mut dataplane = Self {
            object,
            tables,
            planner,
            sweeper,
            sweeps: Sweeps::of(&gone),
            hops: Arena,
            attached: BTreeMap::new(),
            untidy: false,
            gone,
            found: Default::default(),
            synced: false,
            cgroup: None,
            config,
            kernel,
            pins: None,
        };
        dataplane.set_up_state(hz, flows)?;
        dataplane.name_namespace()?;
        Ok(dataplane)
    }

    /// Leaves the node as it was before [`Self::open`]: for a start that failed later on.
    pub fn undo(self) {
        if !self.kernel.has_tcx() && self.pins.as_ref().is_some_and(Pins::is_new) {
            self.attached.keys().copied().for_each(clsact::detach);
        }
        undo(self.pins.as_ref());
    }

    fn set_up_state(&mut self, hz: u32, flows: [u32; 2]) -> Result<()> {
        let words = &mut self.tables.state;
        if words.load(state::seed) == 0 {
            let mut seed = [0; 8];
            std::io::Read::read_exact(&mut std::fs::File::open("/dev/urandom")?, &mut seed)
                .context("/dev/urandom cannot be read")?;
            words.store(state::seed, u64::from_ne_bytes(seed) | 1);
        }
        self.tables.agent.store(agent::hz, hz);
        self.begin_report()?;
        let words = &mut self.tables.state;
        words.store(state::hop_max_age, HOP_MAX_AGE.as_secs() as u32 * hz);
        words.store(state::answers_per_jiffy, (ANSWERS_PER_SECOND / hz).max(1));
        words.store(state::unconfirmed_limit, flows.map(|flows| flows / UNCONFIRMED_SHARE));
        if words.load(state::route) & 0xffff == 0 {
            self.hops.raise(&mut self.tables, Changed::Routes)?;
        }
        Ok(())
    }

    /// Uses `free` as source ports, unless the ports in use will do.
    fn set_pool(&mut self, free: Vec<u16>) {
        let pool = &mut self.tables.pool;
        let len = self.tables.state.load(state::pool_len);
        let held: Vec<u16> =
            (0..=u16::MAX).take(len as usize).map(|place| pool.load(pool_port(place))).collect();
        let Some(ports) = snat_ports::choose(&held, free) else { return };
        // Bits first, and none is taken away: flows that use a port outlive its place in the pool.
        prefilter::add(&mut self.tables.filter, Array::Pool, &ports.iter().copied().collect::<Bits>());
        for (place, port) in (0..).zip(&ports) {
            pool.store(pool_port(place), *port);
        }
        self.tables.state.store(state::pool_len, ports.len() as u32);
        tracing::info!(ports = ports.len(), "source ports towards endpoints of other nodes");
    }

    /// Leaves out source ports that sockets of this node hold by now.
    ///
    /// # Errors
    /// Too few are left; the ports in use stay.
    pub fn refresh_pool(&mut self) -> Result<()> {
        let ports = self.config.pool.ports()?;
        self.set_pool(ports);
        Ok(())
    }

    /// Makes the maps equal to what is desired, touching only what `changed` names (everything, the first time).
    ///
    /// # Errors
    /// The first write that failed; the others were done. The next call compares with the maps anew.
    pub fn sync(
        &mut self,
        desired: &Desired,
        changed: &BTreeSet<ServicePortKey>,
        addresses: &BTreeSet<IpAddr>,
    ) -> Result<Written> {
        let context =
            Context { addresses, drain: self.config.drain, monotonic: monotonic()?, now: Instant::now() };
        let plan = self.planner.plan(desired, changed, &context);
        let mut elements =
            apply::needed(&plan.ops, self.planner.cluster_ips()).add_to(&mut self.tables.filter);
        if !plan.ops.is_empty() {
            self.untidy = true;
            self.sweeps.written();
        }
        // Named before the maps forget them: an agent that is killed here leaves word for the next one.
        let mut failed = self.forget_those_that_serve().err();
        self.name_gone(&plan.gone);
        for op in &plan.ops {
            match apply::write(&mut self.tables, op) {
                Ok(written) => elements += written,
                Err(error) => {
                    tracing::warn!("{error:#}");
                    failed.get_or_insert(error);
                }
            }
        }
        if let Some(error) = failed {
            self.report_failure()?;
            self.planner = Planner::new(apply::read(&self.tables)?, PLAN_SIZES);
            return Err(error);
        }
        self.synced = true;
        self.report_sync()?;
        Ok(Written { elements, no_room: plan.no_room })
    }

    /// Takes away bits of Services that are gone.
    fn tidy(&mut self) {
        let mut needed = Needed::default();
        for id in self.planner.frontends().keys() {
            needed.frontend(id.address, self.planner.cluster_ips());
        }
        self.planner.cluster_ips().iter().for_each(|address| needed.cluster_ip(*address));
        for range in self.planner.service_cidrs() {
            needed.service_cidr(*range);
        }
        needed.replace_all(&mut self.tables.filter);
        self.untidy = false;
    }

    /// Says that stored routes or neighbours may be wrong.
    ///
    /// # Errors
    /// The maps cannot be written.
    pub fn raise(&mut self, changed: Changed) -> Result<()> {
        self.hops.raise(&mut self.tables, changed)
    }

    /// Compares the fingerprint of the node's routes with the one that stored next hops belong to; if it is another,
    /// nobody watched when they changed.
    ///
    /// # Errors
    /// The maps cannot be written.
    pub fn compare_network(&mut self, fingerprint: u32) -> Result<bool> {
        // SAFETY: a field of the mapped element.
        let changed = self.tables.state.load(|s| unsafe { &raw mut (*s).network }) != fingerprint;
        if changed {
            self.raise(Changed::Routes)?;
            self.note_network(fingerprint);
        }
        Ok(changed)
    }

    /// Remembers the fingerprint of routes that [`Self::raise`] was called for.
    pub fn note_network(&mut self, fingerprint: u32) {
        // SAFETY: a field of the mapped element.
        self.tables.state.store(|s| unsafe { &raw mut (*s).network }, fingerprint);
    }

    /// Next hops that packets take now.
    ///
    /// # Errors
    /// The maps cannot be read.
    pub fn next_hops(&self) -> Result<Vec<NextHop>> {
        self.hops.list(&self.tables)
    }
}

/// Takes all programs of this agent off their devices and frees its maps, of any layout version; `None` if there were none.
///
/// # Errors
/// An agent is running, or what could not be removed.
pub fn cleanup(root: &Path) -> Result<Option<Removed>> {
    let kernel = Kernel::running()?;
    pins::cleanup(root, || {
        if !kernel.has_tcx() {
            pinned_devices(root).into_iter().for_each(clsact::detach);
        }
    })
}

/// A start that the verifier refuses ends with what `check` says of it.
fn with_fix(error: anyhow::Error) -> anyhow::Error {
    match error.downcast_ref::<Refusal>() {
        Some(refusal) => anyhow!("{refusal}: {}", Refusal::FIX),
        None => error,
    }
}

/// Takes back what a failed start has pinned.
fn undo(pins: Option<&Pins>) {
    if let Some(Err(error)) = pins.map(Pins::undo) {
        tracing::warn!("cleaning up after the failed start: {error:#}");
    }
}
