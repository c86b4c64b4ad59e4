//! Ways on which IPv6 packets do not fit into outer packets: what remains of the MTU has to be
//! IPv6's own least one, because a host takes no notice of an error that names a smaller one
//! (RFC 8201 section 4).

use traffic_policy_ebpf::abi::{DeviceInfo, kind, way};

use crate::datapath::{
    family::{Family, V6},
    forward::outer,
    maps::{DEVICES, NEXTHOPS, Table},
    value::borrow,
};

/// IPv6's least MTU (RFC 8200 section 5) and an outer IP header, in bytes.
const LEAST: u32 = 1280 + 40;

/// Whether a direct flow that is about to be inserted fits its way; if not, it is made a translated
/// one.
#[inline(always)]
pub fn fits<F: Family>() -> bool {
    !F::V6 || fits6() != 0
}

global_functions! {
    fits6 => judge;
}

/// Judges the flow of `Scratch::request`: 1 if it fits. A flow without a hop has the way of the
/// last query of the FIB.
#[inline(always)]
fn judge() -> i32 {
    let Some(scratch) = V6::scratch() else { return 0 };
    let hop = get!(scratch.request.hop) as u32;
    let mtu = if hop != 0 {
        NEXTHOPS.get_ptr(hop).map_or(0, |hop| get!(hop.mtu))
    } else {
        let ifindex = borrow(place!(const scratch.via.ifindex));
        let device = Table::of(&raw const DEVICES).lookup::<u32, DeviceInfo>(ifindex);
        let mtu = device.map_or(0, |device| get!(device.mtu));
        let of_route = get!(scratch.route_mtu) as u32;
        if mtu != 0 && mtu < of_route { mtu } else { of_route }
    };
    if mtu >= LEAST + way::moved(get!(scratch.direct), way::UDP, outer::UDP as u64) as u32 {
        return 1;
    }
    set!(scratch.request.kind = kind::FORWARD);
    0
}
