//! Periodic maintenance for changes without a notification (routes, detached programs, failed
//! writes), and their report by probes, metrics and Events.

use std::collections::BTreeSet;

use traffic_policy_cluster::source::Source;
use traffic_policy_dataplane::PacketPath;

use super::Controller;

/// Reason that probes report while `others_serve` holds.
const OTHERS_SERVE: &str = "programs of another layout version serve as its agent left them, until this version's can take their places";

impl<P: PacketPath> Controller<P> {
    /// Runs all steps. Each step beats: its requests to the kernel have 10 s each, and together may
    /// take longer than a probe waits for a beat.
    pub(super) async fn maintain(&mut self, source: &Source) {
        self.network.note_routes(&mut self.path, self.timing.maintenance).await;
        self.beat();
        self.network.look_for_programs(&mut self.path).await;
        self.beat();
        if self.path.has_others() {
            self.replace_others().await;
        }
        self.take_part();
        self.needs_write |= self.services.holds_in_vain();
        self.beat();
        if (self.network.devices.needs_rescan() || self.needs_write)
            && let Err(error) = self.rescan(source).await
        {
            self.network.devices.rescan_failed(&error);
        }
        self.follow_pods();
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

    /// Reports to probes whether all programs in place are this version's.
    pub(super) fn report_detached(&self) {
        let others = self.others_serve.then(|| OTHERS_SERVE.to_owned());
        self.health.set_detached(others.or_else(|| self.network.devices.attachments().broken()));
    }

    /// Reports detached programs, and whether they were attached again.
    pub(super) fn report_attachments(&mut self, source: &Source) {
        self.metrics.restored(self.network.devices.attachments().restored());
        self.report_detached();
        for event in self.network.devices.take_events() {
            source.events().post(event);
        }
    }
}
