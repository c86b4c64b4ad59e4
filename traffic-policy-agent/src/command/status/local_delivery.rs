//! Direct delivery to pods of this node, in `status`: which of their devices have it, and why the
//! others do not.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, Write},
    path::Path,
};

use anyhow::Result;
use serde::Serialize;
use traffic_policy_dataplane::{
    inspect::{Link, LinkHook, Pinned},
    judged_pods,
};
use traffic_policy_ebpf::abi::{PodDevice, pod_flags};

use crate::check;

/// The pods' devices of a node with `--local-delivery direct`.
#[derive(Serialize)]
pub(super) struct LocalDelivery {
    /// Devices of pods whose packets bypass the stack.
    direct: BTreeSet<String>,
    /// The others, with the reason.
    by_stack: BTreeMap<String, String>,
}

/// Returns the pods' devices whose description has this one of [`pod_flags`].
pub(super) fn flagged(pinned: &Pinned, flag: u16) -> Result<BTreeSet<u32>> {
    let all = pinned.map("tp_pod_devices")?.entries::<u32, PodDevice>()?;
    Ok(all.into_iter().filter(|(_, device)| device.flags & flag != 0).map(|(index, _)| index).collect())
}

/// Returns the node's own devices with programs, which are no pods'.
pub(super) fn of_the_node(links: &[Link]) -> BTreeSet<u32> {
    let of_pods = |link: &&Link| matches!(link.hook, LinkHook::TcPod | LinkHook::TcPodOut);
    links.iter().filter(|link| !of_pods(link)).map(|link| link.ifindex).collect()
}

impl LocalDelivery {
    /// Reads the state; `None` if the stack delivers everything.
    pub(super) fn read(pinned: &Pinned, pin_dir: &Path) -> Result<Option<Self>> {
        if pinned.config()?.local_delivery == 0 {
            return Ok(None);
        }
        let links = Link::all(pinned)?;
        let direct = flagged(pinned, pod_flags::DIRECT)?;
        let served = of_the_node(&links);
        let mut state = Self { direct: BTreeSet::new(), by_stack: BTreeMap::new() };
        let everywhere = check::local_delivery_obstacle();
        for pod in judged_pods(pin_dir, &served)? {
            if direct.contains(&pod.index) {
                state.direct.insert(pod.name);
            } else {
                let reason = everywhere.clone().or(pod.by_stack);
                let reason = reason.unwrap_or_else(|| "the agent's log says why".to_owned());
                state.by_stack.insert(pod.name, reason);
            }
        }
        Ok(Some(state))
    }

    pub(super) fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let all = self.direct.len() + self.by_stack.len();
        writeln!(out, "pods        packets of {} of {all} bypass the stack", self.direct.len())?;
        for (device, reason) in &self.by_stack {
            writeln!(out, "            - not by {device}: {reason}")?;
        }
        Ok(())
    }
}
