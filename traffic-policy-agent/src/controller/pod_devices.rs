//! Pods' devices are followed as they come and go, for direct delivery and for what pods send to
//! Services; what is left out is logged with the reason.

use traffic_policy_dataplane::{Followed, LocalDelivery, PacketPath};

use crate::check;

/// The pods' devices of this node.
pub(super) struct PodDevices {
    delivery: LocalDelivery,
    followed: Followed,
}

impl PodDevices {
    pub(super) fn new(delivery: LocalDelivery) -> Self {
        Self { delivery, followed: Followed::default() }
    }

    /// Attaches to the pods' devices as they are now. A failure is logged; maintenance tries again.
    pub(super) fn follow(&mut self, path: &mut impl PacketPath) {
        if path.is_replacing() {
            return;
        }
        let direct = self.delivery == LocalDelivery::Direct;
        let obstacle = if direct { check::local_delivery_obstacle() } else { None };
        match path.follow_pods(obstacle) {
            Ok(followed) => {
                tell(&self.followed, &followed);
                self.followed = followed;
            }
            Err(error) => tracing::warn!("following the devices of pods failed: {error:#}"),
        }
    }
}

/// Logs what differs from the last time.
fn tell(before: &Followed, now: &Followed) {
    for device in now.direct.difference(&before.direct) {
        tracing::info!(device, "packets to this pod, and its replies, bypass the stack");
    }
    for (device, reason) in &now.by_stack {
        if before.by_stack.get(device) != Some(reason) {
            tracing::warn!(device, "the stack delivers this pod's packets: {reason}");
        }
    }
    for device in now.served.difference(&before.served) {
        tracing::info!(device, "what this pod sends to Services is translated here");
    }
    for (device, reason) in &now.unserved {
        if before.unserved.get(device) != Some(reason) {
            tracing::warn!(device, "what this pod sends to Services is not translated: {reason}");
        }
    }
}
