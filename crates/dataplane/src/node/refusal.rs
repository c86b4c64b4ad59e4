//! Devices to which nothing can be attached, or not the requested program, and the remedy.

use std::fmt;

use super::{headers::Header, link::Link};

/// A device whose packets are not handled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub name: String,
    /// The name of its header, see [`Header`].
    pub kind: String,
    why: Why,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Why {
    /// The device's packets begin with a header that the packet path cannot read.
    Header,
    /// XDP programs see Ethernet frames only.
    Xdp,
    /// The device leads to other nodes, and is not among the named devices.
    NotNamed,
}

impl Refusal {
    /// Checks that programs can be attached to a device.
    ///
    /// # Errors
    /// Nothing can be attached to the device: its packets begin with neither an Ethernet nor an IP
    /// header.
    pub fn of(link: &Link) -> Result<(), Self> {
        match &link.header {
            Header::Ethernet | Header::Ip(_) => Ok(()),
            Header::Other(kind) => Err(Self::new(link, kind, Why::Header)),
        }
    }

    /// Checks that an XDP program can be attached to a device.
    ///
    /// # Errors
    /// No XDP program can be attached to the device: its packets have no Ethernet header.
    pub fn of_xdp(link: &Link) -> Result<(), Self> {
        match &link.header {
            Header::Ethernet => Ok(()),
            Header::Ip(kind) | Header::Other(kind) => Err(Self::new(link, kind, Why::Xdp)),
        }
    }

    /// Returns the refusal of a tunnel that is not among the named devices.
    pub(super) fn not_named(link: &Link) -> Option<Self> {
        match &link.header {
            Header::Ip(kind) => Some(Self::new(link, kind, Why::NotNamed)),
            Header::Ethernet | Header::Other(_) => None,
        }
    }

    fn new(link: &Link, kind: &str, why: Why) -> Self {
        Self { name: link.name.clone(), kind: kind.to_owned(), why }
    }

    /// Returns the cause, without the remedy.
    pub fn found(&self) -> String {
        let Self { name, kind, .. } = self;
        match self.why {
            Why::Header => format!(
                "packets of device {name} (type {kind}) begin neither with an Ethernet nor with an IP header, and programs can be attached to no others"
            ),
            Why::Xdp => format!(
                "device {name} has no Ethernet header (type {kind}), and XDP programs can be attached to devices with one only"
            ),
            Why::NotNamed => format!(
                "device {name} (type {kind}) has routes, and is not among the devices that were named"
            ),
        }
    }

    /// Returns the remedy.
    pub fn fix(&self) -> &'static str {
        match (self.why, self.kind.as_str()) {
            (Why::Xdp, _) => "--attach auto or --attach tc: TC takes its packets",
            (Why::NotNamed, _) => "name it with --device, too",
            (Why::Header, "loopback") => "leave it out: packets from outside never come by it",
            (Why::Header, "gre" | "ip6gre") => {
                "give it one other end (`remote`), or use IPIP, VXLAN or plain routes between nodes"
            }
            (Why::Header, _) => {
                "let packets from outside and from other nodes come by an Ethernet device or a tunnel of IP packets (IPIP, GRE, WireGuard, tun), and name that with --device"
            }
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.found(), self.fix())
    }
}

impl std::error::Error for Refusal {}
