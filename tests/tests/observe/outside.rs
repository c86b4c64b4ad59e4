//! A foreign benchmark: it opens the pinned programs of a running agent, runs packets of its own
//! through them, and compares them with a floor of its own.

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use aya::maps::{Map, MapData};
use aya::programs::{ProgramFd, ProgramInfo};
use traffic_policy_bench::flows::{self, Table, ends, expected, mirror};
use traffic_policy_bench::frame::addressed;
use traffic_policy_bench::turns::{self, low};
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

/// The benchmark's own ratio, in its own namespaces with maps of its own.
fn inside() -> Result<f64> {
    let fixture = BenchNode::build()?;
    fixture.run(|| {
        let mut loaded = Loaded::new(&fixture, Setup::default())?;
        let own = flows::open(&mut loaded, false, Protocol::Tcp, FLOWS.into())?;
        mirror(&mut loaded.feeder, &own)?;
        let window = loaded.feeder.place(&flows::frames(&own, Kind::Request)?)?;
        let case = |subject| Case::open(subject, window, &own[0], Kind::Request);
        let cases = [case(Subject::Floor)?, case(Subject::Ours(Hook::Xdp))?];
        turns::ratio(&mut loaded, ROUNDS, PACKETS, &cases)
    })
}

/// A foreign feed of packets, in the network namespace of a node whose agent runs.
struct Outside {
    feeder: Feeder,
    pinned: ProgramFd,
    floor: ProgramFd,
    empty: ProgramFd,
    requests: Window,
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
        Ok(Self { feeder, pinned, floor, empty, requests })
    }

    fn ratio(&mut self) -> Result<f64> {
        let Self { feeder, pinned, floor, empty, requests } = self;
        let mut ratios = Vec::new();
        for _ in 0..ROUNDS {
            let mut net = |program: &ProgramFd| -> Result<f64> {
                let empty = feeder.run(Hook::Xdp, empty, *requests, PACKETS)?;
                Ok(feeder.run(Hook::Xdp, program, *requests, PACKETS)?.on_average - empty.on_average)
            };
            let floor = net(floor)?;
            ratios.push(net(pinned)? / floor);
        }
        Ok(low(ratios))
    }
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

    let seen = node.netns().run(|| -> Result<Vec<(f64, f64)>> {
        let mut outside = Outside::new(agent, mac, client, frontend).context("outside")?;
        let mut seen = Vec::new();
        // Other load on the machine disturbs one or the other.
        for _ in 0..6 {
            let pair = (outside.ratio()?, inside()?);
            seen.push(pair);
            if (pair.0 / pair.1 - 1.0).abs() < 0.15 {
                break;
            }
        }
        Ok(seen)
    });
    let seen = seen.unwrap();
    eprintln!("outside, inside: {seen:.2?}");
    let (outside, inside) = seen[seen.len() - 1];
    assert!((outside / inside - 1.0).abs() < 0.15, "outside, inside: {seen:.2?}");
    // The packets went through the agent's own maps.
    let after = agent.packets("xdp", "forwarded").unwrap();
    assert!(after - forwarded >= u64::from(PACKETS) * ROUNDS as u64, "{forwarded} {after}");
    cluster.answer(cluster::Protocol::Tcp, frontend).unwrap();
}
