//! Devices that nothing can be attached to, for their frames have no Ethernet header; and what to use instead.

use std::fmt;

use super::{headers::Header, link::Link};

/// A device that nothing can be attached to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WithoutEthernet {
    pub name: String,
    /// See [`Header::Other`].
    pub kind: String,
}

impl WithoutEthernet {
    /// # Errors
    /// The device's frames have no Ethernet header.
    pub fn refuse(link: &Link) -> Result<(), Self> {
        match &link.header {
            Header::Ethernet => Ok(()),
            Header::Other(kind) => Err(Self { name: link.name.clone(), kind: kind.clone() }),
        }
    }

    /// What is wrong, without a fix.
    pub fn found(&self) -> String {
        let Self { name, kind } = self;
        format!(
            "device {name} has no Ethernet header (type {kind}), and programs can be attached to devices with one only"
        )
    }

    /// What to do about it.
    pub fn fix(&self) -> &'static str {
        match self.kind.as_str() {
            "loopback" => "leave it out: packets from outside never come by it",
            "tun" => "a tap device, which carries Ethernet frames",
            "gre" => {
                "a gretap device or VXLAN, which carry Ethernet frames; between nodes plain routes do, too"
            }
            "ip6gre" => {
                "an ip6gretap device or VXLAN, which carry Ethernet frames; between nodes plain routes do, too"
            }
            "wireguard" => {
                "VXLAN over it, which carries Ethernet frames, and the VXLAN device's name with --device"
            }
            "ipip" | "sit" | "ip6tnl" | "vti" | "vti6" | "xfrm" => {
                "VXLAN in its place, which carries Ethernet frames (Calico: vxlanMode: Always and ipipMode: Never), or plain routes between nodes"
            }
            _ => {
                "let packets from outside and from other nodes come by an Ethernet device, and name that with --device"
            }
        }
    }
}

impl fmt::Display for WithoutEthernet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.found(), self.fix())
    }
}

impl std::error::Error for WithoutEthernet {}
