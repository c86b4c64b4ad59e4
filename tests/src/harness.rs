//! The compiled programs on single packets: loaded with maps of their own in a namespace of their own, run by
//! BPF_PROG_TEST_RUN.
//!
//! ```text
//!                       ┌ 172.18.0.1 → client 192.0.2.0/24
//!        ┌ eth0 ────────┼ 172.18.0.3 → endpoints 10.0.2.0/24
//!        │              └ 172.18.0.9 → endpoints 10.0.4.0/24   (its MAC address is not known)
//! node ──┼ eth1 ──────── 172.19.0.3 → endpoints 10.0.3.0/24
//!        ├ slim0 ─────── 172.20.0.3 → endpoints 10.0.5.0/24   (MTU 1400)
//!        └ pod0 ──────── endpoints 10.0.1.0/24                (not attached: they are on this node)
//! ```

mod flows;
mod maps;
mod run;
mod setup;
mod world;

use std::io::ErrorKind;
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result};
use aya::Ebpf;
use aya::maps::{HashMap, MapData, MapError, PerCpuArray};
use traffic_policy_agent::dataplane::{self, Found, Kernel, Sizes, Sweeper, Tables};
use traffic_policy_ebpf::abi::{Address4, Address6, Affinity, AffinityKey, Bucket, Flow, FlowKey, jump};

pub use self::flows::{Half, Place};
pub use self::run::{Hook, Input, Ran, Way};
pub use self::setup::{Frontend, POOL_PORT, Setup};
use self::world::World;
pub use self::world::{Device, Spot};
use crate::netns::Namespace;

/// The loaded programs with their maps and devices. Lives on a thread inside its namespace.
pub struct Harness {
    pub object: Ebpf,
    pub tables: Tables,
    pending4: HashMap<MapData, FlowKey<Address4>, Flow<Address4>>,
    pending6: HashMap<MapData, FlowKey<Address6>, Flow<Address6>>,
    buckets: PerCpuArray<MapData, Bucket>,
    affinity: HashMap<MapData, AffinityKey, Affinity>,
    world: World,
}

/// Small tables, so that they can be filled.
pub const SIZES: Sizes = Sizes { flows4: 256, flows6: 256, pending: 64 };

/// Runs `work` with freshly loaded programs.
///
/// # Panics
/// Where nothing can be loaded: without root, or without a packet path in this build.
pub fn with<T: Send>(work: impl FnOnce(&mut Harness) -> T + Send) -> T {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let name = format!("tp-packets-{}-{}", process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
    let create =
        |name: &str| Namespace::create(name).unwrap_or_else(|error| panic!("packet tests: {error:#}"));
    let (namespace, wire) = (create(&name), create(&format!("{name}-wire")));
    let world = World::build(&namespace, &wire).unwrap_or_else(|error| panic!("packet tests: {error:#}"));
    namespace.run(|| {
        let mut harness = Harness::load(world).unwrap_or_else(|error| panic!("packet tests: {error:#}"));
        work(&mut harness)
    })
}

impl Harness {
    fn load(world: World) -> Result<Self> {
        dataplane::check_privileges()?;
        let mut object = dataplane::load(SIZES, None, &Kernel::running()?)?;
        dataplane::load_programs(&mut object)?;
        let mut tables = Tables::take(&mut object)?;
        dataplane::jumps(&object, &mut tables)?;
        let mut take = |name: &str| object.take_map(name).with_context(|| format!("no map {name}"));
        let pending4 = take("PENDING4")?.try_into()?;
        let pending6 = take("PENDING6")?.try_into()?;
        let buckets = take("BUCKETS")?.try_into()?;
        let affinity = take("AFFINITY")?.try_into()?;
        Ok(Self { object, tables, pending4, pending6, buckets, affinity, world })
    }

    /// Takes the programs away that the entry programs jump to: what needs them is passed on unfinished.
    pub fn without_jumps<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        for index in 0..jump::COUNT {
            for jumps in [&mut self.tables.xdp_jumps, &mut self.tables.tc_jumps] {
                match jumps.clear_index(&index) {
                    // Not every place is taken.
                    Err(MapError::SyscallError(error)) if error.io_error.kind() == ErrorKind::NotFound => {}
                    cleared => cleared.unwrap_or_else(|error| panic!("clearing a jump: {error}")),
                }
            }
        }
        let done = work(self);
        let restored = dataplane::jumps(&self.object, &mut self.tables);
        restored.unwrap_or_else(|error| panic!("{error:#}"));
        done
    }

    /// Sweeps both families as the agent does.
    pub fn sweep(&mut self, sweeper: &mut Sweeper, mark_gone: bool) -> [Found; 2] {
        let found = sweeper.run(&self.object, &mut self.tables, mark_gone);
        found.unwrap_or_else(|error| panic!("{error:#}"))
    }

    /// The kernel's number of a device.
    pub fn ifindex(&self, device: Device) -> u32 {
        self.world.ifindex(device)
    }

    pub fn namespace(&self) -> &Namespace {
        self.world.namespace()
    }
}
