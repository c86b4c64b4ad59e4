//! Names of Services and of their ports.

use std::fmt;

/// Namespace and name of a Service.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServiceName {
    pub namespace: String,
    pub name: String,
}

impl fmt::Display for ServiceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A transport protocol that the packet path translates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    Tcp,
    Udp,
    Sctp,
}

impl Protocol {
    /// The protocol's name in a Service.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
            Self::Sctp => "SCTP",
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One port of a Service, in one IP family: the unit that kube-proxy calls a service port.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServicePortKey {
    pub service: ServiceName,
    /// `ports[].name`, empty for an unnamed port.
    pub port: String,
    pub protocol: Protocol,
    pub ipv6: bool,
}

/// Formats as `namespace/name`, followed by a colon and the port's name if it has one.
impl fmt::Display for ServicePortKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let colon = if self.port.is_empty() { "" } else { ":" };
        write!(f, "{}{colon}{}", self.service, self.port)
    }
}
