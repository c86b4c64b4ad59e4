//! The way of what is forwarded directly, as flags of a slot.

use traffic_policy_cluster::model::Dispatch;
use traffic_policy_ebpf::abi::{SLOT_HELD, SLOT_L2, SLOT_OPENS, SLOT_UDP};

/// Returns the flags of an endpoint to which packets are forwarded directly: all, by `opens`, or
/// else those of connections that go on, by `held`.
pub const fn flags(opens: Option<Dispatch>, held: Option<Dispatch>) -> u16 {
    match (opens, held) {
        (Some(dispatch), _) => of_dispatch(dispatch),
        (None, Some(dispatch)) => of_dispatch(dispatch) | SLOT_HELD,
        (None, None) => 0,
    }
}

const fn of_dispatch(dispatch: Dispatch) -> u16 {
    match dispatch {
        Dispatch::Ipip => SLOT_OPENS,
        Dispatch::Udp => SLOT_OPENS | SLOT_UDP,
        Dispatch::L2 { else_udp: false } => SLOT_OPENS | SLOT_L2,
        Dispatch::L2 { else_udp: true } => SLOT_OPENS | SLOT_L2 | SLOT_UDP,
    }
}

/// Returns the way of all packets, as such flags say it.
pub const fn of(flags: u16) -> Option<Dispatch> {
    if flags & SLOT_HELD == 0 { dispatch(flags) } else { None }
}

/// Returns the way of connections that go on, where others have none.
pub const fn held(flags: u16) -> Option<Dispatch> {
    if flags & SLOT_HELD == 0 { None } else { dispatch(flags) }
}

const fn dispatch(flags: u16) -> Option<Dispatch> {
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
