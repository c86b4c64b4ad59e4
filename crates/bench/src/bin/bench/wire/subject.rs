//! The subjects of the wire rows: the forwarders that are compared, each on a fixture of its own.

use std::{fmt, time::Duration};

use anyhow::{Context, Result};
use traffic_policy_bench::flows::floor;
use traffic_policy_bench_ebpf::traffic::Arrived;
use traffic_policy_dataplane::ToWire;
use traffic_policy_ebpf::abi::{ABI_VERSION, PROTOCOL_TCP, Ports, Tuple};
use traffic_policy_testing::{agent::Agent, kube_proxy::Backend, netns::Owned, object::Manifests, pinned};

use super::{
    conntrack,
    cpu::keep_process_off,
    fixture::{DOWNLINK, END, ENDPOINTS, NODE, UPLINK, WireTestbed},
    generator::{NODE_PORT, Path4, TARGET_PORT, Traffic, client, later},
    kube_proxy::{self, KubeProxy},
    rules,
    services::{FLOODED, NODE_NAME, objects, services},
};

/// Subject of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Sends each packet back unchanged: the cost of generator, wires and sink.
    Bounce,
    /// The minimum work of a node port, for open flows.
    Floor,
    Xdp(u32),
    Tc(u32),
    /// The kernel as a router without any rule: directly to the endpoint, without a Service.
    Router,
    Nftables(u32),
    Iptables(u32),
}

impl Kind {
    /// Returns the path of the packets.
    pub(crate) fn path(self) -> Path4 {
        if self == Self::Router { Path4::Direct } else { Path4::NodePort }
    }

    pub(crate) fn short(self) -> String {
        match self {
            Self::Bounce => "bounce".to_owned(),
            Self::Floor => "floor".to_owned(),
            Self::Router => "router".to_owned(),
            Self::Xdp(services) => format!("xdp-{services}"),
            Self::Tc(services) => format!("tc-{services}"),
            Self::Nftables(services) => format!("nft-{services}"),
            Self::Iptables(services) => format!("ipt-{services}"),
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = |services: u32| match services {
            1 => "1 Service".to_owned(),
            1_000.. => format!("{}k Services", services / 1_000),
            _ => format!("{services} Services"),
        };
        match self {
            Self::Bounce => write!(f, "sent back unchanged (XDP)"),
            Self::Floor => write!(f, "floor (XDP)"),
            Self::Xdp(services) => write!(f, "traffic-policy, XDP, {}", number(*services)),
            Self::Tc(services) => write!(f, "traffic-policy, TC, {}", number(*services)),
            Self::Router => write!(f, "kernel forwarding, no rules"),
            Self::Nftables(services) => write!(f, "kube-proxy nftables, {}", number(*services)),
            Self::Iptables(services) => write!(f, "kube-proxy iptables, {}", number(*services)),
        }
    }
}

/// A fixture on which a subject forwards.
pub(crate) struct Subject {
    pub(crate) kind: Kind,
    // The agent is dropped before the fixture, whose folder it uses.
    agent: Option<Agent>,
    kube_proxy: Option<KubeProxy>,
    pub(crate) fixture: WireTestbed,
}

impl Subject {
    /// Starts a subject; `traffic` counts at both ends.
    pub(crate) fn start(kind: Kind, traffic: &mut Traffic) -> Result<Self> {
        let fixture = WireTestbed::build(&kind.short())?;
        traffic.attach("sink_xdp", &fixture.client, END)?;
        traffic.attach("sink_xdp", &fixture.endpoint, END)?;
        let mut subject = Self { kind, agent: None, kube_proxy: None, fixture };
        subject.prepare(traffic).with_context(|| format!("preparing {kind}"))?;
        // A subject that forwards nothing, or wrong packets, fails here.
        subject.open(traffic)?;
        Ok(subject)
    }

    fn prepare(&mut self, traffic: &mut Traffic) -> Result<()> {
        let file = self.fixture.folder.logs().join("rules");
        let node: &Owned = &self.fixture.node;
        match self.kind {
            Kind::Router => Ok(()),
            Kind::Bounce => traffic.attach("mac_swap", node, UPLINK),
            Kind::Floor => {
                traffic.attach("floor_established", node, UPLINK)?;
                floor_flows(traffic, super::FLOWS)
            }
            Kind::Xdp(number) => self.agent("xdp", number, traffic.cpu),
            Kind::Tc(number) => self.agent("tc", number, traffic.cpu),
            Kind::Nftables(number) if kube_proxy::program().is_some() => {
                self.kube_proxy("nftables", number, &["nft", "list", "table", "ip", "kube-proxy"])
            }
            Kind::Iptables(number) if kube_proxy::program().is_some() => {
                self.kube_proxy("iptables", number, &["iptables-save", "-t", "nat"])
            }
            Kind::Nftables(number) => rules::write(node, Backend::Nftables, &services(number), "tcp", &file),
            Kind::Iptables(number) => {
                rules::write(node, Backend::IptablesNft, &services(number), "tcp", &file)
            }
        }
    }

    fn kube_proxy(&mut self, mode: &str, number: u32, listing: &[&str]) -> Result<()> {
        let objects = objects(&services(number));
        self.kube_proxy = Some(KubeProxy::start(&self.fixture, mode, objects, listing)?);
        Ok(())
    }

    fn agent(&mut self, attach: &str, number: u32, busy: usize) -> Result<()> {
        let WireTestbed { folder, node, .. } = &self.fixture;
        Manifests::at(&folder.manifests())?.write("all", &objects(&services(number)))?;
        let agent = Agent::in_folder(folder, NODE_NAME, node);
        let agent = agent.attach(attach).flags(&["--device", DOWNLINK]).start()?;
        agent.wait_ready(Duration::from_secs(60))?;
        keep_process_off(agent.pid().context("the agent has ended")?, busy)?;
        self.agent = Some(agent);
        Ok(())
    }

    /// Opens the flows, and verifies that packets arrive as expected.
    pub(crate) fn open(&self, traffic: &mut Traffic) -> Result<()> {
        let path = self.kind.path();
        match self.kind {
            Kind::Bounce | Kind::Floor => {
                traffic.aim(path, super::generator::Send::Requests, super::FLOWS, 0)?;
                traffic.verify(&self.fixture.client, super::FLOWS, self.wanted())
            }
            _ => traffic.open(&self.fixture.client, path, super::FLOWS),
        }
        .with_context(|| format!("opening flows of {}", self.kind))
    }

    /// Removes all flows.
    pub(crate) fn empty(&self) -> Result<()> {
        match self.kind {
            Kind::Bounce | Kind::Floor | Kind::Router => Ok(()),
            Kind::Nftables(_) | Kind::Iptables(_) => conntrack::flush(&self.fixture.node),
            Kind::Xdp(_) | Kind::Tc(_) => {
                let agent = self.agent.as_ref().context("no agent is running")?;
                let maps = agent.pin_dir().join(format!("v{ABI_VERSION}")).join("maps");
                pinned::empty(&maps.join("tp_flows4"))?;
                // Otherwise each new flow would look up a removed one, and search for a place in
                // the directory in vain.
                ["tp_unassured4", "tp_flow_dir4"].iter().try_for_each(|name| pinned::renew(&maps.join(name)))
            }
        }
        .with_context(|| format!("emptying the tables of {}", self.kind))
    }

    /// Returns the expected form of a packet of an open flow on its arrival.
    pub(crate) fn wanted(&self) -> Arrived {
        if self.kind == Kind::Bounce { Arrived::Untranslated } else { Arrived::Request }
    }
}

/// Gives the floor its flows.
fn floor_flows(traffic: &mut Traffic, number: u32) -> Result<()> {
    for flow in 0..number {
        let (address, port) = client(flow);
        let from = Tuple {
            source: address.to_wire(),
            destination: NODE.to_wire(),
            ports: Ports::from_host(port, NODE_PORT),
            protocol: PROTOCOL_TCP,
        };
        let to = Tuple {
            source: NODE.to_wire(),
            destination: later(ENDPOINTS, 1 + flow % FLOODED).to_wire(),
            ports: Ports::from_host(32_768 + flow as u16, TARGET_PORT),
            protocol: PROTOCOL_TCP,
        };
        traffic.floor.insert(from, floor(from, to), 0)?;
    }
    Ok(())
}
