//! Next hops: found by the kernel's FIB, kept in `tp_nexthops`, and shared by all flows with the
//! same route; the next hop of an endpoint.

use aya_ebpf::{
    Global,
    bindings::{__sk_buff, bpf_fib_lookup as FibParameters, xdp_md},
    helpers::bpf_fib_lookup,
};
use traffic_policy_ebpf::{
    abi::{
        Address, DeviceInfo, FibQuery, HOP_L2, HOP_LOCAL, HOP_NO_ETHERNET, HOP_ROUTED, HOP_XDP,
        HOPS_PER_GENERATION, Hop, HopKey, MAC_TAKES, RouteConfig, SLOT_LOCAL, SLOT_REMOTE, Scratch, Slot,
        SlotRoute, Via, WideAddress, mac_key,
    },
    outcome::Outcome,
};

use crate::datapath::{
    barrier::{fetch_add, full_fence},
    ctx::Packet,
    family::{Family, V4, V6},
    forward::Current,
    maps::{DEVICES, DIRECT_MACS, NEXTHOP_IDS, NEXTHOPS, NOEXIST, PREFILTER, TABLE_USAGE, Table},
    pod_client,
    value::{after, borrow, load, load_once, load_unaligned, store, store_once, store_unaligned},
};

/// BPF_FIB_LOOKUP_SRC where the kernel knows it (Linux 6.7), otherwise 0. The agent sets it at
/// load.
#[unsafe(no_mangle)]
static FIB_SOURCE: Global<u32> = Global::new(0);

/// BPF_FIB_LOOKUP_MARK where the kernel knows it (Linux 6.10), otherwise 0. The agent sets it at
/// load.
#[unsafe(no_mangle)]
pub static FIB_MARK: Global<u32> = Global::new(0);

/// 1 in a copy of the programs that evaluates packets without a network: every endpoint of another
/// node is then reached by [`ASSUMED_HOP`]. The agent sets it at load.
#[unsafe(no_mangle)]
static ASSUME_ROUTES: Global<u32> = Global::new(0);

/// The hop that represents all hops when routes are assumed.
const ASSUMED_HOP: u16 = 1;

/// Offsets in `struct bpf_fib_lookup`; the destination MAC follows the source MAC.
const SOURCE: usize = 16;
const DESTINATION: usize = 32;
const SOURCE_MAC: usize = 52;
/// The offset of the mark in a query; the answer has the MAC addresses there.
const MARK: usize = 52;

const RET_SUCCESS: i64 = 0;
const RET_NOT_FORWARDED: i64 = 4;
const RET_FORWARDING_OFF: i64 = 5;
const RET_NO_NEIGHBOUR: i64 = 7;

/// The FIB's answer for a destination.
pub enum Route<A> {
    /// The node itself, or no route: the FIB does not distinguish them.
    Local,
    /// The route leaves by an attached device.
    Via(Via<A>),
    Failed(Outcome),
}

/// Returns a stored hop as [`Current::hop`] does.
#[inline(always)]
fn fresh(epoch: u16, hop: u16, now: u32) -> Option<*const Hop> {
    Current::load()?.hop(epoch, hop, now)
}

/// The current route epoch.
#[inline(always)]
fn epoch() -> u16 {
    PREFILTER.get_ptr(0).map_or(0, |filter| (get!(filter.routes.route) as u16))
}

/// Returns the flags of another node by its MAC address ([`MAC_TAKES`]); `None` if no node has it.
/// The key is in scratch memory: the stack has no room for it.
#[inline(always)]
pub fn node_of<A: Address>(scratch: *mut Scratch<A>, mac: u64) -> Option<u32> {
    set!(scratch.outer.macs = mac);
    let key = borrow(place!(const scratch.outer.macs));
    Table::of(&raw const DIRECT_MACS).lookup::<u64, u32>(key).map(|flags| load(flags))
}

/// Returns the route to this slot's endpoint: the slot's last answer while that is fresh, otherwise
/// the FIB's.
#[inline(always)]
pub fn to_endpoint<P: Packet, F: Family>(
    packet: P,
    index: u32,
    slot: &Slot<F::Address>,
    now: u32,
) -> Route<F::Address> {
    if slot.flags & SLOT_LOCAL != 0 {
        return Route::Local;
    }
    let stored = F::slot_routes().lookup::<u32, SlotRoute<F::Address>>(&index);
    let epoch = epoch();
    if let Some(stored) = stored {
        // Each word is read once: another CPU may be writing.
        let stored = SlotRoute {
            source: load_once(place!(const stored.source)),
            word: load_once(place!(const stored.word)),
            check: load_once(place!(const stored.check)),
        };
        if let Some((under, hop)) = stored.route()
            && under == epoch
        {
            if hop == HOP_LOCAL {
                return Route::Local;
            }
            if fresh(epoch, hop, now).is_some() {
                return Route::Via(Via {
                    hop,
                    epoch,
                    ifindex: 0,
                    attached: 1,
                    zero: 0,
                    source: stored.source,
                });
            }
        }
    }
    let via = match resolve::<P, F>(packet, packet.ingress(), 0, F::Address::default(), slot.address, now) {
        // The FIB answers the same for the node's own addresses and for a destination without a
        // route; slots of the former are marked.
        Route::Local => return Route::Failed(Outcome::DroppedNoRoute),
        Route::Failed(outcome) => return Route::Failed(outcome),
        Route::Via(via) => via,
    };
    if via.attached == 0 && slot.flags & SLOT_REMOTE != 0 {
        return Route::Failed(Outcome::DroppedUnattachedDevice);
    }
    if let Some(stored) = stored {
        let (hop, source) =
            if via.attached != 0 { (via.hop, via.source) } else { (HOP_LOCAL, F::Address::default()) };
        if hop != 0 {
            store(stored, SlotRoute::new(source, epoch, hop));
        }
    }
    // A device to which no program is attached leads to a pod.
    if via.attached != 0 { Route::Via(via) } else { Route::Local }
}

/// Whether this node's routes lead to an address by the device that a packet came by for routing:
/// strict reverse path filtering (RFC 3704).
#[inline(always)]
pub fn is_way_back<P: Packet, F: Family>(packet: P, address: F::Address) -> bool {
    let Some(scratch) = F::scratch() else { return false };
    let fib = place!(mut scratch.fib).cast::<FibParameters>();
    let ingress = pod_client::routed_by(packet);
    set!(scratch.fib = [0; 8]);
    set!(fib.family = F::AF as u8);
    set!(fib.ifindex = ingress);
    store_unaligned(after(fib.cast::<u8>(), DESTINATION), address);
    // SAFETY: a helper of the kernel: the verifier checks its arguments.
    let ret = unsafe { bpf_fib_lookup(packet.raw(), fib, size_of::<FibParameters>() as i32, 0) };
    matches!(ret, RET_SUCCESS | RET_NO_NEIGHBOUR) && get!(fib.ifindex) == ingress
}

/// Queries the FIB for the route from `source` (zero: not known yet) to `destination`, for a packet
/// with `mark` or, if that is 0, without a mark.
#[inline(always)]
pub fn resolve<P: Packet, F: Family>(
    packet: P,
    ingress: u32,
    mark: u32,
    source: F::Address,
    destination: F::Address,
    now: u32,
) -> Route<F::Address> {
    let Some(scratch) = F::scratch() else { return Route::Failed(Outcome::DroppedInternalError) };
    set!(scratch.fib_query = FibQuery { source, destination, ingress, mark, now, zero: 0 });
    match ask::<P, F>(packet) {
        VIA => Route::Via(get!(scratch.via)),
        LOCAL => Route::Local,
        FORWARDING_OFF => Route::Failed(Outcome::DroppedForwardingDisabled),
        _ => Route::Failed(Outcome::DroppedNoRoute),
    }
}

/// Queries the FIB as `Scratch::fib_query` says: [`VIA`] if the route is in `Scratch::via`.
#[inline(always)]
pub fn ask<P: Packet, F: Family>(packet: P) -> i32 {
    let context = packet.raw();
    match (P::TC, F::V6) {
        (false, false) => ask_fib_xdp4(context.cast()),
        (false, true) => ask_fib_xdp6(context.cast()),
        (true, false) => ask_fib_tc4(context.cast()),
        (true, true) => ask_fib_tc6(context.cast()),
    }
}

/// Results of [`ask_fib`].
pub const VIA: i32 = 0;
const LOCAL: i32 = 1;
const FORWARDING_OFF: i32 = 2;
const NO_ROUTE: i32 = 3;

global_functions! {
    ask_fib_xdp4 => ask_fib::<xdp_md, V4>, context: *mut xdp_md;
    ask_fib_xdp6 => ask_fib::<xdp_md, V6>, context: *mut xdp_md;
    ask_fib_tc4 => ask_fib::<__sk_buff, V4>, context: *mut __sk_buff;
    ask_fib_tc6 => ask_fib::<__sk_buff, V6>, context: *mut __sk_buff;
}

/// Queries the FIB as `Scratch::fib_query` says, and leaves the route in `Scratch::via`.
#[inline(always)]
fn ask_fib<C, F: Family>(context: *mut C) -> i32 {
    let (Some(filter), Some(scratch)) = (PREFILTER.get_ptr(0), F::scratch()) else { return NO_ROUTE };
    let config = place!(const filter.routes);
    let FibQuery { source, destination, ingress, mark, now, .. } = get!(scratch.fib_query);
    // Read once: the hop belongs to the generation and epoch at the time of the FIB look-up.
    let (route, hop_epoch) =
        (load_once(place!(const config.route)), load_once(place!(const config.hop_epoch)));

    if ASSUME_ROUTES.load() != 0 {
        return assumed::<F>(scratch, ingress, route as u16);
    }
    let fib = place!(mut scratch.fib).cast::<FibParameters>();
    let base = fib.cast::<u8>();
    let own = place!(mut scratch.fib).cast::<u64>();
    set!(scratch.fib = [0; 8]);
    set!(fib.family = F::AF as u8);
    set!(fib.ifindex = ingress);
    // With a length the answer holds the MTU of the route; a length of 1 never exceeds it.
    set!(fib.__bindgen_anon_1.tot_len = 1);
    store_unaligned(after(base, SOURCE), source);
    store_unaligned(after(base, DESTINATION), destination);
    set!(scratch.route.address = destination);
    // The FIB's answer must not be older than the epochs under which it is stored.
    full_fence(own);
    let mut flags = if source == F::Address::default() { FIB_SOURCE.load() } else { 0 };
    if mark != 0 {
        flags |= FIB_MARK.load();
        store(after(base, MARK), mark);
    }
    // SAFETY: a helper of the kernel: the verifier checks its arguments.
    let mut ret = unsafe { bpf_fib_lookup(context.cast(), fib, size_of::<FibParameters>() as i32, flags) };
    match ret {
        RET_SUCCESS | RET_NO_NEIGHBOUR => {}
        RET_NOT_FORWARDED => return LOCAL,
        RET_FORWARDING_OFF => return FORWARDING_OFF,
        _ => return NO_ROUTE,
    }
    ask_route_mtu::<F>(config, scratch);
    let device = Table::of(&raw const DEVICES).lookup::<u32, DeviceInfo>(borrow(place!(const fib.ifindex)));
    if let Some(device) = device
        && get!(device.flags) & HOP_NO_ETHERNET != 0
    {
        if ret == RET_NO_NEIGHBOUR {
            // No neighbour is needed; but then the answer holds no MTU.
            set!(fib.__bindgen_anon_1.mtu_result = get!(device.mtu) as u16);
        }
        // Everything behind such a device is one hop: the device uses the packet's own address.
        store_unaligned(after(base, DESTINATION), WideAddress::default());
        set!(fib.family = F::AF as u8);
        ret = RET_SUCCESS;
    }
    let (key, via) = (place!(mut scratch.hop_key), place!(mut scratch.via));
    // An IPv4 route may use an IPv6 gateway (RFC 8950): the family field tells which.
    let family = get!(fib.family);
    let [a, mut b] = load_unaligned::<[u64; 2]>(after(base, DESTINATION));
    let a = if family == 2 { a & 0xffff_ffff } else { a };
    if family == 2 {
        b = 0;
    }
    set!(key.gateway = WideAddress::from_wire([a, b]));
    set!(scratch.neighbour[0] = family as u32);
    set!(scratch.neighbour[1] = a as u32);
    set!(scratch.neighbour[2] = (a >> 32) as u32);
    set!(scratch.neighbour[3] = b as u32);
    set!(scratch.neighbour[4] = (b >> 32) as u32);
    let ifindex = get!(fib.ifindex);
    set!(via.hop = 0);
    set!(via.epoch = route as u16);
    set!(via.ifindex = ifindex);
    set!(via.attached = device.is_some() as u32);
    set!(via.source = F::narrow(load_unaligned::<WideAddress>(after(base, SOURCE))));
    let flags = device.map_or(0, |device| get!(device.flags));
    if FIB_SOURCE.load() == 0
        && source == F::Address::default()
        && let Some(device) = device
    {
        let own = place!(const device.addresses).cast::<u64>();
        let own = if F::V6 { [load(own.wrapping_add(1)), load(own.wrapping_add(2))] } else { [load(own), 0] };
        set!(via.source = F::narrow(WideAddress::from_wire(own)));
    }
    if ret == RET_NO_NEIGHBOUR {
        return VIA;
    }
    let mtu = match get!(fib.__bindgen_anon_1.mtu_result) {
        0 => 0xffff,
        mtu => mtu,
    };
    let mtu = mtu.min(get!(scratch.route_mtu) as u16);
    set!(key.ifindex = ifindex);
    set!(key.family = family);
    set!(key.generation = (route >> 16) as u8);
    set!(key.mtu = mtu);
    let index = hop_index(borrow(place!(const scratch.hop_key)));
    if let Some(hop) = NEXTHOPS.get_ptr_mut(index).filter(|_| index != 0) {
        let macs = after::<[u8; 6]>(base, SOURCE_MAC);
        let (source, to) = (load(macs), load(macs.wrapping_add(1)));
        let word = u64::from_ne_bytes([to[0], to[1], to[2], to[3], to[4], to[5], source[0], source[1]]);
        let tail = u32::from_ne_bytes([source[2], source[3], source[4], source[5]]);
        let takes = node_of(scratch, mac_key(to)).unwrap_or(0) & MAC_TAKES;
        let found = Hop {
            macs: word,
            source_mac_tail: tail,
            ifindex,
            mtu: mtu as u32,
            epoch: hop_epoch,
            resolved: now,
            flags: flags & (HOP_XDP | HOP_NO_ETHERNET | HOP_ROUTED) | (takes * HOP_L2),
        };
        write_hop(hop, &found, config, own);
        set!(via.hop = index as u16);
    }
    VIA
}

/// Writes a hop. A reader that learns its index afterwards sees all of it: the fence is the
/// writer's, and a reader needs none, because the address of its load depends on the index.
///
/// Two CPUs may write at once, and the slower one may have the older answer of the FIB: its MAC
/// must not stay under the other's epoch. Each looks once more behind the fence, and one of them
/// sees that the other has written, or that the epoch was raised; then the hop is invalidated, and
/// is resolved again.
///
/// A hop that already holds the same values, because another CPU has just written it, is not
/// written again: its cache line stays shared by all CPUs whose packets use it.
#[inline(always)]
pub fn write_hop(hop: *mut Hop, found: &Hop, config: *const RouteConfig, own: *mut u64) {
    if load_once(place!(const hop.resolved)) == found.resolved
        && load_once(place!(const hop.epoch)) == found.epoch
        && load_once(place!(const hop.macs)) == found.macs
        && load_once(place!(const hop.source_mac_tail)) == found.source_mac_tail
        && load_once(place!(const hop.ifindex)) == found.ifindex
        && load_once(place!(const hop.mtu)) == found.mtu
        && load_once(place!(const hop.flags)) == found.flags
    {
        return;
    }
    store_once(place!(mut hop.macs), found.macs);
    store_once(place!(mut hop.source_mac_tail), found.source_mac_tail);
    store_once(place!(mut hop.ifindex), found.ifindex);
    store_once(place!(mut hop.mtu), found.mtu);
    store_once(place!(mut hop.flags), found.flags);
    store_once(place!(mut hop.resolved), found.resolved);
    store_once(place!(mut hop.epoch), found.epoch);
    full_fence(own);
    let macs = load_once(place!(const hop.macs)) ^ found.macs;
    let epoch = load_once(place!(const config.hop_epoch)) ^ found.epoch;
    if macs | epoch as u64 != 0 {
        // An epoch that is neither the current one, nor one that is used soon.
        store_once(place!(mut hop.epoch), found.epoch.wrapping_sub(1));
    }
}

/// Returns the index of a hop: its own if it has one, otherwise the next free one of the
/// generation; 0 if there is none.
#[inline(always)]
pub fn hop_index(key: &HopKey) -> u32 {
    let table = Table::of(&raw const NEXTHOP_IDS);
    if let Some(index) = table.lookup::<HopKey, u32>(key) {
        return load(index);
    }
    let Some(usage) = TABLE_USAGE.get_ptr_mut(0) else { return 0 };
    let generation = (key.generation & 1) as u32;
    let counter = if generation == 0 { place!(mut usage.hops[0]) } else { place!(mut usage.hops[1]) };
    // Index 0 of the first generation means "none".
    if load(counter) >= HOPS_PER_GENERATION as u64 - 1 {
        return 0;
    }
    let next = fetch_add(counter, 1);
    if next >= HOPS_PER_GENERATION as u64 - 1 {
        return 0;
    }
    let index = generation * HOPS_PER_GENERATION + next as u32 + 1;
    if table.insert(key, &index, NOEXIST) == 0 {
        return index;
    }
    // Another CPU was first.
    table.lookup::<HopKey, u32>(key).map_or(0, |index| load(index))
}

/// Writes the MTU in bytes of the route to the address in scratch memory, as the route itself names
/// it, whatever the MTU of its device; 0xffff if it names none. The result passes through scratch
/// memory because the stack has no room.
///
/// The kernel uses that MTU when it forwards, but in the answer to a program only if the route has
/// it locked. <https://github.com/torvalds/linux/blob/v6.12/include/net/ip.h>
/// (`ip_dst_mtu_maybe_forward`), <https://github.com/torvalds/linux/blob/v6.12/net/ipv4/route.c>
/// (`ip_mtu_from_fib_result`)
#[inline(always)]
fn ask_route_mtu<F: Family>(config: *const RouteConfig, scratch: *mut Scratch<F::Address>) {
    set!(scratch.route_mtu = 0xffff);
    // Behind the fence: the map read here is at least as new as the epoch that was read.
    if load_once(place!(const config.route_mtus)) & (1 << F::INDEX) == 0 {
        return;
    }
    set!(scratch.route.bits = size_of::<F::Address>() as u32 * 8);
    if let Some(mtu) = F::route_mtus().lookup::<u32, u32>(borrow(place!(const scratch.route.bits))) {
        let mtu = load(mtu);
        if mtu != 0 {
            set!(scratch.route_mtu = mtu as u64);
        }
    }
}

/// Leaves the route in `Scratch::via` where routes are assumed, with the device's own address as
/// the source.
#[inline(always)]
fn assumed<F: Family>(scratch: *mut Scratch<F::Address>, ingress: u32, epoch: u16) -> i32 {
    let Some(device) = Table::of(&raw const DEVICES).lookup::<u32, DeviceInfo>(&ingress) else {
        return NO_ROUTE;
    };
    let [v4, v6_head, v6_tail] = get!(device.addresses);
    let source = F::narrow(WideAddress::from_wire(if F::V6 { [v6_head, v6_tail] } else { [v4, 0] }));
    set!(scratch.via = Via { hop: ASSUMED_HOP, epoch, ifindex: ingress, attached: 1, source, zero: 0 });
    VIA
}
