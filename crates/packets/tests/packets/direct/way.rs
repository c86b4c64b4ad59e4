//! The outer packets of a flow that is forwarded directly: IP, or UDP.

use traffic_policy_testing::harness::{Device, Frontend, Ran, Spot};
use traffic_policy_testing::packet::Packet;

use super::{NEAR, outer, sent, udp, within};
use crate::table::Terms;

#[derive(Clone, Copy, Debug)]
pub(super) enum Way {
    Ip,
    /// UDP with this source port.
    Udp(u16),
}

impl Way {
    /// Both, UDP with a source port that nodes use.
    pub(super) const ALL: [Self; 2] = [Self::Ip, Self::Udp(777)];

    pub(super) const fn is_udp(self) -> bool {
        matches!(self, Self::Udp(_))
    }

    /// A frontend with an endpoint to which packets travel in this way.
    pub(super) fn frontend(self, (spot, port): (Spot, u16)) -> Frontend {
        let frontend = Frontend::new(spot, port).endpoints(&[NEAR]);
        if self.is_udp() { frontend.direct_within_udp() } else { frontend.direct() }
    }

    /// The way of the packet that has left, with its source port.
    pub(super) fn of(self, ran: &Ran, terms: Terms) -> Self {
        if self.is_udp() { Self::Udp(udp::source_port(&ran.frame, terms)) } else { self }
    }

    /// Another way: UDP instead of IP, or with another source port.
    pub(super) const fn otherwise(self) -> Self {
        match self {
            Self::Udp(777) => Self::Udp(778),
            Self::Ip | Self::Udp(_) => Self::Udp(777),
        }
    }

    pub(super) fn sent(self, inner: &Packet) -> Packet {
        match self {
            Self::Ip => sent(inner),
            Self::Udp(port) => udp::sent(inner, port),
        }
    }

    pub(super) fn within(self, inner: &Packet, from: Spot, to: Spot) -> Packet {
        match self {
            Self::Ip => within(inner, from, to),
            Self::Udp(port) => udp::within(inner, port, from, to),
        }
    }

    /// The packet as it arrives at the endpoint's node.
    pub(super) fn arrives(self, inner: &Packet, from: Spot, to: Spot) -> Packet {
        self.within(inner, from, to).macs(Spot::Router.mac(), Device::Eth0.mac())
    }

    /// The bytes of the outer headers.
    pub(super) fn bytes(self, terms: Terms) -> usize {
        outer(terms) + if self.is_udp() { udp::UDP } else { 0 }
    }
}
