//! The way of what is forwarded directly, as flags of a slot.

use traffic_policy_cluster::model::Dispatch;
use traffic_policy_ebpf::abi::{SLOT_L2, SLOT_OPENS, SLOT_UDP};

/// Returns the flags of an endpoint to which packets are forwarded directly.
pub const fn flags(dispatch: Option<Dispatch>) -> u16 {
    match dispatch {
        None => 0,
        Some(Dispatch::Ipip) => SLOT_OPENS,
        Some(Dispatch::Udp) => SLOT_OPENS | SLOT_UDP,
        Some(Dispatch::L2 { else_udp: false }) => SLOT_OPENS | SLOT_L2,
        Some(Dispatch::L2 { else_udp: true }) => SLOT_OPENS | SLOT_L2 | SLOT_UDP,
    }
}

/// Returns what such flags say.
pub const fn of(flags: u16) -> Option<Dispatch> {
    if flags & SLOT_OPENS == 0 {
        return None;
    }
    let udp = flags & SLOT_UDP != 0;
    Some(match (flags & SLOT_L2 != 0, udp) {
        (true, _) => Dispatch::L2 { else_udp: udp },
        (false, true) => Dispatch::Udp,
        (false, false) => Dispatch::Ipip,
    })
}
