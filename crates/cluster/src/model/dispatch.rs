//! Dispatch: what a packet that is forwarded directly travels in.

/// The outer packet in which a packet travels to the endpoint's node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Dispatch {
    /// An IP packet of the same family: IPv4 within IPv4 (RFC 2003), IPv6 within IPv6 (RFC 2473).
    Ipip,
    /// UDP: GUE of variant 1, port 6080.
    Udp,
}

impl Dispatch {
    pub const ALL: [Self; 2] = [Self::Ipip, Self::Udp];

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
        }
    }
}

/// `--dispatch`: which dispatch a node uses, of those that another one opens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DispatchChoice {
    /// The one that the other node prefers.
    #[default]
    Auto,
    /// No other one: the network may not let it through.
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
        match self {
            Self::Auto => opened.first().copied(),
            Self::Only(wanted) => opened.contains(&wanted).then_some(wanted),
        }
    }

    /// The kinds that a node with this choice opens, the one that it prefers first.
    #[must_use]
    pub const fn opened(self) -> [Dispatch; 2] {
        match self {
            Self::Only(Dispatch::Udp) => [Dispatch::Udp, Dispatch::Ipip],
            Self::Auto | Self::Only(Dispatch::Ipip) => Dispatch::ALL,
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
        let earlier = [Dispatch::Ipip];
        for (own, opened, used) in [
            (DispatchChoice::Auto, &earlier[..], Some(Dispatch::Ipip)),
            (DispatchChoice::Auto, &DispatchChoice::Auto.opened()[..], Some(Dispatch::Ipip)),
            (DispatchChoice::Auto, &udp.opened()[..], Some(Dispatch::Udp)),
            (ipip, &udp.opened()[..], Some(Dispatch::Ipip)),
            (ipip, &[Dispatch::Udp][..], None),
            (udp, &ipip.opened()[..], Some(Dispatch::Udp)),
            (udp, &earlier[..], None),
            (DispatchChoice::Auto, &[][..], None),
        ] {
            assert_eq!(own.towards(opened), used, "{own:?} towards {opened:?}");
        }
        assert_eq!(DispatchChoice::parse("auto"), Some(DispatchChoice::Auto));
        assert_eq!(DispatchChoice::parse("udp"), Some(udp));
        assert_eq!(DispatchChoice::parse("l2"), None);
    }
}
