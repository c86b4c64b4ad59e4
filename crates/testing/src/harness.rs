//! The compiled programs run on single packets: loaded with maps of their own in a namespace of
//! their own, executed by BPF_PROG_TEST_RUN.
//!
//! ```text
//!                       ┌ 172.18.0.1 → client 192.0.2.0/24
//!        ┌ eth0 ────────┼ 172.18.0.3 → endpoints 10.0.2.0/24
//!        │              └ 172.18.0.9 → endpoints 10.0.4.0/24   (its MAC address is not known)
//! node ──┼ eth1 ──────── 172.19.0.3 → endpoints 10.0.3.0/24
//!        ├ slim0 ─────── 172.20.0.3 → endpoints 10.0.5.0/24   (MTU 1400)
//!        ├ tun0 ──────── 172.21.0.3 → endpoints 10.0.7.0/24   (no Ethernet, MTU 1400)
//!        └ pod0 ──────── endpoints 10.0.1.0/24               (not attached: they are on this node)
//! ```

mod both;
mod buckets;
mod direct;
mod flows;
mod frontends;
mod loaded;
mod maps;
mod owners;
mod pool;
mod prefilter;
mod run;
mod setup;
mod world;

use std::io::ErrorKind;
use std::ops::{Deref, DerefMut};
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use aya::maps::{MapData, MapError, ProgramArray};
use traffic_policy_dataplane::{self as dataplane, Found, MapSizes, Sweeper};
use traffic_policy_ebpf::abi::jump;

pub use self::both::on_one_cpu;
pub use self::flows::FlowEntry;
pub use self::loaded::{Loaded, descriptor};
use self::pool::Pool;
pub use self::run::{Action, Hook, Input, Ran};
pub use self::setup::{Frontend, HZ, SNAT_PORT, Setup, SourceCheck};
use self::world::World;
pub use self::world::{Device, Spot};
use crate::netns::Namespace;

/// The loaded programs, and the node on which they run. It lives on a thread inside the node's
/// namespace.
pub struct Harness {
    loaded: Loaded,
    world: World,
}

/// Small tables, so that tests can fill them. All of their flows may be unassured.
pub const SIZES: MapSizes = MapSizes { flows4: 256, flows6: 256, unassured: 256, ..MapSizes::DEFAULT };

/// Runs `work` with programs whose maps are as new, on a node of its own. The programs are reused
/// from an earlier test of this process, if one has ended without a panic.
///
/// # Panics
/// Nothing can be loaded: root privileges are missing, or this build has no packet path.
pub fn with<T: Send>(work: impl FnOnce(&mut Harness) -> T + Send) -> T {
    static IDLE: Pool<Loaded> = Pool::new();
    lent(SIZES, 0, &IDLE, work)
}

/// Does the same as [`with`], with tables of other sizes, and programs that no other test uses.
///
/// # Panics
/// The same as those of [`with`].
pub fn with_sizes<T: Send>(sizes: MapSizes, work: impl FnOnce(&mut Harness) -> T + Send) -> T {
    lent(sizes, 0, &Pool::new(), work)
}

/// Does the same as [`with`], with programs that no other test uses and that fold IPv6 keys with
/// `seed`. The harness then reports IPv6 flows wrongly.
///
/// # Panics
/// The same as those of [`with`].
pub fn with_seed<T: Send>(seed: u64, work: impl FnOnce(&mut Harness) -> T + Send) -> T {
    lent(SIZES, seed, &Pool::new(), work)
}

fn lent<T: Send>(
    sizes: MapSizes,
    seed: u64,
    idle: &Pool<Loaded>,
    work: impl FnOnce(&mut Harness) -> T + Send,
) -> T {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let name = format!("tp-packets-{}-{}", process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
    let create =
        |name: &str| Namespace::create(name).unwrap_or_else(|error| panic!("packet tests: {error:#}"));
    let (namespace, wire) = (create(&name), create(&format!("{name}-wire")));
    let world = World::build(&namespace, &wire).unwrap_or_else(|error| panic!("packet tests: {error:#}"));
    let load = || Loaded::load(sizes, seed).unwrap_or_else(|error| panic!("packet tests: {error:#}"));
    idle.lend(load, |mut loaded| {
        namespace.run(|| {
            loaded.renew().unwrap_or_else(|error| panic!("packet tests: {error:#}"));
            let mut harness = Harness { loaded, world };
            let done = work(&mut harness);
            (harness.loaded, done)
        })
    })
}

impl Deref for Harness {
    type Target = Loaded;

    fn deref(&self) -> &Loaded {
        &self.loaded
    }
}

impl DerefMut for Harness {
    fn deref_mut(&mut self) -> &mut Loaded {
        &mut self.loaded
    }
}

impl Harness {
    /// Removes the programs to which the entry programs jump during `work`: packets that need them
    /// are passed on unfinished.
    pub fn without_jumps<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        self.clear_jumps();
        self.then_restore(work)
    }

    /// Gives the entry programs during `work` those to jump to that an agent loads which serves no
    /// SCTP.
    pub fn without_sctp<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        self.clear_jumps();
        let placed = dataplane::jumps_without_sctp(&self.loaded.object, &mut self.loaded.tables);
        placed.unwrap_or_else(|error| panic!("{error:#}"));
        self.then_restore(work)
    }

    fn clear_jumps(&mut self) {
        let tables = &mut self.tables;
        // The kernel waits for an RCU grace period for each program that is removed from an array
        // (`bpf_arch_poke_desc_update`), and for several if several programs jump to it. All arrays
        // are therefore cleared at once.
        thread::scope(|scope| {
            for jumps in
                [&mut tables.xdp_jumps, &mut tables.tc_jumps, &mut tables.l3_jumps, &mut tables.pod_jumps]
            {
                scope.spawn(move || clear(jumps));
            }
        });
    }

    fn then_restore<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        let done = work(self);
        let restored = dataplane::jumps(&self.loaded.object, &mut self.loaded.tables);
        restored.unwrap_or_else(|error| panic!("{error:#}"));
        done
    }

    /// Does work while the slow path is missing: what jumps to it fails.
    pub fn without_slow_path<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        let tables = &mut self.tables;
        for jumps in [&mut tables.xdp_jumps, &mut tables.tc_jumps] {
            for family in [0, jump::FAMILY] {
                let cleared = jumps.clear_index(&(family + jump::SLOW_PATH));
                cleared.unwrap_or_else(|error| panic!("clearing a jump: {error}"));
            }
        }
        let done = work(self);
        let restored = dataplane::jumps(&self.loaded.object, &mut self.loaded.tables);
        restored.unwrap_or_else(|error| panic!("{error:#}"));
        done
    }

    /// Sweeps both families as the agent does.
    pub fn sweep(&mut self, sweeper: &mut Sweeper, mark_removed: bool) -> [Found; 2] {
        self.sweep_in_pieces(sweeper, mark_removed).1
    }

    /// Sweeps as [`Self::sweep`] does. Returns the number of pieces as well, between which the
    /// agent does other work.
    pub fn sweep_in_pieces(&mut self, sweeper: &mut Sweeper, mark_removed: bool) -> (usize, [Found; 2]) {
        let swept = sweeper.run(&self.loaded.object, &mut self.loaded.tables, mark_removed);
        swept.unwrap_or_else(|error| panic!("{error:#}"))
    }

    /// The kernel's index of a device.
    pub fn ifindex(&self, device: Device) -> u32 {
        self.world.ifindex(device)
    }

    pub fn namespace(&self) -> &Namespace {
        self.world.namespace()
    }
}

/// Removes all programs from an array.
fn clear(jumps: &mut ProgramArray<MapData>) {
    for index in 0..jump::COUNT {
        match jumps.clear_index(&index) {
            // Not every index is in use.
            Err(MapError::SyscallError(error)) if error.io_error.kind() == ErrorKind::NotFound => {}
            cleared => cleared.unwrap_or_else(|error| panic!("clearing a jump: {error}")),
        }
    }
}
