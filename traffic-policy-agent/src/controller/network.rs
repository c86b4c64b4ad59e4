//! The node's network in the run loop: its changes become epochs, and have its [devices][Devices]
//! looked at again.

use std::{collections::BTreeSet, net::IpAddr, time::Duration};

use anyhow::Result;
use tokio::time::Instant;
use traffic_policy_dataplane::{
    Changed, Mode, NextHops, PacketPath,
    node::{Address, Event, HopAddress, Neighbour, NeighbourManager, Network, RouteMtus},
};

use super::devices::{Devices, Surroundings};

/// Delay that collects the bursts in which network changes come.
const NET_DEBOUNCE: Duration = Duration::from_millis(10);

/// Addresses, routes, neighbours and devices of this node, as far as packets depend on them.
pub(super) struct NodeNetwork {
    network: Network,
    neighbours: NeighbourManager,
    /// Neighbours that the kernel has asked in vain, until they are taken from here.
    pub(super) failed: BTreeSet<HopAddress>,
    addresses: Vec<Address>,
    /// Whether some route names an MTU: any route change may then change an MTU.
    has_route_mtus: bool,
    /// Time of the last route change, if it came after the fingerprint was noted.
    routes_changed: Option<Instant>,
    /// Changes that are followed together, and the time at which they are.
    burst: Vec<Event>,
    burst_ends: Option<Instant>,
    pub(super) devices: Devices,
}

impl NodeNetwork {
    pub(super) fn new(network: Network, named: Vec<String>, mode: Mode) -> Self {
        Self {
            network,
            neighbours: NeighbourManager::default(),
            failed: BTreeSet::new(),
            addresses: Vec::new(),
            has_route_mtus: false,
            routes_changed: None,
            burst: Vec::new(),
            burst_ends: None,
            devices: Devices::new(named, mode),
        }
    }

    /// Returns the connection to the kernel's netlink.
    pub(super) fn netlink(&self) -> &Network {
        &self.network
    }

    /// Returns the addresses of this node's devices, as last read.
    pub(super) fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    /// [Looks for the programs][Devices::look_for_programs] on the devices.
    pub(super) async fn look_for_programs(&mut self, path: &mut impl PacketPath) {
        self.devices.look_for_programs(path, &self.network).await;
    }

    /// Notes a change. The first one of a burst says when all are [followed][Self::follow_burst]:
    /// the run loop has other work until then.
    pub(super) fn note(&mut self, event: Event) {
        self.burst.push(event);
        self.burst_ends.get_or_insert_with(|| Instant::now() + NET_DEBOUNCE);
    }

    /// Returns the time at which the present burst of changes is to be followed.
    pub(super) fn burst_ends(&self) -> Option<Instant> {
        self.burst_ends
    }

    /// Raises epochs for the changes that were noted. Returns whether the node's addresses changed.
    pub(super) fn follow_burst(&mut self, path: &mut impl NextHops) -> bool {
        self.burst_ends = None;
        let burst = std::mem::take(&mut self.burst);
        let (mut routes, mut neighbours, mut devices, mut addresses) = (false, false, false, false);
        for event in burst {
            match event {
                Event::Link => devices = true,
                Event::Address => (routes, devices, addresses) = (true, true, true),
                Event::Route => {
                    (routes, devices) = (true, devices || self.devices.are_found() || self.has_route_mtus);
                }
                Event::RouteMtu => (routes, devices) = (true, true),
                Event::Neighbour(neighbour) => neighbours |= self.neighbours.changed(neighbour),
                Event::NeighbourFailed(hop) => drop(self.failed.insert(hop)),
                Event::NeighbourGone(link, address) => neighbours |= self.neighbours.gone(link, address),
                Event::Lost => (routes, devices, addresses) = (true, true, true),
            }
        }
        if devices {
            self.devices.want_rescan();
        }
        // Raising the epoch costs packets and cannot be postponed: the kernel reports a change
        // once.
        if routes {
            self.routes_changed = Some(Instant::now());
            path.raise(Changed::Routes);
        } else if neighbours {
            path.raise(Changed::Neighbours);
        }
        addresses
    }

    /// Reads addresses and devices again. `primary` holds the addresses of the Node object.
    pub(super) async fn rescan(&mut self, path: &mut impl PacketPath, primary: &[IpAddr]) -> Result<()> {
        self.refresh().await?;
        if self.find_devices(path, primary, false).await? {
            path.raise(Changed::Routes);
        }
        Ok(())
    }

    pub(super) async fn refresh(&mut self) -> Result<()> {
        self.addresses = self.network.addresses().await?;
        Ok(())
    }

    /// Notes the fingerprint of routes once they have not changed for `settled`: a node may have
    /// many routes.
    pub(super) async fn note_routes(&mut self, path: &mut impl NextHops, settled: Duration) {
        if self.routes_changed.take_if(|changed| changed.elapsed() >= settled).is_some() {
            match self.network.fingerprint().await {
                Ok(fingerprint) => path.note_network(fingerprint),
                Err(error) => tracing::warn!("{error:#}"),
            }
        }
    }

    /// Keeps the neighbour entries resolved to which packets are sent.
    pub(super) async fn keep_neighbours(&mut self, path: &impl NextHops) {
        match path.next_hops() {
            Ok(hops) => {
                self.neighbours.keep(&self.network, hops.iter().map(|hop| (hop.ifindex, hop.gateway))).await;
            }
            Err(error) => tracing::warn!("{error:#}"),
        }
    }

    /// Reads devices and routes, and [attaches to them][Devices::follow].
    pub(super) async fn find_devices(
        &mut self,
        path: &mut impl PacketPath,
        primary: &[IpAddr],
        start: bool,
    ) -> Result<bool> {
        if path.is_replacing() {
            // The programs stay on the devices for now.
            self.devices.stay();
            return Ok(false);
        }
        let links = self.network.links().await?;
        let (routes, mtus) = self.network.routing().await?;
        let narrowed = self.follow_route_mtus(path, &mtus)?;
        self.neighbours.keep_those_of(|index| links.iter().any(|link| link.index == index));
        let seen = Surroundings { links: &links, routes: &routes, addresses: &self.addresses };
        Ok(self.devices.follow(path, &seen, primary, start)? || narrowed)
    }

    /// Passes the MTUs of routes to the packet path. Returns whether stored next hops may have
    /// others.
    fn follow_route_mtus(&mut self, path: &mut impl NextHops, mtus: &RouteMtus) -> Result<bool> {
        self.has_route_mtus = !mtus.is_empty();
        path.set_route_mtus(mtus)
    }

    /// Compares the network after a time without an agent: routes may lead elsewhere by now, and a
    /// next hop may have another MAC address.
    pub(super) async fn compare(&mut self, path: &mut impl NextHops) -> Result<()> {
        if path.compare_network(self.network.fingerprint().await?) {
            tracing::debug!("routes are not those that the next hops were found by");
        }
        let hops = path.next_hops()?;
        let hops = hops.iter().map(|hop| Neighbour {
            link: hop.ifindex,
            address: hop.gateway,
            mac: hop.mac,
            fixed: false,
        });
        if self.neighbours.learn(&self.network, hops).await? {
            path.raise(Changed::Neighbours);
        }
        Ok(())
    }
}
