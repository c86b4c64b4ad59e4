//! The maps, by name and type.

pub mod events;
pub mod keys;
pub(crate) mod mmap;
pub mod prefilter;
pub mod reader;
pub mod rows;
pub mod words;

use std::{
    os::fd::{AsFd as _, OwnedFd},
    sync::Arc,
};

use anyhow::{Context, Result};
use aya::{
    Ebpf,
    maps::{Array, HashMap, Map, MapData, PerCpuArray, ProgramArray, lpm_trie::LpmTrie},
};
use traffic_policy_ebpf::abi::{
    Address, Address4, Address6, AgentHeartbeat, DeviceInfo, EndpointKey, Flow, FlowKey, Frontend,
    FrontendKey, Hop, HopKey, LocalNode, OutcomeCounters, PodDevice, Prefilter, RoutePrefix, RuntimeConfig,
    ServiceCidr, ServiceCount, ServiceCountKey, ServiceInfo, Slot, SlotRoute, SocketKey, SourceRange, Sweep,
    TableUsage, TranslatedSocket,
};

use self::{mmap::Mapped, rows::Rows, words::Words};
use super::sync::budget::Capacity;

/// The tables of one IP family.
pub struct Family<A: Address, const W: usize> {
    pub flows: HashMap<MapData, FlowKey<A>, Flow<A>>,
    pub frontends: HashMap<MapData, FrontendKey<A>, Frontend>,
    pub sources: LpmTrie<MapData, SourceRange<W>, u32>,
    pub service_cidrs: LpmTrie<MapData, ServiceCidr<W>, u32>,
    /// The node's own addresses.
    pub node_addresses: HashMap<MapData, A, u32>,
    pub route_mtus: LpmTrie<MapData, RoutePrefix<W>, u32>,
    pub slots: Array<MapData, Slot<A>>,
    pub slot_routes: Array<MapData, SlotRoute<A>>,
    /// The same maps as `slots` and `slot_routes`, for batches.
    pub slot_rows: (Rows<Slot<A>>, Rows<SlotRoute<A>>),
    /// The number of entries that fit into `flows`.
    pub size: u32,
}

/// All maps that the agent reads or writes.
pub struct Maps {
    pub v4: Family<Address4, 1>,
    pub v6: Family<Address6, 4>,
    /// Maglev tables.
    pub tables: Words,
    pub services: HashMap<MapData, u32, ServiceInfo>,
    pub service_counts: HashMap<MapData, ServiceCountKey, ServiceCount>,
    pub sockets: HashMap<MapData, SocketKey, TranslatedSocket>,
    pub local_node: Array<MapData, LocalNode>,
    pub hops: Array<MapData, Hop>,
    pub hop_index: HashMap<MapData, HopKey, u32>,
    pub devices: HashMap<MapData, u32, DeviceInfo>,
    pub pod_devices: HashMap<MapData, u32, PodDevice>,
    pub removed: HashMap<MapData, EndpointKey, u32>,
    pub sweep: Array<MapData, Sweep>,
    pub swept: Swept,
    /// The counters are shared with readers that read them at any time.
    pub counters: Arc<PerCpuArray<MapData, OutcomeCounters>>,
    pub xdp_jumps: ProgramArray<MapData>,
    pub tc_jumps: ProgramArray<MapData>,
    pub l3_jumps: ProgramArray<MapData>,
    pub pod_jumps: ProgramArray<MapData>,
    pub heartbeat: Mapped<AgentHeartbeat>,
    pub config: Mapped<RuntimeConfig>,
    pub usage: Mapped<TableUsage>,
    pub prefilter: Mapped<Prefilter>,
    pub snat_ports: Mapped<[u16; 65_536]>,
    pub room: Room,
}

/// The maps that a sweep walks, by file descriptors; pairs are IPv4, IPv6.
#[derive(Debug)]
pub struct Swept {
    pub flows: [OwnedFd; 2],
    /// The table of sockets of both families.
    pub sockets: OwnedFd,
}

impl Swept {
    fn of(object: &Ebpf) -> Result<Self> {
        let fd = |name: &str| -> Result<OwnedFd> {
            let Some(Map::HashMap(data) | Map::LruHashMap(data)) = object.map(name) else {
                anyhow::bail!("the packet path has no hash {name}")
            };
            // The descriptor is copied, because opening the map by its number needs CAP_SYS_ADMIN.
            data.fd().as_fd().try_clone_to_owned().context("no descriptor is free")
        };
        Ok(Self { flows: [fd("tp_flows4")?, fd("tp_flows6")?], sockets: fd("tp_sockets")? })
    }
}

/// The capacity in entries; pairs are IPv4, IPv6.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    pub unassured: [u32; 2],
    pub frontends: [u32; 2],
    pub slots: [u32; 2],
    pub source_ranges: [u32; 2],
    pub node_addresses: [u32; 2],
    pub route_mtus: [u32; 2],
    /// The number of Service ports.
    pub services: u32,
    /// The elements of Maglev tables.
    pub tables: u32,
    pub devices: u32,
    pub removed: u32,
}

impl Room {
    /// Converts the capacity for the planner.
    pub fn plan_capacity(&self) -> Capacity {
        let Self { frontends, source_ranges, slots, services, tables, .. } = *self;
        Capacity { frontends, source_ranges, slots: slots[0].min(slots[1]), services, tables }
    }

    fn of(object: &Ebpf) -> Result<Self> {
        let both = |name: &str| -> Result<[u32; 2]> {
            Ok([size(object, &format!("{name}4"))?, size(object, &format!("{name}6"))?])
        };
        Ok(Self {
            unassured: both("tp_unassured")?,
            frontends: both("tp_frontends")?,
            slots: both("tp_endpoints")?,
            source_ranges: both("tp_src_ranges")?,
            node_addresses: both("tp_node_addrs")?,
            route_mtus: both("tp_route_mtus")?,
            services: size(object, "tp_svc_names")?,
            tables: size(object, "tp_maglev")?,
            devices: size(object, "tp_devices")?,
            removed: size(object, "tp_removed_eps")?,
        })
    }
}

/// Takes a map out of a loaded object.
///
/// # Errors
/// It is missing or of another type: object and agent are of different builds.
pub(crate) fn take<M>(object: &mut Ebpf, name: &str) -> Result<M>
where
    M: TryFrom<Map, Error: std::error::Error + Send + Sync + 'static>,
{
    let map = object.take_map(name).with_context(|| format!("the packet path has no map {name}"))?;
    map.try_into().with_context(|| format!("map {name} has another type"))
}

/// Returns the number of entries that fit into a map of a loaded object, before [`Maps::take`]
/// takes it out.
pub(crate) fn size(object: &Ebpf, name: &str) -> Result<u32> {
    let Some(Map::HashMap(data) | Map::LruHashMap(data) | Map::LpmTrie(data) | Map::Array(data)) =
        object.map(name)
    else {
        anyhow::bail!("the packet path has no hash, trie or array {name}")
    };
    Ok(data.info().with_context(|| format!("the size of {name} cannot be read"))?.max_entries())
}

impl Maps {
    /// Takes the maps out of a loaded object.
    ///
    /// # Errors
    /// A map is missing or of another type, which means that object and agent are of different
    /// builds.
    pub fn take(object: &mut Ebpf) -> Result<Self> {
        let sizes = [size(object, "tp_flows4")?, size(object, "tp_flows6")?];
        let room = Room::of(object)?;
        let swept = Swept::of(object)?;
        let rows4 = (Rows::of(object, "tp_endpoints4")?, Rows::of(object, "tp_ep_routes4")?);
        let rows6 = (Rows::of(object, "tp_endpoints6")?, Rows::of(object, "tp_ep_routes6")?);
        Ok(Self {
            v4: Family {
                flows: take(object, "tp_flows4")?,
                frontends: take(object, "tp_frontends4")?,
                sources: take(object, "tp_src_ranges4")?,
                service_cidrs: take(object, "tp_svc_cidrs4")?,
                node_addresses: take(object, "tp_node_addrs4")?,
                route_mtus: take(object, "tp_route_mtus4")?,
                slots: take(object, "tp_endpoints4")?,
                slot_routes: take(object, "tp_ep_routes4")?,
                slot_rows: rows4,
                size: sizes[0],
            },
            v6: Family {
                flows: take(object, "tp_flows6")?,
                frontends: take(object, "tp_frontends6")?,
                sources: take(object, "tp_src_ranges6")?,
                service_cidrs: take(object, "tp_svc_cidrs6")?,
                node_addresses: take(object, "tp_node_addrs6")?,
                route_mtus: take(object, "tp_route_mtus6")?,
                slots: take(object, "tp_endpoints6")?,
                slot_routes: take(object, "tp_ep_routes6")?,
                slot_rows: rows6,
                size: sizes[1],
            },
            tables: Words::new(take(object, "tp_maglev")?)?,
            services: take(object, "tp_svc_names")?,
            service_counts: take(object, "tp_svc_counts")?,
            sockets: take(object, "tp_sockets")?,
            local_node: take(object, "tp_local_node")?,
            hops: take(object, "tp_nexthops")?,
            hop_index: take(object, "tp_nexthop_ids")?,
            devices: take(object, "tp_devices")?,
            pod_devices: take(object, "tp_pod_devices")?,
            removed: take(object, "tp_removed_eps")?,
            sweep: take(object, "tp_gc_pass")?,
            swept,
            counters: Arc::new(take(object, "tp_counters")?),
            xdp_jumps: take(object, "tp_xdp_calls")?,
            tc_jumps: take(object, "tp_tc_calls")?,
            l3_jumps: take(object, "tp_l3_calls")?,
            pod_jumps: take(object, "tp_pod_calls")?,
            heartbeat: Mapped::new(take(object, "tp_heartbeat")?)?,
            config: Mapped::new(take(object, "tp_config")?)?,
            usage: Mapped::new(take(object, "tp_table_usage")?)?,
            prefilter: Mapped::new(take(object, "tp_prefilter")?)?,
            snat_ports: Mapped::new(take(object, "tp_snat_ports")?)?,
            room,
        })
    }
}
