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

use crate::check;

/// The pods' devices of a node with `--local-delivery direct`.
#[derive(Serialize)]
pub(super) struct LocalDelivery {
    /// Devices whose pods get their packets past the stack.
    direct: BTreeSet<String>,
    /// The others, with the reason.
    by_stack: BTreeMap<String, String>,
}

impl LocalDelivery {
    /// Reads the state; `None` if the stack delivers everything.
    pub(super) fn read(pinned: &Pinned, pin_dir: &Path) -> Result<Option<Self>> {
        if pinned.config()?.local_delivery == 0 {
            return Ok(None);
        }
        let links = Link::all(pinned)?;
        let of_pods: BTreeSet<u32> = pinned.map("tp_pod_devices")?.keys::<u32>()?.into_iter().collect();
        let served = links.iter().filter(|link| link.hook != LinkHook::TcPod).map(|link| link.ifindex);
        let mut state = Self { direct: BTreeSet::new(), by_stack: BTreeMap::new() };
        let everywhere = check::local_delivery_obstacle();
        for (link, reason) in judged_pods(pin_dir, &served.collect())? {
            if of_pods.contains(&link.index) {
                state.direct.insert(link.name);
            } else {
                let reason = everywhere.clone().or(reason);
                let reason = reason.unwrap_or_else(|| "the agent's log says why".to_owned());
                state.by_stack.insert(link.name, reason);
            }
        }
        Ok(Some(state))
    }

    pub(super) fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let all = self.direct.len() + self.by_stack.len();
        writeln!(out, "pods        {} of {all} get their packets past the stack", self.direct.len())?;
        for (device, reason) in &self.by_stack {
            writeln!(out, "            - not by {device}: {reason}")?;
        }
        Ok(())
    }
}
