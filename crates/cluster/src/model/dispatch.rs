//! Dispatch: what a packet that is forwarded directly travels in, if in anything.

use std::collections::BTreeMap;

/// The way in which a packet travels to the endpoint's node: its outer packet, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Dispatch {
    /// An IP packet of the same family: IPv4 within IPv4 (RFC 2003), IPv6 within IPv6 (RFC 2473).
    Ipip,
    /// UDP: GUE of variant 1, port 6080.
    Udp,
    /// None: the packet goes to the MAC address of the node as it is, where that is its next hop,
    /// and within UDP or IP elsewhere.
    L2 { else_udp: bool },
}

impl Dispatch {
    /// One dispatch of each name: `L2` with `else_udp` has the name of the one without.
    pub const ALL: [Self; 3] = [Self::Ipip, Self::Udp, Self::L2 { else_udp: false }];

    /// Returns the dispatch of this name; `None` if there is none, as for one of a later agent.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dispatch| dispatch.name() == name)
    }

    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ipip => "ipip",
            Self::Udp => "udp",
            Self::L2 { .. } => "l2",
        }
    }

    /// Returns the outer packet that names the endpoint: the dispatch itself, or the next one.
    #[must_use]
    pub const fn within(self) -> Self {
        match self {
            Self::L2 { else_udp: true } => Self::Udp,
            Self::L2 { else_udp: false } => Self::Ipip,
            named => named,
        }
    }
}

/// `--dispatch`: which dispatch a node uses, of those that another one opens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DispatchChoice {
    /// The MAC address of a node that has answered a packet sent to it, else the outer packet that
    /// the other node prefers of those that get there.
    #[default]
    Auto,
    /// This dispatch alone, since the network may drop the others: a node that does not open it
    /// gets SNAT. [`Dispatch::L2`] falls back to what [`Self::Auto`] chooses.
    Only(Dispatch),
}

impl DispatchChoice {
    /// Returns the choice of this name; `None` if there is none.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        if name == "auto" { Some(Self::Auto) } else { Dispatch::parse(name).map(Self::Only) }
    }

    /// Returns the dispatch towards a node that opens these, the preferred one first; `None`: its
    /// packets are not forwarded directly. `passing` and `by_mac`: what gets there and is answered,
    /// which counts where nobody has chosen.
    pub(super) fn towards(self, opened: &[Dispatch], passing: Passing, by_mac: bool) -> Option<Dispatch> {
        let mut named = opened.iter().copied().filter(|opened| opened.within() == *opened);
        let passes = named.find(|dispatch| passing.has(*dispatch));
        let by_mac = match self {
            Self::Auto => by_mac,
            Self::Only(Dispatch::L2 { .. }) => true,
            Self::Only(wanted) => return opened.contains(&wanted).then_some(wanted),
        };
        if by_mac && opened.contains(&Dispatch::L2 { else_udp: false }) {
            return passes.map(|next| Dispatch::L2 { else_udp: next == Dispatch::Udp });
        }
        passes
    }

    /// Whether what gets to other nodes decides on the outer packet.
    #[must_use]
    pub const fn is_left_to_the_network(self) -> bool {
        !matches!(self, Self::Only(Dispatch::Ipip | Dispatch::Udp))
    }

    /// The dispatches that a node with this choice opens, in the order of its Lease: the preferred
    /// one first.
    #[must_use]
    pub const fn opened(self) -> [Dispatch; 3] {
        let [ipip, udp, l2] = Dispatch::ALL;
        match self {
            Self::Only(Dispatch::Udp) => [udp, ipip, l2],
            Self::Auto | Self::Only(Dispatch::Ipip | Dispatch::L2 { .. }) => Dispatch::ALL,
        }
    }
}

/// The outer packets in which packets get from one node to another, and are answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Passing {
    pub within_ip: bool,
    pub within_udp: bool,
}

impl Passing {
    pub const ALL: Self = Self { within_ip: true, within_udp: true };
    pub const NONE: Self = Self { within_ip: false, within_udp: false };
    const UDP: Self = Self { within_ip: false, within_udp: true };

    fn has(self, dispatch: Dispatch) -> bool {
        match dispatch.within() {
            Dispatch::Udp => self.within_udp,
            _ => self.within_ip,
        }
    }

    /// Returns what passes in both cases.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self { within_ip: self.within_ip && other.within_ip, within_udp: self.within_udp && other.within_udp }
    }
}

/// The way to another node in one address family, as its answers have shown it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Way {
    /// The packets whose answers have a frontend's address as source (`direct`).
    pub direct: Passing,
    /// The packets whose answers come within an outer packet (`tunnel`).
    pub tunnel: Passing,
    /// Whether a packet that is sent to the node's MAC address as it is has been answered.
    pub by_mac: bool,
}

impl Way {
    pub const OPEN: Self = Self { direct: Passing::ALL, tunnel: Passing::ALL, by_mac: false };
    pub const CLOSED: Self = Self { direct: Passing::NONE, tunnel: Passing::NONE, by_mac: false };
    pub const WITHIN_UDP: Self = Self { direct: Passing::UDP, tunnel: Passing::UDP, by_mac: false };

    /// Returns what passes on both ways.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self {
            direct: self.direct.and(other.direct),
            tunnel: self.tunnel.and(other.tunnel),
            by_mac: self.by_mac && other.by_mac,
        }
    }

    /// Whether all passes that travels within an outer packet.
    #[must_use]
    pub fn is_open(self) -> bool {
        Self { by_mac: false, ..self } == Self::OPEN
    }
}

/// The ways to the other nodes, for [`DispatchChoice::Auto`]. By default nobody is asked, and all
/// are as their Leases say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ways {
    nodes: [BTreeMap<String, Way>; 2],
    /// See [`Self::hold`].
    held: [bool; 2],
}

impl Ways {
    /// Sets for each family whether nothing is taken to pass before the first node has answered.
    /// Returns whether that was otherwise.
    pub fn hold(&mut self, held: [bool; 2]) -> bool {
        std::mem::replace(&mut self.held, held) != held
    }

    /// Notes the way to a node. Returns whether it was another one.
    pub fn set(&mut self, node: &str, ipv6: bool, way: Way) -> bool {
        self.nodes[usize::from(ipv6)].insert(node.to_owned(), way) != Some(way)
    }

    /// Keeps the ways to these nodes alone. Returns whether there were others.
    pub fn retain(&mut self, mut is_kept: impl FnMut(&str, bool) -> bool) -> bool {
        let before = self.iter().count();
        for (ipv6, nodes) in [false, true].into_iter().zip(&mut self.nodes) {
            nodes.retain(|node, _| is_kept(node, ipv6));
        }
        self.iter().count() < before
    }

    /// Returns the way to a node, if it is known.
    #[must_use]
    pub fn known(&self, node: &str, ipv6: bool) -> Option<Way> {
        self.nodes[usize::from(ipv6)].get(node).copied()
    }

    /// Returns the known ways: the node, whether in IPv6, and the way.
    pub fn iter(&self) -> impl Iterator<Item = (&str, bool, Way)> {
        let of = |ipv6: bool| {
            let nodes = self.nodes[usize::from(ipv6)].iter();
            nodes.map(move |(node, way)| (node.as_str(), ipv6, *way))
        };
        of(false).chain(of(true))
    }

    /// Whether nothing is taken to pass because no node has answered yet.
    pub(super) fn are_awaited(&self, ipv6: bool) -> bool {
        let family = usize::from(ipv6);
        self.held[family] && self.nodes[family].is_empty()
    }

    /// Returns the way to nodes that were not asked: only that passes which does to all others that
    /// answer, since one network mostly treats them alike; nothing by MAC address, for which each
    /// has to answer itself. Its cost is that of all known ways.
    pub(super) fn to_others(&self, ipv6: bool) -> Way {
        let family = usize::from(ipv6);
        if self.nodes[family].is_empty() {
            return if self.are_awaited(ipv6) { Way::CLOSED } else { Way::OPEN };
        }
        let ways = || self.nodes[family].values();
        let common = |of: fn(&Way) -> Passing| {
            let passing = ways().map(of).filter(|passing| *passing != Passing::NONE);
            passing.reduce(Passing::and).unwrap_or(Passing::NONE)
        };
        Way { direct: common(|way| way.direct), tunnel: common(|way| way.tunnel), by_mac: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UDP_ALONE: Passing = Passing { within_ip: false, within_udp: true };

    #[test]
    fn the_network_decides_where_nobody_has_chosen() {
        let udp = DispatchChoice::Only(Dispatch::Udp);
        let ipip = DispatchChoice::Only(Dispatch::Ipip);
        let l2 = DispatchChoice::Only(Dispatch::L2 { else_udp: false });
        for (own, opened, passing, used) in [
            (DispatchChoice::Auto, ipip.opened(), UDP_ALONE, Some(Dispatch::Udp)),
            (DispatchChoice::Auto, ipip.opened(), Passing::NONE, None),
            (DispatchChoice::Auto, udp.opened(), Passing::ALL, Some(Dispatch::Udp)),
            (
                DispatchChoice::Auto,
                udp.opened(),
                Passing { within_ip: true, ..Passing::NONE },
                Some(Dispatch::Ipip),
            ),
            (ipip, ipip.opened(), UDP_ALONE, Some(Dispatch::Ipip)),
            (l2, ipip.opened(), UDP_ALONE, Some(Dispatch::L2 { else_udp: true })),
            (l2, ipip.opened(), Passing::NONE, None),
        ] {
            assert_eq!(own.towards(&opened, passing, false), used, "{own:?} {opened:?} {passing:?}");
        }
    }

    #[test]
    fn nobody_chooses_the_mac_address_but_its_answer() {
        let l2 = |else_udp| Some(Dispatch::L2 { else_udp });
        let opened = DispatchChoice::Auto.opened();
        let auto =
            |opened: &[Dispatch], passing, by_mac| DispatchChoice::Auto.towards(opened, passing, by_mac);
        assert_eq!(auto(&opened, Passing::ALL, true), l2(false));
        assert_eq!(auto(&opened, UDP_ALONE, true), l2(true));
        assert_eq!(auto(&opened, Passing::ALL, false), Some(Dispatch::Ipip));
        // A flow must be able to name its endpoint at any time.
        assert_eq!(auto(&opened, Passing::NONE, true), None);
        assert_eq!(auto(&opened[..2], Passing::ALL, true), Some(Dispatch::Ipip), "it does not take them");
        let ipip = DispatchChoice::Only(Dispatch::Ipip);
        assert_eq!(ipip.towards(&opened, Passing::ALL, true), Some(Dispatch::Ipip), "somebody has chosen");
    }

    #[test]
    fn who_was_not_asked_is_taken_for_one_like_the_others() {
        let mut ways = Ways::default();
        assert_eq!(ways.to_others(false), Way::OPEN);
        assert!(ways.set("a", false, Way { direct: UDP_ALONE, ..Way::OPEN }));
        assert!(!ways.set("a", false, Way { direct: UDP_ALONE, ..Way::OPEN }));
        assert_eq!(ways.to_others(false).direct, UDP_ALONE);
        assert_eq!((ways.to_others(false).tunnel, ways.to_others(true)), (Passing::ALL, Way::OPEN));
        // One that answers nothing says nothing about the others.
        assert!(ways.set("c", false, Way::CLOSED));
        assert_eq!((ways.to_others(false).direct, ways.known("c", false)), (UDP_ALONE, Some(Way::CLOSED)));
        assert!(ways.retain(|node, ipv6| node == "c" && !ipv6) && ways.known("a", false).is_none());
        assert_eq!(ways.to_others(false), Way::CLOSED, "nobody answers");
    }

    #[test]
    fn nothing_passes_until_the_first_node_has_answered() {
        let mut ways = Ways::default();
        assert!(ways.hold([true, false]) && !ways.hold([true, false]));
        assert_eq!((ways.to_others(false), ways.to_others(true)), (Way::CLOSED, Way::OPEN));
        ways.set("b", false, Way { by_mac: true, ..Way::OPEN });
        assert_eq!(ways.to_others(false), Way::OPEN);
    }

    #[test]
    fn both_ends_agree_or_nothing_is_direct() {
        let udp = DispatchChoice::Only(Dispatch::Udp);
        let ipip = DispatchChoice::Only(Dispatch::Ipip);
        let l2 = DispatchChoice::Only(Dispatch::L2 { else_udp: false });
        let earlier = [Dispatch::Ipip];
        for (own, opened, used) in [
            (DispatchChoice::Auto, &earlier[..], Some(Dispatch::Ipip)),
            (DispatchChoice::Auto, &DispatchChoice::Auto.opened()[..], Some(Dispatch::Ipip)),
            (DispatchChoice::Auto, &udp.opened()[..], Some(Dispatch::Udp)),
            (ipip, &udp.opened()[..], Some(Dispatch::Ipip)),
            (ipip, &[Dispatch::Udp][..], None),
            (udp, &ipip.opened()[..], Some(Dispatch::Udp)),
            (udp, &earlier[..], None),
            (l2, &DispatchChoice::Auto.opened()[..], Some(Dispatch::L2 { else_udp: false })),
            (l2, &udp.opened()[..], Some(Dispatch::L2 { else_udp: true })),
            (l2, &earlier[..], Some(Dispatch::Ipip)),
            (DispatchChoice::Auto, &l2.opened()[..], Some(Dispatch::Ipip)),
            (DispatchChoice::Auto, &[][..], None),
        ] {
            assert_eq!(own.towards(opened, Passing::ALL, false), used, "{own:?} towards {opened:?}");
        }
        assert_eq!(DispatchChoice::parse("auto"), Some(DispatchChoice::Auto));
        assert_eq!(DispatchChoice::parse("udp"), Some(udp));
        assert_eq!(DispatchChoice::parse("l2"), Some(l2));
        assert_eq!(DispatchChoice::parse("l3"), None);
    }
}
