//! The replacement of another layout version's programs, once the maps of this one are filled.

use anyhow::{Result, bail};
use traffic_policy_dataplane::PacketPath;

use super::Controller;

impl<P: PacketPath> Controller<P> {
    /// Replaces another layout version as soon as the maps are filled.
    pub(super) async fn replace_others(&mut self) {
        if self.services.synced_once()
            && let Err(error) = self.replace().await
        {
            tracing::warn!("the other layout version is not replaced yet, trying again: {error:#}");
        }
    }

    /// Puts this version's programs into the places of another layout version's. Until all are in
    /// place, nothing of the other version is detached or freed.
    async fn replace(&mut self) -> Result<()> {
        self.path.adopt()?;
        self.network.rescan(&mut self.path, &self.services.primary()).await?;
        self.path.attach_cgroup()?;
        if self.network.devices.needs_rescan() {
            bail!("not all devices are attached to");
        }
        self.network.compare(&mut self.path).await?;
        // The other version's programs at pods' devices have nothing to jump to once its maps are
        // gone.
        self.follow_pods();
        self.others_serve = false;
        self.report_detached();
        self.path.forget_others()?;
        let replaced = self.path.drop_replaced()?;
        tracing::warn!(
            from = replaced.versions.join(", "),
            flows = replaced.flows,
            "the packet path of another layout version was replaced: its flows have ended, so connections from outside to \
             endpoints of other nodes, and those of local endpoints' clients, begin anew"
        );
        Ok(())
    }
}
