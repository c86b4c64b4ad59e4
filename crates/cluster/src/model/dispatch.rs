//! Dispatch: what a packet that is forwarded directly travels in, if in anything.

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
    /// The one that the other node prefers.
    #[default]
    Auto,
    /// No other one: the network may not let it through. `l2` has a next one, as `auto` chooses it.
    Only(Dispatch),
}

impl DispatchChoice {
    /// Returns the choice of this name; `None` if there is none.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        if name == "auto" { Some(Self::Auto) } else { Dispatch::parse(name).map(Self::Only) }
    }

    /// Returns the dispatch towards a node that opens these, the preferred one first; `None`: its
    /// packets are not forwarded directly.
    pub(super) fn towards(self, opened: &[Dispatch]) -> Option<Dispatch> {
        let mut named = opened.iter().copied().filter(|opened| opened.within() == *opened);
        match self {
            Self::Auto => named.next(),
            Self::Only(wanted @ Dispatch::L2 { .. }) if opened.contains(&wanted) => {
                named.next().map(|next| Dispatch::L2 { else_udp: next == Dispatch::Udp })
            }
            Self::Only(Dispatch::L2 { .. }) => named.next(),
            Self::Only(wanted) => opened.contains(&wanted).then_some(wanted),
        }
    }

    /// The kinds that a node with this choice opens, the one that it prefers first.
    #[must_use]
    pub const fn opened(self) -> [Dispatch; 3] {
        let [ipip, udp, l2] = Dispatch::ALL;
        match self {
            Self::Only(Dispatch::Udp) => [udp, ipip, l2],
            Self::Auto | Self::Only(Dispatch::Ipip | Dispatch::L2 { .. }) => Dispatch::ALL,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            assert_eq!(own.towards(opened), used, "{own:?} towards {opened:?}");
        }
        assert_eq!(DispatchChoice::parse("auto"), Some(DispatchChoice::Auto));
        assert_eq!(DispatchChoice::parse("udp"), Some(udp));
        assert_eq!(DispatchChoice::parse("l2"), Some(l2));
        assert_eq!(DispatchChoice::parse("l3"), None);
    }
}
