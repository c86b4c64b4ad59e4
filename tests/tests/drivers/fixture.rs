//! The testbed of one node on two wires, and the hosts around it.
//!
//! ```text
//!                              ┌ eth0 ── first wire ─── near (an endpoint) ── client
//!   pod (an endpoint) ── node ─┤
//!                              └ eth1 ── second wire ── far (an endpoint)
//! ```

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use traffic_policy_testing::agent::{self, Agent, AgentBuilder};
use traffic_policy_testing::cluster::{Cluster, TARGET};
use traffic_policy_testing::lab::{Addresses, Family, Folder, addressing, remove_leftovers};
use traffic_policy_testing::netlink::VethEnd;
use traffic_policy_testing::netns::{Namespace, Owned};
use traffic_policy_testing::object::{Backend, Manifests, Policy, node};
use traffic_policy_testing::state::State;
use traffic_policy_testing::traffic::server::Identity;
use traffic_policy_testing::traffic::{Faults, Ledger, Server};

use crate::wires::{End, Wire, ip};

/// The time limit until an agent is ready, or has refused to start, on a fast machine.
pub const START: Duration = Duration::from_secs(20);

/// The cards exist only once.
static TURN: Mutex<()> = Mutex::new(());

/// The place of a Service's endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    ThisNode,
    /// The place behind the card on which requests arrive.
    SameCard,
    OtherCard,
}

impl Place {
    pub const ALL: [Self; 3] = [Self::ThisNode, Self::SameCard, Self::OtherCard];

    pub fn pod(self) -> &'static str {
        match self {
            Self::ThisNode => "pod",
            Self::SameCard => "near",
            Self::OtherCard => "far",
        }
    }

    fn addresses(self) -> Addresses {
        match self {
            Self::ThisNode => POD,
            Self::SameCard => NEAR,
            Self::OtherCard => FAR,
        }
    }

    pub fn node_port(self) -> u16 {
        30080 + self as u16
    }
}

const NODE: Addresses = Addresses::new([172, 18, 0, 1], [0xfd00, 0x172, 0x18, 0, 0, 0, 0, 1]);
const NEAR: Addresses = Addresses::new([172, 18, 0, 10], [0xfd00, 0x172, 0x18, 0, 0, 0, 0, 0x10]);
const NODE_FAR: Addresses = Addresses::new([172, 19, 0, 1], [0xfd00, 0x172, 0x19, 0, 0, 0, 0, 1]);
const FAR: Addresses = Addresses::new([172, 19, 0, 10], [0xfd00, 0x172, 0x19, 0, 0, 0, 0, 0x10]);
const NODE_POD: Addresses = Addresses::new([10, 244, 1, 1], [0xfd00, 0x10, 0x244, 1, 0, 0, 0, 1]);
const POD: Addresses = Addresses::new([10, 244, 1, 2], [0xfd00, 0x10, 0x244, 1, 0, 0, 0, 2]);
const NEAR_CLIENT: Addresses = Addresses::new([192, 0, 2, 1], [0x2001, 0xdb8, 0xc, 0, 0, 0, 0, 1]);
const CLIENT: Addresses = Addresses::new([192, 0, 2, 10], [0x2001, 0xdb8, 0xc, 0, 0, 0, 0, 0x10]);

/// The device between the node and the other hosts.
#[derive(Clone, Copy, Debug)]
pub enum Link {
    /// The first card itself.
    Card,
    /// VLAN 5 on the first card: eth0.5 at both ends.
    Vlan,
    /// A bond of the cards of the first two wires: bond0 on the node, a bridge outside.
    Bond(Wire),
}

/// The namespaces, cards and servers. Dropping it returns the cards.
pub struct CardTestbed {
    // The fields are dropped in this order.
    _servers: Vec<Server>,
    manifests: Manifests,
    folder: Option<Folder>,
    pub node: Owned,
    pub near: Owned,
    far: Owned,
    pub pod: Owned,
    pub client: Owned,
    cards: Vec<(Wire, End, Namespace, String)>,
    /// The node's device towards the client.
    pub uplink: &'static str,
    _turn: MutexGuard<'static, ()>,
}

impl CardTestbed {
    /// Builds a testbed with cards on `first` and `second`.
    pub fn build(first: Wire, second: Wire) -> Result<Self> {
        Self::build_with(first, second, Link::Card)
    }

    pub fn build_with(first: Wire, second: Wire, link: Link) -> Result<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        // A test that failed before this one has restored everything, too.
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        remove_leftovers()?;
        let id = format!("tp-{}-drivers-{}", process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let create = |role: &str| Namespace::create(&format!("{id}-{role}"));
        let folder = Folder::create(&id)?;
        let manifests = Manifests::at(&folder.manifests())?;
        let mut fixture = Self {
            _servers: Vec::new(),
            manifests,
            folder: Some(folder),
            node: create("node")?,
            near: create("near")?,
            far: create("far")?,
            pod: create("pod")?,
            client: create("client")?,
            cards: Vec::new(),
            uplink: "eth0",
            _turn: turn,
        };
        fixture.plug(first, second, link)?;
        fixture.configure(first.mtu)?;
        fixture.serve()?;
        Ok(fixture)
    }

    fn plug(&mut self, first: Wire, second: Wire, link: Link) -> Result<()> {
        let (node, near, far) = (self.node.clone(), self.near.clone(), self.far.clone());
        let mut plug = |wire: Wire, end, namespace: &Namespace, name: &str| {
            wire.plug(end, namespace, name)?;
            self.cards.push((wire, end, namespace.clone(), name.to_owned()));
            Ok::<_, anyhow::Error>(())
        };
        plug(first, End::Node, &node, "eth0")?;
        plug(first, End::Outside, &near, "eth0")?;
        plug(second, End::Node, &node, "eth1")?;
        plug(second, End::Outside, &far, "eth0")?;
        match link {
            Link::Card => {}
            Link::Vlan => {
                for namespace in [&node, &near] {
                    let vlan = ["link", "add", "link", "eth0", "name", "eth0.5", "type", "vlan", "id", "5"];
                    ip(Some(namespace), &vlan)?;
                    ip(Some(namespace), &["link", "set", "eth0.5", "up"])?;
                }
                self.uplink = "eth0.5";
            }
            Link::Bond(third) => {
                plug(third, End::Node, &node, "eth2")?;
                plug(third, End::Outside, &near, "eth2")?;
                let bond = ["link", "add", "bond0", "type", "bond", "mode", "active-backup", "miimon", "100"];
                ip(Some(&node), &bond)?;
                ip(Some(&near), &["link", "add", "bond0", "type", "bridge", "mcast_snooping", "0"])?;
                for card in ["eth0", "eth2"] {
                    ip(Some(&node), &["link", "set", card, "down"])?;
                    ip(Some(&node), &["link", "set", card, "master", "bond0"])?;
                    ip(Some(&near), &["link", "set", card, "master", "bond0"])?;
                }
                for namespace in [&node, &near] {
                    ip(Some(namespace), &["link", "set", "bond0", "up"])?;
                }
                self.uplink = "bond0";
            }
        }
        Ok(())
    }

    /// Sets addresses and routes.
    fn configure(&self, mtu: u32) -> Result<()> {
        let mtu = Some(mtu);
        let forwarding = [("net.ipv4.ip_forward", "1"), ("net.ipv6.conf.all.forwarding", "1")];
        for namespace in [&self.node, &self.near] {
            namespace.sysctls(&forwarding)?;
        }
        let end = |name| VethEnd { name, mac: None, mtu };
        self.node.netlink(async |net| net.veth(&end("pod0"), None, &end("eth0"), &self.pod).await)?;
        self.near.netlink(async |net| net.veth(&end("client0"), None, &end("eth0"), &self.client).await)?;
        let addresses: [(&Namespace, &str, Addresses); 8] = [
            (&self.node, self.uplink, NODE),
            (&self.near, self.uplink, NEAR),
            (&self.node, "eth1", NODE_FAR),
            (&self.far, "eth0", FAR),
            (&self.node, "pod0", NODE_POD),
            (&self.pod, "eth0", POD),
            (&self.near, "client0", NEAR_CLIENT),
            (&self.client, "eth0", CLIENT),
        ];
        let gateways: [(&Namespace, Option<Addresses>, Addresses); 4] = [
            (&self.node, None, NEAR),
            (&self.far, None, NODE_FAR),
            (&self.pod, None, NODE_POD),
            (&self.client, None, NEAR_CLIENT),
        ];
        addressing::assign(&addresses, &gateways)
    }

    fn serve(&mut self) -> Result<()> {
        let ledger = Ledger::default();
        for (place, namespace) in Place::ALL.into_iter().zip([&self.pod, &self.near, &self.far]) {
            let node = format!("node-{}", 1 + place as u8);
            let identity = Identity { pod: place.pod().to_owned(), node: node.clone() };
            self._servers.push(Server::start_in(namespace, TARGET, identity, Faults::default(), &ledger)?);
            let service = Cluster::node_port(place.pod(), Policy::Cluster, place.node_port());
            self.manifests.apply(&service, &[Backend::at(&place.addresses()).on_node(&node)])?;
        }
        self.manifests.write("nodes", &[node::of_both_families("node-1", &NODE, &POD.network())])
    }

    /// Applies a Service whose endpoint is the server of `near`, at another of its addresses, as a
    /// pod of another node.
    pub fn serve_behind(&self, name: &str, port: u16, endpoint: &Addresses) -> Result<()> {
        let service = Cluster::node_port(name, Policy::Cluster, port);
        self.manifests.apply(&service, &[Backend::at(endpoint).on_node("node-9")])
    }

    /// Returns an agent for the node's two devices.
    pub fn agent(&self, attach: &str) -> Result<AgentBuilder> {
        let folder = self.folder()?;
        let agent = Agent::in_folder(folder, "node-1", &self.node);
        Ok(agent.attach(attach).devices(&[self.uplink, "eth1"]).program(&self.program()?))
    }

    /// The agent's program as it runs on its node: with the sysfs of the node's network namespace.
    pub fn program(&self) -> Result<PathBuf> {
        let path = self.folder()?.logs().join("agent");
        let agent = agent::program()?;
        let script =
            format!("#!/bin/bash\nexec ip netns exec {} {} \"$@\"\n", self.node.name(), agent.display());
        fs::write(&path, script)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        Ok(path)
    }

    /// The current counters of all namespaces.
    pub fn state(&self, agent: &Agent) -> State {
        let namespaces: [(&str, &Namespace); 5] = [
            ("node", &self.node),
            ("near", &self.near),
            ("far", &self.far),
            ("pod", &self.pod),
            ("client", &self.client),
        ];
        State::read(&namespaces, agent)
    }

    pub fn folder(&self) -> Result<&Folder> {
        self.folder.as_ref().context("the fixture is being taken down")
    }

    /// The address of the Service whose endpoint is at this place.
    pub fn at(&self, place: Place, family: Family) -> SocketAddr {
        SocketAddr::new(NODE.of(family), place.node_port())
    }

    /// The client's address as the endpoint must see it: its own on this node, otherwise that of
    /// the node's device towards the endpoint, so that the reply comes back to the node.
    pub fn seen(&self, place: Place, family: Family) -> IpAddr {
        match place {
            Place::ThisNode => CLIENT.of(family),
            Place::SameCard => NODE.of(family),
            Place::OtherCard => NODE_FAR.of(family),
        }
    }
}

impl Drop for CardTestbed {
    fn drop(&mut self) {
        // The pins of the agent are removed first, which detaches its programs from the cards.
        self.folder = None;
        for device in ["bond0", "eth0.5", "eth0.7"] {
            for namespace in [&self.node, &self.near] {
                // These devices exist in some tests only.
                ip(Some(namespace), &["link", "delete", device]).ok();
            }
        }
        for (wire, end, namespace, name) in &self.cards {
            if let Err(error) = wire.unplug(*end, namespace, name) {
                eprintln!("{error:#}");
            }
        }
    }
}
