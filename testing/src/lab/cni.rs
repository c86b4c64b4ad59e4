//! Layouts of network plugins (CNIs): the devices, addresses, routes, neighbours, settings and rules that each of them leaves on a
//! node and in its pods. Each file below names the sources of its facts.

pub(super) mod aws;
mod bridge;
mod calico;
mod flannel;
mod kindnet;

use std::fmt::Write as _;
use std::net::IpAddr;

use anyhow::{Result, bail};

use super::plan::{Addresses, Family};
use super::{Node, Pod};
use crate::netlink::Mac;
use crate::netns::Namespace;

/// A network plugin whose layout a lab can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cni {
    Kindnet,
    FlannelVxlan,
    FlannelHostGw,
    CalicoVxlan,
    Bridge,
    AwsSecondaryEni,
}

/// Those that no lab has: their devices come from a module of the kernel.
const WITHOUT_ETHERNET: [(&str, &str); 2] = [("calico-ipip", "ipip"), ("wireguard", "wireguard")];

impl Cni {
    pub const ALL: [Self; 6] = [
        Self::Kindnet,
        Self::FlannelVxlan,
        Self::FlannelHostGw,
        Self::CalicoVxlan,
        Self::Bridge,
        Self::AwsSecondaryEni,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Kindnet => "kindnet",
            Self::FlannelVxlan => "flannel-vxlan",
            Self::FlannelHostGw => "flannel-host-gw",
            Self::CalicoVxlan => "calico-vxlan",
            Self::Bridge => "bridge",
            Self::AwsSecondaryEni => "aws-secondary-eni",
        }
    }

    /// The layout of that name.
    ///
    /// # Errors
    /// No layout has the name, or it cannot be made of namespaces alone.
    pub fn parse(name: &str) -> Result<Self> {
        if let Some(found) = Self::ALL.into_iter().find(|layout| layout.name() == name) {
            return Ok(found);
        }
        let names = Self::ALL.map(Self::name).join(", ");
        if let Some((name, module)) = WITHOUT_ETHERNET.iter().find(|(other, _)| *other == name) {
            bail!(
                "{name} needs devices of the kernel's module {module}, which a lab does not load: `cargo xtask vm test drivers::kinds` shows how the agent serves them in an emulated machine that has the module, and `cargo xtask vm shell` is one to try by hand (layouts here: {names})"
            );
        }
        bail!("there is no layout {name} (there are: {names})");
    }

    /// Why this machine cannot make a layout: the first program that is missing.
    pub fn missing_program() -> Option<&'static str> {
        let is_there = |program: &&str| {
            let path = std::env::var_os("PATH").unwrap_or_default();
            let folders: Vec<_> = std::env::split_paths(&path).collect();
            folders.iter().any(|folder| folder.join(program).exists())
        };
        ["ip", "nft", "iptables-restore", "ip6tables-restore"].into_iter().find(|program| !is_there(program))
    }

    /// Veths between node and router are as the kernel makes them: with checksum offload.
    pub(super) fn keeps_wire_offloads(self) -> bool {
        self == Self::Kindnet
    }

    /// Nodes have a second network card, `eth1`, by which packets of pods come and go.
    pub(super) fn has_second_card(self) -> bool {
        self == Self::AwsSecondaryEni
    }

    /// Devices that lead to pods, for the drawing.
    pub(super) fn devices(self) -> &'static str {
        match self {
            Self::Kindnet => "a veth a pod",
            Self::FlannelVxlan => "cni0, flannel.1, flannel-v6.1",
            Self::FlannelHostGw | Self::Bridge => "cni0",
            Self::CalicoVxlan => "a cali… a pod, vxlan.calico, vxlan-v6.calico",
            Self::AwsSecondaryEni => "an eni… a pod, eth1 (table 2)",
        }
    }

    /// The address by which a node asks pods of other nodes.
    pub(super) fn source_towards_pods(self, node: &Node) -> Addresses {
        match self {
            // The tunnel's devices have the first address of the pods' network.
            Self::FlannelVxlan | Self::CalicoVxlan => node.pod_network,
            _ => node.addresses,
        }
    }

    pub(super) fn layout(self) -> &'static dyn Layout {
        match self {
            Self::Kindnet => &kindnet::Kindnet,
            Self::FlannelVxlan => &flannel::Vxlan,
            Self::FlannelHostGw => &flannel::HostGateway,
            Self::CalicoVxlan => &calico::Vxlan,
            Self::Bridge => &bridge::Bridge,
            Self::AwsSecondaryEni => &aws::SecondaryEni,
        }
    }
}

/// A setting of a namespace and its value.
pub(super) type Setting = (String, &'static str);

/// A tunnel's device, a MAC address behind it, and the host that has it.
pub(super) type Forwarding = (&'static str, Mac, IpAddr);

/// The set-up that a network plugin makes, as lines of `ip -batch` and as rules of netfilter.
pub(super) trait Layout: Sync {
    /// The MTU of pods.
    fn mtu(&self) -> u32 {
        1500
    }

    /// The bridge whose ports the node's ends of pods' veths are.
    fn bridge(&self) -> Option<&'static str> {
        None
    }

    /// The name of the node's end of a pod's veth, and its MAC address if it is not a random one.
    fn host_end(&self, node: u8, pod: u8) -> (String, Option<Mac>);

    /// On a node that has no pods yet.
    fn node(&self, node: &Node) -> String;

    /// On the node, for a pod.
    fn host(&self, node: &Node, pod: &Pod, device: &str) -> String;

    /// In the pod, by its device eth0.
    fn pod(&self, node: &Node, pod: &Pod) -> String;

    /// Settings of the node for a pod's device.
    fn settings(&self, _device: &str) -> Vec<Setting> {
        Vec::new()
    }

    /// On a node, for another node's pods.
    fn ways(&self, here: &Node, there: &Node) -> String;

    /// On a node, for another node's tunnels.
    fn forwarding(&self, _there: &Node) -> Vec<Forwarding> {
        Vec::new()
    }

    /// On the router, for a node: what a cloud does beside.
    fn cloud(&self, _node: &Node) -> String {
        String::new()
    }

    /// Rules of a node for one family, as `iptables-restore` takes them.
    fn iptables(&self, _node: &Node, _family: Family) -> Option<String> {
        None
    }

    /// Rules of a node for both families, as `nft` takes them.
    fn nftables(&self, _nodes: &[Node]) -> Option<String> {
        None
    }
}

impl Node {
    /// The first address of the pods' network: of the node on it, where it has one.
    fn pods_gateway(&self) -> Addresses {
        super::plan::pod_gateway(self.number)
    }

    /// The network of this node's pods.
    fn pods(&self, family: Family) -> String {
        network(self.pod_network.of(family), family)
    }
}

/// The ranges that all nodes' pods are in.
fn cluster_pods(family: Family) -> &'static str {
    match family {
        Family::V4 => "10.244.0.0/16",
        Family::V6 => "fd00:10:244::/48",
    }
}

fn network(address: IpAddr, family: Family) -> String {
    format!("{address}/{}", family.prefix())
}

/// The length of a single address's prefix.
fn alone(family: Family) -> u8 {
    if family == Family::V4 { 32 } else { 128 }
}

/// A MAC address as `ip` reads it.
fn written(mac: Mac) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

/// One line for each family.
fn both(line: impl Fn(Family) -> String) -> String {
    Family::BOTH.iter().fold(String::new(), |mut text, family| {
        writeln!(text, "{}", line(*family)).expect("writing to a string does not fail");
        text
    })
}

/// Carries out lines of `ip -batch`.
pub(super) fn carry_out(namespace: &Namespace, lines: &str) -> Result<()> {
    if lines.is_empty() { Ok(()) } else { namespace.feed("ip", &["-batch", "-"], lines) }
}

/// Gives a node the ways to the other nodes' pods.
pub(super) fn connect(layout: &dyn Layout, here: &Node, nodes: &[Node]) -> Result<()> {
    let others: Vec<_> = nodes.iter().filter(|there| there.name != here.name).collect();
    let ways: String = others.iter().map(|there| layout.ways(here, there)).collect();
    carry_out(here.netns(), &ways)?;
    let entries: Vec<_> = others.iter().flat_map(|there| layout.forwarding(there)).collect();
    here.netns().netlink(async |net| {
        for (device, mac, host) in entries {
            net.forward_mac(device, mac, host).await?;
        }
        Ok(())
    })
}

impl Cni {
    /// All that is neither device nor route (rules of netfilter, the checks of the cloud), made once all pods are there.
    pub(super) fn finish(self, router: &Namespace, nodes: &[Node]) -> Result<()> {
        let layout = self.layout();
        for node in nodes {
            carry_out(router, &layout.cloud(node))?;
            for (family, program) in Family::BOTH.into_iter().zip(["iptables-restore", "ip6tables-restore"]) {
                if let Some(rules) = layout.iptables(node, family) {
                    node.netns().feed(program, &[], &rules)?;
                }
            }
            if let Some(rules) = layout.nftables(nodes) {
                node.netns().feed("nft", &["-f", "-"], &rules)?;
            }
            if self.has_second_card() {
                // As the plugin sets it on the first card.
                node.netns().sysctl("net.ipv4.conf.eth0.rp_filter", "2")?;
            }
        }
        if self.has_second_card() {
            router.feed("iptables-restore", &[], aws::SOURCE_CHECK)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_layout_is_found_by_its_name() {
        for layout in Cni::ALL {
            assert_eq!(Cni::parse(layout.name()).unwrap(), layout);
        }
        let said = |name| Cni::parse(name).unwrap_err().to_string();
        assert!(said("cilium").starts_with("there is no layout cilium (there are: kindnet, flannel-vxlan,"));
        assert!(said("wireguard").contains("module wireguard"), "{}", said("wireguard"));
        assert!(said("calico-ipip").contains("cargo xtask vm"), "{}", said("calico-ipip"));
    }

    #[test]
    fn names_of_devices_are_short_enough() {
        for layout in Cni::ALL {
            let (name, _) = layout.layout().host_end(90, 255);
            assert!(name.len() < 16, "{name}");
        }
    }
}
