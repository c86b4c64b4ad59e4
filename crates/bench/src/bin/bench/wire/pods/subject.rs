//! The subjects: ways from clients to a pod, each on a fixture of its own.

use std::{fmt, net::Ipv4Addr, time::Duration};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use traffic_policy_testing::{
    agent::{Agent, AgentBuilder},
    kube_proxy::Backend,
    netns::Namespace,
    object::{Manifests, Port, lease},
};

use super::{
    super::{
        cpu::keep_process_off,
        fixture::{DOWNLINK, END, NODE, UPLINK},
        generator::{NODE_PORT, Path4, Traffic},
        plan::SERVICES,
        rules,
        services::{NODE_NAME, Service, node, objects, objects_with, services},
    },
    fixture::{BACK, FRONT, HOME, POD, POD_SERVER, PodTestbed},
};

/// Name of the pod's node, where another one is in front.
const HOME_NAME: &str = "home";

/// Rules as a network plugin has them: for what pods forward and for the addresses that they leave
/// with.
const PLUGINS_RULES: &str = r#"
table ip plugin {
    chain pod-from {
        ct state established,related accept
        ip saddr { 10.1.0.0/16, 10.2.0.0/16 } meta mark set mark or 0x10000
    }
    chain pod-to {
        ct state established,related accept
        ip daddr { 10.1.0.0/16, 10.2.0.0/16 } meta mark set mark or 0x10000
    }
    chain raw {
        type filter hook prerouting priority raw;
        meta mark set mark and 0xfffeffff
    }
    chain forward {
        type filter hook forward priority filter; policy drop;
        ct state invalid drop
        iifname "pod*" jump pod-from
        oifname "pod*" jump pod-to
        mark and 0x10000 == 0x10000 accept
    }
    chain postrouting {
        type nat hook postrouting priority srcnat;
        ip saddr { 10.1.0.0/16, 10.2.0.0/16 } ip daddr != { 10.1.0.0/16, 10.2.0.0/16 } masquerade fully-random
    }
}
"#;

/// Subject of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// The pod is on another node, which opens packets; in front is XDP or TC.
    Direct(&'static str),
    /// The same with the address of the node in front.
    Snat(&'static str),
    /// The pod is on the node that is asked: packets bypass the stack, or pass through it
    /// ([`Self::Stack`]); true: with the rules of a network plugin.
    Past(bool),
    Stack(bool),
    /// The kernel as a router without any rule: to the pod, without a Service.
    Router,
    /// kube-proxy's rules, for TCP or UDP.
    Nftables(&'static str),
    Iptables(&'static str),
}

impl Kind {
    pub(super) fn path(self) -> Path4 {
        match self {
            Self::Direct(_) | Self::Past(_) | Self::Stack(_) => Path4::Pod(None),
            Self::Snat(_) => Path4::Pod(Some(FRONT)),
            Self::Router => Path4::Direct,
            Self::Nftables(_) | Self::Iptables(_) => Path4::NodePort,
        }
    }

    fn short(self) -> String {
        match self {
            Self::Direct(attach) => format!("direct-{attach}"),
            Self::Snat(attach) => format!("snat-{attach}"),
            Self::Past(rules) => format!("past-{rules}"),
            Self::Stack(rules) => format!("stack-{rules}"),
            Self::Router => "router".to_owned(),
            Self::Nftables(protocol) => format!("nft-{protocol}"),
            Self::Iptables(protocol) => format!("ipt-{protocol}"),
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rules = |rules: bool| if rules { ", with a network plugin's rules" } else { "" };
        match self {
            Self::Direct(attach) => write!(f, "within packets, {} in front", attach.to_uppercase()),
            Self::Snat(attach) => write!(f, "SNAT, {} in front", attach.to_uppercase()),
            Self::Past(with) => write!(f, "past the stack{}", rules(*with)),
            Self::Stack(with) => write!(f, "through the stack{}", rules(*with)),
            Self::Router => write!(f, "kernel forwarding, no rules"),
            Self::Nftables(_) => write!(f, "kube-proxy nftables, 1k Services"),
            Self::Iptables(_) => write!(f, "kube-proxy iptables, 1k Services"),
        }
    }
}

/// A fixture on which a subject forwards.
pub(super) struct Subject {
    pub(super) kind: Kind,
    // The agents are dropped before the fixture, whose folder they use.
    pub(super) agents: Vec<Agent>,
    pub(super) fixture: PodTestbed,
}

impl Subject {
    /// Starts a subject. `floods`: with the sinks at both ends. Sockets have none: at the client's
    /// end XDP would copy each packet, whatever the way that it came.
    pub(super) fn start(kind: Kind, floods: bool, traffic: &mut Traffic) -> Result<Self> {
        let of_another_node = matches!(kind, Kind::Direct(_) | Kind::Snat(_));
        let fixture = PodTestbed::build(&kind.short(), of_another_node, floods)?;
        if floods {
            traffic.attach("sink_xdp", &fixture.client, END)?;
            if of_another_node {
                traffic.attach("sink_xdp", &fixture.client, BACK)?;
            }
            traffic.attach_pod(&fixture.pod, UPLINK)?;
        }
        let mut subject = Self { kind, agents: Vec::new(), fixture };
        subject.prepare(traffic.cpu).with_context(|| format!("preparing {kind}"))?;
        Ok(subject)
    }

    fn prepare(&mut self, busy: usize) -> Result<()> {
        let PodTestbed { front, home, folder, .. } = &self.fixture;
        let file = folder.logs().join("rules");
        let services = pods_services();

        match self.kind {
            Kind::Router => {}
            Kind::Nftables(protocol) => {
                rules::write(home, Backend::Nftables, &services, protocol, &file)?;
            }
            Kind::Iptables(protocol) => {
                rules::write(home, Backend::IptablesNft, &services, protocol, &file)?;
            }
            Kind::Past(rules) | Kind::Stack(rules) => {
                if rules {
                    rules::load(home, &["nft", "-f"], PLUGINS_RULES, &file)?;
                }
                Manifests::at(&folder.manifests())?.write("all", &on_node(&services, NODE_NAME)?)?;
                let way = if matches!(self.kind, Kind::Past(_)) { "direct" } else { "stack" };
                self.start_agents(&[(NODE_NAME, (**home).clone(), "tc", &["--local-delivery", way])], busy)?;
            }
            Kind::Direct(attach) | Kind::Snat(attach) => {
                let front = front.as_ref().context("no node is in front")?;
                let mut objects = on_node(&services, HOME_NAME)?;
                objects.push(node(HOME_NAME, HOME, "10.1.0.0/24"));
                let mut flags = vec!["--device", DOWNLINK];
                if matches!(self.kind, Kind::Direct(_)) {
                    objects.push(lease::opens_from(NODE_NAME, &[NODE.into(), FRONT.into()]));
                    objects.push(lease::opens_from(HOME_NAME, &[HOME.into()]));
                    flags.extend(["--forwarding", "direct"]);
                }
                Manifests::at(&folder.manifests())?.write("all", &objects)?;
                let (front, home) = ((**front).clone(), (**home).clone());
                let agents = [(NODE_NAME, front, attach, &flags[..]), (HOME_NAME, home, "tc", &flags[..])];
                self.start_agents(&agents, busy)?;
            }
        }
        Ok(())
    }

    fn start_agents(&mut self, agents: &[(&str, Namespace, &str, &[&str])], busy: usize) -> Result<()> {
        for (name, namespace, attach, flags) in agents {
            let builder: AgentBuilder = Agent::in_folder(&self.fixture.folder, name, namespace);
            self.agents.push(builder.attach(attach).flags(flags).start()?);
        }
        for agent in &self.agents {
            agent.wait_ready(Duration::from_secs(60))?;
            keep_process_off(agent.pid().context("the agent has ended")?, busy)?;
        }
        Ok(())
    }

    /// Fails unless packets have ended at a hook of an agent with an outcome, at least this many
    /// since the count `before`.
    pub(super) fn expect(&self, agent: usize, hook: &str, outcome: &str, least: u64) -> Result<()> {
        let packets = self.agents.get(agent).context("no such agent")?.packets(hook, outcome)?;
        ensure!(packets >= least, "{}: {packets} packets are {outcome}, not {least}", self.kind);
        Ok(())
    }
}

/// Returns the Services of a cluster, two of them with the pod as their endpoint.
fn pods_services() -> Vec<Service> {
    let mut all = services(SERVICES);
    for service in &mut all {
        match service.name.as_str() {
            "flooded" => service.endpoints = vec![POD],
            "http" => service.endpoints = vec![POD_SERVER],
            _ => {}
        }
    }
    all
}

/// Returns their objects with the pod on a node, and one for datagrams on the same node port.
fn on_node(services: &[Service], node: &str) -> Result<Vec<Value>> {
    let datagrams = Service {
        name: "datagrams".to_owned(),
        cluster_ip: Ipv4Addr::new(10, 96, 200, 1),
        node_port: Some(NODE_PORT),
        endpoints: vec![POD],
    };
    let mut objects = objects(services);
    // The first object is the Node, again.
    objects.extend(objects_with(&[datagrams], Port::udp).into_iter().skip(1));
    let mut moved = 0;
    for object in &mut objects {
        let Some(endpoints) = object.get_mut("endpoints").and_then(Value::as_array_mut) else { continue };
        for endpoint in endpoints {
            let address = &endpoint["addresses"][0];
            if [POD, POD_SERVER].iter().any(|pod| *address == pod.to_string()) {
                endpoint["nodeName"] = node.into();
                moved += 1;
            }
        }
    }
    ensure!(moved == 3, "{moved} endpoints are the pod");
    Ok(objects)
}
