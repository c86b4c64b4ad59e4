//! A simulator for a running packet path, whose pinned maps it reads for its decisions.

use std::{collections::HashMap, net::IpAddr, path::Path};

use anyhow::{Context as _, Result, bail};
use ipnet::IpNet;
use traffic_policy_cluster::model::Policy;
use traffic_policy_ebpf::abi::{
    Address, Frontend, FrontendKey, HOP_XDP, IndexRange, SLOT_LOCAL, ServiceInfo, Slot, WideAddress,
    frontend, frontend_kind,
};

use super::{Entrance, PacketHook, Simulator};
use crate::{
    dataplane::{
        bpf::{attach::device, loader::Routes, pins},
        maps::{
            Family,
            keys::from_wide,
            reader::{Pod, Reader},
        },
        privileges::check_privileges,
        tracing_copy::TracingCopy,
    },
    inspect::{external_policy, falls_back},
};

/// The maps that decide, and that the programs only read.
const SHARED: &[&str] = &[
    "tp_frontends4",
    "tp_frontends6",
    "tp_src_ranges4",
    "tp_src_ranges6",
    "tp_svc_cidrs4",
    "tp_svc_cidrs6",
    "tp_endpoints4",
    "tp_endpoints6",
    "tp_maglev",
    "tp_config",
    "tp_prefilter",
    "tp_snat_ports",
    "tp_devices",
    "tp_pod_devices",
    "tp_local_node",
    "tp_node_addrs4",
    "tp_node_addrs6",
    "tp_route_mtus4",
    "tp_route_mtus6",
    "tp_svc_names",
    "tp_direct_from4",
    "tp_direct_from6",
    "tp_direct_macs",
    "tp_direct_node4",
    "tp_direct_node6",
    "tp_direct_eps4",
    "tp_direct_eps6",
];

/// The shared maps whose content depends on the policy.
const OF_POLICY: &[&str] = &["tp_frontends4", "tp_frontends6", "tp_endpoints4", "tp_endpoints6"];

impl Simulator {
    /// Opens the packet path pinned below `root`. With a `policy`, every Service is treated as if
    /// that were its external one.
    ///
    /// # Errors
    /// Nothing of this version is pinned there, privileges are missing, or the kernel refuses.
    pub fn live(root: &Path, policy: Option<Policy>) -> Result<Self> {
        check_privileges()?;
        let maps = pins::maps_below(root);
        if !maps.exists() {
            bail!(
                "no packet path of this version is pinned in {}: is --pin-dir right? Without an agent, name manifests: --manifests DIR --node-name N",
                root.display()
            );
        }
        let shared = |name: &str| SHARED.contains(&name) && (policy.is_none() || !OF_POLICY.contains(&name));
        let mut copy = TracingCopy::load(Some(&maps), &shared, Routes::Real)?;
        let different = copy.differing(&pins::programs_below(root));
        if !different.is_empty() {
            tracing::warn!(
                "the programs on this node's devices are not those of this traffic-policy-agent ({} differ), so packets may fare otherwise than this says: ask the traffic-policy-agent that runs here",
                different.join(", ")
            );
        }
        copy.follow(&maps)?;
        let entrances = find_entrances(&copy, root)?;
        if let Some(policy) = policy {
            let v4 = copy_services(&maps, ["tp_frontends4", "tp_endpoints4"], &mut copy.maps.v4, policy)?;
            let v6 = copy_services(&maps, ["tp_frontends6", "tp_endpoints6"], &mut copy.maps.v6, policy)?;
            if v4 || v6 {
                tracing::warn!(
                    "the endpoints for policy Local are taken from the lists for policy Cluster, which are all that the maps of this node hold: \
                     terminating ones beside ready ones, and those that topology hints keep from this node, are missing, so that \
                     dropped-no-local-endpoint may be wrong; with --api or --manifests, and --node-name, the objects are asked"
                );
            }
        }
        Ok(Self { copy, entrances, as_cluster: policy == Some(Policy::Cluster) })
    }

    /// Returns the node's primary addresses, and the ranges of its pods.
    pub fn node(&self) -> Result<(Vec<IpAddr>, Vec<IpNet>)> {
        let node = self.copy.maps.local_node.get(&0, 0).context("reading what the node is failed")?;
        let known = |wide: [WideAddress; 2]| {
            (0..2)
                .filter(move |family| wide[*family] != WideAddress::UNSPECIFIED)
                .map(move |family| (family, from_wide(wide[family], family == 1)))
        };
        let primary = known(node.primary).map(|(_, address)| address).collect();
        let pods = known(node.pods)
            .filter_map(|(family, address)| IpNet::new(address, node.pod_bits[family] as u8).ok())
            .collect();
        Ok((primary, pods))
    }

    /// Returns the cookie of the node's own network namespace.
    pub fn netns(&self) -> Result<u64> {
        Ok(self.copy.maps.local_node.get(&0, 0).context("reading what the node is failed")?.netns)
    }
}

fn find_entrances(copy: &TracingCopy, root: &Path) -> Result<Vec<Entrance>> {
    let generic = device::generic_devices(&pins::links_below(root));
    let mut entrances = Vec::new();
    for entry in &copy.maps.devices {
        let (ifindex, device) = entry.context("reading the devices failed")?;
        let xdp = device.flags & HOP_XDP != 0 || generic.contains(&ifindex);
        let hook = if xdp { PacketHook::Xdp } else { PacketHook::Tc };
        entrances.push(Entrance { ifindex, mac: device.mac, hook });
    }
    entrances.sort_by_key(|entrance| entrance.ifindex);
    if entrances.is_empty() {
        bail!("the packet path below {} is attached to no device", root.display());
    }
    Ok(entrances)
}

/// Copies frontends and endpoints, with another policy. A list of this node's endpoints that was
/// not needed so far is derived from the other list: it lacks those that are terminating while
/// others are ready, and those that topology hints exclude. Returns whether there is such a list.
fn copy_services<A: Address, const W: usize>(
    maps: &Path,
    [frontends, slots]: [&str; 2],
    to: &mut Family<A, W>,
    policy: Policy,
) -> Result<bool>
where
    FrontendKey<A>: Pod,
    Slot<A>: Pod,
{
    let (frontends, slots) = (Reader::open(maps, frontends)?, Reader::open(maps, slots)?);
    let names: HashMap<u32, ServiceInfo> =
        Reader::open(maps, "tp_svc_names")?.entries::<u32, ServiceInfo>()?.into_iter().collect();
    let mut next = 0;
    let mut derived = false;
    // Frontends of one Service share their lists.
    let mut places = HashMap::new();
    let mut place = |list: (u32, u32, bool), endpoints: &[Slot<A>]| -> Result<IndexRange> {
        if let Some(range) = places.get(&list) {
            return Ok(*range);
        }
        let range = IndexRange { base: next, len: endpoints.len() as u32 };
        for slot in endpoints {
            to.slots.set(next, *slot, 0).context("copying an endpoint failed")?;
            next += 1;
        }
        places.insert(list, range);
        Ok(range)
    };
    for (key, mut frontend) in frontends.entries::<FrontendKey<A>, Frontend>()? {
        let read = |range: IndexRange| -> Result<Vec<Slot<A>>> {
            (range.base..range.base + range.len).map(|index| slots.value(index)).collect()
        };
        let (cluster, mut local) = (read(frontend.cluster)?, read(frontend.local)?);
        let (of_cluster, mut of_local) = (
            (frontend.cluster.base, frontend.cluster.len, false),
            (frontend.local.base, frontend.local.len, false),
        );
        if frontend::kind(frontend.flags) != frontend_kind::CLUSTER_IP && frontend.flags != 0 {
            match policy {
                Policy::Cluster => frontend.flags &= !frontend::LOCAL,
                // The flag stays as it is: an annotation may make the Service forward as under
                // Cluster.
                Policy::Local
                    if names
                        .get(&frontend.service)
                        .is_some_and(|info| falls_back(external_policy(info), frontend.flags)) => {}
                Policy::Local => {
                    // A list that is already in use is empty because there is no endpoint here.
                    if local.is_empty() && frontend.flags & frontend::LOCAL == 0 {
                        derived |= !cluster.is_empty();
                        of_local = (frontend.cluster.base, frontend.cluster.len, true);
                        local = cluster.iter().filter(|slot| slot.flags & SLOT_LOCAL != 0).copied().collect();
                    }
                    frontend.flags |= frontend::LOCAL;
                }
            }
            frontend.drain_until = 0;
        }
        frontend.cluster = place(of_cluster, &cluster)?;
        frontend.local = place(of_local, &local)?;
        to.frontends.insert(key, frontend, 0).context("copying a frontend failed")?;
    }
    Ok(derived)
}
