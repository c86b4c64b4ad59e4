//! Garbage collection: removes expired flows, and marks flows of removed endpoints.
//!
//! It takes two passes: a sweep marks a flow whose entries have both been idle for too long, and
//! the next one deletes it if it still is. A preallocated table reuses a deleted element at once,
//! while a packet may still be reading it. The mark sends packets to the slow path, which clears
//! it. The request entry is removed first: without it no packet uses the pair.

use core::{mem::MaybeUninit, ptr};

use aya_ebpf::{bindings::seq_file, cty::c_void, helpers::bpf_seq_write};
use traffic_policy_ebpf::{
    abi::{
        Address, EndpointKey, Flow, FlowKey, PROTOCOL_UDP, REMOVED_FROM_OPENING, SocketKey, Sweep,
        TranslatedSocket, Tuple, kind, mark,
    },
    tcp::{ASSURED, MARKED, REMOVED, RST, class},
};

use crate::datapath::{
    barrier::opaque,
    clock, counters,
    family::Family,
    flow::{
        datagrams, directory,
        table::{self, FlowTable},
        unassured,
    },
    maps::{self, GC_PASS, Table},
    value::{load, load_once, store},
};

/// Whether the endpoint of a request entry takes no more new flows of its Service port.
#[inline(always)]
fn is_removed<F: Family>(request: &Flow<F::Address>, protocol: u32) -> bool {
    let endpoint = EndpointKey {
        address: request.destination.wide(),
        port: request.ports.destination(),
        protocol: protocol as u8,
        ipv6: F::V6 as u8,
        service: request.service,
    };
    match Table::of(&raw const maps::REMOVED_ENDPOINTS).lookup::<_, u32>(&endpoint) {
        Some(from) => load(from) != REMOVED_FROM_OPENING || request.kind == kind::DIRECT,
        None => false,
    }
}

/// The counter of a protocol's unassured flows.
#[inline(always)]
fn counted(sweep: *mut Sweep, protocol: u32) -> *mut u32 {
    if protocol == PROTOCOL_UDP { place!(mut sweep.unassured_udp) } else { place!(mut sweep.unassured) }
}

/// Begins a sweep, which then walks over the tables one after the other.
pub fn begin(_: *mut c_void) -> u32 {
    let Some(sweep) = GC_PASS.get_ptr_mut(0) else { return 0 };
    set!(sweep.now = clock::jiffies());
    0
}

/// The elements of one piece of a walk, a power of two. A running program keeps others from its
/// CPU, so a piece must be short; one system call for this number of elements costs little compared
/// with the work on the elements.
const PIECE: u32 = 256;

/// The context of an iterator over a map: `struct bpf_iter__bpf_map_elem`.
/// <https://github.com/torvalds/linux/blob/v6.1/kernel/bpf/map_iter.c#L74>
#[repr(C)]
pub struct Element<K, V> {
    meta: *const Meta,
    map: *const c_void,
    /// The key; null behind the last element, as `value` is.
    key: *const K,
    value: *mut V,
}

/// The beginning of `struct bpf_iter_meta`.
#[repr(C)]
struct Meta {
    file: *mut seq_file,
}

/// Looks at one element, and ends the piece after [`PIECE`] elements, or if `look` says so: a read
/// returns once the program has written something, and an element that the program then refuses is
/// where the next read begins.
/// <https://github.com/torvalds/linux/blob/v6.1/kernel/bpf/bpf_iter.c#L96>
#[inline(always)]
pub fn visit<K, V>(
    element: *const Element<K, V>,
    look: impl FnOnce(*mut Sweep, *const K, *mut V) -> bool,
) -> i32 {
    let (key, value) = (get!(element.key), get!(element.value));
    if key.is_null() || value.is_null() {
        return 0;
    }
    let Some(sweep) = GC_PASS.get_ptr_mut(0) else { return 0 };
    if get!(sweep.pause) != 0 {
        set!(sweep.pause = 0);
        return 1;
    }
    let ends = look(sweep, key, value);
    set!(sweep.visited += 1);
    if ends || get!(sweep.visited) % PIECE == 0 {
        set!(sweep.pause = 1);
        let mark = 0_u8;
        let file = get!((get!(element.meta)).file);
        // SAFETY: a helper of the kernel: the verifier checks its arguments.
        unsafe { bpf_seq_write(file, (&raw const mark).cast(), 1) };
    }
    0
}

/// A key as the first arguments of a raw tracepoint, aligned as the verifier wants it.
#[repr(C, align(8))]
struct Arguments<K>(K);

/// Reads a key, of a multiple of eight bytes, from a program's arguments, and has `look` look at
/// its entry: in place of an iterator where the kernel refuses those.
#[inline(always)]
fn visit_one<K, V>(
    context: *mut c_void,
    table: Table,
    look: impl FnOnce(*mut Sweep, *const K, *mut V) -> bool,
) -> u32 {
    let mut key = MaybeUninit::<Arguments<K>>::uninit();
    let (words, arguments) = (key.as_mut_ptr().cast::<u64>(), context.cast_const().cast::<u64>());
    for number in 0..size_of::<K>() / size_of::<u64>() {
        store(words.wrapping_add(number), load(arguments.wrapping_add(number)));
    }
    // SAFETY: all of its bytes have been written, and any bytes are a valid key.
    let key = unsafe { &key.assume_init_ref().0 };
    let (Some(sweep), Some(entry)) = (GC_PASS.get_ptr_mut(0), table.lookup::<K, V>(key)) else { return 0 };
    look(sweep, key, entry);
    0
}

/// Looks at one entry of the main table, see [`visit_one`].
pub fn one_flow<F: Family>(context: *mut c_void) -> u32 {
    visit_one(context, F::flows(), flow_entry::<F>)
}

/// Looks at one entry of the table of sockets, see [`visit_one`].
pub fn one_socket(context: *mut c_void) -> u32 {
    visit_one(context, Table::of(&raw const maps::SOCKETS), socket_entry)
}

/// Ends conversations of unconnected sockets with removed endpoints: their next datagram chooses
/// another endpoint.
#[inline(always)]
pub fn socket_entry(sweep: *mut Sweep, key: *const SocketKey, socket: *mut TranslatedSocket) -> bool {
    let (forward, protocol, socket_ipv6, ipv6) =
        (get!(key.forward), get!(key.protocol), get!(key.ipv6), get!(sweep.ipv6));
    if forward == 0 || socket_ipv6 != ipv6 {
        return false;
    }
    let endpoint = EndpointKey {
        address: get!(socket.address),
        port: get!(socket.port),
        protocol,
        ipv6: ipv6 as u8,
        service: get!(socket.service),
    };
    if let Some(from) = Table::of(&raw const maps::REMOVED_ENDPOINTS).lookup::<_, u32>(&endpoint)
        && load(from) != REMOVED_FROM_OPENING
    {
        set!(socket.used = 0);
    }
    false
}

/// Sweeps one entry of the main table. Returns whether it is a [milestone][FlowKey::milestone],
/// where a piece ends: the kernel passes any number of empty buckets at once.
#[inline(always)]
pub fn flow_entry<F: Family>(
    sweep: *mut Sweep,
    key: *const FlowKey<F::Address>,
    entry: *mut Flow<F::Address>,
) -> bool {
    let (key, flow) = (load(key), load(entry));
    if key.is_milestone() {
        return true;
    }
    let tuple = key.unfolded(&flow, table::multipliers());
    if get!(sweep.mark) == mark::ONLY {
        if matches!(flow.kind, kind::FORWARD | kind::DELIVER | kind::DIRECT)
            && flow.state & REMOVED == 0
            && is_removed::<F>(&flow, tuple.protocol)
        {
            set!(entry.state |= REMOVED);
        }
        return false;
    }
    set!(sweep.entries += 1);
    match flow.kind {
        kind::FORWARD | kind::DELIVER | kind::DIRECT => request::<F>(sweep, &tuple, &flow, entry),
        kind::REPLY | kind::REPLY_LOCAL => reply::<F>(sweep, &tuple, &flow, entry),
        _ => {}
    }
    false
}

/// Counts a flow in its class. The result is not null if the flow may be removed early; it points
/// to the number of flows of its class that still may be.
#[inline(always)]
fn note_class(sweep: *mut Sweep, class: usize, quiet_for: u32) -> *mut u32 {
    if class >= class::COUNT {
        return ptr::null_mut();
    }
    // Opaque, because the compiler would drop masks that only the verifier needs.
    let class = opaque(class as u64) as usize & (class::COUNT - 1);
    let magnitude = opaque((u32::BITS - 1 - (quiet_for | 1).leading_zeros()) as u64) as usize & 31;
    let count = place!(mut sweep.idle[class][magnitude]);
    store(count, load(count) + 1);
    if quiet_for >= get!(sweep.pressure[class]) { place!(mut sweep.surplus[class]) } else { ptr::null_mut() }
}

#[inline(always)]
fn request<F: Family>(
    sweep: *mut Sweep,
    tuple: &Tuple<F::Address>,
    flow: &Flow<F::Address>,
    entry: *mut Flow<F::Address>,
) {
    let (now, timeouts, mark) = (get!(sweep.now), get!(sweep.timeouts), get!(sweep.mark));
    let reply_key = flow.translated(tuple.protocol).reversed();
    let direct = flow.kind == kind::DIRECT;
    let reply = if direct { ptr::null_mut() } else { FlowTable::<F>::new().find(&reply_key) };
    let mut quiet_for = clock::since(flow.last, now);
    // A direct flow has no reply entry; its client's FIN counts for both sides.
    let mut reply_state = if direct { flow.state } else { RST };
    if !reply.is_null() {
        let since = clock::since(get!(reply.last), now);
        quiet_for = if since < quiet_for { since } else { quiet_for };
        reply_state = get!(reply.state);
    }
    let mut state = flow.state;
    if !reply.is_null() && (state ^ reply_state) & ASSURED != 0 && table::is_counterpart(reply, tuple) {
        // The flag is set on both entries at once; a CPU that was about to write an older state has
        // overwritten it.
        set!(entry.state |= ASSURED);
        set!(reply.state |= ASSURED);
        state |= ASSURED;
    }
    if flow.kind == kind::FORWARD || tuple.ports.source() != flow.ports.source() {
        set!(sweep.snat += 1);
    }
    if state & ASSURED == 0 {
        let count = counted(sweep, tuple.protocol);
        store(count, load(count) + 1);
    }
    let connected = tuple.protocol != PROTOCOL_UDP;
    let surplus = note_class(sweep, class(connected, state, reply_state), quiet_for);
    if mark != mark::NONE && flow.state & REMOVED == 0 && is_removed::<F>(flow, tuple.protocol) {
        set!(entry.state |= REMOVED);
    }
    // Nor are its answers seen.
    let is_stream = direct && tuple.protocol == PROTOCOL_UDP && datagrams::spans_stream(flow);
    let lasting = if is_stream { state | ASSURED } else { state };
    if quiet_for <= super::timeout(&timeouts, tuple.protocol, lasting, reply_state) {
        if surplus.is_null() || load(surplus) == 0 {
            return;
        }
        store(surplus, load(surplus) - 1);
    }
    if flow.state & MARKED == 0 {
        set!(entry.state |= MARKED);
        set!(sweep.marked += 1);
        return;
    }
    // The entry is read once more: a packet may have cleared the mark, or begun a new conversation,
    // since the copy was made.
    let now_is = (load_once(place!(const entry.state)), load_once(place!(const entry.last)));
    if now_is != (flow.state, flow.last) {
        return;
    }
    // The entries are counted before they are removed: a deleted element may belong to another flow
    // at once. Both are counted before the first is removed: between the two removals a new
    // conversation with the same endpoint may take over the reply entry.
    counters::end(entry.cast_const());
    if !reply.is_null() {
        counters::end(reply.cast_const());
    }
    let place = opaque(flow.device_or_place.place().into()) as u32;
    directory::leave_place::<F>(&place);
    FlowTable::<F>::new().remove(tuple);
    if !reply.is_null() {
        FlowTable::<F>::new().remove(&reply_key);
    }
    set!(sweep.deleted += 1);
    if flow.state & ASSURED == 0 {
        let place = flow.tail.queue_place();
        unassured::leave_place::<F>(&(opaque(place.into()) as u32), tuple);
        let count = counted(sweep, tuple.protocol);
        store(count, load(count) - 1);
    }
}

/// Sweeps a reply entry, which lives as long as a request entry leads to it.
#[inline(always)]
fn reply<F: Family>(
    sweep: *mut Sweep,
    tuple: &Tuple<F::Address>,
    flow: &Flow<F::Address>,
    entry: *mut Flow<F::Address>,
) {
    let (now, timeouts) = (get!(sweep.now), get!(sweep.timeouts));
    // The check without a look-up comes first: most entries have had a packet recently.
    if clock::since(flow.last, now) <= timeouts.unassured {
        return;
    }
    let key = flow.translated(tuple.protocol).reversed();
    let request = FlowTable::<F>::new().find(&key);
    if !request.is_null() && table::is_counterpart(request, tuple) {
        return;
    }
    if flow.state & MARKED == 0 {
        set!(entry.state |= MARKED);
        set!(sweep.marked += 1);
    } else {
        counters::end(entry.cast_const());
        FlowTable::<F>::new().remove(tuple);
        set!(sweep.deleted += 1);
    }
}
