//! Pairs of netkit devices (Linux 6.7), whose other end is in a pod.

use std::os::fd::AsRawFd;

use anyhow::{Context, Result};
use netlink_packet_route::link::{InfoData, InfoNetkit, NetkitMode};
use rtnetlink::{LinkMessageBuilder, LinkNetkit, LinkUnspec};

use super::Netlink;
use crate::netns::Namespace;

impl Netlink {
    /// Makes a pair with both ends up, the other one in the peer's namespace, as [`Netlink::veth`]
    /// does; without neighbours if not `resolved` (mode L3).
    ///
    /// # Errors
    /// The kernel has no such devices, or refuses.
    pub async fn netkit(
        &self,
        name: &str,
        resolved: bool,
        peer: &str,
        peer_namespace: &Namespace,
    ) -> Result<()> {
        let mode = if resolved { NetkitMode::L2 } else { NetkitMode::L3 };
        let there = LinkMessageBuilder::<LinkUnspec>::new().name(peer.to_owned());
        let there = there.setns_by_fd(peer_namespace.as_raw_fd()).build();
        let here = LinkMessageBuilder::<LinkNetkit>::new(name, peer, mode).up();
        let here =
            here.set_info_data(InfoData::Netkit(vec![InfoNetkit::Mode(mode), InfoNetkit::Peer(there)]));
        let what = || format!("making the netkit pair {name} – {} {peer}", peer_namespace.name());
        self.add(here.build()).await.with_context(what)?;
        peer_namespace.netlink(async |net| net.up(peer).await)
    }
}
