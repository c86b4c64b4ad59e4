//! IPv4 and IPv6 as types, so that the packet path is written once.

use aya_ebpf::Global;
use traffic_policy_ebpf::abi::{Address, Address4, Address6, Scratch, WideAddress};

use crate::datapath::maps::{
    DIRECT_ENDPOINTS4, DIRECT_ENDPOINTS6, DIRECT_FROM4, DIRECT_FROM6, DIRECT_NODES4, DIRECT_NODES6,
    ENDPOINT_ROUTES4, ENDPOINT_ROUTES6, ENDPOINTS4, ENDPOINTS6, FLOW_DIRECTORY4, FLOW_DIRECTORY6, FLOWS4,
    FLOWS6, FRAGMENTS4, FRAGMENTS6, FRONTENDS4, FRONTENDS6, NODE_ADDRESSES4, NODE_ADDRESSES6, OWN_SENT4,
    OWN_SENT6, ROUTE_MTUS4, ROUTE_MTUS6, SCRATCH4, SCRATCH6, SERVICE_CIDRS4, SERVICE_CIDRS6, SOURCE_RANGES4,
    SOURCE_RANGES6, Table, UNASSURED4, UNASSURED6,
};

/// The last places of the directories of flows. The agent sets them at load.
#[unsafe(no_mangle)]
static DIRECTORY_LAST4: Global<u32> = Global::new(262_143);
#[unsafe(no_mangle)]
static DIRECTORY_LAST6: Global<u32> = Global::new(65_535);

/// The last places of a queue of unassured flows. The agent sets them at load.
#[unsafe(no_mangle)]
static UNASSURED_LAST4: Global<u32> = Global::new(65_535);
#[unsafe(no_mangle)]
static UNASSURED_LAST6: Global<u32> = Global::new(32_767);

pub trait Family: 'static {
    type Address: Address;
    const V6: bool;
    /// The index of per-family words.
    const INDEX: usize;
    /// The address family number.
    const AF: u16;

    /// The main table of flow entries.
    fn flows() -> Table;
    /// The unassured flows: [`crate::datapath::flow::unassured`].
    fn unassured() -> Table;
    /// The last place of one queue of unassured flows, a power of two minus one.
    fn unassured_last() -> u32;
    /// The directory of flows in the main table: [`crate::datapath::flow::recycle`].
    fn directory() -> Table;
    /// The last place of the directory, a power of two minus one.
    fn directory_last() -> u32;
    fn frontends() -> Table;
    fn sources() -> Table;
    fn service_cidrs() -> Table;
    /// This node's own addresses.
    fn node_addresses() -> Table;
    /// The datagrams that this node itself has sent from a frontend's port, and its datagrams and
    /// connections from a port of the SNAT port range, by the tuples of their answers.
    fn own_sent() -> Table;
    fn slots() -> Table;
    fn slot_routes() -> Table;
    /// The MTUs that routes name.
    fn route_mtus() -> Table;
    /// The ports of fragmented datagrams.
    fn fragments() -> Table;
    /// The nodes whose packets are opened, and the endpoints that they are opened for.
    fn direct_from() -> Table;
    fn direct_endpoints() -> Table;
    /// Those nodes by their number.
    fn direct_nodes() -> Table;
    /// The scratch memory of this CPU: structures too large for the stack, and state that one
    /// program hands to the next.
    fn scratch() -> Option<*mut Scratch<Self::Address>>;
    /// Converts an address from the wide form of the FIB.
    fn narrow(wide: WideAddress) -> Self::Address;
}

pub struct V4;
pub struct V6;

impl Family for V4 {
    type Address = Address4;
    const V6: bool = false;
    const INDEX: usize = 0;
    const AF: u16 = 2;

    #[inline(always)]
    fn flows() -> Table {
        Table::of(&raw const FLOWS4)
    }
    #[inline(always)]
    fn unassured() -> Table {
        Table::of(&raw const UNASSURED4)
    }
    #[inline(always)]
    fn unassured_last() -> u32 {
        UNASSURED_LAST4.load()
    }
    #[inline(always)]
    fn directory() -> Table {
        Table::of(&raw const FLOW_DIRECTORY4)
    }
    #[inline(always)]
    fn directory_last() -> u32 {
        DIRECTORY_LAST4.load()
    }
    #[inline(always)]
    fn frontends() -> Table {
        Table::of(&raw const FRONTENDS4)
    }
    #[inline(always)]
    fn sources() -> Table {
        Table::of(&raw const SOURCE_RANGES4)
    }
    #[inline(always)]
    fn service_cidrs() -> Table {
        Table::of(&raw const SERVICE_CIDRS4)
    }
    #[inline(always)]
    fn node_addresses() -> Table {
        Table::of(&raw const NODE_ADDRESSES4)
    }
    #[inline(always)]
    fn own_sent() -> Table {
        Table::of(&raw const OWN_SENT4)
    }
    #[inline(always)]
    fn slots() -> Table {
        Table::of(&raw const ENDPOINTS4)
    }
    #[inline(always)]
    fn slot_routes() -> Table {
        Table::of(&raw const ENDPOINT_ROUTES4)
    }
    #[inline(always)]
    fn route_mtus() -> Table {
        Table::of(&raw const ROUTE_MTUS4)
    }
    #[inline(always)]
    fn fragments() -> Table {
        Table::of(&raw const FRAGMENTS4)
    }
    #[inline(always)]
    fn direct_from() -> Table {
        Table::of(&raw const DIRECT_FROM4)
    }
    #[inline(always)]
    fn direct_endpoints() -> Table {
        Table::of(&raw const DIRECT_ENDPOINTS4)
    }
    #[inline(always)]
    fn direct_nodes() -> Table {
        Table::of(&raw const DIRECT_NODES4)
    }
    #[inline(always)]
    fn scratch() -> Option<*mut Scratch<Address4>> {
        SCRATCH4.get_ptr_mut(0)
    }
    #[inline(always)]
    fn narrow(wide: WideAddress) -> Address4 {
        wide.ipv4()
    }
}

impl Family for V6 {
    type Address = Address6;
    const V6: bool = true;
    const INDEX: usize = 1;
    const AF: u16 = 10;

    #[inline(always)]
    fn flows() -> Table {
        Table::of(&raw const FLOWS6)
    }
    #[inline(always)]
    fn unassured() -> Table {
        Table::of(&raw const UNASSURED6)
    }
    #[inline(always)]
    fn unassured_last() -> u32 {
        UNASSURED_LAST6.load()
    }
    #[inline(always)]
    fn directory() -> Table {
        Table::of(&raw const FLOW_DIRECTORY6)
    }
    #[inline(always)]
    fn directory_last() -> u32 {
        DIRECTORY_LAST6.load()
    }
    #[inline(always)]
    fn frontends() -> Table {
        Table::of(&raw const FRONTENDS6)
    }
    #[inline(always)]
    fn sources() -> Table {
        Table::of(&raw const SOURCE_RANGES6)
    }
    #[inline(always)]
    fn service_cidrs() -> Table {
        Table::of(&raw const SERVICE_CIDRS6)
    }
    #[inline(always)]
    fn node_addresses() -> Table {
        Table::of(&raw const NODE_ADDRESSES6)
    }
    #[inline(always)]
    fn own_sent() -> Table {
        Table::of(&raw const OWN_SENT6)
    }
    #[inline(always)]
    fn slots() -> Table {
        Table::of(&raw const ENDPOINTS6)
    }
    #[inline(always)]
    fn slot_routes() -> Table {
        Table::of(&raw const ENDPOINT_ROUTES6)
    }
    #[inline(always)]
    fn route_mtus() -> Table {
        Table::of(&raw const ROUTE_MTUS6)
    }
    #[inline(always)]
    fn fragments() -> Table {
        Table::of(&raw const FRAGMENTS6)
    }
    #[inline(always)]
    fn direct_from() -> Table {
        Table::of(&raw const DIRECT_FROM6)
    }
    #[inline(always)]
    fn direct_endpoints() -> Table {
        Table::of(&raw const DIRECT_ENDPOINTS6)
    }
    #[inline(always)]
    fn direct_nodes() -> Table {
        Table::of(&raw const DIRECT_NODES6)
    }
    #[inline(always)]
    fn scratch() -> Option<*mut Scratch<Address6>> {
        SCRATCH6.get_ptr_mut(0)
    }
    #[inline(always)]
    fn narrow(wide: WideAddress) -> Address6 {
        wide.ipv6()
    }
}
