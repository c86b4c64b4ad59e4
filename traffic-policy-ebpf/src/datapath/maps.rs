//! All maps, pinned by their names, and access to hash maps by address. The agent sets the sizes of
//! the flow tables at load.

use core::ptr;

use aya_ebpf::{
    btf_maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray, ProgramArray, RingBuf},
    cty::c_void,
    helpers::{bpf_map_delete_elem, bpf_map_lookup_elem, bpf_map_update_elem},
    macros::btf_map,
};
use traffic_policy_ebpf::abi::{
    Address4, Address6, Affinity, AffinityKey, AgentHeartbeat, DIRECT_NODES, DeviceInfo, DirectEndpoint,
    DirectEndpointKey, DirectNode, EndpointKey, EventBucket, Flow, FlowKey, Fragment, FragmentKey, Frontend,
    FrontendKey, HOP_PLACES, HOPS as HOP_COUNT, Hop, HopKey, LocalNode, MonitorEvent, NODE_NAME_LENGTH,
    NodeSilence, OutcomeCounters, PacketTrace, Piece, PodDevice, Prefilter, RejectBucket, RoutePrefix,
    RuntimeConfig, Scratch, ServiceCidr, ServiceCount, ServiceCountKey, ServiceInfo, Slot, SlotRoute,
    SocketKey, SocketQuestion, SourceRange, Suspicion, Sweep, TableUsage, TranslatedSocket, Tuple, hook,
    jump,
};

/// BPF_F_NO_PREALLOC. A program that has looked up an element may later read other bytes: since
/// Linux 6.1 a deleted or replaced element is reused at once for another key, on the CPU that freed
/// it. <https://github.com/torvalds/linux/blob/v6.1/kernel/bpf/memalloc.c>
const NO_PREALLOC: usize = 1;
/// BPF_F_MMAPABLE: the agent writes by plain stores.
const MMAPABLE: usize = 1024;

#[btf_map(name = "tp_flows4")]
pub static FLOWS4: HashMap<FlowKey<Address4>, Flow<Address4>, 262_144> = HashMap::new();
#[btf_map(name = "tp_flows6")]
pub static FLOWS6: HashMap<FlowKey<Address6>, Flow<Address6>, 65_536> = HashMap::new();
/// Unassured flows by the tuples of their requests, in the order in which they began: two queues of
/// equal length, TCP and UDP. A new flow takes the place of the oldest one.
#[btf_map(name = "tp_unassured4")]
pub static UNASSURED4: Array<Tuple<Address4>, 131_072> = Array::new();
#[btf_map(name = "tp_unassured6")]
pub static UNASSURED6: Array<Tuple<Address6>, 65_536> = Array::new();
/// The flows of the main tables by the tuples of their requests, each at its own place. The packet
/// path searches it for finished flows when a table is full and no agent sweeps it.
#[btf_map(name = "tp_flow_dir4")]
pub static FLOW_DIRECTORY4: Array<Tuple<Address4>, 262_144> = Array::new();
#[btf_map(name = "tp_flow_dir6")]
pub static FLOW_DIRECTORY6: Array<Tuple<Address6>, 65_536> = Array::new();
/// The tuples of answers to datagrams that this node, or a pod behind its masquerade, sent from a
/// frontend's address and port (UDP), or from a SNAT port to an endpoint's port; with the
/// jiffies of the last datagram, or of a connection's end. The kernel evicts the oldest.
#[btf_map(name = "tp_own_sent4")]
pub static OWN_SENT4: LruHashMap<Tuple<Address4>, u32, 4096> = LruHashMap::new();
#[btf_map(name = "tp_own_sent6")]
pub static OWN_SENT6: LruHashMap<Tuple<Address6>, u32, 4096> = LruHashMap::new();
#[btf_map(name = "tp_frontends4")]
pub static FRONTENDS4: HashMap<FrontendKey<Address4>, Frontend, 65_536, NO_PREALLOC> = HashMap::new();
#[btf_map(name = "tp_frontends6")]
pub static FRONTENDS6: HashMap<FrontendKey<Address6>, Frontend, 65_536, NO_PREALLOC> = HashMap::new();
/// The `loadBalancerSourceRanges` of Service ports that have any.
#[btf_map(name = "tp_src_ranges4")]
pub static SOURCE_RANGES4: LpmTrie<SourceRange<1>, u32, 65_536> = LpmTrie::new();
#[btf_map(name = "tp_src_ranges6")]
pub static SOURCE_RANGES6: LpmTrie<SourceRange<4>, u32, 65_536> = LpmTrie::new();
/// The ranges that ClusterIPs are allocated from.
#[btf_map(name = "tp_svc_cidrs4")]
pub static SERVICE_CIDRS4: LpmTrie<ServiceCidr<1>, u32, 1024> = LpmTrie::new();
#[btf_map(name = "tp_svc_cidrs6")]
pub static SERVICE_CIDRS6: LpmTrie<ServiceCidr<4>, u32, 1024> = LpmTrie::new();
/// This node's own addresses: no packet from outside has them as its source.
#[btf_map(name = "tp_node_addrs4")]
pub static NODE_ADDRESSES4: HashMap<Address4, u32, 4096, NO_PREALLOC> = HashMap::new();
#[btf_map(name = "tp_node_addrs6")]
pub static NODE_ADDRESSES6: HashMap<Address6, u32, 4096, NO_PREALLOC> = HashMap::new();
/// The addresses of the nodes that may send packets directly to endpoints of this one, with a
/// number each.
#[btf_map(name = "tp_direct_from4")]
pub static DIRECT_FROM4: HashMap<Address4, u32, 16_384, NO_PREALLOC> = HashMap::new();
#[btf_map(name = "tp_direct_from6")]
pub static DIRECT_FROM6: HashMap<Address6, u32, 16_384, NO_PREALLOC> = HashMap::new();
/// Those addresses by their number, the value there.
#[btf_map(name = "tp_direct_node4")]
pub static DIRECT_NODES4: Array<DirectNode<Address4>, { DIRECT_NODES as usize }> = Array::new();
#[btf_map(name = "tp_direct_node6")]
pub static DIRECT_NODES6: Array<DirectNode<Address6>, { DIRECT_NODES as usize }> = Array::new();
/// The MAC addresses of other nodes, each with [`MAC_TAKES`][traffic_policy_ebpf::abi::MAC_TAKES]
/// or 0.
#[btf_map(name = "tp_direct_macs")]
pub static DIRECT_MACS: HashMap<u64, u32, 16_384, NO_PREALLOC> = HashMap::new();
/// This node's endpoints of Service ports that are forwarded directly.
#[btf_map(name = "tp_direct_eps4")]
pub static DIRECT_ENDPOINTS4: HashMap<DirectEndpointKey<Address4>, DirectEndpoint, 16_384, NO_PREALLOC> =
    HashMap::new();
#[btf_map(name = "tp_direct_eps6")]
pub static DIRECT_ENDPOINTS6: HashMap<DirectEndpointKey<Address6>, DirectEndpoint, 16_384, NO_PREALLOC> =
    HashMap::new();
/// The last endpoint of each client of a Service with session affinity.
#[btf_map(name = "tp_affinity")]
pub static AFFINITY: LruHashMap<AffinityKey, Affinity, 65_536> = LruHashMap::new();
/// The names of Service ports by their index, for display.
#[btf_map(name = "tp_svc_names")]
pub static SERVICE_NAMES: HashMap<u32, ServiceInfo, 65_536, NO_PREALLOC> = HashMap::new();
/// The packets of Service ports by outcome, without those of existing flows.
#[btf_map(name = "tp_svc_counts")]
pub static SERVICE_COUNTS: HashMap<ServiceCountKey, ServiceCount, 262_144, NO_PREALLOC> = HashMap::new();
/// The sockets whose destination was translated: TCP, and UDP that is not connected.
#[btf_map(name = "tp_sockets")]
pub static SOCKETS: LruHashMap<SocketKey, TranslatedSocket, 65_536> = LruHashMap::new();
/// The UDP sockets that were connected to an endpoint. They are kept apart from the others, and
/// deleted when they are closed: many short-lived sockets must not evict a long-lived one.
#[btf_map(name = "tp_conn_udp")]
pub static CONNECTED_UDP: LruHashMap<SocketKey, TranslatedSocket, 65_536> = LruHashMap::new();
#[btf_map(name = "tp_local_node")]
pub static LOCAL_NODE: Array<LocalNode, 1> = Array::new();
/// The steps of a packet in a traced copy of the programs.
#[btf_map(name = "tp_trace")]
pub static TRACE: Array<PacketTrace, 1> = Array::new();
#[btf_map(name = "tp_explain_call")]
pub static EXPLAIN_CALL: Array<SocketQuestion, 1> = Array::new();
/// Refusals and new flows, for `monitor`.
#[btf_map(name = "tp_events")]
pub static EVENTS: RingBuf<MonitorEvent, 262_144> = RingBuf::new();
#[btf_map(name = "tp_event_limit")]
pub static EVENT_LIMITS: PerCpuArray<EventBucket, 1> = PerCpuArray::new();
#[btf_map(name = "tp_endpoints4")]
pub static ENDPOINTS4: Array<Slot<Address4>, 262_144> = Array::new();
#[btf_map(name = "tp_endpoints6")]
pub static ENDPOINTS6: Array<Slot<Address6>, 262_144> = Array::new();
#[btf_map(name = "tp_ep_routes4")]
pub static ENDPOINT_ROUTES4: Array<SlotRoute<Address4>, 262_144> = Array::new();
#[btf_map(name = "tp_ep_routes6")]
pub static ENDPOINT_ROUTES6: Array<SlotRoute<Address6>, 262_144> = Array::new();
/// Maglev tables of all Service ports that have one: see
/// [`maglev`][traffic_policy_ebpf::abi::maglev].
#[btf_map(name = "tp_maglev")]
pub static MAGLEV: Array<u64, 524_288, MMAPABLE> = Array::new();
/// The MTUs of the main table's routes that name one, in bytes; 0 for a more specific route within
/// such a route that names none.
#[btf_map(name = "tp_route_mtus4")]
pub static ROUTE_MTUS4: LpmTrie<RoutePrefix<1>, u32, 16_384> = LpmTrie::new();
#[btf_map(name = "tp_route_mtus6")]
pub static ROUTE_MTUS6: LpmTrie<RoutePrefix<4>, u32, 16_384> = LpmTrie::new();
#[btf_map(name = "tp_nexthops")]
pub static NEXTHOPS: Array<Hop, { HOP_COUNT as usize }> = Array::new();
#[btf_map(name = "tp_nexthop_ids")]
pub static NEXTHOP_IDS: HashMap<HopKey, u32, { HOP_COUNT as usize }, NO_PREALLOC> = HashMap::new();
/// SYNs to the endpoints of each node, and the answers: by the node's number, then by
/// the next hop of endpoints whose node is not known.
#[btf_map(name = "tp_node_silence")]
pub static NODE_SILENCE: Array<NodeSilence, { HOP_PLACES as usize + HOP_COUNT as usize }, MMAPABLE> =
    Array::new();
/// The names of nodes by their number, zero filled. Only the agent reads and writes them.
#[btf_map(name = "tp_node_names")]
pub static NODE_NAMES: HashMap<u32, [u8; NODE_NAME_LENGTH], { HOP_PLACES as usize }, NO_PREALLOC> =
    HashMap::new();
/// Nodes that may be dead, for the agent.
#[btf_map(name = "tp_suspicions")]
pub static SUSPICIONS: RingBuf<Suspicion, 65_536> = RingBuf::new();
#[btf_map(name = "tp_config")]
pub static CONFIG: Array<RuntimeConfig, 1, MMAPABLE> = Array::new();
#[btf_map(name = "tp_table_usage")]
pub static TABLE_USAGE: Array<TableUsage, 1, MMAPABLE> = Array::new();
#[btf_map(name = "tp_prefilter")]
pub static PREFILTER: Array<Prefilter, 1, MMAPABLE> = Array::new();
/// The agent's heartbeat.
#[btf_map(name = "tp_heartbeat")]
pub static HEARTBEAT: Array<AgentHeartbeat, 1, MMAPABLE> = Array::new();
/// The ports that may be used as source towards endpoints, in host order; the first
/// `RuntimeConfig::snat_port_count` are valid.
#[btf_map(name = "tp_snat_ports")]
pub static SNAT_PORTS: Array<[u16; 65_536], 1, MMAPABLE> = Array::new();
#[btf_map(name = "tp_devices")]
pub static DEVICES: HashMap<u32, DeviceInfo, 256, NO_PREALLOC> = HashMap::new();
/// The host sides of pods' devices where programs are attached, by index.
#[btf_map(name = "tp_pod_devices")]
pub static POD_DEVICES: HashMap<u32, PodDevice, 4096, NO_PREALLOC> = HashMap::new();
#[btf_map(name = "tp_removed_eps")]
pub static REMOVED_ENDPOINTS: HashMap<EndpointKey, u32, 65_536, NO_PREALLOC> = HashMap::new();
#[btf_map(name = "tp_gc_pass")]
pub static GC_PASS: Array<Sweep, 1> = Array::new();
#[btf_map(name = "tp_counters")]
pub static COUNTERS: PerCpuArray<OutcomeCounters, { hook::COUNT as usize }> = PerCpuArray::new();
#[btf_map(name = "tp_reject_limit")]
pub static REJECT_LIMITS: PerCpuArray<RejectBucket, 1> = PerCpuArray::new();

#[btf_map(name = "tp_scratch4")]
pub static SCRATCH4: PerCpuArray<Scratch<Address4>, 1> = PerCpuArray::new();
#[btf_map(name = "tp_scratch6")]
pub static SCRATCH6: PerCpuArray<Scratch<Address6>, 1> = PerCpuArray::new();
/// The second piece of a packet that is sent in two.
#[btf_map(name = "tp_piece")]
pub static PIECE: PerCpuArray<Piece, 1> = PerCpuArray::new();
/// The other programs of the packet path. Pinned like all maps: the kernel empties an array of
/// programs when its last user closes it.
#[btf_map(name = "tp_xdp_calls")]
pub static XDP_TAIL_CALLS: ProgramArray<{ jump::COUNT as usize }> = ProgramArray::new();
#[btf_map(name = "tp_tc_calls")]
pub static TC_TAIL_CALLS: ProgramArray<{ jump::COUNT as usize }> = ProgramArray::new();
/// The programs of TC on devices without Ethernet.
#[btf_map(name = "tp_l3_calls")]
pub static L3_TAIL_CALLS: ProgramArray<{ jump::COUNT as usize }> = ProgramArray::new();
/// The programs at the host side of pods' devices.
#[btf_map(name = "tp_pod_calls")]
pub static POD_TAIL_CALLS: ProgramArray<{ jump::COUNT as usize }> = ProgramArray::new();
/// Fragmented datagrams whose first fragment has arrived. The kernel evicts the oldest.
#[btf_map(name = "tp_fragments4")]
pub static FRAGMENTS4: LruHashMap<FragmentKey<Address4>, Fragment, 8_192> = LruHashMap::new();
#[btf_map(name = "tp_fragments6")]
pub static FRAGMENTS6: LruHashMap<FragmentKey<Address6>, Fragment, 8_192> = LruHashMap::new();

pub const NOEXIST: u64 = 1;
pub const ANY: u64 = 0;
/// The error number -EEXIST.
pub const EXISTS: i32 = -17;
/// The error number -E2BIG.
pub const FULL: i32 = -7;

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

    /// Looks up a value. The caller names the types that the map was declared with. The value stays
    /// valid until the program ends, even if its element is removed meanwhile.
    #[inline(always)]
    pub fn lookup<K, V>(self, key: &K) -> Option<*mut V> {
        // SAFETY: the verifier knows the map's address, and compares the sizes of key and value
        // with its own.
        let value = unsafe { bpf_map_lookup_elem(self.0, ptr::from_ref(key).cast()) }.cast::<V>();
        if value.is_null() { None } else { Some(value) }
    }

    /// Inserts an element and returns 0, or a negative error number. Only 32 bits of it are used:
    /// where the verifier has replaced the helper by a direct call of the map's own function, the
    /// upper half is defined only since Linux 6.4, when these functions began to return `long`.
    /// <https://github.com/aya-rs/aya/issues/1331>
    #[inline(always)]
    pub fn insert<K, V>(self, key: &K, value: *const V, flags: u64) -> i32 {
        // SAFETY: as above; the kernel copies key and value.
        unsafe { bpf_map_update_elem(self.0, ptr::from_ref(key).cast(), value.cast(), flags) as i32 }
    }

    #[inline(always)]
    pub fn remove<K>(self, key: &K) {
        // SAFETY: as above. A missing key is equivalent to a removed one.
        unsafe { bpf_map_delete_elem(self.0, ptr::from_ref(key).cast()) };
    }
}
