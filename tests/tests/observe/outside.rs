//! A foreign benchmark: it opens the pinned programs of a running agent, runs packets of its own
//! through them, and compares them with a floor of its own.

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use aya::maps::{Map, MapData};
use aya::programs::{ProgramFd, ProgramInfo};
use nix::sched::{CpuSet, sched_getcpu, sched_setaffinity};
use nix::unistd::Pid;
use traffic_policy_bench::flows::{self, Table, ends, expected, mirror};
use traffic_policy_bench::frame::addressed;
use traffic_policy_bench::{
    BenchNode, Case, Feeder, Flow, Frame, Hook, Kind, Loaded, Protocol, Room, Setup, Subject, Window,
};
use traffic_policy_ebpf::abi::Address4;
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{self, Cluster};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::netlink::{Mac, index};
use traffic_policy_testing::object::Policy;
use traffic_policy_testing::packet::difference;

const PORT: u16 = 30080;
const FLOWS: u16 = 500;
const PACKETS: u32 = 100_000;
const ROUNDS: usize = 12;
/// The rounds after which ratios that still differ are different ones: a busy machine leaves some
/// of them undisturbed.
const MOST_ROUNDS: usize = 240;
const TOLERANCE: f64 = 0.15;
/// XDP_TX
const TRANSMITTED: u32 = 3;
const PROGRAMS: [&str; 3] = ["tp_tc_egress", "tp_tc_ingress", "tp_xdp_ingress"];

/// The folder of the programs.
fn programs(agent: &Agent) -> PathBuf {
    let versions: Vec<_> =
        fs::read_dir(agent.pin_dir()).unwrap().map(|entry| entry.unwrap().path()).collect();
    let [version] = &versions[..] else { panic!("{versions:?}") };
    version.join("programs")
}

fn names(agent: &Agent) -> Vec<String> {
    let entries = fs::read_dir(programs(agent)).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn numbers(agent: &Agent) -> Vec<u32> {
    PROGRAMS.map(|name| ProgramInfo::from_pin(programs(agent).join(name)).unwrap().id()).to_vec()
}

#[test]
fn programs_are_pinned_replaced_and_removed() {
    let cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
    let mut agent = Agent::start_all(&cluster.lab, |agent| agent.attach("xdp")).unwrap().remove(0);
    assert_eq!(names(&agent), PROGRAMS);
    let before = numbers(&agent);
    agent.kill().unwrap();
    assert_eq!(numbers(&agent), before, "they outlive the agent");
    agent.start_again().unwrap();
    agent.wait_ready(Duration::from_secs(20)).unwrap();
    assert_eq!(names(&agent), PROGRAMS);
    let after = numbers(&agent);
    assert!(after.iter().all(|number| !before.contains(number)), "{before:?} {after:?}");
    agent.stop().unwrap();
    let removed = agent.json(&["cleanup"]).unwrap();
    assert_eq!(removed["programs"], serde_json::json!(PROGRAMS));
    assert!(!agent.pin_dir().exists());
}

/// The least time of a packet in each program, in nanoseconds: other load on the machine can only
/// add to a run.
#[derive(Clone, Copy, Debug)]
struct Least {
    /// The feed alone.
    empty: f64,
    floor: f64,
    path: f64,
}

impl Least {
    const NONE: Self = Self { empty: f64::INFINITY, floor: f64::INFINITY, path: f64::INFINITY };

    fn add(&mut self, empty: f64, floor: f64, path: f64) {
        self.empty = self.empty.min(empty);
        self.floor = self.floor.min(floor);
        self.path = self.path.min(path);
    }

    /// The cost of the packet path relative to the floor's.
    fn ratio(&self) -> f64 {
        (self.path - self.empty) / (self.floor - self.empty)
    }
}

/// The benchmark's own feed, in its own namespaces with maps of its own.
struct Inside<'a> {
    fixture: &'a BenchNode,
    loaded: Loaded,
    requests: Window,
    least: Least,
}

impl<'a> Inside<'a> {
    fn new(fixture: &'a BenchNode) -> Result<Self> {
        fixture.run(|| {
            let mut loaded = Loaded::new(fixture, Setup::default())?;
            let own = flows::open(&mut loaded, false, Protocol::Tcp, FLOWS.into())?;
            mirror(&mut loaded.feeder, &own)?;
            let requests = loaded.feeder.place(&flows::frames(&own, Kind::Request)?)?;
            for subject in [Subject::Floor, Subject::Ours(Hook::Xdp)] {
                Case::open(subject, requests, &own[0], Kind::Request)?.check(&mut loaded)?;
            }
            Ok(Self { fixture, loaded, requests, least: Least::NONE })
        })
    }

    fn round(&mut self) -> Result<()> {
        let Self { fixture, loaded, requests, least } = self;
        fixture.run(|| {
            let mut cost =
                |subject| -> Result<f64> { Ok(loaded.run(subject, *requests, PACKETS)?.on_average) };
            let empty = cost(Subject::Empty(Hook::Xdp))?;
            least.add(empty, cost(Subject::Floor)?, cost(Subject::Ours(Hook::Xdp))?);
            Ok(())
        })
    }
}

/// A foreign feed of packets, in the network namespace of a node whose agent runs.
struct Outside {
    feeder: Feeder,
    pinned: ProgramFd,
    floor: ProgramFd,
    empty: ProgramFd,
    requests: Window,
    least: Least,
}

impl Outside {
    fn new(agent: &Agent, mac: Mac, client: SocketAddr, frontend: SocketAddr) -> Result<Self> {
        let mut feeder = Feeder::load(index("eth0")?, &Room::default())?;
        let program = |name: &str| -> Result<ProgramFd> {
            Ok(ProgramInfo::from_pin(programs(agent).join(name))?.fd()?)
        };
        let (pinned, floor, empty) =
            (program("tp_xdp_ingress")?, feeder.program("floor_established")?, feeder.program("empty_xdp")?);
        let flow = |i: u16| Flow {
            client: SocketAddr::new(client.ip(), client.port() + i),
            frontend,
            protocol: Protocol::Tcp,
            endpoint: frontend,
            node: frontend,
        };
        let frames = |flows: &[Flow], kind| -> Result<Vec<Frame>> {
            Ok(flows::frames(flows, kind)?.into_iter().map(|frame| addressed(frame, mac)).collect())
        };
        let mut flows: Vec<_> = (0..FLOWS).map(flow).collect();
        // The agent's table shows the chosen endpoint.
        let maps = programs(agent).with_file_name("maps");
        let table: Table<Address4> = Map::HashMap(MapData::from_pin(maps.join("tp_flows4"))?).try_into()?;
        for kind in [Kind::Opening, Kind::Answer, Kind::Request, Kind::Reply] {
            feeder.clear();
            let window = feeder.place(&frames(&flows, kind)?)?;
            let took = feeder.run(Hook::Xdp, &pinned, window, window.len)?;
            ensure!(took.verdict == TRANSMITTED, "{kind:?}: verdict {}", took.verdict);
            if kind == Kind::Opening {
                for flow in &mut flows {
                    (flow.node, flow.endpoint) = ends(&table, flow)?;
                }
            }
            // The comparison starts after the MAC addresses, which are the lab's.
            let mut wanted = expected(&flows[flows.len() - 1], kind)?;
            wanted[..12].copy_from_slice(&took.packet[..12]);
            if let Some(difference) = difference(&wanted, &took.packet) {
                bail!("{kind:?}:\n{difference}");
            }
        }
        mirror(&mut feeder, &flows)?;
        feeder.clear();
        let requests = feeder.place(&frames(&flows, Kind::Request)?)?;
        Ok(Self { feeder, pinned, floor, empty, requests, least: Least::NONE })
    }

    fn round(&mut self) -> Result<()> {
        let Self { feeder, pinned, floor, empty, requests, least } = self;
        let mut cost = |program: &ProgramFd| -> Result<f64> {
            Ok(feeder.run(Hook::Xdp, program, *requests, PACKETS)?.on_average)
        };
        let empty = cost(empty)?;
        least.add(empty, cost(floor)?, cost(pinned)?);
        Ok(())
    }
}

/// The part by which the first ratio differs from the second.
fn differ([outside, inside]: &[Least; 2]) -> f64 {
    (outside.ratio() / inside.ratio() - 1.0).abs()
}

#[test]
fn an_outside_bench_sees_the_same_ratio() {
    let cluster = Cluster::start(Lab::builder().pods(&[0, 2])).unwrap();
    cluster.manifests.apply(&Cluster::node_port("web", Policy::Cluster, PORT), &cluster.backends()).unwrap();
    let node = cluster.lab.node(1);
    let agent = &Agent::builder(&cluster.lab, node).attach("xdp").start().unwrap();
    agent.wait_ready(Duration::from_secs(20)).unwrap();
    // Real packets resolve the neighbours first.
    let frontend = cluster.at(1, Family::V4, PORT);
    cluster.answer(cluster::Protocol::Tcp, frontend).unwrap();
    let client = SocketAddr::new(cluster.lab.client().address(Family::V4), 20_000);
    let mac = node.netns().netlink(async |net| net.mac("eth0").await).unwrap();
    let forwarded = agent.packets("xdp", "forwarded").unwrap();

    let fixture = BenchNode::build().unwrap();
    let costs = node.netns().run(|| -> Result<[Least; 2]> {
        // Threads that this one starts are bound to the same CPU.
        let mut one = CpuSet::new();
        one.set(sched_getcpu()?)?;
        sched_setaffinity(Pid::from_raw(0), &one)?;
        let mut outside = Outside::new(agent, mac, client, frontend).context("outside")?;
        let mut inside = Inside::new(&fixture).context("inside")?;
        // They take turns, so that both have the same phases of a busy machine.
        for round in 0..MOST_ROUNDS {
            outside.round()?;
            inside.round()?;
            if round >= ROUNDS && differ(&[outside.least, inside.least]) < TOLERANCE {
                break;
            }
        }
        Ok([outside.least, inside.least])
    });
    let costs = costs.unwrap();
    let seen = format!("outside, inside: {:.2?}, {costs:.1?}", costs.map(|least| least.ratio()));
    eprintln!("{seen}");
    assert!(differ(&costs) < TOLERANCE, "{seen}");
    // The packets went through the agent's own maps.
    let after = agent.packets("xdp", "forwarded").unwrap();
    assert!(after - forwarded >= u64::from(PACKETS) * ROUNDS as u64, "{forwarded} {after}");
    cluster.answer(cluster::Protocol::Tcp, frontend).unwrap();
}
