//! The address plan of labs: every IP and MAC address. It is the same in each lab, so that a packet
//! in a failed test can be read by the drawing.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::family::Family;
use crate::netlink::Mac;

/// The prefix lengths of the plan: every IPv4 network is a /24, every IPv6 network a /64.
pub const PREFIX_V4: u8 = 24;
pub const PREFIX_V6: u8 = 64;

/// One address of each family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Addresses {
    pub v4: Ipv4Addr,
    pub v6: Ipv6Addr,
}

impl Family {
    /// The length of a network prefix of the plan, in bits.
    pub fn prefix(self) -> u8 {
        match self {
            Self::V4 => PREFIX_V4,
            Self::V6 => PREFIX_V6,
        }
    }
}

impl Addresses {
    pub const fn new(v4: [u8; 4], v6: [u16; 8]) -> Self {
        let [a, b, c, d] = v4;
        let v4 = Ipv4Addr::new(a, b, c, d);
        let [a, b, c, d, e, f, g, h] = v6;
        Self { v4, v6: Ipv6Addr::new(a, b, c, d, e, f, g, h) }
    }

    pub fn of(&self, family: Family) -> IpAddr {
        match family {
            Family::V4 => self.v4.into(),
            Family::V6 => self.v6.into(),
        }
    }

    /// The MAC address of the device that has these addresses: 02:00 and the IPv4 address.
    pub fn mac(&self) -> Mac {
        let [a, b, c, d] = self.v4.octets();
        [2, 0, a, b, c, d]
    }

    /// The network that contains the address.
    pub fn network(&self) -> Self {
        let [a, b, c, _] = self.v4.octets();
        let [d, e, f, g, ..] = self.v6.segments();
        Self::new([a, b, c, 0], [d, e, f, g, 0, 0, 0, 0])
    }
}

impl fmt::Display for Addresses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.v4, self.v6)
    }
}

/// The router's address on the nodes' network; `uplink` is 0 for the first router, 1 for the
/// second.
pub const fn gateway(uplink: u8) -> Addresses {
    node_network(uplink, 1)
}

/// A node's address; nodes count from 1.
pub const fn node(uplink: u8, node: u8) -> Addresses {
    node_network(uplink, 10 + node)
}

/// The address of a client that is a neighbour of the nodes.
pub const fn client_on_switch() -> Addresses {
    node_network(0, 200)
}

/// The address of the client behind the routers, by its device: eth0 leads to the first router,
/// eth1 to the second.
pub const fn client(uplink: u8) -> Addresses {
    client_network(uplink, 10)
}

/// The router's address on the client's network.
pub const fn client_gateway(uplink: u8) -> Addresses {
    client_network(uplink, 1)
}

/// A pod's address; pods of a node count from 1.
pub const fn pod(node: u8, pod: u8) -> Addresses {
    pod_network(node, 1 + pod)
}

/// The node's address on its own pods' network.
pub const fn pod_gateway(node: u8) -> Addresses {
    pod_network(node, 1)
}

const fn node_network(uplink: u8, host: u8) -> Addresses {
    let network = if uplink == 0 { 0x18 } else { 0x19 };
    Addresses::new([172, 18 + uplink, 0, host], [0xfd00, 0x172, network, 0, 0, 0, 0, decimal(host)])
}

const fn client_network(uplink: u8, host: u8) -> Addresses {
    let v4 = if uplink == 0 { [192, 0, 2, host] } else { [198, 51, 100, host] };
    let network = if uplink == 0 { 0xc } else { 0xd };
    Addresses::new(v4, [0x2001, 0xdb8, network, 0, 0, 0, 0, decimal(host)])
}

const fn pod_network(node: u8, host: u8) -> Addresses {
    let v6 = [0xfd00, 0x10, 0x244, decimal(node), 0, 0, 0, decimal(host)];
    Addresses::new([10, 244, node, host], v6)
}

/// A number whose hexadecimal form reads like the decimal form of the given one, so that both
/// families look alike.
const fn decimal(number: u8) -> u16 {
    let number = number as u16;
    ((number / 100) << 8) | ((number / 10 % 10) << 4) | (number % 10)
}
