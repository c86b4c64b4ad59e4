//! The compiled packet path and how it is loaded.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use aya::{Btf, Ebpf, EbpfLoader, maps::MapInfo};

use traffic_policy_ebpf::abi::{Multipliers, RuntimeConfig};

use super::{
    attach::Mode,
    frags,
    object::{self, object_bytes},
};
use crate::dataplane::{
    kernel::Kernel,
    maps::{self, reader::Reader},
};

/// BPF_F_IPV6 of `bpf_l4_csum_replace`, Linux 6.16.
/// <https://github.com/torvalds/linux/commit/ead7f9b8de65632ef8060b84b0c55049a33cfea1>
const CHECKSUM_IPV6: u64 = 1 << 7;
/// BPF_FIB_LOOKUP_SRC of `bpf_fib_lookup`, Linux 6.7.
/// <https://github.com/torvalds/linux/commit/dab4e1f06cabb6834de14264394ccab197007302>
const FIB_SOURCE: u32 = 1 << 4;
/// BPF_FIB_LOOKUP_MARK of `bpf_fib_lookup`, Linux 6.10.
/// <https://github.com/torvalds/linux/blob/v6.10/include/uapi/linux/bpf.h>
const FIB_MARK: u32 = 1 << 5;

/// The numbers of entries of the maps whose size the user chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapSizes {
    /// Flow entries of IPv4: two per flow, and twice that number to stay fast.
    pub flows4: u32,
    pub flows6: u32,
    /// Unassured TCP flows of IPv4, and as many of UDP; half as many of IPv6. A power of two.
    pub unassured: u32,
    /// Frontends of each family, and the ClusterIPs in addition to them.
    pub frontends: u32,
    /// `loadBalancerSourceRanges` of each family.
    pub source_ranges: u32,
    /// Slots of each family, and the routes in addition to them.
    pub slots: u32,
    /// Service ports, of both families together.
    pub services: u32,
    /// Elements of Maglev tables, of both families together: four slots each.
    pub maglev: u32,
    /// Counts of Service ports by outcome.
    pub service_counts: u32,
    /// Removed endpoints that are kept until their flows and sockets have been handled.
    pub removed_endpoints: u32,
    /// This node's own addresses, of each family.
    pub node_addresses: u32,
    pub affinity: u32,
    /// Translated sockets; as many for connected UDP as for all others.
    pub sockets: u32,
    /// Fragmented datagrams, of each family.
    pub fragments: u32,
    /// The node's own datagrams, and the ports of the SNAT port range that the node itself uses, of
    /// each family.
    pub own_sent: u32,
}

impl Default for MapSizes {
    fn default() -> Self {
        Self::DEFAULT
    }
}

impl MapSizes {
    /// The sizes that the maps are declared with.
    pub const DEFAULT: Self = Self {
        flows4: 262_144,
        flows6: 65_536,
        unassured: 65_536,
        frontends: 65_536,
        source_ranges: 65_536,
        slots: 262_144,
        services: 65_536,
        maglev: 524_288,
        service_counts: 262_144,
        removed_endpoints: 65_536,
        node_addresses: 4_096,
        affinity: 65_536,
        sockets: 65_536,
        fragments: 8_192,
        own_sent: 4_096,
    };

    /// Returns each size with the flag that sets it, and a map that has it.
    fn named(&self) -> [(&'static str, &'static str, u32); 15] {
        [
            ("--flow-entries", "tp_flows4", self.flows4),
            ("--flow-entries-v6", "tp_flows6", self.flows6),
            ("--unassured-entries", "tp_unassured4", self.unassured),
            ("--frontend-entries", "tp_frontends4", self.frontends),
            ("--source-range-entries", "tp_src_ranges4", self.source_ranges),
            ("--endpoint-entries", "tp_endpoints4", self.slots),
            ("--service-entries", "tp_svc_names", self.services),
            ("--maglev-entries", "tp_maglev", self.maglev),
            ("--service-count-entries", "tp_svc_counts", self.service_counts),
            ("--removed-endpoint-entries", "tp_removed_eps", self.removed_endpoints),
            ("--node-address-entries", "tp_node_addrs4", self.node_addresses),
            ("--affinity-entries", "tp_affinity", self.affinity),
            ("--socket-entries", "tp_sockets", self.sockets),
            ("--fragment-entries", "tp_fragments4", self.fragments),
            ("--own-sent-entries", "tp_own_sent4", self.own_sent),
        ]
    }

    /// Returns the sizes of the maps of a loaded object, by the flags that would set them: pinned
    /// maps keep theirs.
    pub fn in_effect(object: &Ebpf) -> Result<Vec<(&'static str, u32)>> {
        let size = |(flag, map, _)| Ok((flag, maps::size(object, map)?));
        Self::DEFAULT.named().into_iter().map(size).collect()
    }

    /// Returns the number of places in one queue of unassured flows: IPv4, IPv6.
    fn unassured_places(&self) -> [u32; 2] {
        let places = self.unassured.max(2).next_power_of_two();
        [places, places / 2]
    }

    /// Returns the size of a map on a machine with `cpus` possible CPUs. Before Linux 6.16 each of
    /// them reserves 128 elements of an LRU map for itself; if none is left over, a CPU's next
    /// insertion evicts its last one. Such maps therefore get room for twice as many, unless
    /// another size than the default was configured. A default that was configured explicitly
    /// cannot be told from one that was not, and grows, too: what was asked for fits in any case.
    fn on(&self, map: &str, cpus: u32) -> Option<u32> {
        const EVICTING: [&str; 7] = [
            "tp_affinity",
            "tp_sockets",
            "tp_conn_udp",
            "tp_fragments4",
            "tp_fragments6",
            "tp_own_sent4",
            "tp_own_sent6",
        ];
        let size = self.of(map)?;
        let is_chosen = Some(size) != Self::DEFAULT.of(map);
        Some(if is_chosen || !EVICTING.contains(&map) { size } else { size.max(cpus.saturating_mul(256)) })
    }

    /// Returns the size of a map; `None` if no flag sets it.
    #[must_use]
    pub fn of(&self, map: &str) -> Option<u32> {
        match map {
            "tp_flows4" => Some(self.flows4),
            "tp_flows6" => Some(self.flows6),
            "tp_unassured4" => Some(2 * self.unassured_places()[0]),
            "tp_unassured6" => Some(2 * self.unassured_places()[1]),
            "tp_frontends4" | "tp_frontends6" => Some(self.frontends),
            "tp_src_ranges4" | "tp_src_ranges6" => Some(self.source_ranges),
            "tp_endpoints4" | "tp_endpoints6" | "tp_ep_routes4" | "tp_ep_routes6" => Some(self.slots),
            "tp_svc_names" => Some(self.services),
            "tp_maglev" => Some(self.maglev),
            "tp_svc_counts" => Some(self.service_counts),
            "tp_removed_eps" => Some(self.removed_endpoints),
            "tp_node_addrs4" | "tp_node_addrs6" => Some(self.node_addresses),
            "tp_affinity" => Some(self.affinity),
            "tp_sockets" | "tp_conn_udp" => Some(self.sockets),
            "tp_fragments4" | "tp_fragments6" => Some(self.fragments),
            "tp_own_sent4" | "tp_own_sent6" => Some(self.own_sent),
            "tp_flow_dir4" => Some(self.flows4.next_power_of_two()),
            "tp_flow_dir6" => Some(self.flows6.next_power_of_two()),
            _ => None,
        }
    }
}

/// Loads the object with its maps created, or taken over from `pins`; programs are not loaded yet.
///
/// # Errors
/// A pinned map has another layout, privileges are missing, or the kernel has no BTF.
pub fn load(sizes: MapSizes, pins: Option<&Path>, kernel: &Kernel) -> Result<Ebpf> {
    Ok(open(sizes, pins, 0, kernel, Mode::Auto)?.0)
}

/// Loads the object like [`load`], with maps of its own and IPv6 keys that are folded with `seed`.
pub fn load_seeded(sizes: MapSizes, seed: u64, kernel: &Kernel) -> Result<Ebpf> {
    Ok(open(sizes, None, seed, kernel, Mode::Auto)?.0)
}

/// Loads the object like [`load`], with the XDP programs of `mode`. Also returns the kernel's type
/// information, which is needed to load programs.
pub fn open(
    sizes: MapSizes,
    pins: Option<&Path>,
    seed: u64,
    kernel: &Kernel,
    mode: Mode,
) -> Result<(Ebpf, Btf)> {
    Loading { sizes, pins, shared: &|_| true, seed, explains: None, mode }.load(kernel)
}

/// Returns the types of the running kernel.
pub fn kernel_types() -> Result<Btf> {
    Btf::from_sys_fs().context(
        "reading the kernel's type information (/sys/kernel/btf/vmlinux) failed: is this kernel built with CONFIG_DEBUG_INFO_BTF, and /sys mounted?",
    )
}

/// The source of routes for the copy of the object that [`crate::explain::Simulator`] runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Routes {
    /// The kernel is queried.
    Real,
    /// Every endpoint of another node is assumed to be reachable.
    Assumed,
}

/// Loads the object for `explain`: `shared` maps are those pinned in `pins`, the others are its
/// own.
///
/// # Errors
/// See [`load`]; also if a shared map is not pinned.
pub fn load_copy(
    pins: Option<&Path>,
    shared: &dyn Fn(&str) -> bool,
    routes: Routes,
    kernel: &Kernel,
) -> Result<(Ebpf, Btf)> {
    // Before Linux 6.16 a smaller LRU table evicts the latest insertion: each CPU claims 128
    // elements.
    let sizes = MapSizes { flows4: 1024, flows6: 1024, unassured: 1024, ..MapSizes::default() };
    // The flows are the copy's own, except for the seed that it shares.
    let seed = pins.filter(|_| shared("tp_config")).map_or(0, pinned_seed);
    Loading { sizes, pins, shared, seed, explains: Some(routes), mode: Mode::Auto }.load(kernel)
}

/// Returns the seed that an earlier agent has pinned in `folder`; 0 if there is none.
pub fn pinned_seed(folder: &Path) -> u64 {
    // A defect of the map is reported when it is opened for use.
    let config = Reader::open(folder, "tp_config").and_then(|map| map.value::<RuntimeConfig>(0));
    config.map_or(0, |config| config.seed)
}

struct Loading<'a> {
    sizes: MapSizes,
    pins: Option<&'a Path>,
    /// Whether a map is pinned, by its name.
    shared: &'a dyn Fn(&str) -> bool,
    /// The seed of the fold of IPv6 keys.
    seed: u64,
    explains: Option<Routes>,
    /// The mode, which decides which XDP programs are loaded: see [`frags`].
    mode: Mode,
}

impl Loading<'_> {
    fn load(&self, kernel: &Kernel) -> Result<(Ebpf, Btf)> {
        if object_bytes().is_empty() {
            bail!("this build holds no packet path: run `cargo xtask setup` and build again");
        }
        let shapes = shapes()?;
        let mut paths: Vec<(&str, PathBuf)> = Vec::new();
        let mut entries: Vec<(&str, u32)> = Vec::new();
        for (name, shape) in &shapes {
            let wanted = self.sizes.on(name, super::introspect::possible_cpus()).unwrap_or(shape.entries);
            let mut used = wanted;
            if let Some(pins) = self.pins.filter(|_| (self.shared)(name)) {
                let path = pins.join(frags::pin(name, self.mode));
                match pinned(&path, shape)? {
                    Some(entries) => {
                        if entries != wanted && self.explains.is_none() {
                            tracing::warn!(
                                map = name,
                                entries,
                                wanted,
                                "the pinned map keeps its size; `cleanup` and a new start change it"
                            );
                        }
                        used = entries;
                    }
                    // Loading would create and pin the map.
                    None if self.explains.is_some() => {
                        bail!(
                            "{} is not there: is --pin-dir right, and an agent of this version set up?",
                            path.display()
                        )
                    }
                    None => {}
                }
                paths.push((name, path));
            }
            entries.push((name, used));
        }
        let btf = kernel_types()?;
        let checksum_ipv6 = if kernel.at_least(6, 16) { CHECKSUM_IPV6 } else { 0 };
        let fib_source = if kernel.at_least(6, 7) { FIB_SOURCE } else { 0 };
        let fib_mark = if kernel.at_least(6, 10) { FIB_MARK } else { 0 };
        let tracing = u32::from(self.explains.is_some());
        let assume_routes = u32::from(self.explains == Some(Routes::Assumed));
        // The size of a pinned map is a power of two, too.
        let last = |map: &str| {
            let size = entries.iter().find(|(name, _)| *name == map).map_or(1, |(_, entries)| *entries);
            size - 1
        };
        let directory = [last("tp_flow_dir4"), last("tp_flow_dir6")];
        // Each map has two queues.
        let unassured = ["tp_unassured4", "tp_unassured6"].map(|map| last(map) / 2);
        let Multipliers(multipliers) = Multipliers::of(self.seed);
        let mut loader = EbpfLoader::new();
        loader
            .btf(Some(&btf))
            .override_global("CHECKSUM_IPV6", &checksum_ipv6, true)
            .override_global("FIB_SOURCE", &fib_source, true)
            .override_global("FIB_MARK", &fib_mark, true)
            .override_global("TRACING", &tracing, true)
            .override_global("ASSUME_ROUTES", &assume_routes, true)
            .override_global("FOLD_MULTIPLIERS", &multipliers, true)
            .override_global("DIRECTORY_LAST4", &directory[0], true)
            .override_global("DIRECTORY_LAST6", &directory[1], true)
            .override_global("UNASSURED_LAST4", &unassured[0], true)
            .override_global("UNASSURED_LAST6", &unassured[1], true);
        for (name, entries) in &entries {
            loader.map_max_entries(name, *entries);
        }
        for (name, path) in &paths {
            loader.map_pin_path(name, path.as_path());
        }
        let bytes = frags::object(object_bytes(), self.mode);
        let loaded = loader.load(&bytes).context("loading the packet path failed")?;
        object::release();
        Ok((loaded, btf))
    }
}

/// The type and sizes of a map in the object.
struct Shape {
    kind: u32,
    key: u32,
    value: u32,
    entries: u32,
    flags: u32,
}

fn shapes() -> Result<HashMap<String, Shape>> {
    let object = aya_obj::Object::parse(object_bytes()).context("the embedded packet path is damaged")?;
    Ok(object
        .maps
        .iter()
        // Globals are maps too (.rodata), but private to each load.
        .filter(|(name, _)| !name.starts_with('.'))
        .map(|(name, map)| {
            let shape = Shape {
                kind: map.map_type(),
                key: map.key_size(),
                value: map.value_size(),
                entries: map.max_entries(),
                flags: map.map_flags(),
            };
            (name.clone(), shape)
        })
        .collect())
}

/// Returns the number of entries of a pinned map; `None` if there is none. aya accepts any map at
/// the path, so its layout is compared here.
fn pinned(path: &Path, shape: &Shape) -> Result<Option<u32>> {
    if !path.exists() {
        return Ok(None);
    }
    let info = MapInfo::from_pin(path).with_context(|| format!("{} is not a pinned map", path.display()))?;
    let kind = info.map_type().map_or(u32::MAX, |kind| kind as u32);
    let found = (kind, info.key_size(), info.value_size(), info.map_flags());
    let wanted = (shape.kind, shape.key, shape.value, shape.flags);
    if found != wanted {
        bail!(
            "{} was pinned by another version (type, key, value, flags {found:?}, this version wants {wanted:?}): run `traffic-policy-agent cleanup` with the same --pin-dir, which ends the flows in it",
            path.display()
        );
    }
    Ok(Some(info.max_entries()))
}

#[cfg(test)]
mod tests {
    use traffic_policy_cluster::model::Limits;

    use super::*;

    #[test]
    fn the_models_limits_are_the_declared_sizes() {
        let MapSizes { frontends, source_ranges, slots, .. } = MapSizes::DEFAULT;
        let object = aya_obj::Object::parse(object_bytes()).unwrap();
        let declared = Limits {
            frontends: [frontends; 2],
            source_ranges: [source_ranges; 2],
            endpoints: slots,
            // Number 0 is none.
            direct_nodes: object.maps["tp_direct_node4"].max_entries() - 1,
            direct_macs: object.maps["tp_direct_macs"].max_entries(),
        };
        assert_eq!(Limits::default(), declared);
    }

    #[test]
    fn maps_that_evict_have_room_for_every_cpu() {
        let sizes = MapSizes::DEFAULT;
        for (map, on_2, on_128) in [
            ("tp_own_sent4", 4_096, 32_768),
            ("tp_fragments6", 8_192, 32_768),
            ("tp_sockets", 65_536, 65_536),
            ("tp_affinity", 65_536, 65_536),
            ("tp_node_addrs4", 4_096, 4_096),
        ] {
            assert_eq!((sizes.on(map, 2), sizes.on(map, 128)), (Some(on_2), Some(on_128)), "{map}");
        }
        let asked_for = MapSizes { fragments: 1024, ..sizes };
        assert_eq!(asked_for.on("tp_fragments4", 128), Some(1024));
        assert_eq!(sizes.on("tp_config", 128), None);
    }
}
