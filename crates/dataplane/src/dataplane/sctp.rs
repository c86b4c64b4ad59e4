//! The programs of SCTP, a third of what the verifier walks: they are loaded before the first
//! frontend of SCTP is written. Until then small programs stand in for those of incoming packets,
//! and the others are missing, as [`programs`] lists them.
//!
//! They stay when the last Service of SCTP goes, and an agent that takes over maps with them, or
//! with frontends of SCTP, loads its own at its start: associations outlive both.

use std::path::Path;

use traffic_policy_cluster::model::{Changes, Desired, Protocol, ServicePort, ServicePortKey};
use traffic_policy_ebpf::abi::jump;

use super::{
    bpf::programs,
    sync::{op::Held, plan::Planner},
};

/// Whether a start needs the programs, by the content of pinned maps. `folder`: their pins.
pub(super) fn is_served(held: &Held, folder: Option<&Path>) -> bool {
    let in_place = folder.is_some_and(|folder| programs::is_in_place(folder, jump::SCTP_OUT));
    held.frontends.keys().any(|id| id.protocol == Protocol::Sctp) || in_place
}

/// Whether a plan for these changes may write frontends of SCTP for such a Service port.
pub(super) fn is_concerned(
    desired: &Desired,
    changes: &Changes,
    planner: &Planner,
    such: impl Fn(&ServicePort) -> bool,
) -> bool {
    let is_such = |key: &ServicePortKey| {
        key.protocol == Protocol::Sctp && desired.ports.get(key).is_some_and(|port| such(port))
    };
    if planner.is_first() { desired.ports.keys().any(is_such) } else { changes.ports.iter().any(is_such) }
}
