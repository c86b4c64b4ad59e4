//! The count of a flow's first packet. It is counted in the request entry before that is inserted,
//! and the packet is forwarded by the copy in `Scratch`: this saves a look-up in the table. If the
//! packet is not forwarded after all, the count is corrected.

use traffic_policy_ebpf::abi::Flow;

use crate::datapath::{
    barrier::opaque,
    family::{Family, V4, V6},
    flow::table::FlowTable,
    value::borrow,
};

/// Uncounts a packet that was to be forwarded by `entry`, if that is the copy of an entry which was
/// inserted for it, and the packet was not sent.
#[inline(always)]
pub fn settle<F: Family>(entry: *const Flow<F::Address>) {
    let Some(scratch) = F::scratch() else { return };
    // The addresses are compared behind the compiler's back: it would omit the test of `scratch`
    // for null, which equal addresses imply, and before Linux 6.2 the verifier does not know that.
    let is_copy = opaque(entry as u64) == place!(const scratch.request) as u64;
    // A packet that is sent is counted a second time, in the copy.
    if is_copy && get!(scratch.request.packets).count() == 1 {
        let _ = if F::V6 { uncount6() } else { uncount4() };
    }
}

global_functions! {
    uncount4 => uncount::<V4>;
    uncount6 => uncount::<V6>;
}

#[inline(always)]
fn uncount<F: Family>() -> i32 {
    let Some(scratch) = F::scratch() else { return 0 };
    let table = FlowTable::<F>::new();
    let entry = table.find_in(borrow(place!(const scratch.opening)), place!(mut scratch.flow_key));
    if !entry.is_null() && get!(entry.packets).count() != 0 {
        set!(entry.packets = get!(entry.packets).less_one());
        set!(entry.bytes -= get!(scratch.request.bytes));
    }
    0
}
