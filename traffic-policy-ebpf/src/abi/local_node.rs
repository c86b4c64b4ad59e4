//! This node's addresses, and the source check of packets from outside.

use super::{Address, WideAddress};
use crate::hash;

/// The sources that new flows may have: `--source-check`.
pub mod source_check {
    pub const OFF: u32 = 0;
    /// Refuses sources that no packet from outside can have.
    pub const MARTIAN: u32 = 1;
    /// Also refuses sources to which this node's routes do not lead by the device that the packet
    /// came by.
    pub const STRICT: u32 = 2;
}

/// The words of [`LocalNode::address_bits`] for one family.
const ADDRESS_WORDS: usize = 4;

/// This node, as sockets and new flows need to know it. One element of `tp_local_node`, written by
/// the agent.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct LocalNode {
    /// The cookie of the network namespace that the node's own processes live in.
    pub netns: u64,
    /// The node's primary addresses: IPv4, IPv6; zero if it has none.
    pub primary: [WideAddress; 2],
    /// The first address of the node's pod ranges: IPv4, IPv6; zero if not known.
    pub pods: [WideAddress; 2],
    /// Prefix lengths of these ranges, for display; the packet path does not read them.
    pub pod_bits: [u32; 2],
    /// The same ranges as masks; zero if not known.
    pub pod_masks: [WideAddress; 2],
    /// See [`source_check`].
    pub source_check: u32,
    pub zero: u32,
    /// The Bloom filters of `tp_node_addrs4` and `tp_node_addrs6`: [`LocalNode::address_bit`].
    pub address_bits: [[u64; ADDRESS_WORDS]; 2],
}

impl LocalNode {
    /// The word and the bit of an address in its family's [`LocalNode::address_bits`].
    #[inline(always)]
    pub fn address_bit<A: Address>(address: A) -> (usize, u64) {
        let bit = (hash::address(address) >> 56) as u16;
        ((bit >> 6) as usize, 1 << (bit & 63))
    }

    /// Notes an address of family 0 (IPv4) or 1 (IPv6).
    pub fn note_address<A: Address>(&mut self, family: usize, address: A) {
        let (word, bit) = Self::address_bit(address);
        self.address_bits[family][word] |= bit;
    }
}
