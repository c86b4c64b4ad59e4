//! Changes of the network within the run loop: they become epochs, and devices are found, attached to and forgotten.

use anyhow::Result;
use tokio::time::Instant;

use super::{Controller, NET_DEBOUNCE, PacketPath};
use crate::{
    check,
    dataplane::{Attached, Changed, Interface},
    node::{self, Event, Events, Link, Neighbour},
    source::Source,
};

impl<P: PacketPath> Controller<P> {
    pub(super) async fn network_changed(
        &mut self,
        first: Event,
        events: &mut Events,
        source: &Source,
    ) -> Result<()> {
        let mut burst = vec![first];
        let end = Instant::now() + NET_DEBOUNCE;
        while let Ok(Some(event)) = tokio::time::timeout_at(end, events.next()).await {
            burst.push(event);
        }
        let (mut routes, mut neighbours, mut devices, mut addresses) = (false, false, false, false);
        for event in burst {
            match event {
                Event::Link => devices = true,
                Event::Address => (routes, devices, addresses) = (true, true, true),
                Event::Route => (routes, devices) = (true, self.settings.devices.is_empty() || devices),
                Event::Neighbour(neighbour) => neighbours |= self.neighbours.changed(neighbour),
                Event::NeighbourGone(link, address) => self.neighbours.gone(link, address),
                Event::Lost => (routes, devices, addresses) = (true, true, true),
            }
        }
        // First what costs packets, and cannot be done later: nobody tells of it twice.
        if routes {
            self.routes_changed = Some(Instant::now());
            self.dataplane.raise(Changed::Routes)?;
        } else if neighbours {
            self.dataplane.raise(Changed::Neighbours)?;
        }
        // Until they have been looked at; if that fails, the next maintenance tries again.
        self.needs_rescan |= devices;
        self.needs_write |= addresses;
        if self.needs_rescan || self.needs_write {
            self.rescan(source).await?;
        }
        Ok(())
    }

    /// Looks at addresses and devices again, and writes what follows.
    pub(super) async fn rescan(&mut self, source: &Source) -> Result<()> {
        self.refresh_network().await?;
        if self.find_devices(false).await? {
            self.dataplane.raise(Changed::Routes)?;
        }
        if self.needs_write && self.index.is_synced() {
            // Frontends on the node's own addresses may have come or gone.
            self.needs_write = self.write_maps(source).await;
        }
        Ok(())
    }

    pub(super) async fn refresh_network(&mut self) -> Result<()> {
        self.addresses = self.network.addresses().await?;
        Ok(())
    }

    /// Attaches to devices that came, forgets those that went. Returns whether routes over them may have changed.
    ///
    /// At start a device that cannot be attached to is an error; later it is logged, and the others go on.
    pub(super) async fn find_devices(&mut self, start: bool) -> Result<bool> {
        let links = self.network.links().await?;
        let routes = self.network.routes().await?;
        self.primary = self.index.node_addresses(&self.settings.node_name).to_vec();
        let (wanted, missing) =
            node::wanted(&self.settings.devices, &links, &self.addresses, &routes, &self.primary);
        self.needs_rescan = false;
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
            self.neighbours.forget(ifindex);
            tracing::warn!(device = name, "detached: the device is gone");
            changed = true;
        }
        for refusal in node::left_out(&self.settings.devices, &links, &self.addresses, &routes, &self.primary)
        {
            if self.left_out.insert(refusal.name.clone()) {
                tracing::warn!("{refusal}; what comes by it is not served");
            }
        }
        for link in wanted {
            let interface = self.interface(link);
            if self.dataplane.is_settled(&interface) {
                continue;
            }
            // A device that came back may be of another type than the one that was named.
            let fit = node::WithoutEthernet::refuse(link).map_err(anyhow::Error::from);
            match fit.and_then(|()| self.dataplane.attach(&interface)) {
                Ok(attached) => {
                    self.missing.remove(&link.name);
                    self.warned_of.remove(&link.index);
                    tracing::info!(device = link.name, mode = %attached, "attached");
                    if attached == Attached::XdpDriver
                        && let Some(lost) = check::lost_at_other_end(&link.name, link.index)
                    {
                        tracing::warn!("{}: {}", lost.found, lost.fix.unwrap_or_default());
                    }
                    changed = true;
                }
                Err(error) if start => return Err(error),
                Err(error) => {
                    if self.warned_of.insert(link.index) {
                        tracing::warn!(device = link.name, "not attached, trying again: {error:#}");
                    }
                    self.needs_rescan = true;
                }
            }
        }
        if start {
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
            mtu: link.mtu,
            running: link.running,
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
    pub(super) async fn compare_network(&mut self) -> Result<()> {
        if self.dataplane.compare_network(self.network.fingerprint().await?)? {
            tracing::debug!("routes are not those that the next hops were found by");
        }
        let hops = self.dataplane.next_hops()?;
        let hops = hops.iter().map(|hop| Neighbour {
            link: hop.ifindex,
            address: hop.gateway,
            mac: hop.mac,
            fixed: false,
        });
        if self.neighbours.learn(&self.network, hops).await? {
            self.dataplane.raise(Changed::Neighbours)?;
        }
        Ok(())
    }
}
