//! Devices, routes and neighbours of the node under test, and the names of the addresses around it.

use std::fs::File;
use std::net::IpAddr;

use anyhow::Result;

use crate::lab::{Addresses, Family};
use crate::netlink::{self, Mac, VethEnd};
use crate::netns::Namespace;
use crate::tun::TunEnd;

/// A device of the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    Eth0,
    Eth1,
    /// An attached device with an MTU of 1400.
    Slim0,
    /// A tun device, without Ethernet, MTU 1400; attached only where a test demands it.
    Tun0,
    /// A device that is not attached: endpoints of this node are behind it.
    Pod0,
}

impl Device {
    pub const ALL: [Self; 5] = [Self::Eth0, Self::Eth1, Self::Slim0, Self::Tun0, Self::Pod0];

    pub fn name(self) -> &'static str {
        match self {
            Self::Eth0 => "eth0",
            Self::Eth1 => "eth1",
            Self::Slim0 => "slim0",
            Self::Tun0 => "tun0",
            Self::Pod0 => "pod0",
        }
    }

    /// The node's address on this device.
    pub fn spot(self) -> Spot {
        match self {
            Self::Eth0 => Spot::Node,
            Self::Eth1 => Spot::NodeEth1,
            Self::Slim0 => Spot::NodeSlim0,
            Self::Tun0 => Spot::NodeTun0,
            Self::Pod0 => Spot::NodePod0,
        }
    }

    pub fn mac(self) -> Mac {
        self.spot().mac()
    }
}

/// A host with an address of each family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spot {
    Node,
    NodeEth1,
    NodeSlim0,
    NodeTun0,
    NodePod0,
    /// The router of eth0, towards the clients.
    Router,
    RouterNear,
    RouterFar,
    RouterSlim,
    RouterTun,
    /// A router whose MAC address is not known.
    RouterSilent,
    Client,
    OtherClient,
    /// A host without a route to it.
    Stranger,
    Vip,
    OtherVip,
    /// An endpoint behind eth0, where requests arrive.
    Near,
    OtherNear,
    /// An endpoint behind eth1.
    Far,
    /// An endpoint behind slim0.
    Slim,
    /// An endpoint behind tun0.
    Tunnel,
    /// An endpoint behind a router whose neighbour entry is not resolved.
    Silent,
    /// An endpoint on this node.
    Local,
    /// Variants of [`Self::Local`] and [`Self::Client`], at addresses in which a test run, which
    /// takes the first bytes of the packet for an Ethernet header, finds the EtherType of their
    /// family.
    LocalTyped,
    ClientTyped,
    /// An endpoint that is on this node by its route only: its slice names no node.
    LocalByRoute,
    /// An endpoint of another node by its slice, while the route to it leads to pod0: a tunnel to
    /// which nothing is attached.
    RemoteBehindPod0,
    /// An endpoint whose route is of type unreachable.
    Unreachable,
}

impl Spot {
    /// Returns the number of the node that an endpoint is on: one for each endpoint.
    pub fn node_number(self) -> u16 {
        self as u16 + 1
    }

    pub fn addresses(self) -> Addresses {
        let (net, host, v4) = match self {
            Self::Node => (0x18, 2, [172, 18, 0, 2]),
            Self::NodeEth1 => (0x19, 2, [172, 19, 0, 2]),
            Self::NodeSlim0 => (0x20, 2, [172, 20, 0, 2]),
            Self::NodeTun0 => (0x21, 2, [172, 21, 0, 2]),
            Self::NodePod0 => (1, 1, [10, 0, 1, 1]),
            Self::Router => (0x18, 1, [172, 18, 0, 1]),
            Self::RouterNear => (0x18, 3, [172, 18, 0, 3]),
            Self::RouterFar => (0x19, 3, [172, 19, 0, 3]),
            Self::RouterSlim => (0x20, 3, [172, 20, 0, 3]),
            Self::RouterTun => (0x21, 3, [172, 21, 0, 3]),
            Self::RouterSilent => (0x18, 9, [172, 18, 0, 9]),
            Self::Client => (0xc, 0x10, [192, 0, 2, 10]),
            Self::OtherClient => (0xc, 0x11, [192, 0, 2, 11]),
            Self::Stranger => (0xe, 7, [198, 51, 100, 7]),
            Self::Vip => (0xf, 5, [203, 0, 113, 5]),
            Self::OtherVip => (0xf, 6, [203, 0, 113, 6]),
            Self::Near => (2, 0x10, [10, 0, 2, 10]),
            Self::OtherNear => (2, 0x11, [10, 0, 2, 11]),
            Self::Far => (3, 0x10, [10, 0, 3, 10]),
            Self::Slim => (5, 0x10, [10, 0, 5, 10]),
            Self::Silent => (4, 0x10, [10, 0, 4, 10]),
            Self::Tunnel => (7, 0x10, [10, 0, 7, 10]),
            Self::LocalTyped => return typed([8, 0, 1, 10], 1),
            Self::ClientTyped => return typed([8, 0, 2, 10], 2),
            Self::Local => (1, 0x10, [10, 0, 1, 10]),
            Self::LocalByRoute => (1, 0x11, [10, 0, 1, 11]),
            Self::RemoteBehindPod0 => (1, 0x12, [10, 0, 1, 12]),
            Self::Unreachable => (6, 0x10, [10, 0, 6, 10]),
        };
        Addresses::new(v4, [0xfd00, net, 0, 0, 0, 0, 0, host])
    }

    pub fn of(self, family: Family) -> IpAddr {
        self.addresses().of(family)
    }

    pub fn mac(self) -> Mac {
        self.addresses().mac()
    }
}

/// Addresses with an EtherType in bytes 12 and 13 of the IP header: these are the first two bytes
/// of an IPv4 source, and the third 16-bit group of an IPv6 source.
fn typed(v4: [u8; 4], net: u16) -> Addresses {
    Addresses::new(v4, [0xfd00, net, 0x86dd, 0, 0, 0, 0, 0x10])
}

/// The node under test.
pub(super) struct World {
    namespace: Namespace,
    ifindex: [u32; 5],
    /// The other end of tun0, from which nothing reads.
    _tunnel: File,
}

impl World {
    /// Builds the node. The other ends of its devices are in `wire`, without listeners: a test run
    /// sends nothing.
    pub(super) fn build(namespace: &Namespace, wire: &Namespace) -> Result<Self> {
        let tunnel = TunEnd { namespace, name: Device::Tun0.name(), mtu: 1400 }.create()?;
        let ifindex = namespace.netlink(async |net| {
            let mut indices = [0; 5];
            for (device, index) in Device::ALL.into_iter().zip(&mut indices) {
                let mtu = (device == Device::Slim0).then_some(1400);
                let end = VethEnd { name: device.name(), mac: Some(device.mac()), mtu };
                let other = VethEnd { name: device.name(), mac: None, mtu };
                if device != Device::Tun0 {
                    net.veth(&end, None, &other, wire).await?;
                }
                for family in Family::BOTH {
                    net.address(device.name(), device.spot().of(family), family.prefix()).await?;
                }
                *index = netlink::index(device.name())?;
            }
            let routers = [
                (Device::Eth0, Spot::Router, Spot::Client),
                (Device::Eth0, Spot::RouterNear, Spot::Near),
                (Device::Eth1, Spot::RouterFar, Spot::Far),
                (Device::Slim0, Spot::RouterSlim, Spot::Slim),
                (Device::Eth0, Spot::RouterSilent, Spot::Silent),
            ];
            for (device, router, behind) in routers {
                for family in Family::BOTH {
                    let network = behind.addresses().network().of(family);
                    net.route(network, family.prefix(), router.of(family)).await?;
                    if router != Spot::RouterSilent {
                        net.neighbour(device.name(), router.of(family), router.mac()).await?;
                    }
                }
            }
            for family in Family::BOTH {
                let network = Spot::Tunnel.addresses().network().of(family);
                net.route(network, family.prefix(), Spot::RouterTun.of(family)).await?;
            }
            for family in Family::BOTH {
                let network = Spot::Unreachable.addresses().network().of(family);
                net.unreachable(network, family.prefix()).await?;
            }
            Ok(indices)
        })?;
        namespace.sysctls(&[("net.ipv4.ip_forward", "1"), ("net.ipv6.conf.all.forwarding", "1")])?;
        Ok(Self { namespace: namespace.clone(), ifindex, _tunnel: tunnel })
    }

    pub(super) fn ifindex(&self, device: Device) -> u32 {
        self.ifindex[device as usize]
    }

    pub(super) fn namespace(&self) -> &Namespace {
        &self.namespace
    }
}
