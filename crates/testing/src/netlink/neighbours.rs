//! Neighbours of a namespace, and the forwarding entries of its VXLAN devices.

use std::net::IpAddr;

use anyhow::{Context, Result};
use futures::TryStreamExt;
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourExtFlags, NeighbourFlags, NeighbourState,
};

use super::{Mac, Netlink, index};

impl Netlink {
    /// Adds or replaces a permanent neighbour.
    pub async fn neighbour(&self, device: &str, address: IpAddr, mac: Mac) -> Result<()> {
        let request = self.0.neighbours().add(index(device)?, address).link_layer_address(&mac).replace();
        request.execute().await.with_context(|| format!("neighbour {address} on {device}"))
    }

    /// Adds a forwarding entry to a VXLAN device: the host that has a MAC address.
    pub async fn forward_mac(&self, device: &str, mac: Mac, host: IpAddr) -> Result<()> {
        let request = self.0.neighbours().add_bridge(index(device)?, &mac).flags(NeighbourFlags::Own);
        request
            .destination(host)
            .execute()
            .await
            .with_context(|| format!("forwarding entry for {host} on {device}"))
    }

    /// Deletes all learned neighbours of the namespace; permanent ones stay.
    pub async fn flush_neighbours(&self) -> Result<()> {
        let neighbours: Vec<_> = self.0.neighbours().get().execute().try_collect().await?;
        for neighbour in neighbours {
            let learned =
                !matches!(neighbour.header.state, NeighbourState::Permanent | NeighbourState::Noarp);
            if learned {
                // The entry may have vanished meanwhile, which is just as well.
                self.0.neighbours().del(neighbour).execute().await.ok();
            }
        }
        Ok(())
    }

    /// Deletes a neighbour entry, also a permanent one, like `ip neigh del`.
    pub async fn delete_neighbour(&self, address: IpAddr) -> Result<()> {
        let neighbours: Vec<_> = self.0.neighbours().get().execute().try_collect().await?;
        let destination = NeighbourAttribute::Destination(wire(address));
        let entry = neighbours.into_iter().find(|neighbour| neighbour.attributes.contains(&destination));
        let entry = entry.with_context(|| format!("no neighbour {address}"))?;
        let deleted = self.0.neighbours().del(entry).execute().await;
        deleted.with_context(|| format!("deleting the neighbour {address}"))
    }

    /// The number of neighbours that the kernel itself keeps resolved (NTF_EXT_MANAGED).
    pub async fn managed_neighbours(&self) -> Result<usize> {
        let neighbours: Vec<_> = self.0.neighbours().get().execute().try_collect().await?;
        let is_managed = |attribute: &NeighbourAttribute| matches!(attribute, NeighbourAttribute::ExtFlags(flags) if flags.contains(NeighbourExtFlags::Managed));
        Ok(neighbours.iter().filter(|neighbour| neighbour.attributes.iter().any(is_managed)).count())
    }

    /// The MAC address that the kernel holds for a neighbour.
    pub async fn neighbour_mac(&self, address: IpAddr) -> Result<Option<Mac>> {
        let destination = NeighbourAttribute::Destination(wire(address));
        let neighbours: Vec<_> = self.0.neighbours().get().execute().try_collect().await?;
        let attributes = neighbours.into_iter().map(|neighbour| neighbour.attributes);
        let mut ours = attributes.filter(|attributes| attributes.contains(&destination));
        let mac = ours.next().into_iter().flatten().find_map(|attribute| match attribute {
            NeighbourAttribute::LinkLayerAddress(mac) => Mac::try_from(mac.as_slice()).ok(),
            _ => None,
        });
        Ok(mac)
    }
}

fn wire(address: IpAddr) -> NeighbourAddress {
    match address {
        IpAddr::V4(address) => NeighbourAddress::Inet(address),
        IpAddr::V6(address) => NeighbourAddress::Inet6(address),
    }
}
