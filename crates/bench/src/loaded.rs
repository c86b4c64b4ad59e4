//! The packet path, loaded with maps of its own, together with the feed and its floors.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr},
};

use anyhow::{Context, Result, bail, ensure};
use aya::{Ebpf, maps::MapError, programs::ProgramFd};
use ipnet::IpNet;
use traffic_policy_dataplane::{
    Kernel, MapSizes, Maps, ToWire, jumps, jumps_without_opening, load, load_programs,
    maps::prefilter::Needed,
};
use traffic_policy_ebpf::{
    abi::{Address4, Address6, ServiceCount, ServiceCountKey, hook, prefilter::ServiceBits},
    hash,
    outcome::Outcome,
};

use super::{
    feeder::{Feeder, Hook, Room, Took, Window, fd},
    fixture::{BenchNode, later},
    places::Places,
    service,
};

/// Node port of a Service with endpoints on other nodes.
pub const NODE_PORT: u16 = service::NODE_PORT;
/// Node port of a Service without an endpoint.
pub const NO_ENDPOINT_PORT: u16 = service::NO_ENDPOINT_PORT;
/// Node port of a Service with policy Local, whose endpoints are elsewhere.
pub const NO_LOCAL_PORT: u16 = service::NO_LOCAL_PORT;
/// Offset of the load balancer's address from the node's; its port is [`NODE_PORT`].
pub const VIP: u32 = service::VIP;
/// Port of the endpoints.
pub const TARGET_PORT: u16 = service::TARGET_PORT;
/// A SNAT port that no flow of the bench uses as its destination.
pub const SNAT_PORT: u16 = service::SNAT_PORTS.start;

/// The range of ClusterIPs; [`PODS`] is the first of the pods next to them, in the same /16, as in
/// kubespray.
const CLUSTER_IPS: &str = "10.233.0.0/18";
const PODS: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 233, 64, 1));

/// Returns a pod that shares none, one or both of its bits in the prefilter with some of this
/// number of ClusterIPs.
pub fn pod_sharing(bits: usize, cluster_ips: u32) -> Result<IpAddr> {
    let range: IpNet = CLUSTER_IPS.parse()?;
    let bits_of = |address: IpAddr| -> Result<[u32; 2]> {
        let IpAddr::V4(address) = address else { bail!("{address} is not IPv4") };
        let ServiceBits { first, second } = ServiceBits::of(hash::address(address.to_wire()));
        Ok([first, second])
    };
    let mut set = BTreeSet::new();
    for number in 1..=cluster_ips {
        set.extend(bits_of(later(range.network(), number))?);
    }
    for number in 0..8_192 {
        let pod = later(PODS, number);
        if bits_of(pod)?.iter().filter(|bit| set.contains(bit)).count() == bits {
            return Ok(pod);
        }
    }
    bail!("no pod shares {bits} bits with {cluster_ips} ClusterIPs")
}

/// A program to be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Subject {
    Empty(Hook),
    Ours(Hook),
    /// Sends the frame back.
    MacSwap,
    /// The minimum work for a packet of a flow.
    Floor,
    /// The minimum work for the first packet of a flow, without a FIB lookup.
    FloorNew,
    /// The same work with a FIB lookup.
    FloorNewFib,
    /// The minimum work of direct forwarding; true: over IPv6.
    Direct(DirectFloor, bool),
    /// The method of another balancer, over IPv4.
    Other(Method),
}

/// Other balancers whose replies pass the node in front by, as in direct forwarding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Method {
    Katran,
    Cilium,
}

/// Floors of direct forwarding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DirectFloor {
    /// A packet of a flow, at one of both hooks of the node in front: within IP, within UDP, or to
    /// a MAC address.
    Request(Hook),
    Udp(Hook),
    ByMac(Hook),
    /// The first packet, at the node in front: within IP, within UDP, or to a MAC address.
    New(Hook),
    NewUdp(Hook),
    NewByMac(Hook),
    /// The first packet at the endpoint's node, within IP or UDP.
    OpenNew,
    OpenNewUdp,
    /// Packets at the endpoint's node: one within IP or UDP; one that came as it is, in XDP (in TC
    /// it is as [`Self::Back`]); and the endpoint's.
    Open,
    OpenUdp,
    Deliver,
    Back,
    /// A reply through the node in front: sent, and opened there.
    SendBack,
    OpenReply,
}

impl Subject {
    pub fn hook(self) -> Hook {
        match self {
            Self::Empty(hook) | Self::Ours(hook) => hook,
            Self::MacSwap | Self::Floor | Self::FloorNew | Self::FloorNewFib | Self::Other(_) => Hook::Xdp,
            Self::Direct(floor, _) => floor.hook(),
        }
    }

    fn program(self) -> &'static str {
        match self {
            Self::Empty(Hook::Xdp) => "empty_xdp",
            Self::Empty(Hook::Ingress | Hook::Egress) => "empty_tc",
            Self::Ours(Hook::Xdp) => "tp_xdp_ingress",
            Self::Ours(Hook::Ingress) => "tp_tc_ingress",
            Self::Ours(Hook::Egress) => "tp_tc_egress",
            Self::MacSwap => "mac_swap",
            Self::Floor => "floor_established",
            Self::FloorNew => "floor_new",
            Self::FloorNewFib => "floor_new_fib",
            Self::Other(Method::Katran) => "katran_xdp4",
            Self::Other(Method::Cilium) => "cilium_xdp4",
            Self::Direct(floor, ipv6) => floor.program(ipv6),
        }
    }
}

impl DirectFloor {
    fn hook(self) -> Hook {
        match self {
            Self::Request(hook)
            | Self::Udp(hook)
            | Self::ByMac(hook)
            | Self::New(hook)
            | Self::NewUdp(hook)
            | Self::NewByMac(hook) => hook,
            Self::Deliver => Hook::Xdp,
            Self::OpenNew | Self::OpenNewUdp | Self::Open | Self::OpenUdp | Self::OpenReply => Hook::Ingress,
            Self::Back | Self::SendBack => Hook::Egress,
        }
    }

    fn program(self, ipv6: bool) -> &'static str {
        let [v4, v6] = match self {
            Self::Request(Hook::Xdp) => ["floor_direct_xdp4", "floor_direct_xdp6"],
            Self::Request(_) => ["floor_direct_tc4", "floor_direct_tc6"],
            Self::Udp(Hook::Xdp) => ["floor_udp_xdp4", "floor_udp_xdp6"],
            Self::Udp(_) => ["floor_udp_tc4", "floor_udp_tc6"],
            Self::ByMac(Hook::Xdp) => ["floor_by_mac_xdp4", "floor_by_mac_xdp6"],
            Self::ByMac(_) => ["floor_by_mac_tc4", "floor_by_mac_tc6"],
            Self::New(Hook::Xdp) => ["floor_direct_new_xdp4", "floor_direct_new_xdp6"],
            Self::New(_) => ["floor_direct_new_tc4", "floor_direct_new_tc6"],
            Self::NewUdp(Hook::Xdp) => ["floor_udp_new_xdp4", "floor_udp_new_xdp6"],
            Self::NewUdp(_) => ["floor_udp_new_tc4", "floor_udp_new_tc6"],
            Self::NewByMac(Hook::Xdp) => ["floor_by_mac_new_xdp4", "floor_by_mac_new_xdp6"],
            Self::NewByMac(_) => ["floor_by_mac_new_tc4", "floor_by_mac_new_tc6"],
            Self::OpenNew => ["floor_open_new_tc4", "floor_open_new_tc6"],
            Self::OpenNewUdp => ["floor_open_new_udp_tc4", "floor_open_new_udp_tc6"],
            Self::Open => ["floor_open_tc4", "floor_open_tc6"],
            Self::OpenUdp => ["floor_open_udp_tc4", "floor_open_udp_tc6"],
            Self::Deliver => ["floor_deliver_xdp4", "floor_deliver_xdp6"],
            Self::Back => ["floor_back_tc4", "floor_back_tc6"],
            Self::SendBack => ["floor_send_back_tc4", "floor_send_back_tc6"],
            Self::OpenReply => ["floor_open_reply_tc4", "floor_open_reply_tc6"],
        };
        if ipv6 { v6 } else { v4 }
    }
}

/// Sizes of the maps and of the Service.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    pub sizes: MapSizes,
    pub room: Room,
    /// Number of endpoints of the Service; each takes as many flows as there are source ports.
    pub endpoints: u32,
    /// Whether the node takes part in direct forwarding: it may open packets of other nodes.
    pub opens: bool,
}

impl Default for Setup {
    fn default() -> Self {
        Self { sizes: MapSizes::default(), room: Room::default(), endpoints: 8, opens: true }
    }
}

pub struct Loaded {
    pub(super) ours: Ebpf,
    pub feeder: Feeder,
    pub tables: Maps,
    pub(super) places4: Places<Address4>,
    pub(super) places6: Places<Address6>,
    pub setup: Setup,
}

impl Loaded {
    /// Makes fresh maps with Services whose node ports are [`NODE_PORT`] and the other constants of
    /// this file.
    pub fn new(fixture: &BenchNode, setup: Setup) -> Result<Self> {
        Self::beside_another(fixture, setup, 0)
    }

    /// Does the same as [`Self::new`] where another instance exists: its feed uses this one of the
    /// [idle devices][BenchNode::idle].
    pub(super) fn beside_another(fixture: &BenchNode, setup: Setup, idle: usize) -> Result<Self> {
        let mut ours = load(setup.sizes, None, &Kernel::running()?)?;
        load_programs(&mut ours)?;
        let mut tables = Maps::take(&mut ours)?;
        let mut map = |name| ours.take_map(name).with_context(|| format!("no map {name}"));
        let places4 = Places::new(map("tp_flow_dir4")?, map("tp_unassured4")?)?;
        let places6 = Places::new(map("tp_flow_dir6")?, map("tp_unassured6")?)?;
        if setup.opens {
            jumps(&ours, &mut tables)?;
        } else {
            jumps_without_opening(&ours, &mut tables)?;
        }
        let mut feeder = Feeder::load(fixture.ifindex, &setup.room)?;
        feeder.keep_ready(fixture.idle[idle])?;
        service::set_config(&mut tables);
        service::describe_node(&mut tables)?;
        service::set_services(&mut tables, fixture.ifindex, setup.endpoints)?;
        service::set_floor(&mut feeder, &tables, setup.endpoints)?;
        Ok(Self { ours, feeder, tables, places4, places6, setup })
    }

    /// Adds this number of ClusterIPs to the prefilter, and their range, as the agent does.
    pub fn add_cluster_ips(&mut self, count: u32) -> Result<()> {
        let range: IpNet = CLUSTER_IPS.parse()?;
        let mut needed = Needed::default();
        for number in 1..=count {
            let address = later(range.network(), number);
            ensure!(range.contains(&address), "{count} ClusterIPs in {range}");
            needed.address(address);
        }
        needed.service_cidrs = Some([range].into());
        needed.add_to(&mut self.tables.prefilter);
        Ok(())
    }

    /// Sets the number of answers that the packet path may send per jiffy.
    pub fn set_answers_per_jiffy(&mut self, answers: u32) {
        // SAFETY: it is a field of the mapped element.
        self.tables.config.store(|s| unsafe { &raw mut (*s).answers_per_jiffy }, answers);
    }

    /// Runs a program on each of these packets, as if each were the first: none sees what the
    /// program did to the one before. Returns the nanoseconds of each, in whole numbers as the
    /// kernel counts them, and the last packet.
    pub fn run_each(
        &mut self,
        subject: Subject,
        frames: &[Vec<u8>],
        outcome: Option<Outcome>,
    ) -> Result<(Vec<f64>, Took)> {
        let before = self.outcomes(subject.hook())?;
        let program = match subject {
            Subject::Ours(_) => self.ours.program(subject.program()).context("no such program")?,
            _ => self.feeder.alone(subject.program())?,
        };
        let took = self.feeder.each(subject.hook(), program, frames)?;
        if let (Subject::Ours(hook), Some(outcome)) = (subject, outcome) {
            self.expect_outcome(hook, before, frames.len() as u64, outcome)?;
        }
        Ok(took)
    }

    /// Runs a program on this number of packets of a window.
    pub fn run(&mut self, subject: Subject, window: Window, packets: u32) -> Result<Took> {
        let program = self.fd(subject)?;
        self.feeder.run(subject.hook(), &program, window, packets)
    }

    /// Does the same as [`Self::run`] for the packet path, all of whose packets must have one
    /// outcome.
    pub fn run_to(&mut self, hook: Hook, window: Window, packets: u32, outcome: Outcome) -> Result<Took> {
        let before = self.outcomes(hook)?;
        let took = self.run(Subject::Ours(hook), window, packets)?;
        self.expect_outcome(hook, before, packets.into(), outcome)?;
        Ok(took)
    }

    /// Fails unless this number of packets has ended since with an outcome, and no other packet.
    fn expect_outcome(
        &self,
        hook: Hook,
        before: BTreeMap<&'static str, u64>,
        packets: u64,
        outcome: Outcome,
    ) -> Result<()> {
        let mut changed = self.outcomes(hook)?;
        for (outcome, count) in before {
            *changed.entry(outcome).or_default() -= count;
        }
        changed.retain(|_, count| *count != 0);
        let expected = BTreeMap::from([(outcome.name(), packets)]);
        ensure!(changed == expected, "{packets} packets should be {}, but are {changed:?}", outcome.name());
        Ok(())
    }

    /// Returns the number of flows of all kinds that the packet path has made, and the number of
    /// those that it has removed since, as counted for the Service that most packets of the bench
    /// go to.
    pub fn made_and_removed(&self) -> Result<[u64; 2]> {
        let made = self.tables.usage.read().unassured_next.iter().sum();
        let removed = self.counted(service::SERVICE, Outcome::Forwarded)?.flows;
        Ok([made, removed])
    }

    /// Returns the number of packets that all Services have counted so far with an outcome, without
    /// those of existing flows.
    pub fn counted_by_services(&self, outcome: Outcome) -> Result<u64> {
        service::ALL.map(|service| Ok(self.counted(service, outcome)?.packets)).sum()
    }

    fn counted(&self, service: u32, outcome: Outcome) -> Result<ServiceCount> {
        let key = ServiceCountKey { service, outcome: outcome as u32 };
        match self.tables.service_counts.get(&key, 0) {
            // Nothing was counted yet.
            Err(MapError::KeyNotFound) => Ok(ServiceCount::default()),
            count => Ok(count?),
        }
    }

    /// Returns the number of packets that ended at a hook so far, by outcome.
    pub fn outcomes(&self, hook: Hook) -> Result<BTreeMap<&'static str, u64>> {
        let number = match hook {
            Hook::Xdp => hook::XDP,
            Hook::Ingress => hook::INGRESS,
            Hook::Egress => hook::EGRESS,
        };
        let values = self.tables.counters.get(&number, 0)?;
        let sum = |outcome: Outcome| values.iter().map(|cpu| cpu[outcome as usize]).sum();
        Ok(Outcome::ALL.iter().map(|outcome| (outcome.name(), sum(*outcome))).collect())
    }

    pub(super) fn fd(&self, subject: Subject) -> Result<ProgramFd> {
        match subject {
            Subject::Ours(_) => fd(&self.ours, subject.program()),
            _ => self.feeder.program(subject.program()),
        }
    }
}
