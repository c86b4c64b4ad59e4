//! Manager of the kernel's neighbour entries: those of next hops are kept alive, and a changed MAC address is noticed.
//!
//! Packets that XDP sends do not pass the kernel's neighbour code, so an entry would go stale and never be probed again:
//! a gateway that changed its MAC address would stay unnoticed. A managed entry (NTF_EXT_MANAGED, Linux 5.16) is probed by
//! the kernel itself: <https://github.com/torvalds/linux/commit/7482e3841d520a368426ac196720601687e2dc47>

use std::{
    collections::{BTreeSet, HashMap},
    net::IpAddr,
};

use anyhow::{Context, Result};
use futures::TryStreamExt;
use netlink_packet_route::{
    AddressFamily,
    neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourExtFlags, NeighbourMessage, NeighbourState},
};

use super::{
    events::{self, Neighbour},
    network::Network,
};

/// Each managed neighbour is probed every few seconds; beyond this number the 60 s after which a hop is resolved again
/// have to do.
const MOST: usize = 512;

/// What is known of the neighbours.
#[derive(Debug, Default)]
pub struct NeighbourManager {
    known: HashMap<(u32, IpAddr), [u8; 6]>,
    managed: BTreeSet<(u32, IpAddr)>,
    /// Entries that are not to be touched: a managed one is no longer permanent.
    fixed: BTreeSet<(u32, IpAddr)>,
}

impl NeighbourManager {
    /// Takes note; whether the MAC address differs from the one known before.
    pub fn changed(&mut self, neighbour: Neighbour) -> bool {
        let Neighbour { link, address, mac, fixed } = neighbour;
        if fixed {
            self.fixed.insert((link, address));
        } else {
            self.fixed.remove(&(link, address));
        }
        self.known.insert((link, address), mac).is_some_and(|known| known != mac)
    }

    /// Learns all neighbours; whether one of them is another than `hops` say, or than known before.
    ///
    /// # Errors
    /// The kernel refuses the dump.
    pub async fn learn(
        &mut self,
        network: &Network,
        hops: impl IntoIterator<Item = Neighbour>,
    ) -> Result<bool> {
        for Neighbour { link, address, mac, .. } in hops {
            self.known.insert((link, address), mac);
        }
        let mut changed = false;
        for neighbour in list(network).await?.iter().filter_map(events::neighbour) {
            changed |= self.changed(neighbour);
        }
        Ok(changed)
    }

    /// Has the kernel keep the entries of these next hops.
    pub async fn keep(&mut self, network: &Network, hops: impl IntoIterator<Item = (u32, IpAddr)>) {
        let hops: BTreeSet<_> = hops.into_iter().take(MOST).collect();
        let news = hops.difference(&self.managed).filter(|hop| !self.fixed.contains(hop));
        let news: Vec<_> = news.copied().collect();
        for (link, address) in news {
            let mut request = network.handle.neighbours().add(link, address).replace();
            let message = request.message_mut();
            message.header.state = NeighbourState::None;
            message.attributes.push(NeighbourAttribute::ExtFlags(NeighbourExtFlags::Managed));
            match request.execute().await {
                Ok(()) => {
                    self.managed.insert((link, address));
                }
                // The device is gone: nothing to keep.
                Err(error) => tracing::debug!(link, %address, "the neighbour cannot be managed: {error}"),
            }
        }
        let unused: Vec<_> = self.managed.difference(&hops).copied().collect();
        for (link, address) in unused {
            // A managed entry would be probed for ever. Whoever needs the neighbour resolves it anew.
            delete(network, link, address).await;
            self.managed.remove(&(link, address));
        }
    }

    /// Takes note that an entry is gone: if its next hop is still in use, the kernel is asked to keep it again.
    pub fn gone(&mut self, link: u32, address: IpAddr) {
        self.managed.remove(&(link, address));
        self.fixed.remove(&(link, address));
    }

    /// Forgets what was asked of a device's neighbours: it is gone, or came back.
    pub fn forget(&mut self, link: u32) {
        self.managed.retain(|(managed, _)| *managed != link);
        self.fixed.retain(|(fixed, _)| *fixed != link);
    }
}

/// Deletes the managed entries on these devices: nobody needs their next hops any more, and the kernel would probe them
/// for ever.
///
/// # Errors
/// The kernel refuses the dump.
pub async fn release(network: &Network, links: &BTreeSet<u32>) -> Result<()> {
    for message in list(network).await? {
        let managed = message.attributes.iter().any(|attribute| {
            matches!(attribute, NeighbourAttribute::ExtFlags(flags) if flags.contains(NeighbourExtFlags::Managed))
        });
        let link = message.header.ifindex;
        if managed
            && links.contains(&link)
            && let Some(address) = events::address(&message)
        {
            delete(network, link, address).await;
        }
    }
    Ok(())
}

async fn list(network: &Network) -> Result<Vec<NeighbourMessage>> {
    let neighbours = network.handle.neighbours().get().execute();
    neighbours.try_collect().await.context("listing neighbours failed")
}

async fn delete(network: &Network, link: u32, address: IpAddr) {
    let mut entry = NeighbourMessage::default();
    entry.header.family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    entry.header.ifindex = link;
    entry.attributes.push(NeighbourAttribute::Destination(match address {
        IpAddr::V4(address) => NeighbourAddress::Inet(address),
        IpAddr::V6(address) => NeighbourAddress::Inet6(address),
    }));
    if let Err(error) = network.handle.neighbours().del(entry).execute().await {
        tracing::debug!(link, %address, "the neighbour is gone already: {error}");
    }
}
