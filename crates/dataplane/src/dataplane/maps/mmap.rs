//! Maps that the agent writes with plain stores: arrays mapped into its memory.

use std::{
    marker::PhantomData,
    num::NonZeroUsize,
    os::fd::AsFd,
    ptr::{self, NonNull},
    sync::atomic::{AtomicU64, Ordering, fence},
};

use anyhow::{Context, Result};
use aya::{
    Pod,
    maps::{Map, MapData},
};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use traffic_policy_ebpf::abi::{AgentHeartbeat, Prefilter, RuntimeConfig, TableUsage, WideAddress};

/// The single element of an mmapable array.
pub struct Mapped<T> {
    address: NonNull<T>,
    _map: MapData,
    _type: PhantomData<T>,
}

// SAFETY: the memory is shared with the kernel anyway; all access is by volatile loads and stores
// of single words.
unsafe impl<T> Send for Mapped<T> {}

impl<T> Mapped<T> {
    /// Maps the element of `map`, whose value type is `T`.
    pub fn new(map: Map) -> Result<Self> {
        let Map::Array(map) = map else { anyhow::bail!("not an array") };
        // The kernel rounds up to its page size, of 4, 16 or 64 KiB.
        let length = NonZeroUsize::new(size_of::<T>()).context("empty map value")?;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let address = unsafe {
            mmap(
                None,
                length,
                ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
                MapFlags::MAP_SHARED,
                map.fd().as_fd(),
                0,
            )
        }
        .context("mapping a map into memory failed")?;
        Ok(Self { address: address.cast(), _map: map, _type: PhantomData })
    }

    /// Returns a pointer to the element, from which pointers to its words are derived.
    pub fn pointer(&self) -> *mut T {
        self.address.as_ptr()
    }

    /// Reads the whole element, in words that the compiler chooses: only for an element that no
    /// program writes in the meantime.
    pub fn read(&self) -> T
    where
        T: Pod,
    {
        // SAFETY: the element is mapped as long as `self` lives, and any bytes are a valid one.
        unsafe { self.address.as_ptr().read_volatile() }
    }

    /// Writes the whole element, which no program reads in the meantime.
    pub fn write(&mut self, element: T)
    where
        T: Pod,
    {
        // SAFETY: as for `read`.
        unsafe { self.address.as_ptr().write_volatile(element) };
    }

    /// Loads one word.
    pub fn load<W: Copy>(&self, word: impl FnOnce(*mut T) -> *mut W) -> W {
        // SAFETY: callers name a field of the element, which is mapped as long as `self` lives.
        unsafe { ptr::read_volatile(word(self.pointer())) }
    }

    /// Sets bits of a word in which programs set bits, too; returns whether they were not all set.
    /// The order is that of [`Self::store`].
    pub fn set_bits(&mut self, word: impl Fn(*mut T) -> *mut u64, bits: u64) -> bool {
        if self.load(&word) & bits == bits {
            return false;
        }
        // SAFETY: as for `load`; the words of an element are aligned, and every writer of this one
        // writes it atomically.
        unsafe { AtomicU64::from_ptr(word(self.pointer())) }.fetch_or(bits, Ordering::AcqRel);
        true
    }

    /// Stores one word if it differs; returns whether it did. A program that sees it sees all that
    /// this process wrote before, by this or by bpf(2): docs/memory-ordering.md.
    pub fn store<W: Copy + PartialEq>(&mut self, word: impl Fn(*mut T) -> *mut W, value: W) -> bool {
        if self.load(&word) == value {
            return false;
        }
        fence(Ordering::Release);
        // SAFETY: as for `load`.
        unsafe { ptr::write_volatile(word(self.pointer()), value) };
        true
    }
}

/// Names words of an element for [`Mapped::load`] and [`Mapped::store`].
macro_rules! words {
    ($module:ident, $element:ident, $($word:ident: $type:ty = $($path:tt).+;)+) => {
        pub mod $module {
            use super::$element;

            $(pub fn $word(element: *mut $element) -> *mut $type {
                // SAFETY: an address within the mapped element; nothing is read.
                unsafe { (&raw mut (*element).$($path).+).cast() }
            })+
        }
    };
}

words!(config, RuntimeConfig,
    snat_port_count: u32 = snat_port_count;
    seed: u64 = seed;
    answers_per_jiffy: u32 = answers_per_jiffy;
    monitor_until: u64 = monitor_until;
    network: u32 = network;
    suspect_syns: u32 = suspect_syns;
    suspect_after: u32 = suspect_after;
    local_delivery: u32 = local_delivery;
    pod_services: u32 = pod_services;
    sctp_divider: u32 = sctp_divider;
    sctp_divided: u32 = sctp_divided;
    conntrack_was_strict: u32 = conntrack_was_strict;
    conntrack_unacknowledged: u32 = conntrack_unacknowledged;
);

words!(routes, Prefilter,
    route: u32 = routes.route;
    hop_epoch: u32 = routes.hop_epoch;
    hop_max_age: u32 = routes.hop_max_age;
    route_mtus: u32 = routes.route_mtus;
);

words!(heartbeat, AgentHeartbeat,
    started: u64 = started;
    seen: u64 = seen;
    jiffies: u32 = jiffies;
    hz: u32 = hz;
    synced: u64 = synced;
    failing: u64 = failing;
    address: super::WideAddress = address;
    port: u32 = port;
    ipv6: u32 = ipv6;
    pid: u32 = pid;
);

words!(table_usage, TableUsage,
    full_at: u32 = full_at;
);

/// Returns the word with the number of hops handed out in a generation, 0 or 1.
pub fn used_hops(generation: u32) -> impl Fn(*mut TableUsage) -> *mut u64 {
    // SAFETY: an address within the mapped element; nothing is read.
    move |usage| unsafe { (&raw mut (*usage).hops).cast::<u64>().add(generation as usize & 1) }
}

/// Returns the word of the source port at a place of the SNAT port range.
pub fn snat_port(place: u16) -> impl Fn(*mut [u16; 65_536]) -> *mut u16 {
    // SAFETY: as for `used_hops`.
    move |ports| unsafe { ports.cast::<u16>().add(usize::from(place)) }
}

impl<T> Drop for Mapped<T> {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length, and no reference into it is kept.
        let unmapped = unsafe { munmap(self.address.cast(), size_of::<T>()) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}
