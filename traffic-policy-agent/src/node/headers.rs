//! The header that a device's frames begin with: the packet path reads Ethernet's, and no other.

use netlink_packet_route::link::{InfoKind, LinkAttribute, LinkInfo, LinkLayerType, LinkMessage};

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::WithoutEthernet;

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
