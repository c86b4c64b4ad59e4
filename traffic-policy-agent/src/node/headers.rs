//! The header that a device's frames begin with: the packet path reads Ethernet's, and no other.

use std::fmt;

use netlink_packet_route::link::{InfoKind, LinkAttribute, LinkInfo, LinkLayerType, LinkMessage};

use super::Link;

/// What frames of a device begin with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Header {
    Ethernet,
    /// Another, or none. Named by the device's kind (`ipip`, `wireguard`), or else by its hardware type (`rawip`).
    Other(String),
}

impl Header {
    pub(super) fn of(message: &LinkMessage) -> Self {
        let layer = message.header.link_layer_type;
        if layer == LinkLayerType::Ether {
            return Self::Ethernet;
        }
        let kind = message.attributes.iter().find_map(|attribute| match attribute {
            LinkAttribute::LinkInfo(infos) => infos.iter().find_map(kind),
            _ => None,
        });
        Self::Other(kind.unwrap_or_else(|| format!("{layer:?}").to_lowercase()))
    }
}

/// `veth`, `ipip` …; `None` for a device with a driver of hardware.
pub(super) fn kind(info: &LinkInfo) -> Option<String> {
    match info {
        LinkInfo::Kind(InfoKind::Other(name)) => Some(name.clone()).filter(|name| !name.is_empty()),
        LinkInfo::Kind(kind) => Some(kind.to_string()),
        _ => None,
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    fn message(layer: LinkLayerType, kind: Option<InfoKind>) -> LinkMessage {
        let mut message = LinkMessage::default();
        message.header.link_layer_type = layer;
        message.attributes.extend(kind.map(|kind| LinkAttribute::LinkInfo(vec![LinkInfo::Kind(kind)])));
        message
    }

    #[test]
    fn the_kind_names_it_or_else_the_hardware_type() {
        use LinkLayerType::{Ether, None as NoHeader, Rawip, Tunnel};
        let of = |layer, kind| Header::of(&message(layer, kind));
        let other = |name: &str| Header::Other(name.into());
        assert_eq!(of(Ether, None), Header::Ethernet);
        assert_eq!(of(Ether, Some(InfoKind::Vlan)), Header::Ethernet);
        assert_eq!(of(Tunnel, Some(InfoKind::IpIp)), other("ipip"));
        assert_eq!(of(NoHeader, Some(InfoKind::Wireguard)), other("wireguard"));
        assert_eq!(of(NoHeader, Some(InfoKind::Other("amnezia".into()))), other("amnezia"));
        assert_eq!(of(Rawip, None), other("rawip"));
    }

    #[test]
    fn each_refusal_has_cause_and_fix() {
        for kind in ["loopback", "tun", "gre", "ip6gre", "wireguard", "ipip", "sit", "rawip"] {
            let text = WithoutEthernet { name: "x0".into(), kind: kind.into() }.to_string();
            let cause = format!("device x0 has no Ethernet header (type {kind}), and ");
            let (_, fix) = text.split_once("only: ").unwrap();
            assert!(text.starts_with(&cause) && !fix.is_empty(), "{text}");
        }
    }
}
