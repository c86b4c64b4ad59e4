//! A manager of the kernel's neighbour entries: it keeps those of next hops alive, and notices
//! changed MAC addresses.
//!
//! Packets that XDP sends bypass the kernel's neighbour code, so an entry would go stale and never
//! be probed again: a gateway's new MAC address would remain unnoticed. The kernel itself probes a
//! managed entry (NTF_EXT_MANAGED, Linux 5.16):
//! <https://github.com/torvalds/linux/commit/7482e3841d520a368426ac196720601687e2dc47>

use std::{
    collections::{BTreeSet, HashMap},
    net::IpAddr,
};

use anyhow::Result;
use futures::TryStreamExt;
use netlink_packet_route::{
    AddressFamily,
    neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourExtFlags, NeighbourMessage, NeighbourState},
};

use super::{
    events::{self, Neighbour},
    network::{Network, Unanswered, answered},
};

/// The most neighbours to manage: each of them is probed every few seconds. Beyond this number, the
/// 5 s after which a hop is resolved again must suffice.
const MOST: usize = 512;

/// The states of the neighbours.
#[derive(Debug, Default)]
pub struct NeighbourManager {
    known: HashMap<(u32, IpAddr), [u8; 6]>,
    managed: BTreeSet<(u32, IpAddr)>,
    /// The entries that must not be changed: an entry that is managed would no longer be permanent.
    fixed: BTreeSet<(u32, IpAddr)>,
    /// The entries that vanished while they were managed: they may return with another MAC address.
    lost: BTreeSet<(u32, IpAddr)>,
}

impl NeighbourManager {
    /// Records a neighbour; returns whether its MAC address differs from the one known before.
    pub fn changed(&mut self, neighbour: Neighbour) -> bool {
        let Neighbour { link, address, mac, fixed } = neighbour;
        if fixed {
            self.fixed.insert((link, address));
        } else {
            self.fixed.remove(&(link, address));
        }
        self.lost.remove(&(link, address));
        self.known.insert((link, address), mac).is_some_and(|known| known != mac)
    }

    /// Learns all neighbours; returns whether one of them differs from `hops`, or from what was
    /// known before.
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

    /// Makes the kernel maintain the entries of these next hops. It stops at the first request that
    /// the kernel does not answer: the next call continues, and the run loop does not wait for each
    /// of hundreds.
    pub async fn keep(&mut self, network: &Network, hops: impl IntoIterator<Item = (u32, IpAddr)>) {
        let mut hops: BTreeSet<_> = hops.into_iter().collect();
        if hops.len() > MOST {
            // Gateways are only queried in this case: a node may have many routes.
            let gateways = match network.gateways().await {
                Ok(gateways) => gateways,
                Err(error) => return tracing::warn!("{error:#}"),
            };
            hops = self.most_needed(&hops, &gateways);
        }
        self.forget_lost(&hops);
        let news = hops.difference(&self.managed).filter(|hop| !self.fixed.contains(hop));
        let news: Vec<_> = news.copied().collect();
        for (link, address) in news {
            let mut request = network.handle.neighbours().add(link, address).replace();
            let message = request.message_mut();
            message.header.state = NeighbourState::None;
            message.attributes.push(NeighbourAttribute::ExtFlags(NeighbourExtFlags::Managed));
            match answered("keeping a neighbour", async { Ok(request.execute().await?) }).await {
                Ok(()) => {
                    self.managed.insert((link, address));
                }
                Err(error) if error.is::<Unanswered>() => {
                    tracing::warn!("{error:#}");
                    return;
                }
                // The device is gone, so there is no entry to maintain.
                Err(error) => tracing::debug!(link, %address, "the neighbour cannot be managed: {error:#}"),
            }
        }
        let unused: Vec<_> = self.managed.difference(&hops).copied().collect();
        for (link, address) in unused {
            // A managed entry would be probed forever. If the neighbour is needed again, it is
            // resolved again.
            if let Err(error) = delete(network, link, address).await {
                tracing::warn!("{error}");
                return;
            }
            self.managed.remove(&(link, address));
        }
    }

    /// Selects the next hops whose entries are maintained: gateways first, through which whole
    /// networks of pods are reached. Each other one stands for a single neighbour. Entries that
    /// must not be changed cost nothing.
    fn most_needed(
        &self,
        hops: &BTreeSet<(u32, IpAddr)>,
        gateways: &BTreeSet<(u32, IpAddr)>,
    ) -> BTreeSet<(u32, IpAddr)> {
        let probed = hops.difference(&self.fixed);
        let (first, last): (Vec<_>, Vec<_>) = probed.partition(|hop| gateways.contains(hop));
        first.into_iter().chain(last).take(MOST).chain(hops.intersection(&self.fixed)).copied().collect()
    }

    /// Records that an entry is gone: if its next hop is still in use, the kernel is told to
    /// maintain it again. Returns whether it was deleted from outside: the kernel itself deletes
    /// neither managed nor permanent entries. Its MAC address must not be used any more.
    pub fn gone(&mut self, link: u32, address: IpAddr) -> bool {
        let entry = (link, address);
        let was_fixed = self.fixed.remove(&entry);
        let was_managed = self.managed.remove(&entry);
        if was_managed {
            self.lost.insert(entry);
        } else {
            self.known.remove(&entry);
        }
        was_managed || was_fixed
    }

    /// Forgets entries that vanished, did not return, and are no longer next hops.
    fn forget_lost(&mut self, hops: &BTreeSet<(u32, IpAddr)>) {
        for entry in std::mem::take(&mut self.lost) {
            if hops.contains(&entry) {
                self.lost.insert(entry);
            } else {
                self.known.remove(&entry);
            }
        }
    }

    /// Forgets the entries of all but these devices.
    pub fn keep_those_of(&mut self, is_there: impl Fn(u32) -> bool) {
        self.managed.retain(|(link, _)| is_there(*link));
        self.fixed.retain(|(link, _)| is_there(*link));
        self.known.retain(|(link, _), _| is_there(*link));
        self.lost.retain(|(link, _)| is_there(*link));
    }
}

/// Deletes the managed entries on these devices: their next hops are no longer needed, and the
/// kernel would probe them forever.
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
            delete(network, link, address).await?;
        }
    }
    Ok(())
}

async fn list(network: &Network) -> Result<Vec<NeighbourMessage>> {
    let list = async { Ok(network.handle.neighbours().get().execute().try_collect().await?) };
    answered("listing neighbours", list).await
}

async fn delete(network: &Network, link: u32, address: IpAddr) -> Result<(), Unanswered> {
    let mut entry = NeighbourMessage::default();
    entry.header.family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    entry.header.ifindex = link;
    entry.attributes.push(NeighbourAttribute::Destination(match address {
        IpAddr::V4(address) => NeighbourAddress::Inet(address),
        IpAddr::V6(address) => NeighbourAddress::Inet6(address),
    }));
    let request = network.handle.neighbours().del(entry);
    let answer = answered("deleting a neighbour", async { Ok(request.execute().await?) }).await;
    match answer.map_err(anyhow::Error::downcast::<Unanswered>) {
        Err(Ok(silence)) => return Err(silence),
        Err(Err(error)) => tracing::debug!(link, %address, "the neighbour is gone already: {error:#}"),
        Ok(()) => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn neighbour(number: u32, mac: u8) -> Neighbour {
        let address = std::net::Ipv4Addr::from(0x0a00_0000 + number).into();
        Neighbour { link: 2, address, mac: [2, 0, 0, 0, 0, mac], fixed: false }
    }

    /// Hundreds of requests, each with its deadline, would delay the run loop for an hour.
    #[tokio::test]
    async fn a_kernel_that_does_not_answer_is_asked_once() {
        // The connection is never polled, so no request is sent.
        let (_connection, handle, _) = rtnetlink::new_connection().unwrap();
        let network = Network { handle };
        let mut manager = NeighbourManager::default();
        let hops = (0..3).map(|number| (2, neighbour(number, 1).address));
        let kept = manager.keep(&network, hops);
        // A single deadline is 10 s.
        tokio::time::timeout(std::time::Duration::from_secs(15), kept).await.unwrap();
        assert!(manager.managed.is_empty());
    }

    /// Next hops are ordered by address: IPv6 after IPv4, and a gateway with the last address of
    /// its network after all others.
    #[test]
    fn gateways_are_kept_among_very_many_neighbours() {
        let gateways: BTreeSet<(u32, IpAddr)> =
            ["10.0.255.254", "fe80::1", "fd00::1"].map(|address| (2, address.parse().unwrap())).into();
        let others: BTreeSet<_> = (0..10_000).map(|number| (2, neighbour(number, 1).address)).collect();
        let hops = &others | &gateways;
        let mut manager = NeighbourManager::default();
        // In this control case, the order alone would select none of them.
        assert!(manager.most_needed(&hops, &BTreeSet::new()).is_disjoint(&gateways));
        let kept = manager.most_needed(&hops, &gateways);
        assert_eq!(kept.len(), MOST);
        assert!(gateways.is_subset(&kept), "{:?}", gateways.difference(&kept));
        // If there are more routes than that, no more than the maximum are kept.
        assert_eq!(manager.most_needed(&hops, &hops).len(), MOST);
        // Entries that are never probed take no other entry's place, and stay as they are.
        for number in 0..1000 {
            manager.changed(Neighbour { fixed: true, ..neighbour(number, 1) });
        }
        let kept = manager.most_needed(&hops, &gateways);
        assert_eq!(kept.len(), MOST + 1000);
        assert!(gateways.is_subset(&kept) && manager.fixed.is_subset(&kept));
    }

    #[test]
    fn what_is_known_shrinks_with_the_kernels_table() {
        let mut manager = NeighbourManager::default();
        for number in 0..1000 {
            manager.changed(neighbour(number, 1));
        }
        assert_eq!(manager.known.len(), 1000);
        for number in 0..1000 {
            assert!(!manager.gone(2, neighbour(number, 1).address), "the kernel did that");
        }
        assert_eq!(manager.known.len(), 0);
        manager.changed(neighbour(1, 1));
        manager.keep_those_of(|link| link != 2);
        assert_eq!(manager.known.len(), 0, "with its device");
    }

    /// A deletion with `ip neigh del` means that the entry was wrong.
    #[test]
    fn an_entry_that_somebody_deletes_is_a_change() {
        let mut manager = NeighbourManager::default();
        let fixed = Neighbour { fixed: true, ..neighbour(1, 1) };
        manager.changed(fixed);
        assert!(manager.gone(fixed.link, fixed.address));
        assert!(!manager.gone(fixed.link, fixed.address), "once");
        let managed = neighbour(2, 1);
        manager.changed(managed);
        manager.managed.insert((managed.link, managed.address));
        assert!(manager.gone(managed.link, managed.address));
    }

    #[test]
    fn a_next_hop_that_comes_back_as_another_is_noticed() {
        let mut manager = NeighbourManager::default();
        let hop = (2, neighbour(1, 1).address);
        manager.changed(neighbour(1, 1));
        manager.managed.insert(hop);
        manager.gone(hop.0, hop.1);
        manager.forget_lost(&BTreeSet::from([hop]));
        assert!(manager.changed(neighbour(1, 9)), "another MAC address");
        // An entry that is no longer needed is forgotten.
        manager.managed.insert(hop);
        manager.gone(hop.0, hop.1);
        manager.forget_lost(&BTreeSet::new());
        assert!(manager.known.is_empty() && manager.lost.is_empty());
    }
}
