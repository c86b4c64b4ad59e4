//! Construction of a lab: namespaces, devices, addresses and routes, in an order that needs no
//! waiting.

use anyhow::{Context, Result, bail, ensure};

use super::addressing::{add_addresses, add_routes, default_route};
use super::plan::{self, Addresses};
use super::{Client, Cni, Folder, Lab, Node, Pod, cni, folder, overlay, persistent};
use crate::netlink::{Mac, VethEnd};
use crate::netns::{Namespace, Owned, ensure_root};
use crate::xdp::Always;

const MTU: u32 = 1500;

/// The layout of a lab; see [`Lab::builder`].
#[derive(Clone, Debug)]
pub struct LabBuilder {
    pods: Vec<u8>,
    overlay: bool,
    two_uplinks: bool,
    client_on_switch: bool,
    strict_rp_filter: bool,
    wire_offloads: bool,
    pod_offloads: bool,
    cni: Option<Cni>,
    persistent: Option<String>,
}

impl Default for LabBuilder {
    fn default() -> Self {
        Self {
            pods: vec![1; 3],
            overlay: false,
            two_uplinks: false,
            client_on_switch: false,
            strict_rp_filter: false,
            wire_offloads: false,
            pod_offloads: true,
            cni: None,
            persistent: None,
        }
    }
}

impl LabBuilder {
    /// Sets the number of nodes, each with one pod; 3 by default.
    pub fn nodes(mut self, nodes: u8) -> Self {
        self.pods = vec![self.pods.first().copied().unwrap_or(1); nodes.into()];
        self
    }

    /// Sets the number of pods on each node.
    pub fn pods_per_node(mut self, pods: u8) -> Self {
        self.pods.fill(pods);
        self
    }

    /// Sets the number of nodes and of their pods: one node for each element, with that many pods.
    pub fn pods(mut self, pods: &[u8]) -> Self {
        self.pods = pods.to_vec();
        self
    }

    /// Sends pod traffic between nodes through a VXLAN device `flannel.1` instead of plain routes.
    pub fn overlay(mut self) -> Self {
        self.overlay = true;
        self
    }

    /// Gives node-1 a second uplink `eth1` to a second router, to which its default route leads:
    /// requests to its eth0 address arrive on one device and their replies leave by the other.
    pub fn two_uplinks(mut self) -> Self {
        self.two_uplinks = true;
        self
    }

    /// Makes the client a neighbour of the nodes instead of placing it behind the router.
    pub fn client_on_switch(mut self) -> Self {
        self.client_on_switch = true;
        self
    }

    /// Makes nodes drop packets that do not arrive on the device of the route to their source.
    pub fn strict_rp_filter(mut self) -> Self {
        self.strict_rp_filter = true;
        self
    }

    /// Switches checksum and segmentation offload on both ends of every link between client, router
    /// and nodes. It is off by default, as XDP needs it (the router's ports then also let XDP_TX
    /// arrive); the default of a veth itself is on, which is what TC meets in practice.
    pub fn wire_offloads(mut self, on: bool) -> Self {
        self.wire_offloads = on;
        self
    }

    /// Switches the same offloads for the links between nodes and pods; they are on by default.
    pub fn pod_offloads(mut self, on: bool) -> Self {
        self.pod_offloads = on;
        self
    }

    /// Sets up nodes and pods as a network plugin leaves them, in place of plain routes and `cni0`.
    pub fn cni(mut self, cni: Cni) -> Self {
        self.cni = Some(cni);
        self.wire_offloads |= cni.keeps_wire_offloads();
        self
    }

    /// Gives the lab a name of its own, under which [`persistent::keep`] can leave it up.
    pub fn persistent(mut self, name: &str) -> Self {
        self.persistent = Some(name.to_owned());
        self
    }

    pub fn build(self) -> Result<Lab> {
        ensure_root()?;
        ensure!(!(self.two_uplinks && self.client_on_switch), "a client on the switch has no second router");
        ensure!(self.pods.len() <= 90, "the address plan has room for 90 nodes");
        if let Some(cni) = self.cni {
            let other = self.overlay || self.two_uplinks;
            ensure!(!other, "the layout {} says itself how nodes are connected", cni.name());
            if let Some(missing) = cni.missing()? {
                bail!("the layout {} cannot be made: there is {missing}", cni.name());
            }
        }
        folder::remove_leftovers().context("removing what dead labs left")?;
        let id = match &self.persistent {
            Some(name) => persistent::id(name)?,
            None => folder::unused_id(),
        };
        let folder = Folder::create(&id)?;
        let make = |role: &str| self.namespace(&format!("{id}-{role}"));

        let router = make("router")?;
        self.switch(&router, 0)?;
        let client = Client { netns: make("client")?, addresses: self.client_addresses() };
        self.connect_client(&router, &client, 0)?;
        let second_router = if self.two_uplinks {
            let second = make("router-2")?;
            self.switch(&second, 1)?;
            self.connect_client(&second, &client, 1)?;
            Some(second)
        } else {
            None
        };

        let mut nodes = Vec::new();
        for (number, pods) in (1..).zip(self.pods.iter().copied()) {
            let second = second_router.as_deref().filter(|_| number == 1);
            let netns = make(&format!("node-{number}"))?;
            let mut node = self.node(number, netns, &router, second)?;
            for index in 1..=pods {
                let netns = make(&format!("pod-{number}-{index}"))?;
                node.pods.push(self.pod(number, index, netns, &node)?);
            }
            nodes.push(node);
        }
        let lab = Lab { id, nodes, router, second_router, client, plan: self, folder };
        lab.nodes.iter().try_for_each(|node| lab.connect_pods_of(node))?;
        if let Some(cni) = lab.plan.cni {
            cni.finish(&lab.router, &lab.nodes)?;
        }
        Lab::settle(&lab.namespaces())?;
        Ok(lab)
    }

    fn client_addresses(&self) -> Addresses {
        if self.client_on_switch { plan::client_on_switch() } else { plan::client(0) }
    }

    fn namespace(&self, name: &str) -> Result<Owned> {
        let namespace = Namespace::create(name)?;
        // Set before any device exists, so that each starts with these. Addresses are usable at
        // once, and all routes are made here.
        namespace.sysctls(&[
            ("net.ipv6.conf.default.accept_dad", "0"),
            ("net.ipv6.conf.default.accept_ra", "0"),
            ("net.ipv6.conf.default.router_solicitations", "0"),
            ("net.ipv4.conf.all.rp_filter", "0"),
            ("net.ipv4.conf.default.rp_filter", "0"),
        ])?;
        namespace.netlink(async |net| net.up("lo").await)?;
        Ok(namespace)
    }

    /// Makes a router with a bridge `br0` into which all its nodes are plugged.
    fn switch(&self, router: &Namespace, uplink: u8) -> Result<()> {
        forward(router)?;
        let gateway = plan::gateway(uplink);
        router.netlink(async |net| {
            net.bridge("br0", gateway.mac(), MTU).await?;
            if self.cni.is_some_and(Cni::has_second_card) {
                net.bridge("br1", [2, 0, 10, 244, 0, 1], MTU).await?;
            }
            add_addresses(&net, "br0", &gateway).await
        })
    }

    fn connect_client(&self, router: &Namespace, client: &Client, uplink: u8) -> Result<()> {
        let device = format!("eth{uplink}");
        let addresses = if uplink == 0 { client.addresses } else { plan::client(uplink) };
        let gateway = plan::client_gateway(uplink);
        let here = VethEnd { name: "client", mac: Some(gateway.mac()), mtu: None };
        let there = VethEnd { name: &device, mac: Some(addresses.mac()), mtu: None };
        if self.client_on_switch {
            let port = VethEnd { mac: None, ..here };
            router.netlink(async |net| net.veth(&port, Some("br0"), &there, &client.netns).await)?;
        } else {
            router.netlink(async |net| {
                net.veth(&here, None, &there, &client.netns).await?;
                add_addresses(&net, "client", &gateway).await?;
                if uplink > 0 {
                    // Replies to the client's address on the first uplink may come back through
                    // this router.
                    let first = client.addresses;
                    add_routes(&net, &first.network(), &addresses).await?;
                }
                Ok(())
            })?;
        }
        client.netns.netlink(async |net| {
            add_addresses(&net, &device, &addresses).await?;
            match uplink {
                0 if self.client_on_switch => Ok(()),
                0 => default_route(&net, &gateway).await,
                _ => add_routes(&net, &plan::gateway(uplink).network(), &gateway).await,
            }
        })?;
        self.prepare_wire((router, "client"), (&client.netns, &device))
    }

    fn node(&self, number: u8, netns: Owned, router: &Namespace, second: Option<&Namespace>) -> Result<Node> {
        let name = format!("node-{number}");
        let addresses = plan::node(0, number);
        forward(&netns)?;
        if self.strict_rp_filter {
            netns
                .sysctls(&[("net.ipv4.conf.all.rp_filter", "1"), ("net.ipv4.conf.default.rp_filter", "1")])?;
        }
        self.uplink(&netns, "eth0", &name, router, &addresses)?;
        let second_uplink = match second {
            Some(router) => {
                let addresses = plan::node(1, number);
                self.uplink(&netns, "eth1", &name, router, &addresses)?;
                Some(addresses)
            }
            None => None,
        };
        let pods_gateway = plan::pod_gateway(number);
        netns.netlink(async |net| {
            default_route(&net, &plan::gateway(u8::from(second.is_some()))).await?;
            if self.cni.is_some() {
                return Ok(());
            }
            net.bridge("cni0", pods_gateway.mac(), self.pod_mtu()).await?;
            add_addresses(&net, "cni0", &pods_gateway).await
        })?;
        let pod_network = pods_gateway.network();
        let node = Node { name, addresses, second_uplink, pod_network, pods: Vec::new(), number, netns };
        if let Some(cni) = self.cni {
            if cni.has_second_card() {
                let port = format!("{}-eth1", node.name);
                self.wire(&node.netns, "eth1", cni::aws::card_mac(&node), router, &port, "br1")?;
            }
            cni::carry_out(&node.netns, &cni.layout().node(&node))?;
            cni.layout().keys(&node)?;
        }
        Ok(node)
    }

    fn uplink(
        &self,
        node: &Namespace,
        device: &str,
        port: &str,
        router: &Namespace,
        addresses: &Addresses,
    ) -> Result<()> {
        self.wire(node, device, addresses.mac(), router, port, "br0")?;
        node.netlink(async |net| add_addresses(&net, device, addresses).await)
    }

    /// Makes a device of a node that is plugged into a bridge of the router.
    fn wire(
        &self,
        node: &Namespace,
        device: &str,
        mac: Mac,
        router: &Namespace,
        port: &str,
        bridge: &str,
    ) -> Result<()> {
        let end = VethEnd { name: port, mac: None, mtu: None };
        let peer = VethEnd { name: device, mac: Some(mac), mtu: None };
        router.netlink(async |net| net.veth(&end, Some(bridge), &peer, node).await)?;
        self.prepare_wire((router, port), (node, device))?;
        if self.wire_offloads {
            return Ok(());
        }
        // The port then receives what an XDP program on the node sends back; with it, the node
        // could not keep its segmentation offload.
        router.attach_xdp(port, Always::Pass)
    }

    fn pod(&self, node_number: u8, index: u8, netns: Owned, node: &Node) -> Result<Pod> {
        let addresses = plan::pod(node_number, index);
        let mtu = Some(self.pod_mtu());
        let link = self.cni.map(|cni| cni.layout().link());
        let (veth, mac, bridge) = match link {
            Some(link) => {
                let (name, mac) = link.host_end(node_number, index);
                (name, mac, link.bridge())
            }
            None => (format!("veth{index}"), None, Some("cni0")),
        };
        let end = VethEnd { name: &veth, mac, mtu };
        let peer = VethEnd { name: "eth0", mac: Some(addresses.mac()), mtu };
        node.netns.netlink(async |net| net.veth(&end, bridge, &peer, &netns).await)?;
        if !self.pod_offloads {
            node.netns.set_offloads(&veth, false)?;
            netns.set_offloads("eth0", false)?;
        }
        let pod =
            Pod { name: format!("pod-{node_number}-{index}"), node: node.name.clone(), addresses, netns };
        if let Some(link) = link {
            let settings = link.settings(&veth);
            let settings: Vec<_> = settings.iter().map(|(key, value)| (key.as_str(), *value)).collect();
            node.netns.sysctls(&settings)?;
            cni::carry_out(&node.netns, &link.host(node, &pod, &veth))?;
            cni::carry_out(&pod.netns, &link.pod(node, &pod))?;
            return Ok(pod);
        }
        pod.netns.netlink(async |net| {
            add_addresses(&net, "eth0", &addresses).await?;
            default_route(&net, &plan::pod_gateway(node_number)).await
        })?;
        Ok(pod)
    }

    fn prepare_wire(
        &self,
        (router, port): (&Namespace, &str),
        (host, device): (&Namespace, &str),
    ) -> Result<()> {
        if !self.wire_offloads {
            router.set_offloads(port, false)?;
            host.set_offloads(device, false)?;
        }
        router.set_gro(port, true)
    }

    fn pod_mtu(&self) -> u32 {
        match self.cni {
            Some(cni) => cni.layout().mtu(),
            None if self.overlay => overlay::MTU,
            None => MTU,
        }
    }

    pub(super) fn layout(&self) -> Option<Cni> {
        self.cni
    }
}

impl Lab {
    pub(super) fn is_overlay(&self) -> bool {
        self.plan.overlay
    }

    /// Gives a node the routes to the other nodes' pods.
    fn connect_pods_of(&self, here: &Node) -> Result<()> {
        if let Some(cni) = self.plan.cni {
            return cni::connect(cni.layout(), here, &self.nodes);
        }
        if self.plan.overlay {
            return overlay::connect(here, &self.nodes);
        }
        here.netns.netlink(async |net| {
            for there in self.nodes.iter().filter(|there| there.name != here.name) {
                add_routes(&net, &there.pod_network, &there.addresses).await?;
            }
            Ok(())
        })
    }

    /// Restores what [`Lab::remove_uplink`] removed: a new device with the old name, addresses and
    /// routes.
    pub fn restore_uplink(&self, node: &Node) -> Result<()> {
        self.plan.uplink(&node.netns, "eth0", &node.name, &self.router, &node.addresses)?;
        if node.second_uplink.is_none() {
            node.netns.netlink(async |net| default_route(&net, &plan::gateway(0)).await)?;
        }
        self.connect_pods_of(node)?;
        Self::settle(&[("router", &self.router), (&node.name, &node.netns)])
    }
}

fn forward(namespace: &Namespace) -> Result<()> {
    namespace.sysctls(&[
        ("net.ipv4.ip_forward", "1"),
        ("net.ipv6.conf.default.forwarding", "1"),
        ("net.ipv6.conf.all.forwarding", "1"),
    ])
}
