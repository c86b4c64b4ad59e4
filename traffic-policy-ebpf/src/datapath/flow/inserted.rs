//! The end of a flow's creation, once its entries are in the table.

use traffic_policy_ebpf::{
    abi::{PROTOCOL_TCP, kind},
    tcp::ASSURED,
};

use crate::datapath::{
    family::{Family, V4, V6},
    flow::{delivered, table::FlowTable, unassured},
    node_silence,
    value::borrow,
};

/// Concludes the creation of the flow that is in scratch memory.
#[inline(always)]
pub fn conclude<F: Family>() {
    let _ = if F::V6 { inserted6() } else { inserted4() };
}

global_functions! {
    inserted4 => inserted::<V4>;
    inserted6 => inserted::<V6>;
}

#[inline(always)]
fn inserted<F: Family>() -> i32 {
    let Some(scratch) = F::scratch() else { return 0 };
    delivered::tell_apart::<F>(scratch);
    if get!(scratch.request.state) & ASSURED != 0 {
        // A connection that the pod's stack knows need not be confirmed.
        let tuple = borrow(place!(const scratch.opening));
        let request = FlowTable::<F>::new().find_in(tuple, place!(mut scratch.flow_key));
        if !request.is_null() && get!(request.state) & ASSURED != 0 {
            unassured::leave::<F>(request, tuple);
        }
    }
    if get!(scratch.opening.protocol) == PROTOCOL_TCP && get!(scratch.request.kind) == kind::FORWARD {
        node_silence::note_syn(get!(scratch.request.head).node(), get!(scratch.port_search.now));
    }
    0
}
