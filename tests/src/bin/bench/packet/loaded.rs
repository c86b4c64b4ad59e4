//! The loaded programs: the packet path, the floor, and the feed that runs either.

use std::{collections::BTreeMap, net::IpAddr, path::Path, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use aya::{
    Ebpf, EbpfLoader, TestRun, TestRunOptions,
    maps::{Array, HashMap, Map, MapData, ProgramArray},
    programs::{Program, ProgramFd},
};
use nix::time::{ClockId, clock_gettime};
use traffic_policy_agent::dataplane::{Kernel, Sizes, Tables, ToWire, jumps, load, load_programs, wide};
use traffic_policy_ebpf::{
    abi::{
        Address4, Device, Frontend, FrontendKey, HOP_XDP, PROTOCOL_TCP, PROTOCOL_UDP, Range, Slot, Tuple,
        frontend, hook, scope,
    },
    bench::{Feed, FloorFlow},
    outcome::{OUTCOMES, Outcome},
};

use super::{
    frame::{Frame, LENGTH},
    stand::{Addresses, MAC, Stand, V4, V6},
};

/// Endpoints of the Service.
pub(crate) const ENDPOINTS: u32 = 8;
pub(crate) const NODE_PORT: u16 = 30_080;
pub(crate) const TARGET_PORT: u16 = 8_080;
/// Source ports towards endpoints.
const POOL: std::ops::Range<u16> = 32_768..65_535;
/// A port of the pool that no test flow uses as its destination.
pub(crate) const POOL_PORT: u16 = POOL.start;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Hook {
    Xdp,
    Tc,
}

/// A program to be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Subject {
    Empty(Hook),
    Ours(Hook),
    Floor,
    FloorNew,
}

impl Subject {
    pub(crate) fn hook(self) -> Hook {
        match self {
            Self::Empty(hook) | Self::Ours(hook) => hook,
            Self::Floor | Self::FloorNew => Hook::Xdp,
        }
    }

    fn program(self) -> &'static str {
        match self {
            Self::Empty(Hook::Xdp) => "empty_xdp",
            Self::Empty(Hook::Tc) => "empty_tc",
            Self::Ours(Hook::Xdp) => "xdp_ingress",
            Self::Ours(Hook::Tc) => "tc_ingress",
            Self::Floor => "floor_established",
            Self::FloorNew => "floor_new",
        }
    }
}

/// Nanoseconds per packet, the feed's included.
pub(crate) struct Took {
    /// From the CPU time of the whole run: for long runs, of which it shows fractions.
    pub(crate) on_average: f64,
    /// As the kernel says, in whole nanoseconds: for short runs, whose preparation costs as much.
    pub(crate) by_kernel: f64,
}

pub(crate) struct Loaded {
    ours: Ebpf,
    bench: Ebpf,
    pub(crate) tables: Tables,
    pub(crate) floor: HashMap<MapData, Tuple<Address4>, FloorFlow>,
    frames: Array<MapData, Frame>,
    feed: Array<MapData, Feed>,
    xdp_subject: ProgramArray<MapData>,
    tc_subject: ProgramArray<MapData>,
    ifindex: u32,
}

impl Loaded {
    /// Fresh maps, with one Service that has a node port and endpoints on other nodes, for both families and protocols.
    pub(crate) fn new(stand: &Stand) -> Result<Self> {
        let mut ours = load(Sizes::default(), None, &Kernel::running()?)?;
        load_programs(&mut ours)?;
        let mut tables = Tables::take(&mut ours)?;
        jumps(&ours, &mut tables)?;

        let folder = Path::new(env!("TRAFFIC_POLICY_PROGRAMS"));
        let mut bench = EbpfLoader::new()
            .load_file(folder.join("traffic-policy-bench"))
            .context("no programs to compare with: run `cargo xtask setup` and build again")?;
        load_programs(&mut bench)?;
        let mut loaded = Self {
            floor: take(&mut bench, "FLOOR_FLOWS")?.try_into()?,
            frames: take(&mut bench, "FRAMES")?.try_into()?,
            feed: take(&mut bench, "FEED")?.try_into()?,
            xdp_subject: take(&mut bench, "XDP_SUBJECT")?.try_into()?,
            tc_subject: take(&mut bench, "TC_SUBJECT")?.try_into()?,
            ours,
            bench,
            tables,
            ifindex: stand.ifindex,
        };
        loaded.set_state();
        loaded.tables.devices.insert(stand.ifindex, device(), 0)?;
        loaded.set_service()?;
        loaded.set_floor()?;
        Ok(loaded)
    }

    /// What the agent writes once: epochs that hold, the pool, and the bits of frontends and pool.
    fn set_state(&mut self) {
        let (state, filter, pool) = (&mut self.tables.state, &mut self.tables.filter, &mut self.tables.pool);
        // SAFETY: fields of mapped elements, and elements of their arrays.
        unsafe {
            state.store(|s| &raw mut (*s).route, 1);
            state.store(|s| &raw mut (*s).hop_epoch, 1);
            state.store(|s| &raw mut (*s).hop_max_age, u32::MAX);
            state.store(|s| &raw mut (*s).pool_len, u32::from(POOL.end - POOL.start));
            state.store(|s| &raw mut (*s).unconfirmed_limit, [16_384, 4_096]);
            state.store(|s| &raw mut (*s).seed, 0x5eed_5eed_5eed_5eed);
            for (i, port) in POOL.enumerate() {
                pool.store(|p| p.cast::<u16>().add(i), port);
                let word = filter.load(|f| (&raw mut (*f).pool).cast::<u64>().add(usize::from(port >> 6)));
                filter.store(
                    |f| (&raw mut (*f).pool).cast::<u64>().add(usize::from(port >> 6)),
                    word | 1 << (port & 63),
                );
            }
            filter.store(
                |f| (&raw mut (*f).frontends).cast::<u64>().add(usize::from(NODE_PORT >> 6)),
                1 << (NODE_PORT & 63),
            );
        }
    }

    fn set_service(&mut self) -> Result<()> {
        for protocol in [PROTOCOL_TCP, PROTOCOL_UDP] {
            let (IpAddr::V4(v4), IpAddr::V6(v6)) = (V4.node, V6.node) else { bail!("families mixed up") };
            self.tables.v4.frontends.insert(key(v4.to_wire(), protocol), service(), 0)?;
            self.tables.v6.frontends.insert(key(v6.to_wire(), protocol), service(), 0)?;
        }
        for i in 0..ENDPOINTS {
            let (port, flags, zero) = (TARGET_PORT.to_be(), 0, 0);
            let (IpAddr::V4(v4), IpAddr::V6(v6)) = (endpoint(V4, i), endpoint(V6, i)) else {
                bail!("families mixed up")
            };
            self.tables.v4.slots.set(i, Slot { address: v4.to_wire(), port, flags, zero }, 0)?;
            self.tables.v6.slots.set(i, Slot { address: v6.to_wire(), port, flags, zero }, 0)?;
        }
        Ok(())
    }

    /// The same Service for the floor.
    fn set_floor(&mut self) -> Result<()> {
        let IpAddr::V4(node) = V4.node else { bail!("families mixed up") };
        let mut frontends: HashMap<_, FrontendKey<Address4>, Frontend> =
            take(&mut self.bench, "FLOOR_FRONTENDS")?.try_into()?;
        frontends.insert(key(node.to_wire(), PROTOCOL_TCP), service(), 0)?;
        let mut slots: Array<_, Slot<Address4>> = take(&mut self.bench, "FLOOR_SLOTS")?.try_into()?;
        for i in 0..ENDPOINTS {
            slots.set(i, self.tables.v4.slots.get(&i, 0)?, 0)?;
        }
        let mut own: Array<_, FloorFlow> = take(&mut self.bench, "FLOOR_NODE")?.try_into()?;
        own.set(0, FloorFlow { source: node.to_wire(), ..FloorFlow::default() }, 0)?;
        Ok(())
    }

    /// Sets the packets that come, in this order.
    pub(crate) fn set_frames(&mut self, frames: &[Frame]) -> Result<()> {
        for (i, frame) in frames.iter().enumerate() {
            self.frames.set(i as u32, frame, 0)?;
        }
        self.feed.set(0, Feed { next: 0, count: frames.len() as u32 }, 0)?;
        Ok(())
    }

    /// Runs a program on so many packets, from the first one on.
    pub(crate) fn run(&mut self, subject: Subject, packets: u32) -> Result<Took> {
        let count = self.feed.get(&0, 0)?.count;
        self.feed.set(0, Feed { next: 0, count }, 0)?;
        let program = self.fd(subject)?;
        let (name, context) = match subject.hook() {
            Hook::Xdp => {
                self.xdp_subject.set(0, &program, 0)?;
                ("feed_xdp", xdp_context(self.ifindex))
            }
            Hook::Tc => {
                self.tc_subject.set(0, &program, 0)?;
                ("feed_tc", tc_context(self.ifindex))
            }
        };
        let data = [0; LENGTH];
        let options = TestRunOptions {
            data_in: Some(&data),
            ctx_in: Some(&context),
            repeat: packets,
            ..TestRunOptions::default()
        };
        let program = self.bench.program(name).with_context(|| format!("no program {name}"))?;
        // The CPU time of this thread leaves out what others run meanwhile.
        let started = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)?;
        let result = match program {
            Program::Xdp(program) => program.test_run(options)?,
            Program::SchedClassifier(program) => program.test_run(options)?,
            _ => bail!("{name} is of another type"),
        };
        let ended = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)?;
        let all = Duration::from(ended) - Duration::from(started);
        Ok(Took {
            on_average: all.as_secs_f64() * 1e9 / f64::from(packets),
            by_kernel: result.duration.as_secs_f64() * 1e9,
        })
    }

    /// As [`Self::run`] for the packet path, all of whose packets must end in one way.
    pub(crate) fn run_to(&mut self, hook: Hook, packets: u32, outcome: Outcome) -> Result<Took> {
        let before = self.outcomes(hook)?;
        let took = self.run(Subject::Ours(hook), packets)?;
        let after = self.outcomes(hook)?;
        let mut changed = after;
        for (outcome, count) in before {
            *changed.entry(outcome).or_default() -= count;
        }
        changed.retain(|_, count| *count != 0);
        let expected = BTreeMap::from([(outcome.name(), u64::from(packets))]);
        ensure!(changed == expected, "{packets} packets should be {}, but are {changed:?}", outcome.name());
        Ok(took)
    }

    fn outcomes(&self, hook: Hook) -> Result<BTreeMap<&'static str, u64>> {
        let number = match hook {
            Hook::Xdp => hook::XDP,
            Hook::Tc => hook::INGRESS,
        };
        let count = |outcome: &Outcome| -> Result<_> {
            let values = self.tables.counters.get(&(number * OUTCOMES + *outcome as u32), 0)?;
            Ok((outcome.name(), values.iter().sum()))
        };
        Outcome::ALL.iter().map(count).collect()
    }

    fn fd(&self, subject: Subject) -> Result<ProgramFd> {
        let object = if matches!(subject, Subject::Ours(_)) { &self.ours } else { &self.bench };
        let name = subject.program();
        match object.program(name).with_context(|| format!("no program {name}"))? {
            Program::Xdp(program) => Ok(program.fd()?.try_clone()?),
            Program::SchedClassifier(program) => Ok(program.fd()?.try_clone()?),
            _ => bail!("{name} is of another type"),
        }
    }
}

fn take(object: &mut Ebpf, name: &str) -> Result<Map> {
    object.take_map(name).with_context(|| format!("no map {name}"))
}

fn key<A>(address: A, protocol: u32) -> FrontendKey<A> {
    FrontendKey { address, port: NODE_PORT.to_be(), protocol: protocol as u16, scope: scope::ADDRESS }
}

fn service() -> Frontend {
    Frontend {
        service: 1,
        flags: frontend::HAS_ENDPOINTS | frontend::NODE_ADDRESS,
        cluster: Range { base: 0, len: ENDPOINTS },
        local: Range { base: 0, len: 0 },
        ..Frontend::default()
    }
}

fn device() -> Device {
    let [a, b] = wide(V6.node);
    Device { mac: MAC, zero: 0, flags: HOP_XDP, mtu: 1500, addresses: [wide(V4.node)[0], a, b] }
}

/// The address of an endpoint.
fn endpoint(addresses: Addresses, number: u32) -> IpAddr {
    super::flows::later(addresses.endpoint, number)
}

/// `struct xdp_md`: the end of the data at 4, the device at 12.
fn xdp_context(ifindex: u32) -> Vec<u8> {
    let mut context = vec![0; 24];
    context[4..8].copy_from_slice(&(LENGTH as u32).to_ne_bytes());
    context[12..16].copy_from_slice(&ifindex.to_ne_bytes());
    context
}

/// `struct __sk_buff`: the device at 40.
fn tc_context(ifindex: u32) -> Vec<u8> {
    let mut context = vec![0; 192];
    context[40..44].copy_from_slice(&ifindex.to_ne_bytes());
    context
}
