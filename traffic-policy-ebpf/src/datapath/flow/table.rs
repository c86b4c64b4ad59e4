//! The flow tables: look-up, insertion and removal of entries by the tuple of a packet.

use core::{marker::PhantomData, mem::MaybeUninit, ptr};

use aya_ebpf::Global;
use traffic_policy_ebpf::abi::{Address, Flow, FlowKey, Multipliers, Tuple};

use crate::datapath::{
    family::Family,
    maps::Table,
    value::{borrow, load_once, store, store_once},
};

/// The multipliers by which IPv6 keys are folded. The agent sets them at load, from the pinned
/// seed; they are constants in frozen memory, one load each.
#[unsafe(no_mangle)]
static FOLD_MULTIPLIERS: Global<[u64; 2]> = Global::new(Multipliers::UNSEEDED.0);

/// Returns the [`Multipliers`] of this program.
#[inline(always)]
pub fn multipliers() -> Multipliers {
    Multipliers(FOLD_MULTIPLIERS.load())
}

/// A table of flows.
pub struct FlowTable<F> {
    table: Table,
    of: PhantomData<F>,
}

impl<F: Family> FlowTable<F> {
    /// Returns the table of the family. Nothing is evicted from it except to make room:
    /// [`super::recycle`], [`super::unassured`].
    #[inline(always)]
    pub fn new() -> Self {
        Self { table: F::flows(), of: PhantomData }
    }

    /// Returns the entry of packets with this tuple; null if there is none. (An empty `Option`
    /// would leave a register that the verifier has never seen written.)
    #[inline(always)]
    pub fn find(&self, tuple: &Tuple<F::Address>) -> *mut Flow<F::Address> {
        let mut room = MaybeUninit::uninit();
        match self.table.lookup::<_, Flow<F::Address>>(key(tuple, &mut room)) {
            Some(entry) if is_of(entry, tuple) => entry,
            _ => ptr::null_mut(),
        }
    }

    /// Removes an entry that was found or inserted.
    #[inline(always)]
    pub fn remove(&self, tuple: &Tuple<F::Address>) {
        let mut room = MaybeUninit::uninit();
        self.table.remove(key(tuple, &mut room));
    }
}

/// The same operations with the key in `room`: a callback's stack has no room for it.
impl<F: Family> FlowTable<F> {
    /// Finds an entry as [`Self::find`] does.
    #[inline(always)]
    pub fn find_in(
        &self,
        tuple: &Tuple<F::Address>,
        room: *mut FlowKey<F::Address>,
    ) -> *mut Flow<F::Address> {
        match self.table.lookup::<_, Flow<F::Address>>(key_in(tuple, room)) {
            Some(entry) if is_of(entry, tuple) => entry,
            _ => ptr::null_mut(),
        }
    }

    /// Inserts `entry`, which must keep the bits of the tuple that its key omits:
    /// [`traffic_policy_ebpf::abi::Fold::kept`].
    #[inline(always)]
    pub fn insert_in(
        &self,
        tuple: &Tuple<F::Address>,
        room: *mut FlowKey<F::Address>,
        entry: *const Flow<F::Address>,
        flags: u64,
    ) -> i32 {
        self.table.insert(key_in(tuple, room), entry, flags)
    }

    /// Removes an entry as [`Self::remove`] does.
    #[inline(always)]
    pub fn remove_in(&self, tuple: &Tuple<F::Address>, room: *mut FlowKey<F::Address>) {
        self.table.remove(key_in(tuple, room));
    }
}

/// Whether an entry that was found by the key of this tuple belongs to the tuple: [`Flow::is_of`]
/// for an entry that other CPUs write.
#[inline(always)]
fn is_of<A: Address>(entry: *const Flow<A>, tuple: &Tuple<A>) -> bool {
    get!(entry.kept) == tuple.destination.kept()
}

/// Returns the tuple of the translated packets: [`Flow::translated`] for an entry that other CPUs
/// write.
#[inline(always)]
pub fn translated<A: Address>(entry: *const Flow<A>, protocol: u32) -> Tuple<A> {
    Tuple {
        source: get!(entry.source),
        destination: get!(entry.destination),
        ports: get!(entry.ports),
        protocol,
    }
}

/// Whether the replies to an entry's packets have this tuple: then that tuple's entry is the other
/// one of its flow.
#[inline(always)]
pub fn is_counterpart<A: Address>(entry: *const Flow<A>, tuple: &Tuple<A>) -> bool {
    translated(entry, tuple.protocol) == tuple.reversed()
}

/// Compares as [`is_counterpart`] does, with a key that lies in a map's value too: field by field,
/// because the stack of a callback has no room for a tuple.
#[inline(always)]
pub fn is_counterpart_in_place<A: Address>(entry: *const Flow<A>, key: *const Tuple<A>) -> bool {
    get!(key.source) == get!(entry.destination)
        && get!(key.destination) == get!(entry.source)
        && get!(key.ports) == get!(entry.ports).reversed()
}

/// Returns hop and route epoch of an entry, by one load: another CPU may be writing them, and a hop
/// of one epoch must not be mistaken for that of another.
#[inline(always)]
pub fn next_hop<A: Address>(entry: *const Flow<A>) -> (u16, u16) {
    let [a, b, c, d] = load_once(place!(const entry.hop).cast::<u32>()).to_ne_bytes();
    (u16::from_ne_bytes([a, b]), u16::from_ne_bytes([c, d]))
}

/// Writes both values of [`next_hop`] by one store. A reader that sees them also sees the hop as it
/// was written before: `nexthop::resolve`.
#[inline(always)]
pub fn set_next_hop<A: Address>(entry: *mut Flow<A>, hop: u16, epoch: u16) {
    let ([a, b], [c, d]) = (hop.to_ne_bytes(), epoch.to_ne_bytes());
    store_once(place!(mut entry.hop).cast::<u32>(), u32::from_ne_bytes([a, b, c, d]));
}

/// Returns the key of a tuple, in `room` if it is not that tuple itself.
#[inline(always)]
fn key<'a, A: Address>(tuple: &'a Tuple<A>, room: &'a mut MaybeUninit<FlowKey<A>>) -> &'a FlowKey<A> {
    if FlowKey::<A>::IS_TUPLE {
        // SAFETY: key and tuple have the same layout.
        return unsafe { &*ptr::from_ref(tuple).cast() };
    }
    room.write(FlowKey::folded(tuple, multipliers()))
}

/// Returns the key as [`key`] does, in memory of a map.
#[inline(always)]
fn key_in<A: Address>(tuple: &Tuple<A>, room: *mut FlowKey<A>) -> &FlowKey<A> {
    if FlowKey::<A>::IS_TUPLE {
        // SAFETY: key and tuple have the same layout.
        return unsafe { &*ptr::from_ref(tuple).cast() };
    }
    store(room, FlowKey::folded(tuple, multipliers()));
    borrow(room)
}
