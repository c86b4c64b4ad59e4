//! IPv4 and IPv6 as types, so that the packet path is written once.

use aya_ebpf::cty::c_void;
use traffic_policy_ebpf::abi::{Address, Address4, Address6, Scratch, Search};

use crate::datapath::{
    choose, claim,
    flows::Flows,
    maps::{
        self, FLOWS4, FLOWS6, FRONTENDS4, FRONTENDS6, PENDING4, PENDING6, SCRATCH4, SCRATCH6, SERVICE_CIDRS4,
        SERVICE_CIDRS6, SLOT_ROUTES4, SLOT_ROUTES6, SLOTS4, SLOTS6, SOURCES4, SOURCES6, Table,
    },
};

pub trait Family: 'static {
    type Address: Address;
    const V6: bool;
    /// Index of per-family words.
    const INDEX: usize;
    /// Address family number.
    const AF: u16;

    fn flows() -> Flows<Self::Address>;
    fn pending() -> Flows<Self::Address>;
    fn frontends() -> Table;
    fn sources() -> Table;
    fn service_cidrs() -> Table;
    fn slots() -> Table;
    fn slot_routes() -> Table;
    fn scratch() -> Option<*mut Scratch<Self::Address>>;
    /// [`claim::next_port`] of this family, as `bpf_loop` calls it.
    fn next_port() -> *mut c_void;
    /// [`choose::next_slot`] of this family, as `bpf_loop` calls it.
    fn next_slot() -> *mut c_void;
    /// From the wide form of the FIB.
    fn narrow(wide: [u64; 2]) -> Self::Address;
}

pub struct V4;
pub struct V6;

impl Family for V4 {
    type Address = Address4;
    const V6: bool = false;
    const INDEX: usize = 0;
    const AF: u16 = 2;

    #[inline(always)]
    fn flows() -> Flows<Address4> {
        Flows::of(&raw const FLOWS4)
    }
    #[inline(always)]
    fn pending() -> Flows<Address4> {
        Flows::of(&raw const PENDING4)
    }
    #[inline(always)]
    fn frontends() -> Table {
        Table::of(&raw const FRONTENDS4)
    }
    #[inline(always)]
    fn sources() -> Table {
        Table::of(&raw const SOURCES4)
    }
    #[inline(always)]
    fn service_cidrs() -> Table {
        Table::of(&raw const SERVICE_CIDRS4)
    }
    #[inline(always)]
    fn slots() -> Table {
        Table::of(&raw const SLOTS4)
    }
    #[inline(always)]
    fn slot_routes() -> Table {
        Table::of(&raw const SLOT_ROUTES4)
    }
    #[inline(always)]
    fn scratch() -> Option<*mut Scratch<Address4>> {
        SCRATCH4.get_ptr_mut(0)
    }
    #[inline(always)]
    fn next_port() -> *mut c_void {
        next_port4 as *mut c_void
    }
    #[inline(always)]
    fn next_slot() -> *mut c_void {
        next_slot4 as *mut c_void
    }
    #[inline(always)]
    fn narrow(wide: [u64; 2]) -> Address4 {
        wide[0] as u32
    }
}

impl Family for V6 {
    type Address = Address6;
    const V6: bool = true;
    const INDEX: usize = 1;
    const AF: u16 = 10;

    #[inline(always)]
    fn flows() -> Flows<Address6> {
        Flows::of(&raw const FLOWS6)
    }
    #[inline(always)]
    fn pending() -> Flows<Address6> {
        Flows::of(&raw const PENDING6)
    }
    #[inline(always)]
    fn frontends() -> Table {
        Table::of(&raw const FRONTENDS6)
    }
    #[inline(always)]
    fn sources() -> Table {
        Table::of(&raw const SOURCES6)
    }
    #[inline(always)]
    fn service_cidrs() -> Table {
        Table::of(&raw const SERVICE_CIDRS6)
    }
    #[inline(always)]
    fn slots() -> Table {
        Table::of(&raw const SLOTS6)
    }
    #[inline(always)]
    fn slot_routes() -> Table {
        Table::of(&raw const SLOT_ROUTES6)
    }
    #[inline(always)]
    fn scratch() -> Option<*mut Scratch<Address6>> {
        SCRATCH6.get_ptr_mut(0)
    }
    #[inline(always)]
    fn next_port() -> *mut c_void {
        next_port6 as *mut c_void
    }
    #[inline(always)]
    fn next_slot() -> *mut c_void {
        next_slot6 as *mut c_void
    }
    #[inline(always)]
    fn narrow(wide: [u64; 2]) -> Address6 {
        wide
    }
}

/// Whether `PENDING` may hold anything.
#[inline(always)]
pub fn pending_in_use() -> bool {
    let (Some(state), Some(usage)) = (maps::STATE.get_ptr(0), maps::USAGE.get_ptr(0)) else { return false };
    unsafe { (*usage).pending_created != (*state).pending_swept }
}

extern "C" fn next_port4(_: u64, _: *mut c_void) -> i64 {
    claim::next_port::<V4>()
}

extern "C" fn next_port6(_: u64, _: *mut c_void) -> i64 {
    claim::next_port::<V6>()
}

extern "C" fn next_slot4(_: u64, search: *mut *mut Search<Address4>) -> i64 {
    choose::next_slot::<V4>(unsafe { *search })
}

extern "C" fn next_slot6(_: u64, search: *mut *mut Search<Address6>) -> i64 {
    choose::next_slot::<V6>(unsafe { *search })
}
