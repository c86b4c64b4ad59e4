//! Start of the packet path: it is loaded or taken over, and undone if a start fails; and its end,
//! `cleanup`.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, bail};
use aya::Ebpf;
use traffic_policy_ebpf::abi::jump;

use super::{
    Changed, Config, Dataplane, Kernel, MapSizes, Maps, Refusal, Removed, Sweeper,
    adoption::Adoption,
    bpf::{
        attach::clsact,
        loader,
        pins::{self, Pins},
        programs, verifier,
    },
    check_privileges, clock, conntrack_windows,
    devices::{Devices, pinned_devices},
    direct::Direct,
    heartbeat,
    maps::{
        mmap::{config, routes, table_usage},
        reader::Reader,
    },
    nexthop::{self, NextHops},
    node,
    node_silence::Silence,
    on_demand::OnDemand,
    pod_devices::{PodDevices, pinned_pods},
    sctp,
    sctp_divider::Divider,
    sockets::Sockets,
    sweep::{Sweeps, milestones},
    sync::{apply, plan::Planner, snat_ports::SnatPorts},
};
use crate::node::sctp_divider;

/// The time after which a hop is resolved again, whether or not there is an agent and whatever it
/// noticed: one FIB lookup per hop.
const HOP_MAX_AGE: Duration = Duration::from_secs(5);
/// The number of replies (ICMP errors, RST) that each CPU may generate per second.
const ANSWERS_PER_SECOND: u32 = 1000;

impl Dataplane {
    /// Loads the packet path, or takes over what an earlier agent left. Entries that are correct
    /// already are not written.
    ///
    /// # Errors
    /// Privileges are missing, the kernel is unsuitable, there is no bpffs, a second agent runs,
    /// there are pins of another version, or there are too few ports.
    pub fn open(config: Config) -> Result<Self> {
        check_privileges()?;
        let kernel = Kernel::running()?;
        let ports = config.snat_ports.ports()?;
        let cgroup = config.cgroup.folder()?;
        let on_other = config.on_other_layout;
        let pins = config.pins.as_deref().map(|root| Pins::open(root, on_other)).transpose()?;
        let sockets = Sockets::new(cgroup, pins.as_ref());
        match Self::load(config, kernel, pins.as_ref(), sockets) {
            Ok(mut dataplane) => {
                if !nexthop::has_epoch(&dataplane.maps) {
                    dataplane.raise(Changed::Routes);
                }
                dataplane.use_snat_ports(ports);
                dataplane.pins = pins;
                dataplane.take_over_divider();
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
        // The seed of existing flows is kept: they are found with it.
        let seed = match folder.as_deref().map_or(0, loader::pinned_seed) {
            0 => random()? | 1,
            seed => seed,
        };
        let (mut object, btf) = loader::open(config.sizes, folder.as_deref(), seed, &kernel, config.mode)?;
        let sizes = MapSizes::in_effect(&object)?;
        let mut maps = Maps::take(&mut object)?;
        let earlier = heartbeat::loading(&mut maps);
        let held = apply::read(&maps)?;
        // The others go on sending to a node that has opened packets.
        let opens = folder.as_deref().is_some_and(|folder| programs::is_in_place(folder, jump::OPEN));
        let selection = config.programs(sctp::is_served(&held, folder.as_deref()), opens);
        if let Err(error) = verifier::load_those(&mut object, &btf, |name| selection.needs(name)) {
            heartbeat::restore(&mut maps, earlier);
            return Err(with_fix(error));
        }
        drop(btf);
        #[cfg(feature = "log")]
        super::bpf::log::follow(&mut object)?;
        programs::jumps_needed(&object, &mut maps, selection)?;
        if let Some(pins) = pins {
            programs::pin(&mut object, &pins.programs())?;
        }
        let hz = clock::hz()?;
        config.idle.warn_of_too_long(hz);
        let flows = [maps.v4.size, maps.v6.size];
        let sweeper = Sweeper::new(config.idle.in_jiffies(hz), flows);
        let planner = Planner::new(held, maps.room.plan_capacity());
        set_up_state(&mut maps, &object, hz, seed)?;
        sweeper.announce(&mut maps)?;
        milestones::enter(&mut maps)?;
        let silence = Silence::open(&mut object)?;
        let forwarding = Direct::open(&mut object, Instant::now())?;
        let sweeps = Sweeps::new(sweeper, apply::removed(&maps)?, maps.usage.load(table_usage::full_at));
        node::name_namespace(&mut maps, config.source_check)?;
        let devices = Devices::new(config.mode, kernel, pins.map(Pins::links));
        let [stale, adopted] = [false; 2];
        Ok(Self {
            object,
            maps,
            planner,
            stale,
            sweeps,
            devices,
            sockets,
            // An earlier agent may have left some.
            needs_prune: true,
            sizes,
            config,
            pins: None,
            adopted,
            named: node::Named::default(),
            silence,
            direct: forwarding,
            pods: PodDevices::default(),
            sctp: OnDemand::loaded(selection.sctp),
            opening: OnDemand::loaded(selection.direct),
            divider: Divider::default(),
            programs: selection,
            route_mtus: None,
            adoption: Adoption::default(),
        })
    }

    /// Restores the node to its state before [`Self::open`], after a start that failed later on.
    pub fn undo(self) {
        if self.pins.as_ref().is_some_and(Pins::is_new) {
            self.devices.detach_filters();
            remove_divider();
        }
        undo(self.pins.as_ref());
    }
}

/// Returns unpredictable bytes.
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
    maps.prefilter.store(routes::hop_max_age, HOP_MAX_AGE.as_secs() as u32 * hz);
    maps.config.store(config::answers_per_jiffy, (ANSWERS_PER_SECOND / hz).max(1));
    Ok(())
}

/// Detaches all programs of this agent from their devices and removes its maps, of any layout
/// version; returns `None` if there were none.
///
/// # Errors
/// An agent is running, or a pin cannot be removed.
pub fn cleanup(root: &Path) -> Result<Option<Removed>> {
    let kernel = Kernel::running()?;
    let removed = pins::cleanup(root, || {
        if !kernel.has_tcx() {
            pinned_devices(root).into_iter().for_each(clsact::detach);
            pinned_pods(root).into_iter().for_each(clsact::detach);
        }
        let noted = Reader::open(&pins::maps_below(root), "tp_config").and_then(|map| map.value(0));
        if let Ok(noted) = noted {
            conntrack_windows::restore(&noted);
        }
    })?;
    remove_divider();
    Ok(removed)
}

fn remove_divider() {
    if let Err(error) = sctp_divider::remove() {
        tracing::warn!("the device {} cannot be removed: {error}", sctp_divider::NAMES[0]);
    }
}

/// Appends the remedy to the error of a start that the verifier refuses.
fn with_fix(error: anyhow::Error) -> anyhow::Error {
    match error.downcast_ref::<Refusal>() {
        Some(refusal) => anyhow!("{refusal}: {}", Refusal::FIX),
        None => error,
    }
}

/// Removes the pins of a failed start.
fn undo(pins: Option<&Pins>) {
    if let Some(Err(error)) = pins.map(Pins::undo) {
        tracing::warn!("cleaning up after the failed start: {error:#}");
    }
}
