//! The testbed of one node whose clients, and whose route to another node's pods, are behind
//! devices without Ethernet.
//!
//! ```text
//!   tunnel client ── tun0 ─┐          ┌─ tun1 ── far (another node) ── pod-far
//!                          ├── node ──┤
//!   wire client ─── eth0 ──┘          └─ pod0 ── pod-here
//! ```

use std::net::{IpAddr, SocketAddr};
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use traffic_policy_testing::agent::{Agent, AgentBuilder};
use traffic_policy_testing::cluster::{Cluster, Protocol, TARGET};
use traffic_policy_testing::lab::{Addresses, Family, Folder, addressing};
use traffic_policy_testing::netlink::VethEnd;
use traffic_policy_testing::netns::{Namespace, Owned};
use traffic_policy_testing::object::{Backend, Manifests, Policy, lease, node};
use traffic_policy_testing::traffic::server::Identity;
use traffic_policy_testing::traffic::{Answer, Faults, Ledger, Outcome, Server};
use traffic_policy_testing::tun::{TunEnd, TunWire};

/// The time limit of a request; one without an answer by then is lost.
const PATIENCE: Duration = Duration::from_secs(10);

/// The client that sends requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Client {
    Tunnel,
    Wire,
}

/// A node port, by the policy and the place of its endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Port {
    /// Policy Local, with an endpoint on this node.
    Here,
    /// Policy Cluster, with an endpoint behind the tunnel.
    Far,
    /// Policy Local, with the endpoint behind the tunnel.
    LocalFar,
    /// No endpoint at all.
    Empty,
}

impl Client {
    pub const BOTH: [Self; 2] = [Self::Tunnel, Self::Wire];
}

impl Port {
    pub fn number(self) -> u16 {
        30080 + self as u16
    }
}

const NODE_TUNNEL: Addresses = Addresses::new([10, 8, 0, 1], [0xfd00, 8, 0, 0, 0, 0, 0, 1]);
const TUNNEL_CLIENT: Addresses = Addresses::new([10, 8, 0, 10], [0xfd00, 8, 0, 0, 0, 0, 0, 0x10]);
const NODE_WIRE: Addresses = Addresses::new([172, 18, 0, 1], [0xfd00, 0x172, 0x18, 0, 0, 0, 0, 1]);
const WIRE_CLIENT: Addresses = Addresses::new([172, 18, 0, 10], [0xfd00, 0x172, 0x18, 0, 0, 0, 0, 0x10]);
const NODE_FAR: Addresses = Addresses::new([10, 9, 0, 1], [0xfd00, 9, 0, 0, 0, 0, 0, 1]);
pub const FAR: Addresses = Addresses::new([10, 9, 0, 10], [0xfd00, 9, 0, 0, 0, 0, 0, 0x10]);
const NODE_POD: Addresses = Addresses::new([10, 244, 1, 1], [0xfd00, 0x10, 0x244, 1, 0, 0, 0, 1]);
pub const POD_HERE: Addresses = Addresses::new([10, 244, 1, 2], [0xfd00, 0x10, 0x244, 1, 0, 0, 0, 2]);
const FAR_POD: Addresses = Addresses::new([10, 244, 2, 1], [0xfd00, 0x10, 0x244, 2, 0, 0, 0, 1]);
pub const POD_FAR: Addresses = Addresses::new([10, 244, 2, 2], [0xfd00, 0x10, 0x244, 2, 0, 0, 0, 2]);

/// The namespaces, devices and servers.
pub struct Tunnels {
    // The fields are dropped in this order.
    _servers: Vec<Server>,
    _wires: [TunWire; 2],
    manifests: Manifests,
    folder: Folder,
    pub node: Owned,
    pub far: Owned,
    here: Owned,
    pub pod_far: Owned,
    tunnel_client: Owned,
    wire_client: Owned,
}

impl Tunnels {
    /// Builds the testbed. `far_mtu` is the MTU of the node's end of the tunnel to the other node.
    pub fn build(far_mtu: u32) -> Result<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let id = format!("tp-{}-tunnels-{}", process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let create = |role: &str| Namespace::create(&format!("{id}-{role}"));
        let (node, far, tunnel_client) = (create("node")?, create("far")?, create("tunnel")?);
        let end = |namespace, name, mtu| TunEnd { namespace, name, mtu };
        let wires = [
            TunWire::join(end(&node, "tun0", 1500), end(&tunnel_client, "tun0", 1500))?,
            TunWire::join(end(&node, "tun1", far_mtu), end(&far, "tun0", 1500))?,
        ];
        let folder = Folder::create(&id)?;
        let mut tunnels = Self {
            _servers: Vec::new(),
            _wires: wires,
            manifests: Manifests::at(&folder.manifests())?,
            folder,
            node,
            far,
            here: create("here")?,
            pod_far: create("pod-far")?,
            tunnel_client,
            wire_client: create("wire")?,
        };
        tunnels.configure()?;
        tunnels.serve()?;
        Ok(tunnels)
    }

    fn configure(&self) -> Result<()> {
        for namespace in [&self.node, &self.far] {
            namespace.sysctls(&[("net.ipv4.ip_forward", "1"), ("net.ipv6.conf.all.forwarding", "1")])?;
        }
        let end = |name| VethEnd { name, mac: None, mtu: Some(1500) };
        self.node.netlink(async |net| {
            net.veth(&end("pod0"), None, &end("eth0"), &self.here).await?;
            net.veth(&end("eth0"), None, &end("eth0"), &self.wire_client).await
        })?;
        self.far.netlink(async |net| net.veth(&end("pod0"), None, &end("eth0"), &self.pod_far).await)?;
        let addresses: [(&Namespace, &str, Addresses); 10] = [
            (&self.node, "tun0", NODE_TUNNEL),
            (&self.tunnel_client, "tun0", TUNNEL_CLIENT),
            (&self.node, "eth0", NODE_WIRE),
            (&self.wire_client, "eth0", WIRE_CLIENT),
            (&self.node, "tun1", NODE_FAR),
            (&self.far, "tun0", FAR),
            (&self.node, "pod0", NODE_POD),
            (&self.here, "eth0", POD_HERE),
            (&self.far, "pod0", FAR_POD),
            (&self.pod_far, "eth0", POD_FAR),
        ];
        let routes: [(&Namespace, Option<Addresses>, Addresses); 6] = [
            (&self.node, Some(POD_FAR.network()), FAR),
            (&self.far, None, NODE_FAR),
            (&self.here, None, NODE_POD),
            (&self.pod_far, None, FAR_POD),
            (&self.tunnel_client, None, NODE_TUNNEL),
            (&self.wire_client, None, NODE_WIRE),
        ];
        addressing::assign(&addresses, &routes)
    }

    fn serve(&mut self) -> Result<()> {
        let ledger = Ledger::default();
        let pods = [("pod-here", "node-1", &self.here), ("pod-far", "node-2", &self.pod_far)];
        for (pod, node, namespace) in pods {
            let identity = Identity { pod: pod.to_owned(), node: node.to_owned() };
            self._servers.push(Server::start_in(namespace, TARGET, identity, Faults::default(), &ledger)?);
        }
        let here = Backend::at(&POD_HERE).on_node("node-1");
        let far = Backend::at(&POD_FAR).on_node("node-2");
        let services: [(&str, Policy, Port, &[Backend]); 4] = [
            ("here", Policy::Local, Port::Here, std::slice::from_ref(&here)),
            ("far", Policy::Cluster, Port::Far, std::slice::from_ref(&far)),
            ("local-far", Policy::Local, Port::LocalFar, std::slice::from_ref(&far)),
            ("empty", Policy::Cluster, Port::Empty, &[]),
        ];
        for (name, policy, port, backends) in services {
            self.manifests.apply(&Cluster::node_port(name, policy, port.number()), backends)?;
        }
        self.manifests.write("nodes", &[node::of_both_families("node-1", &NODE_WIRE, &POD_HERE.network())])
    }

    /// Lets both nodes open packets of each other, and the other one be in front of an endpoint
    /// here, at this address of a load balancer and the port of [`Port::Here`].
    pub fn forward_between_nodes(&self, vips: Addresses) -> Result<()> {
        let leases = [("node-1", NODE_FAR), ("node-2", FAR)];
        self.manifests.write("leases", &leases.map(|(name, at)| lease::tunnels_at(name, &at)))?;
        let nodes = [("node-1", NODE_WIRE, POD_HERE), ("node-2", FAR, POD_FAR)];
        let nodes = nodes.map(|(name, at, pod)| node::of_both_families(name, &at, &pod.network()));
        self.manifests.write("nodes", &nodes)?;
        let service = Cluster::node_port("here", Policy::Cluster, Port::Here.number());
        let service = Family::BOTH.into_iter().fold(service, |service, family| service.vip(vips.of(family)));
        self.manifests.apply(&service, &[Backend::at(&POD_HERE).on_node("node-1")])
    }

    /// The agent of the other node, on the tunnel and on the device of the pod there.
    pub fn agent_of_far(&self) -> AgentBuilder {
        Agent::in_folder(&self.folder, "node-2", &self.far).attach("tc").devices(&["tun0", "pod0"])
    }

    pub fn agent(&self, attach: &str, devices: &[&str]) -> AgentBuilder {
        Agent::in_folder(&self.folder, "node-1", &self.node).attach(attach).devices(devices)
    }

    pub fn client(&self, client: Client) -> &Namespace {
        match client {
            Client::Tunnel => &self.tunnel_client,
            Client::Wire => &self.wire_client,
        }
    }

    /// The address of the Node at which clients reach a node port.
    pub fn at(family: Family, port: Port) -> SocketAddr {
        SocketAddr::new(NODE_WIRE.of(family), port.number())
    }

    /// The client's address as the endpoint of a port must see it.
    pub fn seen(client: Client, family: Family, port: Port) -> IpAddr {
        match (port, client) {
            (Port::Here, Client::Tunnel) => TUNNEL_CLIENT.of(family),
            (Port::Here, Client::Wire) => WIRE_CLIENT.of(family),
            _ => NODE_FAR.of(family),
        }
    }

    fn ask(&self, client: Client, family: Family, protocol: Protocol, port: Port) -> Result<Answer> {
        let to = Self::at(family, port);
        let what = || format!("{client:?} {family:?} {protocol:?} {port:?}");
        let answer = protocol.probe(to).limit(PATIENCE).answer(self.client(client)).with_context(what)?;
        let seen = answer.client.ip();
        ensure!(seen == Self::seen(client, family, port), "{}: the endpoint saw {seen}", what());
        Ok(answer)
    }

    /// Tests both policies, families and protocols, from both clients.
    pub fn matrix(&self) -> Result<()> {
        for client in Client::BOTH {
            for family in Family::BOTH {
                for protocol in Protocol::BOTH {
                    // Several requests, so that all that is resolved with the kernel's help first
                    // is known by then.
                    for _ in 0..3 {
                        for (port, pod) in [(Port::Here, "pod-here"), (Port::Far, "pod-far")] {
                            let answer = self.ask(client, family, protocol, port)?;
                            ensure!(answer.pod == pod, "{client:?} {family:?} {port:?}: {answer:?}");
                        }
                    }
                    let asked = |port| protocol.probe(Self::at(family, port));
                    let silent = asked(Port::LocalFar).from(self.client(client))?;
                    ensure!(
                        silent == Outcome::Silent,
                        "{client:?} {family:?} {protocol:?} Local: {silent:?}"
                    );
                    let refused = asked(Port::Empty).limit(PATIENCE).from(self.client(client))?;
                    // Where the wire has no delay, the client's kernel notices an ICMPv6 error at
                    // the second SYN only.
                    let twice = family == Family::V6 && protocol == Protocol::Tcp;
                    ensure!(
                        matches!(refused, Outcome::Refused(_)) && twice || refused.is_refused_at_once(),
                        "{client:?} {family:?} {protocol:?} without endpoints: {refused:?}"
                    );
                }
            }
        }
        Ok(())
    }
}
