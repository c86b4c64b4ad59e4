//! Endpoints: those that may be chosen, and those that were removed.

use super::{Port, WideAddress, way};

/// The endpoint is on this node, by its `nodeName` or because the address is the node's own: it is
/// delivered here whatever the routes say.
pub const SLOT_LOCAL: u16 = 1;
/// The endpoint is on another node, by its `nodeName`: it is never delivered here whatever the
/// routes say.
pub const SLOT_REMOTE: u16 = 2;
/// The endpoint's node opens packets that other nodes send it for the endpoint.
pub const SLOT_OPENS: u16 = 4;
/// Packets to an endpoint that has [`SLOT_OPENS`], too, are sent within UDP.
pub const SLOT_UDP: u16 = 8;
/// The node of an endpoint that has [`SLOT_OPENS`], too, also finds the endpoint itself, by its own
/// Maglev table, for packets that another node sends to its MAC address as they are.
pub const SLOT_L2: u16 = 16;
/// Stands beside [`SLOT_OPENS`] until the other nodes know this one, and this one knows which
/// packets get to them, and while the endpoint's node asks for no new flows: connections that
/// another node began and this one takes over ([`way::GOES_ON`]) are forwarded directly, new ones
/// by SNAT.
pub const SLOT_HELD: u16 = 32;

/// An endpoint, by value.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Slot<A> {
    pub address: A,
    pub port: Port,
    /// [`SLOT_LOCAL`], [`SLOT_REMOTE`], [`SLOT_OPENS`], [`SLOT_UDP`], [`SLOT_L2`], [`SLOT_HELD`].
    pub flags: u16,
    /// The number of its node in `tp_node_names`; 0: it has no `nodeName`, or is on this node.
    pub node: u16,
    pub zero: u16,
}

impl<A> Slot<A> {
    /// 1 if it has [`SLOT_OPENS`], also while it is [held][SLOT_HELD].
    #[inline(always)]
    pub const fn opens(&self) -> u8 {
        (self.flags >> SLOT_OPENS.trailing_zeros()) as u8 & 1
    }

    /// The [ways][way] by which packets may reach it. A node that opens packets ([`way::DIRECT`])
    /// can also send replies back through this one, and be an owner: those bits follow from it.
    #[inline(always)]
    pub const fn dispatch(&self) -> u64 {
        let ways = (self.flags >> SLOT_OPENS.trailing_zeros()) as u64;
        ways & (way::DIRECT | way::UDP | way::BY_MAC)
            | way::moved(ways, way::DIRECT, way::TUNNEL | way::OWNER | way::BY_TABLE)
    }

    /// Returns those of these [ways][way] that lead to it; without [`way::GOES_ON`] none while it
    /// is [held][SLOT_HELD].
    #[inline(always)]
    #[must_use]
    pub const fn taken(&self, ways: u64) -> u64 {
        let held = (self.flags >> SLOT_HELD.trailing_zeros()) as u64 & 1;
        let open = way::moved(ways, way::GOES_ON, 1) | (held ^ 1);
        // Without a branch, which the verifier would walk both ways.
        (ways & self.dispatch()) * open
    }
}

const _: () = assert!(
    SLOT_UDP as u64 == SLOT_OPENS as u64 * way::UDP && SLOT_L2 as u64 == SLOT_OPENS as u64 * way::BY_MAC
);

/// The value of an element of `tp_removed_eps` whose endpoint has left the Service port, or serves
/// no more.
pub const REMOVED_FROM_SERVICE: u32 = 1;
/// The value of one whose node has stopped opening packets: of UDP, and of direct flows alone.
/// Those of TCP end by themselves.
pub const REMOVED_FROM_OPENING: u32 = 2;

/// The key of `tp_removed_eps`: an endpoint whose flows of one Service port are to choose anew. It
/// may still take flows of other Service ports.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct EndpointKey {
    pub address: WideAddress,
    pub port: Port,
    pub protocol: u8,
    pub ipv6: u8,
    /// The index of the Service port.
    pub service: u32,
}
