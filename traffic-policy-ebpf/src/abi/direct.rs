//! Direct forwarding: the nodes that send packets within outer packets, and the endpoints for which
//! this node opens them.

use super::{Address, Port, SlotRoute};

/// The destination port of UDP that has a packet inside: GUE of variant 1, in which the inner
/// header follows that of UDP.
/// <https://datatracker.ietf.org/doc/html/draft-ietf-intarea-gue-09> section 4
pub const GUE_PORT: Port = Port::from_host(6080);

/// The source ports of such packets, by the bits that they have in common: 512 to 1023. Datagrams
/// of others that have a node's address as their source, by SNAT or from a process without
/// privileges, have larger ones: a payload that looks like a packet is not taken for one of a node.
const OUTER_PORTS: u16 = 512;

/// Returns the source port of a flow's outer packets, by which the cards of other nodes and routers
/// spread flows.
#[inline(always)]
pub const fn outer_port(hash: u64) -> Port {
    Port::from_host(OUTER_PORTS | (hash >> 16) as u16 & (OUTER_PORTS - 1))
}

/// Whether [`outer_port`] may have returned a port.
#[inline(always)]
pub const fn is_outer_port(port: Port) -> bool {
    port.to_host() & !(OUTER_PORTS - 1) == OUTER_PORTS
}

/// Ways of packets to an endpoint of another node, as bits of [`Scratch::direct`] and
/// [`Slot::dispatch`].
///
/// [`Scratch::direct`]: super::Scratch::direct
/// [`Slot::dispatch`]: super::Slot::dispatch
pub mod way {
    /// Packets travel unchanged: the flow is a direct one.
    pub const DIRECT: u64 = 1;
    /// The outer packet, if there is one, is UDP.
    pub const UDP: u64 = 2;
    /// Packets are sent to the MAC address of the endpoint's node as they are, where that can be.
    pub const BY_MAC: u64 = 4;
    /// Replies come back through this node.
    pub const TUNNEL: u64 = 8;
    /// The node in front is another one, and the endpoint a former owner of the connection.
    pub const OWNER: u64 = 16;
    /// The endpoint is the one that the Maglev table names, so a node that does not know the
    /// connection sends its segments there, too.
    pub const BY_TABLE: u64 = 32;
    /// They belong to a connection that this node does not know and its owner does.
    pub const GOES_ON: u64 = 64;
    /// The ways of packets whose outer packet names the endpoint.
    pub const NAMED: u64 = DIRECT | UDP | TUNNEL | OWNER;

    /// Returns one of these bits of `ways`, as the bit `to` of another word. A number that is
    /// computed without a branch: the verifier would walk both ways to the end.
    #[inline(always)]
    #[must_use]
    pub const fn moved(ways: u64, bit: u64, to: u64) -> u64 {
        (ways >> bit.trailing_zeros() & 1) * to
    }
}

/// A bit of [`Flow::port_delta`][super::Flow::port_delta] in a [`DIRECT`][super::kind::DIRECT]
/// entry that no source port has: packets are sent to the MAC address of the endpoint's node as
/// they are, where that can be.
pub const BY_MAC: u16 = 0x8000_u16.to_be();

/// The key of `tp_direct_macs`: a MAC address, then two bytes of 0, as one word in memory order.
pub const fn mac_key(mac: [u8; 6]) -> u64 {
    let [a, b, c, d, e, f] = mac;
    u64::from_ne_bytes([a, b, c, d, e, f, 0, 0])
}

/// A flag of the values of `tp_direct_macs`, each of which is another node's MAC address: the node
/// takes packets for its endpoints as they are.
pub const MAC_TAKES: u32 = 1;

/// The bit beside the number of owners in an outer packet by which the node in front says that
/// replies are to come back through it, within outer packets as well.
pub const REPLY_THROUGH_FRONT: u32 = 4;

/// The bits of the identification of an outer IPv4 packet below its number, that of owners with
/// [`REPLY_THROUGH_FRONT`]. They are 0 as it is sent, and count its segments where it is an
/// aggregate: the kernel, or the card, that cuts one gives each segment the next identification.
/// They suffice for the longest aggregate (`GSO_MAX_SIZE`, 512 KiB) if its segments have 64 bytes
/// or more each.
/// <https://github.com/torvalds/linux/blob/v6.12/net/ipv4/af_inet.c> (`inet_gso_segment`)
const SEGMENT_BITS: u32 = 13;

/// Returns the identification of an outer IPv4 packet, or of the first segment that it becomes, in
/// host order. `number`: at most 7.
#[inline(always)]
pub const fn identification(number: u32) -> u16 {
    (number << SEGMENT_BITS) as u16
}

/// Returns the number of an outer IPv4 packet with this identification, in host order.
#[inline(always)]
pub const fn number_of(identification: u16) -> u32 {
    (identification >> SEGMENT_BITS) as u32
}

/// A bit of [`Flow::address_delta`][super::Flow::address_delta] in a
/// [`DIRECT`][super::kind::DIRECT] entry: another node is in front, and packets are sent on to an
/// owner of the connection that the Maglev table names, or named before. They are counted by it.
pub const TO_OWNER: u16 = 8;

/// The bit of [`way::BY_TABLE`] beside [`TO_OWNER`]: the connection goes on without its entry.
pub const BY_TABLE: u16 = 16;

/// The way back of a flow's replies, as the endpoint's node knows it: to the client, or to the node
/// in front, which opens them.
///
/// | bits | |
/// |---|---|
/// | 0 to 13 | the number of the address in `tp_direct_node4` or `tp_direct_node6`, never 0 |
/// | 14 | they travel within UDP |
/// | 15 | 1, so that the word names no place in `tp_node_silence`, whose field it takes |
///
/// 0: they go to the client.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct WayBack(u16);

impl WayBack {
    pub const TO_CLIENT: Self = Self(0);
    const NUMBER: u16 = DIRECT_NODES as u16 - 1;
    const UDP: u16 = 1 << 14;
    const THROUGH_FRONT: u16 = 1 << 15;

    /// The way through the node whose address has this number.
    #[inline(always)]
    pub const fn through(number: u32, udp: bool) -> Self {
        Self((number as u16 & Self::NUMBER) | (udp as u16 * Self::UDP) | Self::THROUGH_FRONT)
    }

    #[inline(always)]
    pub const fn of_word(word: u16) -> Self {
        Self(word)
    }

    #[inline(always)]
    pub const fn word(self) -> u16 {
        self.0
    }

    #[inline(always)]
    pub const fn is_to_client(self) -> bool {
        self.0 == 0
    }

    /// The number of the address of the node in front.
    #[inline(always)]
    pub const fn number(self) -> u32 {
        (self.0 & Self::NUMBER) as u32
    }

    /// 1 if replies travel within UDP, otherwise 0.
    #[inline(always)]
    pub const fn udp(self) -> u16 {
        self.0 >> Self::UDP.trailing_zeros() & 1
    }
}

/// The elements of `tp_direct_node4` and `tp_direct_node6`.
pub const DIRECT_NODES: u32 = 16_384;

/// The value of `tp_direct_node4` and `tp_direct_node6`: an address of another node, by the number
/// that `tp_direct_from4` or `tp_direct_from6` gives it. Number 0 is none.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct DirectNode<A> {
    pub address: A,
    /// The route to it, which the packet path keeps here.
    pub route: SlotRoute<A>,
}

/// The key of `tp_direct_eps4` and `tp_direct_eps6`: an endpoint on this node.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct DirectEndpointKey<A: Address> {
    pub address: A,
    /// The index of the Service port; [`NO_SERVICE`][super::NO_SERVICE] for the element that every
    /// such address has.
    pub service: u32,
    /// Padding.
    pub zero: u32,
}

/// The value of `tp_direct_eps4` and `tp_direct_eps6`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct DirectEndpoint {
    /// The port of the endpoint; [`Port::NONE`] in the element without a Service port.
    pub port: Port,
    /// The id of the pod's network namespace as seen from this node's, plus 1; 0 if it is not
    /// known, and in the element without a Service port.
    pub netns: u16,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// GSO_MAX_SIZE: <https://github.com/torvalds/linux/blob/v6.12/include/linux/netdevice.h>
    const LONGEST_AGGREGATE: u32 = 8 * 65_536;

    #[test]
    fn every_segment_of_an_aggregate_has_its_number() {
        for number in 0..=7 {
            for place in 0..LONGEST_AGGREGATE / 64 {
                let identification = identification(number).wrapping_add(place as u16);
                assert_eq!(number_of(identification), number, "segment {place}");
            }
        }
    }
}
