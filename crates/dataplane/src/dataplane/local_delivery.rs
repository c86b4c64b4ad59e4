//! Direct delivery to pods of this node (`--local-delivery direct`): the programs on the host side
//! of pods' devices, which follow these as they come and go.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use anyhow::{Context as _, Result};
use traffic_policy_ebpf::abi::PodDevice;

use super::{
    Dataplane,
    bpf::{attach::pod, pins},
    conntrack_windows,
    devices::DevicePrograms as _,
    kernel::Kernel,
    maps::{mmap::config, reader::Reader},
    nexthop::{Changed, NextHops as _},
};
use crate::node::pod_links::{self, PodLink};

/// The value of `--local-delivery`: the way of packets to pods of this node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LocalDelivery {
    /// The stack delivers every packet.
    #[default]
    Stack,
    /// Packets of established flows go straight to the pod, and its replies to the client.
    Direct,
}

/// The programs on pods' devices.
pub trait PodPrograms {
    /// Attaches to the pods' devices of this node as they are now, and detaches from those that
    /// others use since. `obstacle`: why nothing may pass the stack by on this node.
    ///
    /// # Errors
    /// The devices cannot be listed, or the pin of a link cannot be removed. A device that refuses
    /// the program is left out.
    fn follow_pods(&mut self, obstacle: Option<String>) -> Result<Followed>;
}

/// The pods' devices of this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Followed {
    /// The names of those with the program.
    pub direct: BTreeSet<String>,
    /// The names of the others, with the reason.
    pub by_stack: BTreeMap<String, String>,
}

/// The devices that this agent has attached to, as they were then.
#[derive(Debug, Default)]
pub(super) struct PodDevices {
    attached: BTreeMap<u32, PodLink>,
    /// Whether those of an earlier agent have been taken over or forgotten.
    taken_over: bool,
}

impl PodPrograms for Dataplane {
    fn follow_pods(&mut self, obstacle: Option<String>) -> Result<Followed> {
        let kernel = self.devices.kernel();
        let Some(links) = self.devices.links_folder().map(Path::to_owned) else {
            return Ok(Followed::default());
        };
        let direct = self.config.local_delivery == LocalDelivery::Direct;
        if !direct && self.pods.taken_over {
            return Ok(Followed::default());
        }
        self.maps.config.store(config::local_delivery, u32::from(direct));
        let served: BTreeSet<u32> = self.attached().map(|(interface, _)| interface.ifindex).collect();
        let mut followed = Followed::default();
        let mut wanted = BTreeMap::new();
        if direct {
            let obstacle = obstacle.or_else(|| conntrack_windows::prepare(&mut self.maps.config).err());
            for (link, reason) in judged(&links, &served, kernel)? {
                match obstacle.clone().or(reason) {
                    Some(reason) => drop(followed.by_stack.insert(link.name, reason)),
                    None => drop(wanted.insert(link.index, link)),
                }
            }
        }
        self.forget_pods(&links, &wanted, kernel)?;
        for (index, link) in wanted {
            match self.attach_pod(&links, &link, kernel) {
                Ok(()) => drop(followed.direct.insert(link.name)),
                Err(error) => {
                    self.detach_pod(&links, index, kernel)?;
                    followed.by_stack.insert(link.name, format!("{error:#}"));
                }
            }
        }
        Ok(followed)
    }
}

impl Dataplane {
    /// Detaches from devices that are not wanted, or gone. Requests take the stack again at once.
    fn forget_pods(&mut self, links: &Path, wanted: &BTreeMap<u32, PodLink>, kernel: Kernel) -> Result<()> {
        let mut held: BTreeSet<u32> = self.pods.attached.keys().copied().collect();
        if !self.pods.taken_over {
            held.extend(pod::linked(links));
            held.extend(self.maps.pod_devices.keys().filter_map(Result::ok));
            self.pods.taken_over = true;
        }
        held.retain(|index| !wanted.contains_key(index));
        for index in &held {
            self.detach_pod(links, *index, kernel)?;
        }
        if !held.is_empty() {
            self.raise(Changed::Neighbours);
        }
        Ok(())
    }

    fn attach_pod(&mut self, links: &Path, link: &PodLink, kernel: Kernel) -> Result<()> {
        let intact = !kernel.has_tcx() || pod::is_intact(&self.object, links, link.index);
        if intact && self.pods.attached.get(&link.index) == Some(link) {
            return Ok(());
        }
        let device = PodDevice { mtu: link.mtu, bridge: link.bridge.unwrap_or(0) };
        let held = self.maps.pod_devices.get(&link.index, 0).ok();
        if held != Some(device) {
            self.maps.pod_devices.insert(link.index, device, 0).context("tp_pod_devices is full")?;
        }
        if held.is_some_and(|held| held != device) {
            // Stored hops have the former MTU.
            self.raise(Changed::Routes);
        }
        pod::attach(&mut self.object, links, link, kernel)?;
        self.pods.attached.insert(link.index, link.clone());
        Ok(())
    }

    fn detach_pod(&mut self, links: &Path, index: u32, kernel: Kernel) -> Result<()> {
        self.pods.attached.remove(&index);
        // It may never have been described.
        let _ = self.maps.pod_devices.remove(&index);
        pod::detach(links, index, kernel)
    }
}

/// Returns the pods' devices of this node as the agent that is pinned below `root` judges them,
/// each with the reason why the stack delivers its packets. `served`: the devices of the node that
/// are attached to.
///
/// # Errors
/// The devices cannot be listed.
pub fn judged_below(root: &Path, served: &BTreeSet<u32>) -> Result<Vec<(PodLink, Option<String>)>> {
    judged(&pins::links_below(root), served, Kernel::running()?)
}

/// Returns the pods' devices with programs of an agent that is pinned below `root`.
pub(super) fn pinned_pods(root: &Path) -> Vec<u32> {
    let map = Reader::open(&pins::maps_below(root), "tp_pod_devices");
    map.ok().and_then(|map| map.keys::<u32>().ok()).unwrap_or_default()
}

fn judged(links: &Path, served: &BTreeSet<u32>, kernel: Kernel) -> Result<Vec<(PodLink, Option<String>)>> {
    let all = pod_links::all().context("listing the devices of pods failed")?;
    let pods = all.into_iter().filter(|link| !served.contains(&link.index));
    // A device that is gone by now has no obstacle that could be read.
    let judged = pods.map(|link| match pod::obstacle(links, &link, kernel) {
        Ok(obstacle) => (link, obstacle),
        Err(error) => (link, Some(format!("{error:#}"))),
    });
    Ok(judged.collect())
}
