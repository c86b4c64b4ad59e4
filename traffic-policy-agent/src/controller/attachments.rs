//! Programs that others detach are noticed, attached again, and counted; `/healthz` answers 503
//! while that fails.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use traffic_policy_cluster::source::{ObjectEvent, Subject};
use traffic_policy_dataplane::{
    CgroupPrograms, DevicePrograms, Lost,
    node::{Filter, Network},
};

/// Programs that were detached by others, and failures to attach them again.
#[derive(Debug, Default)]
pub(super) struct Attachments {
    /// Devices that lack programs, by index.
    lost: BTreeSet<u32>,
    /// Names of devices to which programs could not be attached again, and the reason, by index; 0
    /// is the cgroup.
    broken: BTreeMap<u32, String>,
    /// Number of times that programs were attached again.
    restored: u64,
    /// Events that have not been posted yet.
    events: Vec<ObjectEvent>,
}

const CGROUP: u32 = 0;

impl Attachments {
    /// Looks for detached programs. Devices that lack any become unsettled and are attached to by
    /// the next rescan. Returns whether there are any.
    pub(super) async fn look(&mut self, path: &mut impl DevicePrograms, network: &Network) -> bool {
        let mut lost = path.lost();
        if let Some(filters) = path.filters() {
            lost.extend(lost_filters(path, network, filters).await);
        }
        for Lost { ifindex, name, places } in lost {
            if self.lost.insert(ifindex) {
                tracing::warn!(
                    device = name,
                    at = places.join(", "),
                    "somebody has taken programs off; attaching them again"
                );
                self.taken_off(&name, &places);
            } else {
                // The first rescan after the loss failed before it reached this device, and so has
                // recorded no reason.
                self.broken.entry(ifindex).or_insert_with(|| {
                    format!("the programs of {name} were taken off and are not put back yet")
                });
            }
            path.unsettle(ifindex);
        }
        self.lost.iter().any(|ifindex| *ifindex != CGROUP)
    }

    /// Attaches the programs of the cgroup again, if they were detached.
    pub(super) fn restore_cgroup(&mut self, path: &mut impl CgroupPrograms) {
        let calls = match path.lost_calls() {
            Ok(calls) => calls,
            Err(error) => {
                // Whether any were detached is unknown: there is nothing to count.
                let unseen = format!("the programs of the cgroup cannot be looked at: {error:#}");
                if self.broken.insert(CGROUP, unseen.clone()).is_none() {
                    tracing::warn!("{unseen}");
                }
                return;
            }
        };
        if !calls.is_empty() {
            if self.lost.insert(CGROUP) {
                tracing::warn!(
                    at = calls.join(", "),
                    "somebody has taken programs off the cgroup; attaching them again"
                );
                self.taken_off("the cgroup", &calls);
            }
            if let Err(error) = path.attach_cgroup() {
                if !self.broken.contains_key(&CGROUP) {
                    tracing::warn!("connections of the node's processes are not served any more: {error:#}");
                }
                self.failed(CGROUP, "the cgroup", &error);
                return;
            }
        }
        self.attached(CGROUP);
    }

    /// Records that a device has been attached to.
    pub(super) fn attached(&mut self, ifindex: u32) {
        self.broken.remove(&ifindex);
        if self.lost.remove(&ifindex) {
            self.restored += 1;
        }
    }

    /// Records that a device could not be attached to, which matters here if it was attached to
    /// before.
    pub(super) fn failed(&mut self, ifindex: u32, name: &str, error: &anyhow::Error) {
        if self.lost.contains(&ifindex) {
            let message = format!("the programs of {name} were taken off and cannot be put back: {error:#}");
            if self.broken.insert(ifindex, message.clone()).is_none() {
                self.events.push(ObjectEvent::warning(Subject::Node, "ProgramsMissing", "Attach", message));
            }
        }
    }

    fn taken_off(&mut self, name: &str, places: &[&'static str]) {
        let message = format!(
            "somebody has taken programs off {name} ({}): they are attached again",
            places.join(", ")
        );
        self.events.push(ObjectEvent::warning(Subject::Node, "ProgramsTakenOff", "Attach", message));
    }

    /// Returns the Events of the Node since the last call.
    pub(super) fn take_events(&mut self) -> Vec<ObjectEvent> {
        std::mem::take(&mut self.events)
    }

    /// Whether a device lacks programs.
    pub(super) fn is_lost(&self, ifindex: u32) -> bool {
        self.lost.contains(&ifindex)
    }

    /// Forgets a device that no longer exists or is no longer wanted.
    pub(super) fn forget(&mut self, ifindex: u32) {
        self.lost.remove(&ifindex);
        self.broken.remove(&ifindex);
    }

    /// Returns the number of times that programs were attached again so far.
    pub(super) fn restored(&self) -> u64 {
        self.restored
    }

    /// Returns the devices and the cgroup whose programs cannot be attached again, with reasons;
    /// `None` if there are none.
    pub(super) fn broken(&self) -> Option<String> {
        (!self.broken.is_empty()).then(|| self.broken.values().cloned().collect::<Vec<_>>().join("; "))
    }
}

/// Returns the devices that lack a filter, on a kernel where TC programs have no links.
async fn lost_filters(path: &impl DevicePrograms, network: &Network, ours: (u16, u32)) -> Vec<Lost> {
    let mut lost = Vec::new();
    for (interface, _) in path.attached() {
        let filters: Result<Vec<Filter>> =
            network.details(interface.ifindex).await.map(|details| details.filters);
        // A removed device is handled elsewhere.
        let Ok(filters) = filters else { continue };
        let places = missing_filters(&filters, ours);
        if !places.is_empty() {
            lost.push(Lost { ifindex: interface.ifindex, name: interface.name.clone(), places });
        }
    }
    lost
}

/// Returns the directions that lack a filter of this priority and handle.
fn missing_filters(filters: &[Filter], (priority, handle): (u16, u32)) -> Vec<&'static str> {
    let has = |ingress: bool| {
        filters.iter().any(|filter| {
            filter.ingress == ingress
                && filter.kind == "bpf"
                && filter.info >> 16 == u32::from(priority)
                && filter.handle == handle
        })
    };
    let places = [(true, "TC ingress"), (false, "TC egress")];
    places.into_iter().filter(|(ingress, _)| !has(*ingress)).map(|(_, place)| place).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_by_priority_and_handle() {
        let filter = |ingress, info, handle| Filter {
            ingress,
            kind: "bpf".to_owned(),
            program: Some("tp_tc_ingress".to_owned()),
            info,
            handle,
        };
        let ours = (0x7470, 1);
        let both = [filter(true, 0x7470_0300, 1), filter(false, 0x7470_0300, 1)];
        assert!(missing_filters(&both, ours).is_empty());
        assert_eq!(missing_filters(&both[..1], ours), ["TC egress"]);
        let another = [filter(true, 0x0001_0300, 1), filter(false, 0x7470_0300, 2)];
        assert_eq!(missing_filters(&another, ours), ["TC ingress", "TC egress"]);
        assert_eq!(missing_filters(&[], ours), ["TC ingress", "TC egress"]);
    }
}
