//! Maintenance, which the controller's loop does between changes of Services: what the kernel does
//! not notify of is looked for, and bursts of changes of the network are followed.

use std::collections::BTreeSet;

use anyhow::Result;
use traffic_policy_cluster::source::Source;
use traffic_policy_dataplane::PacketPath;

use super::Controller;

impl<P: PacketPath> Controller<P> {
    /// Replaces another layout version as soon as the maps are filled.
    pub(super) async fn replace_others(&mut self) {
        let Self { path, network, pods, services, health, other_layout, .. } = self;
        if services.synced_once()
            && let Err(error) = other_layout.conclude(path, network, pods, &services.primary(), health).await
        {
            tracing::warn!("the other layout version is not replaced yet, trying again: {error:#}");
        }
    }

    /// Looks for changes without a notification (routes, detached programs, failed writes), and
    /// reports them by probes, metrics and Events. Each step beats: its requests to the kernel have
    /// 10 s each, and together may take longer than a probe waits for a beat.
    pub(super) async fn maintain(&mut self, source: &Source) {
        self.network.note_routes(&mut self.path, self.timing.maintenance).await;
        self.beat();
        self.network.look_for_programs(&mut self.path).await;
        self.beat();
        if self.path.has_others() {
            self.replace_others().await;
        }
        self.part.take(&self.path, &self.network, &mut self.services, &mut self.ways);
        self.needs_write |= self.services.holds_in_vain();
        self.beat();
        if (self.network.devices.needs_rescan() || self.needs_write)
            && let Err(error) = self.rescan(source).await
        {
            self.network.devices.rescan_failed(&error);
        }
        self.pods.follow(&mut self.path);
        self.path.follow_divider();
        self.beat();
        let lacks_room = self.services.lacks_room() || self.path.opens_not_all().is_some();
        if self.services.look_at(source) || lacks_room {
            self.needs_write |= self.write_maps(source).await;
        }
        if self.services.has_health_failures() {
            self.services.update_health(source, Some(&BTreeSet::new())).await;
        }
        self.beat();
        self.report_attachments(source);
        self.report_status(source);
        self.adoption.look().await;
        self.network.keep_neighbours(&self.path).await;
        let (network, devices) = (self.network.netlink(), &self.settings.devices);
        let endpoints = || self.services.remote_endpoints();
        match self.unattached.look(network, &self.path, devices, endpoints).await {
            Ok(events) => events.into_iter().for_each(|event| source.events().post(event)),
            Err(error) => tracing::warn!("{error:#}"),
        }
    }

    /// Reports detached programs, and whether they were attached again.
    fn report_attachments(&mut self, source: &Source) {
        self.metrics.restored(self.network.devices.attachments().restored());
        self.other_layout.report(&self.network, &self.health);
        for event in self.network.devices.take_events() {
            source.events().post(event);
        }
    }

    /// Follows a burst of changes of the network.
    pub(super) async fn network_changed(&mut self, source: &Source) -> Result<()> {
        self.needs_write |= self.network.follow_burst(&mut self.path);
        let failed = std::mem::take(&mut self.network.failed);
        self.silence.neighbours_failed(failed, self.services.index());
        if self.network.devices.needs_rescan() || self.needs_write {
            self.rescan(source).await?;
        }
        Ok(())
    }

    /// Reads addresses and devices again, and writes the resulting changes.
    pub(super) async fn rescan(&mut self, source: &Source) -> Result<()> {
        self.network.rescan(&mut self.path, &self.services.primary()).await?;
        self.pods.follow(&mut self.path);
        self.path.follow_divider();
        if self.needs_write && self.services.has_objects() {
            // Frontends on the node's own addresses may have come or gone.
            self.needs_write = self.write_maps(source).await;
        }
        Ok(())
    }
}
