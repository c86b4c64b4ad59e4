//! Flows: their entries and states, the source port of a new flow, and the removal of old flows.

pub mod associations;
pub mod claim;
pub mod datagrams;
pub mod delivered;
pub mod directory;
pub mod established;
pub mod gc;
pub mod inserted;
pub mod narrow;
pub mod new_flow;
pub mod no_port;
pub mod one_way;
pub mod pair;
pub mod recycle;
pub mod silence;
pub mod snat_port;
pub mod state;
pub mod table;
pub mod unassured;
pub mod way_back;

use traffic_policy_ebpf::{
    abi::{PROTOCOL_SCTP, PROTOCOL_UDP},
    sctp,
    tcp::Timeouts,
};

use crate::datapath::clock;

/// Returns the time-out of a flow whose entries have these states, in jiffies.
#[inline(always)]
fn timeout(timeouts: &Timeouts, protocol: u32, request: u8, reply: u8) -> u32 {
    if protocol == PROTOCOL_SCTP {
        return sctp::timeout(timeouts, clock::hz(), request, reply);
    }
    timeouts.of(protocol != PROTOCOL_UDP, request, reply)
}
