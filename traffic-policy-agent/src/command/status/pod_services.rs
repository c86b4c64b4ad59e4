//! Services of pods at their devices, in `status`: which of these have them, and why the others do
//! not.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, Write},
    path::Path,
};

use anyhow::Result;
use serde::Serialize;
use traffic_policy_dataplane::{
    inspect::{Link, Pinned},
    judged_pods,
};
use traffic_policy_ebpf::abi::pod_flags;

use super::local_delivery::{flagged, of_the_node};

/// The pods' devices of a node with `--pod-services on`.
#[derive(Serialize)]
pub(super) struct PodServices {
    /// Devices whose pods' packets to Services are translated.
    served: BTreeSet<String>,
    /// The others, with the reason.
    unserved: BTreeMap<String, String>,
}

impl PodServices {
    /// Reads the state; `None` if nothing is translated at pods' devices.
    pub(super) fn read(pinned: &Pinned, pin_dir: &Path) -> Result<Option<Self>> {
        if pinned.config()?.pod_services == 0 {
            return Ok(None);
        }
        let with_programs = flagged(pinned, pod_flags::SERVICES)?;
        let mut state = Self { served: BTreeSet::new(), unserved: BTreeMap::new() };
        for pod in judged_pods(pin_dir, &of_the_node(&Link::all(pinned)?))? {
            if with_programs.contains(&pod.index) {
                state.served.insert(pod.name);
            } else {
                let reason = pod.unserved.unwrap_or_else(|| "the agent's log says why".to_owned());
                state.unserved.insert(pod.name, reason);
            }
        }
        Ok(Some(state))
    }

    pub(super) fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let all = self.served.len() + self.unserved.len();
        writeln!(out, "pods        {} of {all} have Services at their devices", self.served.len())?;
        for (device, reason) in &self.unserved {
            writeln!(out, "            - not at {device}: {reason}")?;
        }
        Ok(())
    }
}
