//! The run loop: what a source says becomes map content, and the network's changes become epochs and devices.

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
    dataplane::{Changed, Config, Dataplane, Interface},
    health::{HealthzServer, ProxyHealth, ServiceHealth},
    model::{Index, NodeInput, ServicePortKey},
    node::{self, Address, Event, Events, Keeper, Link, Neighbour, Network},
    source::{Kubernetes, Manifests, ServiceEvent, Source},
};

/// Where objects come from.
#[derive(Clone, Debug)]
pub enum Origin {
    Manifests(Manifests),
    Kubernetes(Kubernetes),
}

/// `--node-port-addresses`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodePortAddresses {
    /// Every address of the node but loopback and link-local ones.
    All,
    /// The Node object's addresses.
    Primary,
    /// Addresses of the node in these ranges; a family without a range has all.
    Within(Vec<IpNet>),
}

impl std::str::FromStr for NodePortAddresses {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "all" => Ok(Self::All),
            "primary" => Ok(Self::Primary),
            ranges => ranges
                .split(',')
                .map(|range| {
                    range.trim().parse::<IpNet>().map_err(|_| {
                        format!("`{range}` is neither `all`, `primary` nor a CIDR such as 192.0.2.0/24")
                    })
                })
                .collect::<Result<_, _>>()
                .map(Self::Within),
        }
    }
}

impl NodePortAddresses {
    fn resolve(&self, addresses: &[Address], primary: &[IpAddr]) -> Vec<IpAddr> {
        let global = addresses.iter().filter(|address| address.global).map(|address| address.address);
        let mut resolved: Vec<IpAddr> = match self {
            Self::All => global.collect(),
            Self::Primary => global.filter(|address| primary.contains(address)).collect(),
            Self::Within(ranges) => global
                .filter(|address| {
                    let mut of_family =
                        ranges.iter().filter(|range| range.addr().is_ipv4() == address.is_ipv4());
                    let unrestricted = of_family.clone().next().is_none();
                    unrestricted || of_family.any(|range| range.contains(address))
                })
                .collect(),
        };
        resolved.sort_unstable();
        resolved.dedup();
        resolved
    }
}

/// All that `run` needs.
#[derive(Clone, Debug)]
pub struct Settings {
    pub node_name: String,
    /// `--device`; empty: found by routes and addresses.
    pub devices: Vec<String>,
    pub origin: Origin,
    pub node_port_addresses: NodePortAddresses,
    pub healthz: SocketAddr,
    pub dataplane: Config,
}

/// Changes that come within this time are written together; the first one is written at once.
const GATHER: Duration = Duration::from_millis(50);
const SWEEP: Duration = Duration::from_secs(2);
const UPKEEP: Duration = Duration::from_secs(5);
const POOL: Duration = Duration::from_secs(30);
/// A failed write is tried again after this time.
const RETRY: Duration = Duration::from_secs(5);
/// Network changes come in bursts.
const SETTLE: Duration = Duration::from_millis(10);

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
    let dataplane = Dataplane::open(settings.dataplane.clone())?;
    let mut control = Control {
        index: Index::default(),
        service_health: ServiceHealth::new(settings.node_name.clone(), health.clone()),
        health,
        dataplane,
        network,
        keeper: Keeper::default(),
        addresses: Vec::new(),
        missing: BTreeSet::new(),
        warned: BTreeSet::new(),
        pending: BTreeSet::new(),
        synced_once: false,
        unnoted: None,
        warned_of: BTreeSet::new(),
        look_again: false,
        primary: Vec::new(),
        settings,
    };
    match control.start().await {
        Ok(source) => control.follow(source, events).await,
        Err(error) => {
            control.dataplane.undo();
            Err(error)
        }
    }
}

struct Control {
    settings: Settings,
    index: Index,
    dataplane: Dataplane,
    network: Network,
    health: ProxyHealth,
    service_health: ServiceHealth,
    keeper: Keeper,
    addresses: Vec<Address>,
    /// Named devices that are not there at present.
    missing: BTreeSet<String>,
    /// Warnings that have been logged.
    warned: BTreeSet<String>,
    /// Service ports whose write failed.
    pending: BTreeSet<ServicePortKey>,
    synced_once: bool,
    /// When routes changed last, if that was after their fingerprint was noted.
    unnoted: Option<Instant>,
    /// Devices that could not be attached to, as has been logged.
    warned_of: BTreeSet<u32>,
    /// Devices could not be looked at, or one of them not be attached to.
    look_again: bool,
    /// Addresses of the Node object, as they were when devices were last looked for.
    primary: Vec<IpAddr>,
}

impl Control {
    async fn start(&mut self) -> Result<Source> {
        self.refresh_network().await?;
        self.find_devices(true).await?;
        self.compare_network().await?;
        Ok(match self.settings.origin.clone() {
            Origin::Manifests(manifests) => manifests.start(),
            Origin::Kubernetes(kubernetes) => kubernetes.start().await?,
        })
    }

    async fn follow(&mut self, mut source: Source, mut events: Events) -> Result<()> {
        let mut terminate = signal(SignalKind::terminate()).context("SIGTERM cannot be waited for")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("SIGINT cannot be waited for")?;
        let [mut sweep, mut upkeep, mut pool] = [SWEEP, UPKEEP, POOL].map(|period| {
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
                    let mut changed = batch.apply(&mut self.index);
                    if self.index.is_synced() && changed {
                        self.health.queued();
                    }
                    sleep_until(next_write).await;
                    while let Some(batch) = source.try_next() {
                        changed |= batch.apply(&mut self.index);
                    }
                    if changed {
                        retry = self.write(&source).await.then(|| Instant::now() + RETRY);
                        next_write = Instant::now() + GATHER;
                    }
                }
                event = events.next() => {
                    let Some(event) = event else { bail!("the kernel's network events have stopped") };
                    if let Err(error) = self.network_changed(event, &mut events, &source).await {
                        tracing::warn!("following a change of the network failed: {error:#}");
                        self.look_again = true;
                    }
                }
                () = sleep_until(retry_at), if retry.is_some() => {
                    retry = self.write(&source).await.then(|| Instant::now() + RETRY);
                }
                _ = sweep.tick() => {
                    if let Err(error) = self.dataplane.sweep() {
                        tracing::warn!("sweeping old flows failed: {error:#}");
                    }
                }
                _ = upkeep.tick() => self.upkeep(&source).await,
                _ = pool.tick() => {
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

    /// Brings the maps up to date, then the health ports. Returns whether it has to be tried again.
    async fn write(&mut self, source: &Source) -> bool {
        if !self.index.is_synced() {
            return false;
        }
        let primary = self.index.node_addresses(&self.settings.node_name).to_vec();
        let input = NodeInput {
            node_name: self.settings.node_name.clone(),
            node_port_addresses: self.settings.node_port_addresses.resolve(&self.addresses, &primary),
            ipv4: true,
            ipv6: true,
        };
        // Now that the Node's addresses are known, their devices are too.
        if self.settings.devices.is_empty()
            && primary != self.primary
            && let Err(error) = self.look_again().await
        {
            tracing::warn!("looking at the devices failed: {error:#}");
            self.look_again = true;
        }
        let mut changes = self.index.update(&input);
        changes.ports.append(&mut self.pending);
        let desired = self.index.desired();
        for warning in desired.warnings.difference(&self.warned) {
            tracing::warn!("{warning}");
        }
        self.warned.clone_from(&desired.warnings);
        let local = node::local(&self.addresses);
        match self.dataplane.sync(desired, &changes.ports, &local) {
            Ok(written) => {
                for key in &written.no_room {
                    tracing::warn!(service = %key.service, port = key.port, "the maps have no room for its endpoints; the old ones stay");
                }
                if !self.synced_once {
                    tracing::info!(services = desired.ports.len(), writes = written.elements, "first sync");
                } else if written.elements > 0 {
                    tracing::info!(changed = changes.ports.len(), writes = written.elements, "synced");
                }
                self.synced_once = true;
                self.health.set_node_eligible(desired.node_eligible);
                self.health.synced();
                self.update_health(source).await;
                false
            }
            Err(error) => {
                tracing::error!("writing the maps failed, trying again in {} s: {error:#}", RETRY.as_secs());
                self.pending = changes.ports;
                self.health.failed();
                true
            }
        }
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

    async fn upkeep(&mut self, source: &Source) {
        // Not while they keep changing: a node may have many.
        if self.unnoted.take_if(|changed| changed.elapsed() >= UPKEEP).is_some() {
            match self.network.fingerprint().await {
                Ok(fingerprint) => self.dataplane.note_network(fingerprint),
                Err(error) => tracing::warn!("{error:#}"),
            }
        }
        if self.look_again
            && let Err(error) = self.look_again().await
        {
            tracing::warn!("looking at the devices failed: {error:#}");
        }
        if self.service_health.has_failures() {
            self.update_health(source).await;
        }
        match self.dataplane.next_hops() {
            Ok(hops) => {
                self.keeper.keep(&self.network, hops.iter().map(|hop| (hop.ifindex, hop.gateway))).await;
            }
            Err(error) => tracing::warn!("{error:#}"),
        }
    }

    async fn network_changed(&mut self, first: Event, events: &mut Events, source: &Source) -> Result<()> {
        let mut burst = vec![first];
        let end = Instant::now() + SETTLE;
        while let Ok(Some(event)) = tokio::time::timeout_at(end, events.next()).await {
            burst.push(event);
        }
        let (mut routes, mut neighbours, mut devices, mut addresses) = (false, false, false, false);
        for event in burst {
            match event {
                Event::Link => devices = true,
                Event::Address => (routes, devices, addresses) = (true, true, true),
                Event::Route => (routes, devices) = (true, self.settings.devices.is_empty() || devices),
                Event::Neighbour(neighbour) => neighbours |= self.keeper.changed(neighbour),
                Event::NeighbourGone(link, address) => self.keeper.gone(link, address),
                Event::Lost => (routes, devices, addresses) = (true, true, true),
            }
        }
        if addresses || devices {
            self.refresh_network().await?;
        }
        if devices {
            routes |= self.find_devices(false).await?;
        }
        if routes {
            self.unnoted = Some(Instant::now());
            self.dataplane.raise(Changed::Routes)?;
        } else if neighbours {
            self.dataplane.raise(Changed::Neighbours)?;
        }
        if addresses && self.index.is_synced() {
            // Frontends on the node's own addresses may have come or gone.
            self.write(source).await;
        }
        Ok(())
    }

    async fn look_again(&mut self) -> Result<()> {
        self.refresh_network().await?;
        if self.find_devices(false).await? {
            self.dataplane.raise(Changed::Routes)?;
        }
        Ok(())
    }

    async fn refresh_network(&mut self) -> Result<()> {
        self.addresses = self.network.addresses().await?;
        Ok(())
    }

    /// Attaches to devices that came, forgets those that went. Returns whether routes over them may have changed.
    ///
    /// At start a device that cannot be attached to is an error; later it is logged, and the others go on.
    async fn find_devices(&mut self, start: bool) -> Result<bool> {
        let links = self.network.links().await?;
        let routes = self.network.routes().await?;
        self.primary = self.index.node_addresses(&self.settings.node_name).to_vec();
        let (wanted, missing) =
            node::wanted(&self.settings.devices, &links, &self.addresses, &routes, &self.primary);
        self.look_again = false;
        let mut changed = false;
        for name in &missing {
            if self.missing.insert(name.clone()) {
                tracing::warn!(device = name, "the device is gone; waiting until it comes back");
            }
        }
        let gone: Vec<(u32, String)> = self
            .dataplane
            .attached()
            .filter(|(attached, _)| !links.iter().any(|link| link.index == attached.ifindex))
            .map(|(attached, _)| (attached.ifindex, attached.name.clone()))
            .collect();
        for (ifindex, name) in gone {
            self.dataplane.detach(ifindex)?;
            self.keeper.forget(ifindex);
            tracing::warn!(device = name, "detached: the device is gone");
            changed = true;
        }
        for link in wanted {
            let interface = self.interface(link);
            if self.dataplane.attached().any(|(attached, _)| *attached == interface) {
                continue;
            }
            match self.dataplane.attach(&interface) {
                Ok(attached) => {
                    self.missing.remove(&link.name);
                    self.warned_of.remove(&link.index);
                    tracing::info!(device = link.name, mode = %attached, "attached");
                    changed = true;
                }
                Err(error) if start => return Err(error),
                Err(error) => {
                    if self.warned_of.insert(link.index) {
                        tracing::warn!(device = link.name, "not attached, trying again: {error:#}");
                    }
                    self.look_again = true;
                }
            }
        }
        if start {
            self.dataplane.forget_others()?;
            if self.dataplane.attached().next().is_none() {
                tracing::warn!("no device to attach to: name one with --device");
            }
            // What is attached now was so before, or is new: nothing stored can be wrong for it.
            return Ok(false);
        }
        Ok(changed)
    }

    fn interface(&self, link: &Link) -> Interface {
        Interface {
            name: link.name.clone(),
            ifindex: link.index,
            mac: link.mac,
            wire: link.wire,
            addresses: self
                .addresses
                .iter()
                .filter(|address| address.link == link.index && address.global)
                .map(|address| address.address)
                .collect(),
        }
    }

    /// After a time without an agent: routes may lead elsewhere by now, a next hop may have another MAC address.
    async fn compare_network(&mut self) -> Result<()> {
        if self.dataplane.compare_network(self.network.fingerprint().await?)? {
            tracing::debug!("routes are not those that the next hops were found by");
        }
        let hops = self.dataplane.next_hops()?;
        let hops = hops.iter().map(|hop| Neighbour { link: hop.ifindex, address: hop.gateway, mac: hop.mac });
        if self.keeper.learn(&self.network, hops).await? {
            self.dataplane.raise(Changed::Neighbours)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_port_addresses() {
        let address = |text: &str, global| Address { link: 2, address: text.parse().unwrap(), global };
        let all = [
            address("127.0.0.1", false),
            address("192.0.2.1", true),
            address("198.51.100.1", true),
            address("fe80::1", false),
            address("2001:db8::1", true),
        ];
        let resolve = |text: &str, primary: &[&str]| {
            let primary: Vec<IpAddr> = primary.iter().map(|text| text.parse().unwrap()).collect();
            let resolved = text.parse::<NodePortAddresses>().unwrap().resolve(&all, &primary);
            resolved.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(resolve("all", &[]), "192.0.2.1 198.51.100.1 2001:db8::1");
        assert_eq!(resolve("primary", &["198.51.100.1"]), "198.51.100.1");
        assert_eq!(resolve("192.0.2.0/24", &[]), "192.0.2.1 2001:db8::1", "a family without a range has all");
        assert_eq!(resolve("192.0.2.0/24,::/0", &[]), "192.0.2.1 2001:db8::1");
        assert!("everything".parse::<NodePortAddresses>().is_err());
    }
}
