//! All maps, pinned by their names; sizes of the flow tables are set by the agent at load. And access to hash maps by address.

use core::ptr;

use aya_ebpf::{
    btf_maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray, ProgramArray, RingBuf},
    cty::c_void,
    helpers::{bpf_map_delete_elem, bpf_map_lookup_elem, bpf_map_update_elem},
    macros::btf_map,
};
use traffic_policy_ebpf::abi::{
    Address4, Address6, Affinity, AffinityKey, Agent, Bucket, Cidr, Counters, Device, EndpointKey, Event,
    EventBucket, Filter, Flow, FlowKey, Fragment, FragmentKey, Frontend, FrontendKey, HOPS as HOP_COUNT, Hop,
    HopKey, Node, Scratch, ServiceCount, ServiceCountKey, ServiceInfo, Slot, SlotRoute, Socket, SocketKey,
    SocketQuestion, SourceRange, State, Sweep, Trace, Usage, hook, jump,
};

/// BPF_F_NO_PREALLOC. A program that has looked an element up may read other bytes later: since Linux 6.1 an element that was
/// deleted or replaced is handed out again at once, on the CPU that freed it, as that of another key.
/// <https://github.com/torvalds/linux/blob/v6.1/kernel/bpf/memalloc.c>
const NO_PREALLOC: usize = 1;
/// BPF_F_MMAPABLE: the agent writes by plain stores.
const MMAPABLE: usize = 1024;

#[btf_map]
pub static FLOWS4: HashMap<FlowKey<Address4>, Flow<Address4>, 262_144> = HashMap::new();
#[btf_map]
pub static FLOWS6: HashMap<FlowKey<Address6>, Flow<Address6>, 65_536> = HashMap::new();
#[btf_map]
pub static PENDING4: LruHashMap<FlowKey<Address4>, Flow<Address4>, 16_384> = LruHashMap::new();
#[btf_map]
pub static PENDING6: LruHashMap<FlowKey<Address6>, Flow<Address6>, 16_384> = LruHashMap::new();
#[btf_map]
pub static FRONTENDS4: HashMap<FrontendKey<Address4>, Frontend, 65_536, NO_PREALLOC> = HashMap::new();
#[btf_map]
pub static FRONTENDS6: HashMap<FrontendKey<Address6>, Frontend, 65_536, NO_PREALLOC> = HashMap::new();
/// `loadBalancerSourceRanges` of Service ports that have any.
#[btf_map]
pub static SOURCES4: LpmTrie<SourceRange<1>, u32, 65_536> = LpmTrie::new();
#[btf_map]
pub static SOURCES6: LpmTrie<SourceRange<4>, u32, 65_536> = LpmTrie::new();
/// Ranges that ClusterIPs are taken from.
#[btf_map]
pub static SERVICE_CIDRS4: LpmTrie<Cidr<1>, u32, 1024> = LpmTrie::new();
#[btf_map]
pub static SERVICE_CIDRS6: LpmTrie<Cidr<4>, u32, 1024> = LpmTrie::new();
/// Where clients of Services with session affinity were sent to last.
#[btf_map]
pub static AFFINITY: LruHashMap<AffinityKey, Affinity, 65_536> = LruHashMap::new();
/// Names of Service ports by their index, for display.
#[btf_map]
pub static SERVICES: HashMap<u32, ServiceInfo, 65_536, NO_PREALLOC> = HashMap::new();
/// Packets of Service ports by outcome, but for those of flows that still stand.
#[btf_map]
pub static SERVICE_COUNTS: HashMap<ServiceCountKey, ServiceCount, 262_144, NO_PREALLOC> = HashMap::new();
/// Sockets whose destination was translated: TCP, and UDP that is not connected.
#[btf_map]
pub static SOCKETS: LruHashMap<SocketKey, Socket, 65_536> = LruHashMap::new();
/// UDP sockets that were connected to an endpoint. Apart from the others, and deleted when they are closed: one that lives
/// long must not be pushed out by many that do not.
#[btf_map]
pub static CONNECTED_UDP: LruHashMap<SocketKey, Socket, 65_536> = LruHashMap::new();
#[btf_map]
pub static NODE: Array<Node, 1> = Array::new();
/// Steps of a packet in a traced copy of the programs.
#[btf_map]
pub static TRACE: Array<Trace, 1> = Array::new();
#[btf_map]
pub static QUESTION: Array<SocketQuestion, 1> = Array::new();
/// Refusals and new flows, for whoever listens.
#[btf_map]
pub static EVENTS: RingBuf<Event, 262_144> = RingBuf::new();
#[btf_map]
pub static EVENT_BUCKETS: PerCpuArray<EventBucket, 1> = PerCpuArray::new();
#[btf_map]
pub static SLOTS4: Array<Slot<Address4>, 262_144> = Array::new();
#[btf_map]
pub static SLOTS6: Array<Slot<Address6>, 262_144> = Array::new();
#[btf_map]
pub static SLOT_ROUTES4: Array<SlotRoute<Address4>, 262_144> = Array::new();
#[btf_map]
pub static SLOT_ROUTES6: Array<SlotRoute<Address6>, 262_144> = Array::new();
#[btf_map]
pub static HOPS: Array<Hop, { HOP_COUNT as usize }> = Array::new();
#[btf_map]
pub static HOP_INDEX: HashMap<HopKey, u32, { HOP_COUNT as usize }, NO_PREALLOC> = HashMap::new();
#[btf_map]
pub static STATE: Array<State, 1, MMAPABLE> = Array::new();
#[btf_map]
pub static USAGE: Array<Usage, 1, MMAPABLE> = Array::new();
#[btf_map]
pub static FILTER: Array<Filter, 1, MMAPABLE> = Array::new();
/// The agent's heartbeat.
#[btf_map]
pub static AGENT: Array<Agent, 1, MMAPABLE> = Array::new();
/// Ports that may be used as source towards endpoints, host order, the first `State::pool_len` are valid.
#[btf_map]
pub static POOL: Array<[u16; 65_536], 1, MMAPABLE> = Array::new();
#[btf_map]
pub static DEVICES: HashMap<u32, Device, 256, NO_PREALLOC> = HashMap::new();
#[btf_map]
pub static GONE: HashMap<EndpointKey, u32, 65_536, NO_PREALLOC> = HashMap::new();
#[btf_map]
pub static SWEEP: Array<Sweep, 1> = Array::new();
#[btf_map]
pub static COUNTERS: PerCpuArray<Counters, { hook::COUNT as usize }> = PerCpuArray::new();
#[btf_map]
pub static BUCKETS: PerCpuArray<Bucket, 1> = PerCpuArray::new();

#[btf_map]
pub static SCRATCH4: PerCpuArray<Scratch<Address4>, 1> = PerCpuArray::new();
#[btf_map]
pub static SCRATCH6: PerCpuArray<Scratch<Address6>, 1> = PerCpuArray::new();
/// The other programs of the packet path. Pinned like all maps: the kernel empties an array of programs when its last
/// user lets go of it.
#[btf_map]
pub static XDP_JUMPS: ProgramArray<{ jump::COUNT as usize }> = ProgramArray::new();
#[btf_map]
pub static TC_JUMPS: ProgramArray<{ jump::COUNT as usize }> = ProgramArray::new();
/// Datagrams in fragments of which the first has come. The kernel evicts the oldest.
#[btf_map]
pub static FRAGMENTS4: LruHashMap<FragmentKey<Address4>, Fragment, 8_192> = LruHashMap::new();
#[btf_map]
pub static FRAGMENTS6: LruHashMap<FragmentKey<Address6>, Fragment, 8_192> = LruHashMap::new();

pub const NOEXIST: u64 = 1;
pub const ANY: u64 = 0;
/// -EEXIST
pub const EXISTS: i64 = -17;

/// A hash map by its address, so that code generic over the family needs no generic map type.
#[derive(Clone, Copy)]
pub struct Table(*mut c_void);

impl Table {
    #[inline(always)]
    pub fn of<M>(map: *const M) -> Self {
        Self(map.cast_mut().cast())
    }

    #[inline(always)]
    pub fn raw(self) -> *mut c_void {
        self.0
    }

    /// The caller names the types that the map was declared with. The value stays valid until the program ends, also where its
    /// element is removed meanwhile.
    #[inline(always)]
    pub fn lookup<K, V>(self, key: &K) -> Option<*mut V> {
        // SAFETY: the verifier knows the map's address, and compares the sizes of key and value with its own.
        let value = unsafe { bpf_map_lookup_elem(self.0, ptr::from_ref(key).cast()) }.cast::<V>();
        if value.is_null() { None } else { Some(value) }
    }

    #[inline(always)]
    pub fn insert<K, V>(self, key: &K, value: *const V, flags: u64) -> i64 {
        // SAFETY: as above; the kernel copies key and value.
        unsafe { bpf_map_update_elem(self.0, ptr::from_ref(key).cast(), value.cast(), flags) }
    }

    #[inline(always)]
    pub fn remove<K>(self, key: &K) {
        // SAFETY: as above. A missing key is as good as a removed one.
        unsafe { bpf_map_delete_elem(self.0, ptr::from_ref(key).cast()) };
    }
}
