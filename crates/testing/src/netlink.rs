//! The part of rtnetlink that a lab needs: devices and addresses of one namespace; its routes and
//! neighbours in files of their own.

mod multipath;
mod neighbours;
mod netkit;
mod routes;

use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsRawFd, RawFd};

use anyhow::{Context, Result};
use futures::TryStreamExt;
use netlink_packet_route::address::{AddressAttribute, AddressFlags, AddressHeaderFlags, CacheInfo};
use netlink_packet_route::link::{
    InfoBridge, InfoData, InfoKind, InfoVeth, LinkAttribute, LinkFlags, LinkInfo, LinkMessage, LinkXdp, State,
};
use netlink_packet_route::tc::{TcAttribute, TcMessage};
use nix::net::if_::{if_nameindex, if_nametoindex};
use rtnetlink::{
    Handle, LinkBridge, LinkBridgePort, LinkDummy, LinkMessageBuilder, LinkUnspec, LinkVeth, LinkVxlan,
    new_connection,
};

use crate::netns::Namespace;

pub type Mac = [u8; 6];

/// One end of a veth pair to be made.
#[derive(Clone, Debug, Default)]
pub struct VethEnd<'a> {
    pub name: &'a str,
    /// The MAC address; a random one if `None`.
    pub mac: Option<Mac>,
    pub mtu: Option<u32>,
}

/// A netlink connection of the namespace in which it was made.
#[derive(Clone, Debug)]
pub struct Netlink(Handle);

impl Namespace {
    /// Runs `work` inside the namespace with a netlink connection.
    pub fn netlink<T: Send>(&self, work: impl AsyncFnOnce(Netlink) -> Result<T> + Send) -> Result<T> {
        self.block_on(async || {
            let (connection, handle, _) = new_connection()?;
            tokio::spawn(connection);
            work(Netlink(handle)).await
        })
        .with_context(|| format!("configuring {}", self.name()))
    }
}

impl Netlink {
    /// Makes a veth pair with both ends up: one end here (a port of `bridge` if given), the other
    /// created directly in the peer's namespace, so that nothing ever appears in a third one.
    pub async fn veth(
        &self,
        end: &VethEnd<'_>,
        bridge: Option<&str>,
        peer: &VethEnd<'_>,
        peer_namespace: &Namespace,
    ) -> Result<()> {
        let there =
            peer.message(LinkMessageBuilder::<LinkUnspec>::new()).setns_by_fd(peer_namespace.as_raw_fd());
        let mut here = end.message(LinkMessageBuilder::<LinkVeth>::new(end.name, peer.name)).up();
        if let Some(bridge) = bridge {
            here = here.controller(index(bridge)?);
        }
        let here = here.set_info_data(InfoData::Veth(InfoVeth::Peer(there.build())));
        let what = || format!("making the veth pair {} – {} {}", end.name, peer_namespace.name(), peer.name);
        self.add(here.build()).await.with_context(what)?;
        // The kernel creates the peer first, and a veth without its other end cannot be up.
        peer_namespace.netlink(async |net| net.up(peer.name).await)
    }

    /// Makes a bridge that forwards at once and floods frames to unknown destinations.
    pub async fn bridge(&self, name: &str, mac: Mac, mtu: u32) -> Result<()> {
        // Without a querier on the network, snooping would only delay neighbour discovery.
        let bridge = LinkBridge::new(name).append_info_data(InfoBridge::MulticastSnooping(false));
        let bridge = bridge.append_info_data(InfoBridge::ForwardDelay(0)).address(mac.to_vec()).mtu(mtu);
        self.add(bridge.build()).await.with_context(|| format!("making the bridge {name}"))
    }

    /// Makes a VXLAN device with VNI 1 on flannel's port, with learning off.
    pub async fn vxlan(&self, name: &str, mac: Mac, local: Ipv4Addr, device: &str, mtu: u32) -> Result<()> {
        let vxlan = LinkVxlan::new(name, 1).dev(index(device)?).local(local).port(8472).learning(false);
        let vxlan = vxlan.address(mac.to_vec()).mtu(mtu).up();
        self.add(vxlan.build()).await.with_context(|| format!("making the vxlan device {name}"))
    }

    /// Returns the name of a veth, or of a bridge with ports, that is up but does not forward yet.
    /// Querying each device alone makes the kernel notice a new carrier now, which it may otherwise
    /// do a second later (linkwatch).
    pub async fn unsettled(&self) -> Result<Option<String>> {
        let mut waiting = Vec::new();
        let mut bridges_with_ports = Vec::new();
        for device in &if_nameindex()? {
            let Some(link) = self.0.link().get().match_index(device.index()).execute().try_next().await?
            else {
                continue;
            };
            let is_kind = |wanted: InfoKind| {
                let wanted = LinkInfo::Kind(wanted);
                let mut attributes = link.attributes.iter();
                attributes
                    .any(|found| matches!(found, LinkAttribute::LinkInfo(info) if info.contains(&wanted)))
            };
            let (is_veth, is_bridge) = (is_kind(InfoKind::Veth), is_kind(InfoKind::Bridge));
            let is_on = link.header.flags.contains(LinkFlags::Up);
            let forwards = link.attributes.contains(&LinkAttribute::OperState(State::Up));
            if is_on && !forwards && (is_veth || is_bridge) {
                waiting.push((device.index(), is_veth, device.name().to_string_lossy().into_owned()));
            }
            bridges_with_ports.extend(link.attributes.iter().filter_map(|attribute| match attribute {
                LinkAttribute::Controller(bridge) => Some(*bridge),
                _ => None,
            }));
        }
        let mut waiting = waiting.into_iter();
        let waits = waiting.find(|(index, is_veth, _)| *is_veth || bridges_with_ports.contains(index));
        Ok(waits.map(|(_, _, name)| name))
    }

    /// Makes a dummy device.
    pub async fn dummy(&self, name: &str) -> Result<()> {
        self.add(LinkDummy::new(name).up().build())
            .await
            .with_context(|| format!("making the dummy device {name}"))
    }

    pub async fn up(&self, device: &str) -> Result<()> {
        self.change(device, LinkMessageBuilder::up).await
    }

    pub async fn down(&self, device: &str) -> Result<()> {
        self.change(device, LinkMessageBuilder::down).await
    }

    pub async fn set_mac(&self, device: &str, mac: Mac) -> Result<()> {
        self.change(device, |link| link.address(mac.to_vec())).await
    }

    pub async fn set_mtu(&self, device: &str, mtu: u32) -> Result<()> {
        self.change(device, |link| link.mtu(mtu)).await
    }

    /// Allows a device to send and merge aggregates of up to `bytes` bytes (BIG TCP).
    pub async fn allow_aggregates(&self, device: &str, bytes: u32) -> Result<()> {
        let (gso, gro) = (LinkAttribute::GsoMaxSize(bytes), LinkAttribute::GroMaxSize(bytes));
        let (gso4, gro4) = (LinkAttribute::GsoIpv4MaxSize(bytes), LinkAttribute::GroIpv4MaxSize(bytes));
        let set =
            |link| [gso, gro, gso4, gro4].into_iter().fold(link, LinkMessageBuilder::append_extra_attribute);
        self.change(device, set).await
    }

    /// Allows a frame to leave by the bridge port on which it arrived.
    pub async fn hairpin(&self, port: &str) -> Result<()> {
        let message = LinkBridgePort::new(index(port)?).hairpin(true).build();
        self.0.link().set_port(message).execute().await.with_context(|| format!("hairpin mode of {port}"))
    }

    /// Renames a device, which may stay up (Linux 6.2 and later).
    pub async fn rename(&self, device: &str, name: &str) -> Result<()> {
        self.change(device, |link| link.name(name.to_owned())).await
    }

    /// Deletes a device; of a veth pair, both ends are deleted.
    pub async fn delete(&self, device: &str) -> Result<()> {
        self.0.link().del(index(device)?).execute().await.with_context(|| format!("deleting {device}"))
    }

    /// Attaches an XDP program to a device in native mode, or detaches it if `program` is -1.
    pub async fn attach_xdp(&self, device: &str, program: RawFd) -> Result<()> {
        const NATIVE: u32 = 1 << 2;
        let xdp = LinkAttribute::Xdp(vec![LinkXdp::Fd(program), LinkXdp::Flags(NATIVE)]);
        self.change(device, |link| link.append_extra_attribute(xdp)).await
    }

    /// Whether an XDP program is attached to a device.
    pub async fn has_xdp(&self, device: &str) -> Result<bool> {
        let mut links = self.0.link().get().match_index(index(device)?).execute();
        let link = links.try_next().await?.with_context(|| format!("{device} is gone"))?;
        Ok(link.attributes.iter().any(|attribute| match attribute {
            LinkAttribute::Xdp(facts) => facts.iter().any(|fact| matches!(fact, LinkXdp::ProgId(_))),
            _ => false,
        }))
    }

    /// The numbers of BPF filters of clsact at ingress and egress of a device.
    pub async fn bpf_filters(&self, device: &str) -> Result<(u32, u32)> {
        let index = i32::try_from(index(device)?)?;
        let mut counts = [0; 2];
        for (count, ingress) in counts.iter_mut().zip([true, false]) {
            let mut handle = self.0.traffic_filter(index);
            let request = if ingress { handle.get().ingress() } else { handle.get().egress() };
            let filters: Vec<TcMessage> = request.execute().try_collect().await?;
            // The kernel also lists each priority itself, without a filter.
            let real = filters.iter().filter(|filter| u32::from(filter.header.handle) != 0);
            *count = real
                .filter(|filter| filter.attributes.contains(&TcAttribute::Kind("bpf".to_owned())))
                .count() as u32;
        }
        Ok(counts.into())
    }

    pub async fn mac(&self, device: &str) -> Result<Mac> {
        let mut links = self.0.link().get().match_index(index(device)?).execute();
        let link = links.try_next().await?.with_context(|| format!("{device} is gone"))?;
        let mac = link.attributes.iter().find_map(|attribute| match attribute {
            LinkAttribute::Address(mac) => Mac::try_from(mac.as_slice()).ok(),
            _ => None,
        });
        mac.with_context(|| format!("{device} has no MAC address"))
    }

    /// Adds an address that is usable at once (no duplicate address detection).
    pub async fn address(&self, device: &str, address: IpAddr, prefix: u8) -> Result<()> {
        let mut request = self.0.address().add(index(device)?, address, prefix);
        if address.is_ipv6() {
            let message = request.message_mut();
            message.header.flags = AddressHeaderFlags::Nodad;
            message.attributes.push(AddressAttribute::Flags(AddressFlags::Nodad));
        }
        request.execute().await.with_context(|| format!("adding {address}/{prefix} to {device}"))
    }

    /// Adds an address of its own prefix that the kernel never chooses as a source by itself
    /// (`preferred_lft 0`), as daemons do that move an address from host to host.
    pub async fn floating_address(&self, device: &str, address: IpAddr) -> Result<()> {
        let prefix = if address.is_ipv4() { 32 } else { 128 };
        let mut request = self.0.address().add(index(device)?, address, prefix);
        let message = request.message_mut();
        let mut lifetime = CacheInfo::default();
        lifetime.ifa_valid = u32::MAX;
        message.attributes.push(AddressAttribute::CacheInfo(lifetime));
        message.attributes.push(AddressAttribute::Flags(AddressFlags::Nodad));
        request.execute().await.with_context(|| format!("adding {address} to {device}"))
    }

    async fn add(&self, message: LinkMessage) -> Result<()> {
        Ok(self.0.link().add(message).execute().await?)
    }

    async fn change(
        &self,
        device: &str,
        edit: impl FnOnce(LinkMessageBuilder<LinkUnspec>) -> LinkMessageBuilder<LinkUnspec>,
    ) -> Result<()> {
        let message = edit(LinkUnspec::new_with_index(index(device)?)).build();
        self.0.link().change(message).execute().await.with_context(|| format!("changing {device}"))
    }
}

impl VethEnd<'_> {
    fn message<T>(&self, link: LinkMessageBuilder<T>) -> LinkMessageBuilder<T> {
        let mut link = link.name(self.name);
        if let Some(mac) = self.mac {
            link = link.address(mac.to_vec());
        }
        if let Some(mtu) = self.mtu {
            link = link.mtu(mtu);
        }
        link
    }
}

/// The names of all devices in the calling thread's namespace.
pub fn devices() -> Result<Vec<String>> {
    Ok(if_nameindex()?.iter().filter_map(|device| Some(device.name().to_str().ok()?.to_owned())).collect())
}

/// The index of a device in the calling thread's namespace.
pub fn index(device: &str) -> Result<u32> {
    if_nametoindex(device).with_context(|| format!("no device {device} here"))
}
