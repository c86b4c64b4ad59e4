//! The flow tables, asked by the tuple of a packet.

use core::{marker::PhantomData, mem::MaybeUninit, ptr};

use traffic_policy_ebpf::abi::{Address, Flow, FlowKey, Tuple};

use crate::datapath::maps::Table;

/// A table of flows.
pub struct Flows<A> {
    table: Table,
    of: PhantomData<A>,
}

impl<A: Address> Flows<A> {
    #[inline(always)]
    pub fn of<M>(map: *const M) -> Self {
        Self { table: Table::of(map), of: PhantomData }
    }

    /// The half of packets of this tuple; null if there is none. (An empty `Option` would leave a register that the verifier
    /// has never seen written.)
    #[inline(always)]
    pub fn find(&self, tuple: &Tuple<A>) -> *mut Flow<A> {
        let mut room = MaybeUninit::uninit();
        match self.table.lookup::<_, Flow<A>>(key(tuple, &mut room)) {
            Some(half) if unsafe { (*half).is_of(tuple) } => half,
            _ => ptr::null_mut(),
        }
    }

    /// `half` keeps what belongs to the tuple: [`traffic_policy_ebpf::abi::Fold::kept`].
    #[inline(always)]
    pub fn insert(&self, tuple: &Tuple<A>, half: *const Flow<A>, flags: u64) -> i64 {
        let mut room = MaybeUninit::uninit();
        self.table.insert(key(tuple, &mut room), half, flags)
    }

    /// Removes a half that was found or inserted.
    #[inline(always)]
    pub fn remove(&self, tuple: &Tuple<A>) {
        let mut room = MaybeUninit::uninit();
        self.table.remove(key(tuple, &mut room));
    }
}

/// Hop and route epoch of a half, by one load: another CPU may be writing them, and a hop of one epoch must not be taken for
/// that of another.
#[inline(always)]
pub unsafe fn way<A: Address>(half: *const Flow<A>) -> (u16, u16) {
    let [a, b, c, d] = unsafe { ptr::read_volatile((&raw const (*half).hop).cast::<u32>()) }.to_ne_bytes();
    (u16::from_ne_bytes([a, b]), u16::from_ne_bytes([c, d]))
}

/// Writes what [`way`] reads, by one store. Whoever reads it sees the hop as it was before: [`crate::datapath::hop::resolve`].
#[inline(always)]
pub unsafe fn set_way<A: Address>(half: *mut Flow<A>, hop: u16, epoch: u16) {
    let ([a, b], [c, d]) = (hop.to_ne_bytes(), epoch.to_ne_bytes());
    unsafe { ptr::write_volatile((&raw mut (*half).hop).cast::<u32>(), u32::from_ne_bytes([a, b, c, d])) };
}

/// The key of a tuple, in `room` if it is not that tuple itself.
#[inline(always)]
fn key<'a, A: Address>(tuple: &'a Tuple<A>, room: &'a mut MaybeUninit<FlowKey<A>>) -> &'a FlowKey<A> {
    if FlowKey::<A>::IS_TUPLE {
        // SAFETY: they lie in memory alike.
        return unsafe { &*ptr::from_ref(tuple).cast() };
    }
    room.write(FlowKey::of(tuple))
}
