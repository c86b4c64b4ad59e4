//! The ways of packets to endpoints of other nodes.

/// The annotation that sets how a Service's packets reach endpoints of other nodes.
pub const FORWARDING_ANNOTATION: &str = "traffic-policy.io/forwarding";

/// The way of packets to endpoints of other nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Forwarding {
    /// Both addresses are rewritten; replies come back to this node.
    #[default]
    Snat,
    /// The packet travels unchanged, and the endpoint's node answers the client. Where that node
    /// does not open such packets, it is [`Forwarding::Snat`].
    Direct,
    /// The packet travels unchanged, and so does the reply, back through this node. Where the
    /// endpoint's node does not know that, it is [`Forwarding::Snat`].
    Tunnel,
}

impl Forwarding {
    /// Returns the way of this name; `None` if there is none.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        [Self::Snat, Self::Direct, Self::Tunnel].into_iter().find(|way| way.name() == name)
    }

    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Snat => "snat",
            Self::Direct => "direct",
            Self::Tunnel => "tunnel",
        }
    }

    /// Whether packets travel unchanged, so that endpoints see the client.
    #[must_use]
    pub const fn is_direct(self) -> bool {
        matches!(self, Self::Direct | Self::Tunnel)
    }
}
