//! The outer packet of what is forwarded directly, as flags of a slot.

use traffic_policy_cluster::model::Dispatch;
use traffic_policy_ebpf::abi::{SLOT_OPENS, SLOT_UDP};

/// Returns the flags of an endpoint to which packets are forwarded directly.
pub const fn flags(dispatch: Option<Dispatch>) -> u16 {
    match dispatch {
        None => 0,
        Some(Dispatch::Ipip) => SLOT_OPENS,
        Some(Dispatch::Udp) => SLOT_OPENS | SLOT_UDP,
    }
}

/// Returns what such flags say.
pub const fn of(flags: u16) -> Option<Dispatch> {
    if flags & SLOT_OPENS == 0 {
        return None;
    }
    Some(if flags & SLOT_UDP == 0 { Dispatch::Ipip } else { Dispatch::Udp })
}
