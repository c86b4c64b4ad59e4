//! The controller, `run`'s loop: when changes of Services become map content, and what else has its
//! turn between them.

mod adoption;
mod attachments;
mod devices;
mod direct_part;
mod direct_ways;
mod drains;
mod flight;
mod health_ports;
mod left_out;
mod listening;
mod maintenance;
mod network;
mod node_port_addresses;
mod pod_devices;
mod reload;
mod replacement;
mod service_sync;
mod settings;
mod silent_hops;
mod silent_nodes;
mod sockets;
mod stop;
mod sweep;
#[cfg(test)]
mod tests;
mod timing;
mod unattached;

use std::time::Duration;

use anyhow::{Result, bail};
use tokio::{
    task::{JoinHandle, JoinSet},
    time::{Instant, MissedTickBehavior, interval, sleep_until},
};
use traffic_policy_cluster::source::Source;
use traffic_policy_dataplane::{
    Changed, Dataplane, PacketPath,
    inspect::service_count_reader,
    node::{self, Events, Network},
};

use self::{
    adoption::Adoption, direct_part::Part, direct_ways::DirectWays, network::NodeNetwork,
    pod_devices::PodDevices, replacement::OtherLayout, service_sync::ServiceSync, silent_nodes::NodeWatch,
    stop::Stop, sweep::SweepPacer, timing::Timing, unattached::Unattached,
};
pub use self::{
    node_port_addresses::NodePortAddresses,
    reload::{Live, Reload, Reloads},
    settings::{Origin, Settings, Silence},
};
use crate::{
    check,
    health::ProxyHealth,
    metrics::{Metrics, MetricsServer},
    notice,
    systemd::Notifier,
};

/// Runs until a signal to stop (SIGTERM, SIGINT) arrives. Programs and maps stay.
///
/// # Errors
/// Whatever keeps the node from being set up, with the remedy. The node is then as it was.
pub async fn run(settings: Settings, reloads: Reloads, notifier: Notifier) -> Result<()> {
    // Signals are handled from the beginning: process 1 of a container would not receive them
    // otherwise, and a start that is aborted leaves the node as it was.
    let mut stop = Stop::listen()?;
    let (network, events) = Network::connect()?;
    let links = network.links().await?;
    node::check(&settings.devices, &links)?;
    if settings.dataplane.mode.is_xdp() {
        let mut named = links.iter().filter(|link| settings.devices.contains(&link.name));
        named.try_for_each(node::Refusal::of_xdp)?;
    }
    if settings.adopt {
        adoption::check_node()?;
    }
    let health = ProxyHealth::new(true, true);
    health.heed(settings.board.clone());
    let notices = notice::start(&settings.notices, &settings.board);
    let healthz = listening::healthz(settings.healthz, &health)?;
    let metrics = Metrics::new(settings.node_name.clone(), health.clone());
    let mut dataplane = Dataplane::open(settings.dataplane.clone())?;
    dataplane.report_address(healthz.address());
    settings.in_effect.set_sizes(dataplane.sizes());
    tracing::info!("configuration in effect: {}", settings.in_effect.line());
    for finding in check::forward_policy_drop() {
        tracing::warn!("{}: {}", finding.found, finding.fix.unwrap_or_default());
    }
    metrics.count_packets(dataplane.counter_reader());
    if let Some(pins) = settings.dataplane.pins.clone() {
        metrics.count_services(service_count_reader(pins));
    }
    let mut controller = Controller::new(settings, Timing::default(), dataplane, network, health, metrics);
    controller.notifier = notifier;
    controller.notices = notices;
    let started = tokio::select! {
        biased;
        () = stop.requested() => {
            controller.notifier.stopping();
            tracing::info!("stopping before the start was complete; the node is as it was");
            controller.path.undo();
            return Ok(());
        }
        started = controller.start() => started,
    };
    match started {
        Ok(source) => controller.follow(source, events, reloads, stop).await,
        Err(error) => {
            controller.path.undo();
            Err(error)
        }
    }
}

/// The loop's state: the packet path, and the services and network that change it.
struct Controller<P> {
    settings: Settings,
    timing: Timing,
    path: P,
    network: NodeNetwork,
    unattached: Unattached,
    pods: PodDevices,
    other_layout: OtherLayout,
    services: ServiceSync,
    pacer: SweepPacer,
    health: ProxyHealth,
    metrics: Metrics,
    /// The metrics server, which answers as long as this is kept.
    metrics_server: Option<MetricsServer>,
    /// The notifier of systemd; without effect until it is set.
    notifier: Notifier,
    /// The tasks that listen for news that this node is about to go.
    notices: JoinSet<()>,
    adoption: Adoption,
    part: Part,
    ways: DirectWays,
    silence: NodeWatch,
    /// Whether the node's addresses changed and the maps do not reflect that yet.
    needs_write: bool,
}

impl<P: PacketPath> Controller<P> {
    fn new(
        settings: Settings,
        timing: Timing,
        path: P,
        network: Network,
        health: ProxyHealth,
        metrics: Metrics,
    ) -> Self {
        Self {
            silence: NodeWatch::new(&settings, network.clone(), health.clone(), metrics.clone()),
            network: NodeNetwork::new(network, settings.devices.clone(), settings.dataplane.mode),
            unattached: Unattached::default(),
            pods: PodDevices::new(settings.dataplane.local_delivery),
            other_layout: OtherLayout::default(),
            services: ServiceSync::new(&settings, timing.retry, health.clone(), metrics.clone()),
            pacer: SweepPacer::new(),
            adoption: Adoption::new(settings.adopt),
            part: Part::new(&settings, health.clone()),
            ways: DirectWays::new(&settings),
            settings,
            timing,
            path,
            health,
            metrics,
            metrics_server: None,
            notifier: Notifier::default(),
            notices: JoinSet::new(),
            needs_write: false,
        }
    }

    async fn start(&mut self) -> Result<Source> {
        self.beat();
        if self.settings.adopt {
            self.path.begin_adopting();
        }
        self.services.keep_node_numbers(self.path.node_numbers());
        self.ways.resume(self.settings.dataplane.pins.as_deref(), &mut self.services);
        self.path.suspect_after(self.settings.silence.suspect_syns);
        let serve = |address| listening::metrics(address, &self.metrics, &self.settings.in_effect);
        self.metrics_server = self.settings.metrics.map(serve).transpose()?;
        self.network.refresh().await?;
        if self.path.is_replacing() {
            self.other_layout.begin();
            self.other_layout.report(&self.network, &self.health);
        } else {
            if self.network.find_devices(&mut self.path, &self.services.primary(), true).await? {
                self.path.raise(Changed::Routes);
            }
            self.pods.follow(&mut self.path);
            self.path.attach_cgroup()?;
            self.network.compare(&mut self.path).await?;
        }
        Ok(match self.settings.origin.clone() {
            Origin::Manifests(manifests) => manifests.start(),
            Origin::Kubernetes(kubernetes) => kubernetes.start().await?,
        })
    }

    async fn follow(
        &mut self,
        mut source: Source,
        mut events: Events,
        mut reloads: Reloads,
        mut stop: Stop,
    ) -> Result<()> {
        self.health.follow(source.status());
        self.metrics.follow(source.status());
        self.silence.follow(&source);
        let Timing { debounce, sweep, room, maintenance, snat_ports, retry: retry_after } = self.timing;
        let [mut sweep, mut room, mut maintenance, mut snat_ports] = [sweep, room, maintenance, snat_ports]
            .map(|period| {
                let mut ticks = interval(period);
                ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
                ticks.reset();
                ticks
            });
        let mut next_write = Instant::now();
        let mut waiting = false;
        let mut retry = None;
        let mut look: Option<JoinHandle<Result<Vec<u16>>>> = None;
        loop {
            self.beat();
            let follow_at = self.adoption.next_piece();
            let burst_ends = self.network.burst_ends();
            let retry_at = retry.unwrap_or_else(|| Instant::now() + Duration::from_secs(3600));
            tokio::select! {
                batch = source.next() => {
                    let Some(batch) = batch else { bail!("the source of Services has stopped unexpectedly") };
                    let mut changed = self.services.apply_batch(batch);
                    if self.services.has_objects() && changed {
                        self.health.queued();
                        self.metrics.queued();
                    }
                    while let Some(batch) = source.try_next() {
                        changed |= self.services.apply_batch(batch);
                    }
                    waiting |= changed;
                }
                () = sleep_until(next_write), if waiting => {
                    waiting = false;
                    retry = self.write(&source).await.then(|| Instant::now() + retry_after);
                    next_write = Instant::now() + debounce.max(self.path.pause());
                }
                event = events.next() => {
                    let Some(event) = event else { bail!("the kernel's network events have stopped") };
                    self.network.note(event);
                }
                () = sleep_until(burst_ends.unwrap_or_else(Instant::now)), if burst_ends.is_some() => {
                    if let Err(error) = self.network_changed(&source).await {
                        self.network.devices.rescan_failed(&error.context("following a change of the network"));
                        // Whether the addresses changed is unknown now.
                        self.needs_write = true;
                    }
                }
                () = sleep_until(retry_at), if retry.is_some() => {
                    retry = self.write(&source).await.then(|| Instant::now() + retry_after);
                }
                _ = sweep.tick() => self.begin_sweep(),
                _ = room.tick() => {
                    if self.path.found_no_room() {
                        self.begin_sweep();
                        sweep.reset();
                    }
                }
                () = sleep_until(self.pacer.next_piece()), if self.path.is_sweeping() => {
                    if self.pacer.sweep_on(&mut self.path) {
                        self.swept(&source);
                    }
                }
                _ = maintenance.tick() => self.maintain(&source).await,
                connections = self.adoption.read(), if self.adoption.is_reading() => {
                    self.adoption.follow(connections, &mut self.path);
                }
                () = sleep_until(follow_at), if self.adoption.is_following() => {
                    self.adoption.follow_on(&mut self.path);
                }
                _ = snat_ports.tick(), if look.is_none() => {
                    let range = self.path.snat_port_range();
                    // A node may have hundreds of thousands of sockets.
                    look = Some(tokio::task::spawn_blocking(move || range.ports()));
                }
                ports = async { look.as_mut()?.await.ok() }, if look.is_some() => {
                    look = None;
                    match ports {
                        Some(Ok(ports)) => self.path.use_snat_ports(ports),
                        Some(Err(error)) => tracing::warn!("{error:#}"),
                        None => {}
                    }
                }
                happening = self.silence.next(&mut self.path) => {
                    if self.silence.follow_up(happening, &mut self.path, &mut self.services, &source) {
                        waiting = false;
                        retry = self.write(&source).await.then(|| Instant::now() + retry_after);
                        next_write = Instant::now() + debounce.max(self.path.pause());
                    }
                }
                happening = self.ways.next() => {
                    waiting |= self.ways.follow_up(happening, &mut self.services);
                }
                reload = reloads.next() => {
                    if self.apply(&reload.live) {
                        waiting = false;
                        retry = self.write(&source).await.then(|| Instant::now() + retry_after);
                        next_write = Instant::now() + debounce.max(self.path.pause());
                    }
                    reload.done();
                }
                Some(_) = self.notices.join_next() => bail!("a source of --notice has stopped unexpectedly"),
                () = stop.requested() => break,
            }
        }
        self.notifier.stopping();
        tracing::info!("stopping; the packet path stays in place (`cleanup` removes it)");
        Ok(())
    }

    /// Signals to /livez and systemd's watchdog that the loop has come round, or is making progress
    /// on a long task.
    fn beat(&self) {
        self.health.beat();
        self.notifier.beat();
    }

    /// Reports the agent's state to systemd.
    fn report_status(&self, source: &Source) {
        let report = self.health.report();
        let wrong: Vec<_> = report.waiting_for.iter().chain(&report.left_out).map(String::as_str).collect();
        source.report(&wrong);
        match wrong.as_slice() {
            [] => self.notifier.status("the maps are in sync"),
            wrong => self.notifier.status(&wrong.join("; ")),
        }
    }

    /// Applies changed settings. Returns whether the maps are to be written.
    fn apply(&mut self, live: &Live) -> bool {
        self.path.set_idle_times(live.idle);
        self.services.set_node_port_addresses(&live.node_port_addresses)
    }

    /// Begins a periodic sweep.
    fn begin_sweep(&mut self) {
        self.services.end_sockets(&self.path);
        if let Err(error) = self.path.sweep() {
            tracing::warn!("{error:#}");
        }
    }

    /// Concludes a periodic sweep: that is often enough for any scrape.
    fn swept(&mut self, source: &Source) {
        if self.services.synced_once() {
            self.services.observe(&self.path, &source.events());
        }
    }

    /// Brings devices and maps up to date. Returns whether that failed.
    async fn write(&mut self, source: &Source) -> bool {
        // Now that the Node's addresses are known, their devices are known, too.
        if self.services.has_objects()
            && self.network.devices.depends_on(&self.services.primary())
            && let Err(error) = self.rescan(source).await
        {
            self.network.devices.rescan_failed(&error);
        }
        self.write_maps(source).await
    }

    /// Brings the maps up to date, then the health-check ports. Returns whether that failed.
    async fn write_maps(&mut self, source: &Source) -> bool {
        let was_ready = self.services.synced_once();
        self.part.resume(&self.path, &self.network, &mut self.services);
        let (health, notifier) = (&self.health, &self.notifier);
        let beat = || {
            health.beat();
            notifier.beat();
        };
        let mut failed = self.services.write(&mut self.path, self.network.addresses(), source, &beat).await;
        if self.services.synced_once() && !failed && self.adoption.adopt(&mut self.path, &beat).await {
            failed = self.services.write(&mut self.path, self.network.addresses(), source, &beat).await;
        }
        if !was_ready && self.services.synced_once() {
            self.notifier.ready();
            source.filled();
        }
        self.ways.endpoints_changed();
        self.part.take(&self.path, &self.network, &mut self.services, &mut self.ways);
        self.report_status(source);
        // Maintenance concludes a replacement that has begun: writes may come many times a second.
        if self.path.is_replacing() {
            self.replace_others().await;
        }
        failed
    }
}
