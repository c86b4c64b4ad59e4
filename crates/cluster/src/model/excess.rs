//! The reason why the maps have no room for a Service.

use std::fmt;

use super::{ServiceName, capacity::Kind};

/// A Service that asks for more than there is room for, over all of its ports: no part of it is
/// served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Excess {
    /// The number of ports of the Service, counted once for each family.
    pub ports: usize,
    cause: Cause,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Cause {
    /// The Service alone needs more than a map can hold.
    Alone { kind: Kind, ipv6: bool, needed: u64, room: u64 },
    /// Other Services leave no room. There are no numbers, because they change with each of those.
    BesideOthers,
}

impl Excess {
    /// Returns the excess of a Service of that many ports which alone needs more than the room.
    pub(super) const fn alone(ports: usize, [needed, room]: [u64; 2], kind: Kind, ipv6: bool) -> Self {
        Self { ports, cause: Cause::Alone { kind, ipv6, needed, room } }
    }

    /// Returns the excess of a Service of that many ports to which others leave no room.
    pub(super) const fn beside_others(ports: usize) -> Self {
        Self { ports, cause: Cause::BesideOthers }
    }

    /// Returns the warning for a person.
    #[must_use]
    pub fn sentence(&self, service: &ServiceName) -> String {
        format!(
            "Service {service}: the maps have no room for it: {self}. Nothing of it is served until it asks for less."
        )
    }
}

impl fmt::Display for Excess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Cause::Alone { kind, ipv6, needed, room } = self.cause else {
            return f.write_str(
                "all Services together ask for more than twice what a map takes, and those that are served, then \
                 older ones, come first \
                 (--frontend-entries, --source-range-entries, --endpoint-entries)",
            );
        };
        let (verb, what, flag) = match kind {
            Kind::Frontends => ("needs", "frontends", "--frontend-entries"),
            Kind::SourceRanges => ("needs", "source ranges", "--source-range-entries"),
            Kind::Endpoints => ("has", "endpoints", "--endpoint-entries"),
            Kind::Serving => ("has", "endpoints that serve, on all nodes,", "--endpoint-entries"),
            Kind::Listed => ("lists", "endpoints, with those that do not serve,", "--endpoint-entries"),
        };
        let family = if ipv6 { "IPv6" } else { "IPv4" };
        let limit = match kind {
            Kind::Listed => "no more are looked at than",
            Kind::Serving => "no more are remembered than",
            _ => "the map takes",
        };
        write!(f, "it {verb} {needed} {family} {what} over all of its ports, and {limit} {room} ({flag})")
    }
}
