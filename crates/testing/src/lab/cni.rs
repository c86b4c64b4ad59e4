//! Layouts of network plugins (CNIs): the devices, addresses, routes, neighbours, settings and
//! rules that each of them leaves on a node and in its pods. Each file below names the sources of
//! its facts.

pub(super) mod aws;
mod bridge;
mod calico;
mod flannel;
mod kindnet;

use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use super::plan::Addresses;
use super::{Node, Pod};
use crate::family::Family;
use crate::netlink::Mac;
use crate::netns::Namespace;

/// A network plugin whose layout a lab can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cni {
    Kindnet,
    FlannelVxlan,
    FlannelHostGw,
    CalicoVxlan,
    CalicoIpip,
    Wireguard,
    Bridge,
    AwsSecondaryEni,
}

impl Cni {
    pub const ALL: [Self; 8] = [
        Self::Kindnet,
        Self::FlannelVxlan,
        Self::FlannelHostGw,
        Self::CalicoVxlan,
        Self::CalicoIpip,
        Self::Wireguard,
        Self::Bridge,
        Self::AwsSecondaryEni,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Kindnet => "kindnet",
            Self::FlannelVxlan => "flannel-vxlan",
            Self::FlannelHostGw => "flannel-host-gw",
            Self::CalicoVxlan => "calico-vxlan",
            Self::CalicoIpip => "calico-ipip",
            Self::Wireguard => "wireguard",
            Self::Bridge => "bridge",
            Self::AwsSecondaryEni => "aws-secondary-eni",
        }
    }

    /// Returns the layout of this name.
    pub fn parse(name: &str) -> Result<Self> {
        if let Some(found) = Self::ALL.into_iter().find(|layout| layout.name() == name) {
            return Ok(found);
        }
        bail!("there is no layout {name} (there are: {})", Self::ALL.map(Self::name).join(", "));
    }

    /// The reason why this machine cannot make the layout: the first program or kernel module that
    /// is missing.
    pub fn missing(self) -> Result<Option<String>> {
        if let Some(program) = Self::missing_program() {
            return Ok(Some(format!("no program {program} here: install iproute2, nftables and iptables")));
        }
        let Some(module) = self.module() else { return Ok(None) };
        let name = self.name();
        Ok((!makes_devices(module)?).then(|| {
            format!(
                "no module {module} in this kernel: `cargo xtask vm test --kernel 6.1 cni::{}` has one, and so has `cargo xtask vm shell`",
                name.replace('-', "_")
            )
        }))
    }

    /// The reason why this machine can make no layout at all: the first program that is missing.
    pub fn missing_program() -> Option<&'static str> {
        let is_there = |program: &&str| {
            let path = std::env::var_os("PATH").unwrap_or_default();
            let folders: Vec<_> = std::env::split_paths(&path).collect();
            folders.iter().any(|folder| folder.join(program).exists())
        };
        ["ip", "nft", "iptables-restore", "ip6tables-restore"].into_iter().find(|program| !is_there(program))
    }

    /// Whether other nodes' pods are behind tunnels.
    pub const fn has_tunnels(self) -> bool {
        matches!(self, Self::FlannelVxlan | Self::CalicoVxlan | Self::CalicoIpip | Self::Wireguard)
    }

    /// The kernel module of its tunnels, where few kernels have it built in; named like the type of
    /// the devices.
    const fn module(self) -> Option<&'static str> {
        match self {
            Self::CalicoIpip => Some("ipip"),
            Self::Wireguard => Some("wireguard"),
            _ => None,
        }
    }

    /// Whether the veths between node and router stay as the kernel makes them: with checksum
    /// offload.
    pub(super) fn keeps_wire_offloads(self) -> bool {
        self == Self::Kindnet
    }

    /// Whether nodes have a second network card, `eth1`, which carries the packets of pods.
    pub(super) fn has_second_card(self) -> bool {
        self == Self::AwsSecondaryEni
    }

    /// The devices that lead to pods, for the drawing.
    pub(super) fn devices(self) -> &'static str {
        match self {
            Self::Kindnet => "a veth a pod",
            Self::FlannelVxlan => "cni0, flannel.1, flannel-v6.1",
            Self::FlannelHostGw | Self::Bridge => "cni0",
            Self::CalicoVxlan => "a cali… a pod, vxlan.calico, vxlan-v6.calico",
            Self::CalicoIpip => "a cali… a pod, tunl0",
            Self::Wireguard => "cni0, flannel-wg, flannel-wg-v6",
            Self::AwsSecondaryEni => "an eni… a pod, eth1 (table 2)",
        }
    }

    /// The source address with which a node reaches pods of other nodes.
    pub(super) fn source_towards_pods(self, node: &Node) -> Addresses {
        match self {
            // The tunnel's devices have the first address of the pods' network.
            Self::FlannelVxlan | Self::CalicoVxlan | Self::Wireguard => node.pod_network,
            // IPIP exists for IPv4 only.
            Self::CalicoIpip => Addresses { v4: node.pod_network.v4, v6: node.addresses.v6 },
            _ => node.addresses,
        }
    }

    pub(super) fn layout(self) -> &'static dyn Layout {
        match self {
            Self::Kindnet => &kindnet::Kindnet,
            Self::FlannelVxlan => &flannel::Vxlan,
            Self::FlannelHostGw => &flannel::HostGateway,
            Self::CalicoVxlan => &calico::Vxlan,
            Self::CalicoIpip => &calico::Ipip,
            Self::Wireguard => &flannel::Wireguard,
            Self::Bridge => &bridge::Bridge,
            Self::AwsSecondaryEni => &aws::SecondaryEni,
        }
    }
}

/// A sysctl of a namespace and its value.
pub(super) type Setting = (String, &'static str);

/// A tunnel's device, a MAC address behind it, and the host that has that address.
pub(super) type Forwarding = (&'static str, Mac, IpAddr);

/// The link of a pod to its node, as lines of `ip -batch`.
pub(super) trait Link: Sync {
    /// The bridge whose ports are the node's ends of the pods' veths.
    fn bridge(&self) -> Option<&'static str> {
        None
    }

    /// The name of the node's end of a pod's veth, and its MAC address unless it is random.
    fn host_end(&self, node: u8, pod: u8) -> (String, Option<Mac>);

    /// Commands on the node, for a pod.
    fn host(&self, node: &Node, pod: &Pod, device: &str) -> String;

    /// Commands in the pod, for its device eth0.
    fn pod(&self, node: &Node, pod: &Pod) -> String;

    /// Settings of the node for a pod's device.
    fn settings(&self, _device: &str) -> Vec<Setting> {
        Vec::new()
    }
}

/// The set-up that a network plugin makes, as lines of `ip -batch` and as netfilter rules.
pub(super) trait Layout: Sync {
    /// The MTU of pods.
    fn mtu(&self) -> u32 {
        1500
    }

    /// The way in which pods are linked to the node.
    fn link(&self) -> &'static dyn Link;

    /// Commands for a node that has no pods yet.
    fn node(&self, node: &Node) -> String;

    /// Commands on a node, for another node's pods.
    fn ways(&self, here: &Node, there: &Node) -> String;

    /// Forwarding entries on a node, for another node's tunnels.
    fn forwarding(&self, _there: &Node) -> Vec<Forwarding> {
        Vec::new()
    }

    /// Set-up on a node for which `ip` has no commands: the keys of its tunnels.
    fn keys(&self, _node: &Node) -> Result<()> {
        Ok(())
    }

    /// Peers on a node, for another node's tunnels, which have their keys already.
    fn peers(&self, _here: &Node, _there: &Node) -> Result<()> {
        Ok(())
    }

    /// Commands on the router, for a node: the part that a cloud adds.
    fn cloud(&self, _node: &Node) -> String {
        String::new()
    }

    /// Rules of a node for one family, in the format of `iptables-restore`.
    fn iptables(&self, _node: &Node, _family: Family) -> Option<String> {
        None
    }

    /// Rules of a node for both families, in the format of `nft`.
    fn nftables(&self, _nodes: &[Node]) -> Option<String> {
        None
    }
}

impl Node {
    /// The first address of the pods' network: that of the node in it, where it has one.
    pub fn pods_gateway(&self) -> Addresses {
        super::plan::pod_gateway(self.number)
    }

    /// Replaces a pod's device by another one with the same name, number and addresses, as if the
    /// pod had been recreated. Its MAC address is another one, which the node and its other pods
    /// are told, as plugins do: on a bridge they know the former one for up to 45 s. Pods count
    /// from 1.
    pub fn recreate_device(&self, cni: Cni, number: u8) -> Result<()> {
        let (layout, pod) = (cni.layout(), self.pod(number.into()));
        let link = layout.link();
        let (name, mac) = link.host_end(self.number, number);
        let index = self.netns().run(|| crate::netlink::index(&name))?;
        let mac = mac.map(|mac| format!("address {} ", written(mac))).unwrap_or_default();
        let (mtu, inside) = (layout.mtu(), pod.netns().path());
        let master = link.bridge().map(|bridge| format!(" master {bridge}")).unwrap_or_default();
        let lines = format!(
            "link del {name}\n\
             link add {name} index {index} {mac}mtu {mtu} type veth peer name eth0 mtu {mtu} netns {}\n\
             link set {name} up{master}\n",
            inside.display()
        );
        carry_out(self.netns(), &lines)?;
        for (key, value) in link.settings(&name) {
            self.netns().sysctl(&key, value)?;
        }
        carry_out(self.netns(), &link.host(self, pod, &name))?;
        carry_out(pod.netns(), &format!("link set eth0 up\n{}", link.pod(self, pod)))?;
        // The request for the neighbour's address tells it this one (RFC 826, RFC 4861 section
        // 7.2.3).
        let others = self.pods.iter().map(|other| other.addresses).filter(|other| *other != pod.addresses);
        let told: Vec<_> = others.chain([self.pods_gateway()]).collect();
        pod.netns().run(|| {
            for to in told.iter().flat_map(|to| Family::BOTH.map(|family| to.of(family))) {
                let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
                UdpSocket::bind(any)?.send_to(&[], SocketAddr::new(to, 9))?;
            }
            Ok(())
        })
    }

    /// The network of this node's pods.
    fn pods(&self, family: Family) -> String {
        network(self.pod_network.of(family), family)
    }
}

/// The range that contains all nodes' pods.
fn cluster_pods(family: Family) -> &'static str {
    match family {
        Family::V4 => "10.244.0.0/16",
        Family::V6 => "fd00:10:244::/48",
    }
}

fn network(address: IpAddr, family: Family) -> String {
    format!("{address}/{}", family.prefix())
}

/// The prefix length of a single address.
fn alone(family: Family) -> u8 {
    if family == Family::V4 { 32 } else { 128 }
}

/// A MAC address in the format that `ip` reads.
fn written(mac: Mac) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

/// Returns one line for each family.
fn both(line: impl Fn(Family) -> String) -> String {
    Family::BOTH.iter().fold(String::new(), |mut text, family| {
        writeln!(text, "{}", line(*family)).expect("writing to a string does not fail");
        text
    })
}

/// Whether the kernel supports devices of a type, for which it may load a module; tried in a
/// namespace of its own.
fn makes_devices(kind: &str) -> Result<bool> {
    let namespace = Namespace::create(&format!("{}-probe", super::folder::unused_id()))?;
    let mut command = Command::new("ip");
    command.args(["link", "add", "probe", "type", kind]);
    if kind == "ipip" {
        // Without addresses, the request would match the tunl0 that exists already.
        command.args(["local", "192.0.2.1"]);
    }
    let output = namespace.output(command).context("ip cannot be started")?;
    let said = String::from_utf8_lossy(&output.stderr);
    let is_unknown = said.contains("Unknown device type") || said.contains("Operation not supported");
    ensure!(output.status.success() || is_unknown, "a device of type {kind} cannot be made: {}", said.trim());
    Ok(output.status.success())
}

/// Runs lines of `ip -batch`.
pub(super) fn carry_out(namespace: &Namespace, lines: &str) -> Result<()> {
    if lines.is_empty() { Ok(()) } else { namespace.feed("ip", &["-batch", "-"], lines) }
}

/// Gives a node the routes to the other nodes' pods.
pub(super) fn connect(layout: &dyn Layout, here: &Node, nodes: &[Node]) -> Result<()> {
    let others: Vec<_> = nodes.iter().filter(|there| there.name != here.name).collect();
    let ways: String = others.iter().map(|there| layout.ways(here, there)).collect();
    carry_out(here.netns(), &ways)?;
    others.iter().try_for_each(|there| layout.peers(here, there))?;
    let entries: Vec<_> = others.iter().flat_map(|there| layout.forwarding(there)).collect();
    here.netns().netlink(async |net| {
        for (device, mac, host) in entries {
            net.forward_mac(device, mac, host).await?;
        }
        Ok(())
    })
}

impl Cni {
    /// Makes all that is neither device nor route (netfilter rules, the checks of the cloud), once
    /// all pods exist.
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
                // The plugin sets it on the first card, too.
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
        let error = Cni::parse("cilium").unwrap_err().to_string();
        assert!(
            error.starts_with("there is no layout cilium (there are: kindnet, flannel-vxlan,"),
            "{error}"
        );
    }

    #[test]
    fn names_of_devices_are_short_enough() {
        for layout in Cni::ALL {
            let (name, _) = layout.layout().link().host_end(90, 255);
            assert!(name.len() < 16, "{name}");
        }
    }
}
