//! The part of rtnetlink that a lab needs: devices, addresses, routes and neighbours of one
//! namespace.

mod multipath;
mod netkit;

use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsRawFd, RawFd};

use anyhow::{Context, Result};
use futures::TryStreamExt;
use netlink_packet_route::address::{AddressAttribute, AddressFlags, AddressHeaderFlags, CacheInfo};
use netlink_packet_route::link::{
    InfoBridge, InfoData, InfoKind, InfoVeth, LinkAttribute, LinkFlags, LinkInfo, LinkMessage, LinkXdp, State,
};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourExtFlags, NeighbourFlags, NeighbourState,
};
use netlink_packet_route::route::{RouteMessage, RouteScope, RouteType};
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleMessage};
use netlink_packet_route::tc::{TcAttribute, TcMessage};
use nix::net::if_::{if_nameindex, if_nametoindex};
use rtnetlink::{
    Handle, IpVersion, LinkBridge, LinkBridgePort, LinkDummy, LinkMessageBuilder, LinkUnspec, LinkVeth,
    LinkVxlan, RouteMessageBuilder, new_connection,
};

use crate::family::Family;
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

    /// Adds or replaces a route to `destination`/`prefix` via a gateway.
    pub async fn route(&self, destination: IpAddr, prefix: u8, gateway: IpAddr) -> Result<()> {
        let message = route(destination, prefix, gateway)?.build();
        self.replace_route(message)
            .await
            .with_context(|| format!("route to {destination}/{prefix} via {gateway}"))
    }

    /// A variant of [`Self::route`] for another table than the main one.
    pub async fn route_in(&self, table: u32, to: IpAddr, prefix: u8, gateway: IpAddr) -> Result<()> {
        let message = route(to, prefix, gateway)?.table_id(table).build();
        let replaced = self.replace_route(message).await;
        replaced.with_context(|| format!("route to {to}/{prefix} via {gateway} in table {table}"))
    }

    /// Adds a rule that routes packets from an address by a table.
    pub async fn rule_from(&self, source: IpAddr, table: u32, priority: u32) -> Result<()> {
        let rule = self.0.rule().add().table_id(table).action(RuleAction::ToTable).priority(priority);
        let added = match source {
            IpAddr::V4(source) => rule.v4().source_prefix(source, 32).execute().await,
            IpAddr::V6(source) => rule.v6().source_prefix(source, 128).execute().await,
        };
        added.with_context(|| format!("rule from {source} to table {table}"))
    }

    /// Removes the rule that [`Self::rule_from`] added.
    pub async fn remove_rule_from(&self, source: IpAddr, table: u32) -> Result<()> {
        let version = if source.is_ipv4() { IpVersion::V4 } else { IpVersion::V6 };
        let rules: Vec<_> = self.0.rule().get(version).execute().try_collect().await?;
        let is_it = |rule: &&RuleMessage| {
            u32::from(rule.header.table) == table && rule.attributes.contains(&RuleAttribute::Source(source))
        };
        let rule = rules.iter().find(is_it).with_context(|| format!("no rule from {source}"))?;
        let removed = self.0.rule().del(rule.clone()).execute().await;
        removed.with_context(|| format!("removing the rule from {source}"))
    }

    /// Adds a rule that routes packets with a mark by a table.
    pub async fn rule_marked(&self, family: Family, mark: u32, table: u32, priority: u32) -> Result<()> {
        let rule = self.0.rule().add().table_id(table).action(RuleAction::ToTable).priority(priority);
        let rule = rule.fw_mark(mark);
        let added = match family {
            Family::V4 => rule.v4().execute().await,
            Family::V6 => rule.v6().execute().await,
        };
        added.with_context(|| format!("rule for the mark {mark:#x}"))
    }

    /// Adds a rule that routes packets that arrive on a device by a table.
    pub async fn rule_arriving(&self, family: Family, device: &str, table: u32, priority: u32) -> Result<()> {
        let rule = self.0.rule().add().table_id(table).action(RuleAction::ToTable).priority(priority);
        let rule = rule.input_interface(device.to_owned());
        let added = match family {
            Family::V4 => rule.v4().execute().await,
            Family::V6 => rule.v6().execute().await,
        };
        added.with_context(|| format!("rule for what comes by {device}"))
    }

    /// Adds a route by a device without a gateway, in another table than the main one.
    pub async fn route_by_device(&self, table: u32, to: IpAddr, prefix: u8, device: &str) -> Result<()> {
        let route = RouteMessageBuilder::<IpAddr>::new().destination_prefix(to, prefix)?;
        let route = route.output_interface(index(device)?).table_id(table).build();
        self.replace_route(route).await.with_context(|| format!("route to {to}/{prefix} by {device}"))
    }

    /// A variant of [`Self::route`] for a gateway that no address of `device` covers.
    pub async fn route_on_link(&self, to: IpAddr, prefix: u8, gateway: IpAddr, device: &str) -> Result<()> {
        let route = route(to, prefix, gateway)?.output_interface(index(device)?).onlink().build();
        self.replace_route(route)
            .await
            .with_context(|| format!("route to {to}/{prefix} via {gateway} on {device}"))
    }

    /// Adds a route of type unreachable.
    pub async fn unreachable(&self, destination: IpAddr, prefix: u8) -> Result<()> {
        let route = RouteMessageBuilder::<IpAddr>::new().destination_prefix(destination, prefix)?;
        self.replace_route(route.kind(RouteType::Unreachable).build())
            .await
            .with_context(|| format!("unreachable route to {destination}/{prefix}"))
    }

    /// Removes a route that [`Self::unreachable`] added.
    pub async fn reachable(&self, destination: IpAddr, prefix: u8) -> Result<()> {
        let route = RouteMessageBuilder::<IpAddr>::new().destination_prefix(destination, prefix)?;
        let route = route.kind(RouteType::Unreachable).build();
        let deleted = self.0.route().del(route).execute().await;
        deleted.with_context(|| format!("deleting the unreachable route to {destination}/{prefix}"))
    }

    /// Makes an address local to this machine without assigning it to a device, as cloud providers'
    /// agents do with the addresses of load balancers: `ip route add to local ADDRESS dev DEVICE`.
    pub async fn local(&self, address: IpAddr, device: &str) -> Result<()> {
        const LOCAL_TABLE: u32 = 255;
        let prefix = if address.is_ipv4() { 32 } else { 128 };
        let route = RouteMessageBuilder::<IpAddr>::new().destination_prefix(address, prefix)?;
        let route = route.kind(RouteType::Local).table_id(LOCAL_TABLE).output_interface(index(device)?);
        let added = self.replace_route(route.scope(RouteScope::Host).build()).await;
        added.with_context(|| format!("local route to {address} on {device}"))
    }

    pub async fn delete_route(&self, destination: IpAddr, prefix: u8) -> Result<()> {
        let route = RouteMessageBuilder::<IpAddr>::new().destination_prefix(destination, prefix)?;
        let deleted = self.0.route().del(route.build()).execute().await;
        deleted.with_context(|| format!("deleting the route to {destination}/{prefix}"))
    }

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

    async fn replace_route(&self, message: RouteMessage) -> Result<()> {
        Ok(self.0.route().add(message).replace().execute().await?)
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

fn route(destination: IpAddr, prefix: u8, gateway: IpAddr) -> Result<RouteMessageBuilder<IpAddr>> {
    Ok(RouteMessageBuilder::<IpAddr>::new().destination_prefix(destination, prefix)?.gateway(gateway)?)
}

fn wire(address: IpAddr) -> NeighbourAddress {
    match address {
        IpAddr::V4(address) => NeighbourAddress::Inet(address),
        IpAddr::V6(address) => NeighbourAddress::Inet6(address),
    }
}
