//! The replacement of another layout version's programs, once the maps of this one are filled.

use std::net::IpAddr;

use anyhow::{Result, bail};
use traffic_policy_dataplane::PacketPath;

use super::{network::NodeNetwork, pod_devices::PodDevices};
use crate::health::ProxyHealth;

/// Reason that probes report while programs of another layout version serve.
const OTHERS_SERVE: &str = "programs of another layout version serve as its agent left them, until this version's can take their places";

/// The programs of another layout version, as far as there are any.
#[derive(Default)]
pub(super) struct OtherLayout {
    /// Whether they serve, on maps that are no longer updated.
    serves: bool,
}

impl OtherLayout {
    /// Notes that the other version's programs serve until the maps are filled.
    pub(super) fn begin(&mut self) {
        tracing::info!("programs of another layout version serve until this one's maps are filled");
        self.serves = true;
    }

    /// Reports to probes whether all programs in place are this version's.
    pub(super) fn report(&self, network: &NodeNetwork, health: &ProxyHealth) {
        let others = self.serves.then(|| OTHERS_SERVE.to_owned());
        health.set_detached(others.or_else(|| network.devices.attachments().broken()));
    }

    /// Puts this version's programs into the places of another layout version's. Until all are in
    /// place, nothing of the other version is detached or freed.
    pub(super) async fn conclude(
        &mut self,
        path: &mut impl PacketPath,
        network: &mut NodeNetwork,
        pods: &mut PodDevices,
        primary: &[IpAddr],
        health: &ProxyHealth,
    ) -> Result<()> {
        path.adopt()?;
        network.rescan(path, primary).await?;
        path.attach_cgroup()?;
        if network.devices.needs_rescan() {
            bail!("not all devices are attached to");
        }
        network.compare(path).await?;
        // The other version's programs at pods' devices have nothing to jump to once its maps are
        // gone.
        pods.follow(path);
        path.follow_divider();
        self.serves = false;
        self.report(network, health);
        path.forget_others()?;
        let replaced = path.drop_replaced()?;
        tracing::warn!(
            from = replaced.versions.join(", "),
            flows = replaced.flows,
            "the packet path of another layout version was replaced: its flows have ended, so connections from outside to \
             endpoints of other nodes, and those of local endpoints' clients, begin anew"
        );
        Ok(())
    }
}
