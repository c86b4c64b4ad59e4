//! Start of the packet path: loaded, or taken over, and taken back where a start fails; and its end, `cleanup`.

use std::{path::Path, time::Duration};

use anyhow::{Context as _, Result, anyhow, bail};
use aya::Ebpf;

use super::{
    Changed, Config, Dataplane, Kernel, MapSizes, Maps, Refusal, Removed, Sweeper,
    adoption::Adoption,
    bpf::{
        attach::clsact,
        loader,
        pins::{self, Pins},
        programs, test_run, verifier,
    },
    check_privileges, clock,
    devices::{Devices, pinned_devices},
    gc::Gc,
    heartbeat, jumps,
    maps::mmap::{config, table_usage},
    nexthop, node,
    sockets::Sockets,
    sync::{apply, plan::Planner, snat_ports},
};

/// A hop is resolved again after this time, whatever the agent noticed, and whether there is one: one FIB look-up a hop.
const HOP_MAX_AGE: Duration = Duration::from_secs(5);
/// Answers (ICMP errors, RST) that each CPU may make in a second.
const ANSWERS_PER_SECOND: u32 = 1000;

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
        let on_other = config.on_other_layout;
        let pins = config.pins.as_deref().map(|root| Pins::open(root, on_other)).transpose()?;
        let sockets = Sockets::new(cgroup, pins.as_ref());
        match Self::load(config, kernel, pins.as_ref(), sockets) {
            Ok(mut dataplane) => {
                snat_ports::apply(&mut dataplane.maps, ports);
                dataplane.pins = pins;
                Ok(dataplane)
            }
            Err(error) => {
                undo(pins.as_ref());
                Err(error)
            }
        }
    }

    fn load(config: Config, kernel: Kernel, pins: Option<&Pins>, sockets: Sockets) -> Result<Self> {
        let folder = pins.map(Pins::maps);
        // That of the flows that are there: they are found by it.
        let seed = match folder.as_deref().map_or(0, loader::pinned_seed) {
            0 => random()? | 1,
            seed => seed,
        };
        let (mut object, btf) = loader::open(config.sizes, folder.as_deref(), seed, &kernel, config.mode)?;
        let sizes = MapSizes::in_effect(&object)?;
        let mut maps = Maps::take(&mut object)?;
        let earlier = heartbeat::loading(&mut maps);
        if let Err(error) = verifier::load(&mut object, &btf) {
            heartbeat::restore(&mut maps, earlier);
            return Err(with_fix(error));
        }
        drop(btf);
        #[cfg(feature = "log")]
        super::bpf::log::follow(&mut object)?;
        jumps(&object, &mut maps)?;
        if let Some(pins) = pins {
            programs::pin(&mut object, &pins.programs())?;
        }
        let hz = clock::sample_hz(|| test_run::raw_tracepoint(&object, "tp_clock"))?;
        config.idle.warn_of_too_long(hz);
        let flows = [maps.v4.size, maps.v6.size];
        let sweeper = Sweeper::new(config.idle.in_jiffies(hz), flows);
        let planner = Planner::new(apply::read(&maps)?, maps.room.plan_capacity());
        set_up_state(&mut maps, &object, hz, seed)?;
        sweeper.announce(&mut maps)?;
        let gc = Gc::new(sweeper, apply::gone(&maps)?, maps.usage.load(table_usage::full_at));
        node::name_namespace(&mut maps, config.source_check)?;
        let devices = Devices::new(config.mode, kernel, pins.map(Pins::links));
        let [needs_prune, stale, adopted] = [false; 3];
        Ok(Self {
            object,
            maps,
            planner,
            stale,
            gc,
            devices,
            sockets,
            needs_prune,
            sizes,
            config,
            pins: None,
            adopted,
            named: node::Named::default(),
            route_mtus: None,
            adoption: Adoption::default(),
        })
    }

    /// Leaves the node as it was before [`Self::open`]: for a start that failed later on.
    pub fn undo(self) {
        if self.pins.as_ref().is_some_and(Pins::is_new) {
            self.devices.detach_filters();
        }
        undo(self.pins.as_ref());
    }
}

/// Bytes that nobody can guess.
fn random() -> Result<u64> {
    let mut bytes = [0; 8];
    std::io::Read::read_exact(&mut std::fs::File::open("/dev/urandom")?, &mut bytes)
        .context("/dev/urandom cannot be read")?;
    Ok(u64::from_ne_bytes(bytes))
}

fn set_up_state(maps: &mut Maps, object: &Ebpf, hz: u32, seed: u64) -> Result<()> {
    let held = maps.config.load(config::seed);
    if held != 0 && held != seed {
        bail!("the pinned map tp_config could not be read before the programs were loaded: start again");
    }
    maps.config.store(config::seed, seed);
    heartbeat::begin(maps, object, hz)?;
    let words = &mut maps.config;
    words.store(config::hop_max_age, HOP_MAX_AGE.as_secs() as u32 * hz);
    words.store(config::answers_per_jiffy, (ANSWERS_PER_SECOND / hz).max(1));
    if words.load(config::route) & 0xffff == 0 {
        nexthop::raise(maps, Changed::Routes)?;
    }
    Ok(())
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
