//! The controller, `run`'s loop: what a source says becomes map content, and the network's changes become epochs and
//! devices.

mod gc;
mod network;
mod node_port_addresses;
mod packet_path;
mod sockets;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use ipnet::IpNet;
use tokio::{
    signal::unix::{SignalKind, signal},
    time::{Instant, MissedTickBehavior, interval, sleep_until},
};

use crate::{
    check,
    dataplane::{Config, Dataplane, release_memory},
    health::{HealthzServer, ProxyHealth, ServiceHealth},
    inspect::service_count_reader,
    metrics::{Metrics, MetricsServer, NoLocal, Observed},
    model::{Index, NodeInput, ServicePortKey, Warning},
    node::{self, Address, Events, NeighbourManager, Network},
    source::{Batch, Kubernetes, Manifests, ServiceEvent, Source},
};

pub use self::node_port_addresses::NodePortAddresses;
use self::packet_path::PacketPath;

/// Where objects come from.
#[derive(Clone, Debug)]
pub enum Origin {
    Manifests(Manifests),
    Kubernetes(Kubernetes),
}

/// All that `run` needs.
#[derive(Clone, Debug)]
pub struct Settings {
    pub node_name: String,
    /// `--device`; empty: found by routes and addresses.
    pub devices: Vec<String>,
    pub origin: Origin,
    pub node_port_addresses: NodePortAddresses,
    /// Ranges of cluster IPs beside those of ServiceCIDR objects.
    pub service_cidrs: BTreeSet<IpNet>,
    pub healthz: SocketAddr,
    /// `None`: no metrics.
    pub metrics: Option<SocketAddr>,
    pub dataplane: Config,
}

/// How often, and after which time.
#[derive(Clone, Copy, Debug)]
struct Timing {
    /// Changes that come within this time are written together; the first one is written at once.
    debounce: Duration,
    /// Between periodic sweeps.
    sweep: Duration,
    /// Between looks at what failed, at next hops and at the fingerprint of routes.
    maintenance: Duration,
    /// Between looks at the source ports that sockets hold.
    snat_ports: Duration,
    /// A failed write is tried again after this time.
    retry: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            debounce: Duration::from_millis(50),
            sweep: Duration::from_secs(2),
            maintenance: Duration::from_secs(5),
            snat_ports: Duration::from_secs(30),
            retry: Duration::from_secs(5),
        }
    }
}

/// Network changes come in bursts.
const NET_DEBOUNCE: Duration = Duration::from_millis(10);

/// Runs until told to stop (SIGTERM, SIGINT). Programs and maps stay.
///
/// # Errors
/// Whatever keeps the node from being set up: named, with what to do about it. The node is then as it was.
pub async fn run(settings: Settings) -> Result<()> {
    let (network, events) = Network::connect()?;
    node::check(&settings.devices, &network.links().await?)?;
    let health = ProxyHealth::new(true, true);
    let healthz = HealthzServer::start(settings.healthz, health.clone()).with_context(|| {
        format!(
            "{} cannot be listened on (is another proxy running here?): choose another with --healthz-address",
            settings.healthz
        )
    })?;
    tracing::info!(address = %healthz.address(), "answering /healthz and /livez");
    let metrics = Metrics::new(settings.node_name.clone(), health.clone());
    let mut dataplane = Dataplane::open(settings.dataplane.clone())?;
    dataplane.report_address(healthz.address());
    for finding in check::forward_policy_drop() {
        tracing::warn!("{}: {}", finding.found, finding.fix.unwrap_or_default());
    }
    metrics.count_packets(dataplane.counter_reader());
    if let Some(pins) = settings.dataplane.pins.clone() {
        metrics.count_services(service_count_reader(pins));
    }
    let mut controller = Controller::new(settings, dataplane, network, health, metrics);
    match controller.start().await {
        Ok(source) => controller.follow(source, events).await,
        Err(error) => {
            controller.dataplane.undo();
            Err(error)
        }
    }
}

fn serve_metrics(address: SocketAddr, metrics: &Metrics) -> Result<MetricsServer> {
    let server = MetricsServer::start(address, metrics.clone()).with_context(|| {
        format!(
            "{address} cannot be listened on (is another proxy running here?): choose another with \
             --metrics-address, or `none`"
        )
    })?;
    tracing::info!(address = %server.address(), "answering /metrics and /proxyMode");
    Ok(server)
}

struct Controller<P> {
    settings: Settings,
    timing: Timing,
    index: Index,
    dataplane: P,
    network: Network,
    health: ProxyHealth,
    metrics: Metrics,
    /// Answers as long as it is kept.
    metrics_server: Option<MetricsServer>,
    service_health: ServiceHealth,
    neighbours: NeighbourManager,
    addresses: Vec<Address>,
    /// Named devices that are not there at present.
    missing: BTreeSet<String>,
    /// Warnings that have been logged.
    warned: BTreeSet<Warning>,
    /// Service ports whose write failed.
    pending: BTreeSet<ServicePortKey>,
    /// How many of `pending` are there because the last write of all failed, not for want of room.
    failed: usize,
    synced_once: bool,
    /// When routes changed last, if that was after their fingerprint was noted.
    routes_changed: Option<Instant>,
    /// Devices that could not be attached to, as has been logged.
    warned_of: BTreeSet<u32>,
    /// Devices without Ethernet header that were told of, by name.
    left_out: BTreeSet<String>,
    /// Devices could not be looked at, or one of them not be attached to.
    needs_rescan: bool,
    /// The node's addresses changed, and the maps do not say so yet.
    needs_write: bool,
    /// Addresses of the Node object, as they were when devices were last looked for.
    primary: Vec<IpAddr>,
    /// When sweeping goes on, if there is something to be swept.
    next_piece: Instant,
}

impl<P: PacketPath> Controller<P> {
    fn new(
        settings: Settings,
        dataplane: P,
        network: Network,
        health: ProxyHealth,
        metrics: Metrics,
    ) -> Self {
        Self {
            timing: Timing::default(),
            index: Index::default(),
            service_health: ServiceHealth::new(settings.node_name.clone(), health.clone()),
            health,
            metrics,
            metrics_server: None,
            dataplane,
            network,
            neighbours: NeighbourManager::default(),
            addresses: Vec::new(),
            missing: BTreeSet::new(),
            warned: BTreeSet::new(),
            pending: BTreeSet::new(),
            failed: 0,
            synced_once: false,
            routes_changed: None,
            warned_of: BTreeSet::new(),
            left_out: BTreeSet::new(),
            needs_rescan: false,
            needs_write: false,
            primary: Vec::new(),
            next_piece: Instant::now(),
            settings,
        }
    }

    async fn start(&mut self) -> Result<Source> {
        let metrics = &self.metrics;
        self.metrics_server =
            self.settings.metrics.map(|address| serve_metrics(address, metrics)).transpose()?;
        self.refresh_network().await?;
        self.find_devices(true).await?;
        self.dataplane.attach_cgroup()?;
        self.compare_network().await?;
        Ok(match self.settings.origin.clone() {
            Origin::Manifests(manifests) => manifests.start(),
            Origin::Kubernetes(kubernetes) => kubernetes.start().await?,
        })
    }

    async fn follow(&mut self, mut source: Source, mut events: Events) -> Result<()> {
        self.health.follow(source.status());
        self.metrics.follow(source.status());
        let mut terminate = signal(SignalKind::terminate()).context("SIGTERM cannot be waited for")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("SIGINT cannot be waited for")?;
        let Timing { debounce, sweep, maintenance, snat_ports, retry: retry_after } = self.timing;
        let [mut sweep, mut maintenance, mut snat_ports] = [sweep, maintenance, snat_ports].map(|period| {
            let mut ticks = interval(period);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            ticks.reset();
            ticks
        });
        let mut next_write = Instant::now();
        let mut retry = None;
        loop {
            let retry_at = retry.unwrap_or_else(|| Instant::now() + Duration::from_secs(3600));
            tokio::select! {
                batch = source.next() => {
                    let Some(batch) = batch else { bail!("the source of Services has stopped unexpectedly") };
                    let mut changed = self.apply_batch(batch);
                    if self.index.is_synced() && changed {
                        self.health.queued();
                        self.metrics.queued();
                    }
                    self.sweep_until(next_write).await;
                    while let Some(batch) = source.try_next() {
                        changed |= self.apply_batch(batch);
                    }
                    if changed {
                        retry = self.write(&source).await.then(|| Instant::now() + retry_after);
                        next_write = Instant::now() + debounce;
                    }
                }
                event = events.next() => {
                    let Some(event) = event else { bail!("the kernel's network events have stopped") };
                    if let Err(error) = self.network_changed(event, &mut events, &source).await {
                        tracing::warn!("following a change of the network failed: {error:#}");
                        self.needs_rescan = true;
                    }
                }
                () = sleep_until(retry_at), if retry.is_some() => {
                    retry = self.write(&source).await.then(|| Instant::now() + retry_after);
                }
                _ = sweep.tick() => {
                    self.end_sockets();
                    if let Err(error) = self.dataplane.sweep() {
                        tracing::warn!("{error:#}");
                    }
                }
                () = sleep_until(self.next_piece), if self.dataplane.is_sweeping() => self.sweep_on(),
                _ = maintenance.tick() => self.maintain(&source).await,
                _ = snat_ports.tick() => {
                    if let Err(error) = self.dataplane.refresh_pool() {
                        tracing::warn!("{error:#}");
                    }
                }
                _ = terminate.recv() => break,
                _ = interrupt.recv() => break,
            }
        }
        tracing::info!("stopping; the packet path stays in place (`cleanup` removes it)");
        Ok(())
    }

    /// Brings devices and maps up to date. Returns whether it has to be tried again.
    async fn write(&mut self, source: &Source) -> bool {
        // Now that the Node's addresses are known, their devices are too.
        let primary = self.index.node_addresses(&self.settings.node_name);
        if self.index.is_synced()
            && self.settings.devices.is_empty()
            && primary != self.primary
            && let Err(error) = self.rescan(source).await
        {
            tracing::warn!("looking at the devices failed: {error:#}");
            self.needs_rescan = true;
        }
        self.write_maps(source).await
    }

    /// Brings the maps up to date, then the health ports. Returns whether it has to be tried again.
    async fn write_maps(&mut self, source: &Source) -> bool {
        if !self.index.is_synced() {
            return false;
        }
        let start = Instant::now();
        let primary = self.index.node_addresses(&self.settings.node_name).to_vec();
        self.describe_node(&primary);
        let chosen = &self.settings.node_port_addresses;
        let input = NodeInput {
            node_name: self.settings.node_name.clone(),
            node_port_addresses: chosen.resolve(&self.addresses, &primary),
            loopback_ipv4: chosen.loopback(false),
            loopback_ipv6: chosen.loopback(true),
            service_cidrs: self.settings.service_cidrs.clone(),
            ipv4: true,
            ipv6: true,
        };
        let mut changes = self.index.update(&input);
        changes.ports.append(&mut self.pending);
        let desired = self.index.desired();
        let mut warnings = desired.warnings.clone();
        let missing = chosen.missing(&self.settings.node_name, &primary);
        warnings.extend(missing.map(|text| Warning { service: None, text }));
        report_warnings(&warnings, &self.warned, source);
        self.warned = warnings;
        let local = node::local(&self.addresses);
        let full = self.dataplane.compares_all();
        let result = self.dataplane.sync(desired, &changes.ports, &local);
        match &result {
            Ok(_) => self.metrics.synced(start.elapsed(), full),
            Err(_) => self.metrics.failed(start.elapsed(), full),
        }
        match result {
            Ok(written) => {
                self.end_sockets();
                self.failed = 0;
                for key in &written.no_room {
                    tracing::warn!(service = %key.service, port = key.port, "the maps have no room for its endpoints; the old ones stay, trying again");
                }
                let again = !written.no_room.is_empty();
                self.pending.extend(written.no_room);
                if !self.synced_once {
                    tracing::info!(services = desired.ports.len(), writes = written.elements, "first sync");
                } else if written.elements > 0 {
                    tracing::info!(changed = changes.ports.len(), writes = written.elements, "synced");
                }
                if !self.synced_once
                    && let Err(error) = self.dataplane.forget_others()
                {
                    // They go on as they did; the next start tries again.
                    tracing::warn!("devices of an earlier run were not forgotten: {error:#}");
                }
                let first = !std::mem::replace(&mut self.synced_once, true);
                self.health.set_node_eligible(desired.node_eligible);
                self.health.synced();
                if first {
                    self.observe();
                }
                self.update_health(source).await;
                if first {
                    release_memory();
                }
                again
            }
            Err(error) => {
                tracing::error!(
                    "writing the maps failed, trying again in {} s: {error:#}",
                    self.timing.retry.as_secs()
                );
                self.failed = changes.ports.len();
                self.pending = changes.ports;
                self.health.explain(format!("{error:#}"));
                self.health.failed();
                true
            }
        }
    }

    /// Puts a batch into the index; whether anything changed that may have to be written.
    fn apply_batch(&mut self, batch: Batch) -> bool {
        self.metrics.arriving(&batch, &self.index);
        batch.apply(&mut self.index)
    }

    /// Leaves word for scrapes: after each sweep, as that is often enough for any of them, and known to end soon.
    fn observe(&self) {
        let desired = self.index.desired();
        let of_family = |ipv6| desired.ports.keys().filter(|key| key.ipv6 == ipv6).count();
        let attached = self.dataplane.attached();
        self.metrics.observed(Observed {
            attached: attached.map(|(interface, mode)| (interface.name.clone(), mode)).collect(),
            levels: self.dataplane.levels(),
            service_ports: [of_family(false), of_family(true)],
            no_local: NoLocal::count(desired),
            node_eligible: desired.node_eligible,
            warnings: self.index.warnings().map(|(name, count)| (name.clone(), count)).collect(),
            no_room: self.pending.len() - self.failed,
            failed: self.failed,
            no_frontend: desired.ports.values().filter(|port| port.frontends.is_empty()).count(),
        });
    }

    async fn update_health(&mut self, source: &Source) {
        let failures = self.service_health.update(&self.index.desired().health).await;
        for failure in failures {
            source.events().post(ServiceEvent {
                service: failure.service.clone(),
                reason: "FailedToStartServiceHealthcheck".to_owned(),
                action: "Listen".to_owned(),
                message: failure.message(&self.settings.node_name),
            });
        }
    }

    async fn maintain(&mut self, source: &Source) {
        // Not while they keep changing: a node may have many.
        if self.routes_changed.take_if(|changed| changed.elapsed() >= self.timing.maintenance).is_some() {
            match self.network.fingerprint().await {
                Ok(fingerprint) => self.dataplane.note_network(fingerprint),
                Err(error) => tracing::warn!("{error:#}"),
            }
        }
        if (self.needs_rescan || self.needs_write)
            && let Err(error) = self.rescan(source).await
        {
            tracing::warn!("looking at the devices failed: {error:#}");
            self.needs_rescan = true;
        }
        if self.service_health.has_failures() {
            self.update_health(source).await;
        }
        match self.dataplane.next_hops() {
            Ok(hops) => {
                self.neighbours.keep(&self.network, hops.iter().map(|hop| (hop.ifindex, hop.gateway))).await;
            }
            Err(error) => tracing::warn!("{error:#}"),
        }
    }
}

/// Logs what has not been reported yet, and posts an Event where a Service is concerned.
fn report_warnings(warnings: &BTreeSet<Warning>, reported: &BTreeSet<Warning>, source: &Source) {
    for warning in warnings.difference(reported) {
        tracing::warn!("{warning}");
        if let Some(service) = &warning.service {
            source.events().post(ServiceEvent {
                service: service.clone(),
                reason: "Misconfigured".to_owned(),
                action: "Program".to_owned(),
                message: warning.text.clone(),
            });
        }
    }
}
