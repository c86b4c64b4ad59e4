//! The header that a device's packets begin with: the packet path reads Ethernet's, and IP's if
//! there is no other.

use netlink_packet_route::link::{InfoKind, LinkAttribute, LinkFlags, LinkInfo, LinkLayerType, LinkMessage};

/// The first header of a device's packets, as TC programs see them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Header {
    Ethernet,
    /// An IP header with none before it, with the name of the device's kind (`ipip`, `wireguard`),
    /// or else of its hardware type.
    Ip(String),
    /// Another header, with a name of the same kind.
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
        let kind = kind.unwrap_or_else(|| format!("{layer:?}").to_lowercase());
        if is_ip(layer, message.header.flags) { Self::Ip(kind) } else { Self::Other(kind) }
    }
}

/// Whether a device's packets begin with IP at both hooks, among the types that the kernel treats
/// as devices without MAC header (`dev_is_mac_header_xmit`). GRE without a single peer builds its
/// own header before TC sees an outgoing packet (`ipgre_header`).
/// <https://github.com/torvalds/linux/blob/v6.12/net/ipv4/ip_gre.c>
fn is_ip(layer: LinkLayerType, flags: LinkFlags) -> bool {
    match layer {
        LinkLayerType::Tunnel | LinkLayerType::Tunnel6 | LinkLayerType::Sit | LinkLayerType::None => true,
        LinkLayerType::Ipgre | LinkLayerType::Ip6gre => flags.contains(LinkFlags::Pointopoint),
        _ => false,
    }
}

/// Returns the kind: `veth`, `ipip` …; `None` for a device with a hardware driver.
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
    use crate::node::{Link, Refusal};

    fn message(layer: LinkLayerType, kind: Option<InfoKind>) -> LinkMessage {
        let mut message = LinkMessage::default();
        message.header.link_layer_type = layer;
        message.attributes.extend(kind.map(|kind| LinkAttribute::LinkInfo(vec![LinkInfo::Kind(kind)])));
        message
    }

    #[test]
    fn the_kind_names_it_or_else_the_hardware_type() {
        use LinkLayerType::{Ether, Ipgre, None as NoHeader, Rawip, Tunnel};
        let of = |layer, kind| Header::of(&message(layer, kind));
        let (ip, other) = (|name: &str| Header::Ip(name.into()), |name: &str| Header::Other(name.into()));
        assert_eq!(of(Ether, None), Header::Ethernet);
        assert_eq!(of(Ether, Some(InfoKind::Vlan)), Header::Ethernet);
        assert_eq!(of(Tunnel, Some(InfoKind::IpIp)), ip("ipip"));
        assert_eq!(of(NoHeader, Some(InfoKind::Wireguard)), ip("wireguard"));
        assert_eq!(of(NoHeader, Some(InfoKind::Other("amnezia".into()))), ip("amnezia"));
        assert_eq!(of(Rawip, None), other("rawip"));
        // A tunnel with many peers puts its own header first.
        let mut gre = message(Ipgre, Some(InfoKind::GreTun));
        assert_eq!(Header::of(&gre), other("gre"));
        gre.header.flags = LinkFlags::Pointopoint;
        assert_eq!(Header::of(&gre), ip("gre"));
    }

    #[test]
    fn each_refusal_has_cause_and_fix() {
        let link = |header| Link {
            index: 1,
            name: "x0".into(),
            mac: [0; 6],
            mtu: 1480,
            up: true,
            running: true,
            loopback: false,
            header,
            wire: false,
            has_vlans: false,
            point_to_point: true,
        };
        for kind in ["loopback", "gre", "ip6gre", "rawip"] {
            let text = Refusal::of(&link(Header::Other(kind.into()))).unwrap_err().to_string();
            let (_, fix) = text.split_once("no others: ").unwrap();
            assert!(text.contains(&format!("x0 (type {kind})")) && !fix.is_empty(), "{text}");
        }
        for kind in ["tun", "ipip", "wireguard"] {
            let link = link(Header::Ip(kind.into()));
            assert_eq!(Refusal::of(&link), Ok(()));
            let text = Refusal::of_xdp(&link).unwrap_err().to_string();
            let cause = format!("device x0 has no Ethernet header (type {kind}), and XDP");
            assert!(text.starts_with(&cause) && text.contains("only: --attach auto"), "{text}");
        }
        assert_eq!(Refusal::of_xdp(&link(Header::Ethernet)), Ok(()));
    }
}
