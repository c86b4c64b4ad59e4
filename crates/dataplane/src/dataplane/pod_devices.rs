//! The programs on the host side of pods' devices, which follow these as they come and go: for
//! direct delivery (`--local-delivery direct`), and for what pods send to Services
//! (`--pod-services on`).

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use anyhow::{Context as _, Result};
use traffic_policy_ebpf::abi::{PodDevice, pod_flags};

use super::{
    Dataplane,
    bpf::{
        attach::pod::{self, Obstacles},
        pins,
    },
    conntrack_windows,
    devices::DevicePrograms as _,
    kernel::Kernel,
    local_delivery::LocalDelivery,
    maps::{mmap::config, reader::Reader},
    nexthop::{Changed, NextHops as _},
    pod_services::PodServices,
};
use crate::node::pod_links::{self, PodLink};

/// The programs on pods' devices.
pub trait PodPrograms {
    /// Attaches to the pods' devices of this node as they are now, and detaches from those that
    /// others use since. `obstacle`: why nothing may bypass the stack on this node.
    ///
    /// # Errors
    /// The devices cannot be listed, or the pin of a link cannot be removed. A device that refuses
    /// a program is left out.
    fn follow_pods(&mut self, obstacle: Option<String>) -> Result<Followed>;
}

/// The pods' devices of this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Followed {
    /// The names of those whose packets bypass the stack.
    pub direct: BTreeSet<String>,
    /// The names of the others and the reason for each, while direct delivery is on.
    pub by_stack: BTreeMap<String, String>,
    /// The names of those whose packets to Services are translated.
    pub served: BTreeSet<String>,
    /// The names of the others and the reason for each, while `--pod-services` is on.
    pub unserved: BTreeMap<String, String>,
}

impl Followed {
    fn note_attached(&mut self, name: &str, flags: u16) {
        for (flag, names) in [(pod_flags::DIRECT, &mut self.direct), (pod_flags::SERVICES, &mut self.served)]
        {
            if flags & flag != 0 {
                names.insert(name.to_owned());
            }
        }
    }

    fn note_refused(&mut self, name: &str, flags: u16, reason: &str) {
        for (flag, reasons) in
            [(pod_flags::DIRECT, &mut self.by_stack), (pod_flags::SERVICES, &mut self.unserved)]
        {
            if flags & flag != 0 {
                reasons.insert(name.to_owned(), reason.to_owned());
            }
        }
    }
}

/// A pod's device as an agent judges it.
#[derive(Clone, Debug)]
pub struct JudgedPod {
    pub name: String,
    pub index: u32,
    /// The reason for which the stack delivers its packets with `--local-delivery direct`.
    pub by_stack: Option<String>,
    /// The reason for which its packets to Services are not translated with `--pod-services on`.
    pub unserved: Option<String>,
}

/// The devices that this agent has attached to, as they were then, with their [`pod_flags`].
#[derive(Debug, Default)]
pub(super) struct PodDevices {
    attached: BTreeMap<u32, (PodLink, u16)>,
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
        let services = self.config.pod_services == PodServices::On;
        if !direct && !services && self.pods.taken_over {
            return Ok(Followed::default());
        }
        self.maps.config.store(config::local_delivery, u32::from(direct));
        self.maps.config.store(config::pod_services, u32::from(services));
        let served: BTreeSet<u32> = self.attached().map(|(interface, _)| interface.ifindex).collect();
        let mut followed = Followed::default();
        let mut wanted = BTreeMap::new();
        if direct || services {
            let whole_node = || obstacle.or_else(|| conntrack_windows::prepare(&mut self.maps.config).err());
            let obstacle = if direct { whole_node() } else { None };
            for (link, obstacles) in judged(&links, &served, kernel)? {
                let mut flags = 0;
                for (wanted, flag, reason) in [
                    (direct, pod_flags::DIRECT, obstacle.clone().or(obstacles.direct)),
                    (services, pod_flags::SERVICES, obstacles.services),
                ] {
                    match reason {
                        _ if !wanted => {}
                        Some(reason) => followed.note_refused(&link.name, flag, &reason),
                        None => flags |= flag,
                    }
                }
                if flags != 0 {
                    wanted.insert(link.index, (link, flags));
                }
            }
        }
        self.forget_pods(&links, &wanted, kernel)?;
        for (index, (link, flags)) in wanted {
            match self.attach_pod(&links, &link, flags, kernel) {
                Ok(()) => followed.note_attached(&link.name, flags),
                Err(error) => {
                    self.detach_pod(&links, index, kernel)?;
                    followed.note_refused(&link.name, flags, &format!("{error:#}"));
                }
            }
        }
        Ok(followed)
    }
}

impl Dataplane {
    /// Detaches from devices that are not wanted, or gone. Requests take the stack again at once.
    fn forget_pods(
        &mut self,
        links: &Path,
        wanted: &BTreeMap<u32, (PodLink, u16)>,
        kernel: Kernel,
    ) -> Result<()> {
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

    fn attach_pod(&mut self, links: &Path, link: &PodLink, flags: u16, kernel: Kernel) -> Result<()> {
        let intact = !kernel.has_tcx() || pod::is_intact(&self.object, links, link.index, flags);
        let known = self.pods.attached.get(&link.index);
        if intact && known.is_some_and(|(known, had)| known == link && *had == flags) {
            return Ok(());
        }
        let (bridge, bridge_mac) = link.bridge.unwrap_or_default();
        let device = PodDevice { mtu: link.mtu, bridge, bridge_mac, flags };
        let held = self.maps.pod_devices.get(&link.index, 0).ok();
        if held != Some(device) {
            self.maps.pod_devices.insert(link.index, device, 0).context("tp_pod_devices is full")?;
        }
        if held.is_some_and(|held| held != device) {
            // Stored hops have the former MTU, or lead where nothing may bypass the stack now.
            self.raise(Changed::Routes);
        }
        pod::attach(&mut self.object, links, link, flags, kernel)?;
        self.pods.attached.insert(link.index, (link.clone(), flags));
        Ok(())
    }

    fn detach_pod(&mut self, links: &Path, index: u32, kernel: Kernel) -> Result<()> {
        self.pods.attached.remove(&index);
        // It may never have been described.
        let _ = self.maps.pod_devices.remove(&index);
        pod::detach(links, index, kernel)
    }
}

/// Returns the pods' devices of this node as the agent that is pinned below `root` judges them.
/// `served`: the devices of the node that are attached to.
pub fn judged_below(root: &Path, served: &BTreeSet<u32>) -> Result<Vec<JudgedPod>> {
    let judged = judged(&pins::links_below(root), served, Kernel::running()?)?;
    let pod = |(link, obstacles): (PodLink, Obstacles)| JudgedPod {
        name: link.name,
        index: link.index,
        by_stack: obstacles.direct,
        unserved: obstacles.services,
    };
    Ok(judged.into_iter().map(pod).collect())
}

/// Returns the pods' devices with programs of an agent that is pinned below `root`.
pub(super) fn pinned_pods(root: &Path) -> Vec<u32> {
    let map = Reader::open(&pins::maps_below(root), "tp_pod_devices");
    map.ok().and_then(|map| map.keys::<u32>().ok()).unwrap_or_default()
}

fn judged(links: &Path, served: &BTreeSet<u32>, kernel: Kernel) -> Result<Vec<(PodLink, Obstacles)>> {
    let all = pod_links::all().context("listing the devices of pods failed")?;
    let pods = all.into_iter().filter(|link| !served.contains(&link.index));
    // A device that is gone by now has no obstacle that could be read.
    let judged = pods.map(|link| match pod::obstacles(links, &link, kernel) {
        Ok(obstacles) => (link, obstacles),
        Err(error) => {
            let reason = Some(format!("{error:#}"));
            (link, Obstacles { direct: reason.clone(), services: reason })
        }
    });
    Ok(judged.collect())
}
