//! A trial beside a running packet path: what decides is read from its pinned maps.

use std::{net::IpAddr, path::Path};

use anyhow::{Context as _, Result, bail};
use aya::maps::{Array, HashMap, Map, MapData};
use ipnet::IpNet;
use traffic_policy_ebpf::abi::{
    Address, Frontend, FrontendKey, HOP_XDP, Range, SLOT_LOCAL, Slot, frontend, frontend_kind,
};

use super::{
    super::tables::from_wide, Entrance, Kernel, PacketHook, Routes, Running, Trial, Words, load_copy,
};
use crate::{
    dataplane::{attach, check_privileges, pins},
    model::Policy,
};

/// Maps that decide, and that the programs only read.
const SHARED: &[&str] = &[
    "FRONTENDS4",
    "FRONTENDS6",
    "SOURCES4",
    "SOURCES6",
    "SERVICE_CIDRS4",
    "SERVICE_CIDRS6",
    "SLOTS4",
    "SLOTS6",
    "STATE",
    "FILTER",
    "POOL",
    "DEVICES",
    "NODE",
    "SERVICES",
];

/// Those of them that another policy changes.
const OF_POLICY: &[&str] = &["FRONTENDS4", "FRONTENDS6", "SLOTS4", "SLOTS6"];

impl Trial {
    /// The packet path pinned below `root`. With a `policy`, as if every Service had it as its external one.
    ///
    /// # Errors
    /// Nothing of this version is pinned there; missing privileges; the kernel refuses.
    pub fn live(root: &Path, policy: Option<Policy>) -> Result<Self> {
        check_privileges()?;
        let maps = pins::maps_below(root);
        if !maps.exists() {
            bail!(
                "no packet path of this version is pinned in {}: is --pin-dir right? Without an agent, name manifests: --manifests DIR --node-name N",
                root.display()
            );
        }
        let kernel = Kernel::running()?;
        let shared = |name: &str| SHARED.contains(&name) && (policy.is_none() || !OF_POLICY.contains(&name));
        let mut trial = Self::load(load_copy(Some(&maps), &shared, Routes::Real, &kernel)?)?;
        let affinity = MapData::from_pin(maps.join("AFFINITY")).context("AFFINITY is not pinned")?;
        let usage = MapData::from_pin(maps.join("USAGE")).context("USAGE is not pinned")?;
        trial.running = Some(Running {
            affinity: HashMap::try_from(Map::LruHashMap(affinity))?,
            usage: Words::new(Map::Array(usage))?,
        });
        trial.entrances = trial.find_entrances(root)?;
        if let Some(policy) = policy {
            let v4 = &mut trial.tables.v4;
            copy(&maps, ["FRONTENDS4", "SLOTS4"], &mut v4.frontends, &mut v4.slots, policy)?;
            let v6 = &mut trial.tables.v6;
            copy(&maps, ["FRONTENDS6", "SLOTS6"], &mut v6.frontends, &mut v6.slots, policy)?;
        }
        Ok(trial)
    }

    /// The node's primary addresses, and the ranges of its pods.
    ///
    /// # Errors
    /// The map cannot be read.
    pub fn node(&self) -> Result<(Vec<IpAddr>, Vec<IpNet>)> {
        let node = self.tables.node.get(&0, 0).context("reading what the node is failed")?;
        let known = |wide: [[u64; 2]; 2]| {
            (0..2)
                .filter(move |family| wide[*family] != [0; 2])
                .map(move |family| (family, from_wide(wide[family], family == 1)))
        };
        let primary = known(node.primary).map(|(_, address)| address).collect();
        let pods = known(node.pods)
            .filter_map(|(family, address)| IpNet::new(address, node.pod_bits[family] as u8).ok())
            .collect();
        Ok((primary, pods))
    }

    /// Cookie of the node's own network namespace.
    ///
    /// # Errors
    /// The map cannot be read.
    pub fn netns(&self) -> Result<u64> {
        Ok(self.tables.node.get(&0, 0).context("reading what the node is failed")?.netns)
    }

    fn find_entrances(&self, root: &Path) -> Result<Vec<Entrance>> {
        let generic = attach::generic_devices(&pins::links_below(root));
        let mut entrances = Vec::new();
        for entry in &self.tables.devices {
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
}

/// Copies frontends and endpoints, with another policy. A list of this node's endpoints that nobody needed so far is taken
/// from the other list: it lacks those that are terminating while others are ready, and those that topology hints leave
/// out.
fn copy<A: Address>(
    maps: &Path,
    [frontends, slots]: [&str; 2],
    to_frontends: &mut HashMap<MapData, FrontendKey<A>, Frontend>,
    to_slots: &mut Array<MapData, Slot<A>>,
    policy: Policy,
) -> Result<()> {
    let pinned =
        |name: &str| MapData::from_pin(maps.join(name)).with_context(|| format!("{name} is not pinned"));
    let frontends: HashMap<_, FrontendKey<A>, Frontend> = Map::HashMap(pinned(frontends)?).try_into()?;
    let slots: Array<_, Slot<A>> = Map::Array(pinned(slots)?).try_into()?;
    let mut next = 0;
    // Frontends of one Service share their lists.
    let mut places = std::collections::HashMap::new();
    let mut place = |list: (u32, u32, bool), endpoints: &[Slot<A>]| -> Result<Range> {
        if let Some(range) = places.get(&list) {
            return Ok(*range);
        }
        let range = Range { base: next, len: endpoints.len() as u32 };
        for slot in endpoints {
            to_slots.set(next, *slot, 0).context("copying an endpoint failed")?;
            next += 1;
        }
        places.insert(list, range);
        Ok(range)
    };
    for entry in &frontends {
        let (key, mut frontend) = entry.context("reading a frontend failed")?;
        let read = |range: Range| -> Result<Vec<Slot<A>>> {
            (range.base..range.base + range.len).map(|index| Ok(slots.get(&index, 0)?)).collect()
        };
        let (cluster, mut local) = (read(frontend.cluster)?, read(frontend.local)?);
        let (of_cluster, mut of_local) = (
            (frontend.cluster.base, frontend.cluster.len, false),
            (frontend.local.base, frontend.local.len, false),
        );
        if frontend::kind(frontend.flags) != frontend_kind::CLUSTER_IP && frontend.flags != 0 {
            match policy {
                Policy::Cluster => frontend.flags &= !frontend::LOCAL,
                Policy::Local => {
                    if local.is_empty() {
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
        to_frontends.insert(key, frontend, 0).context("copying a frontend failed")?;
    }
    Ok(())
}
