//! Changes of a running lab.

use std::net::IpAddr;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use super::{Family, Lab, Node, plan};
use crate::netlink::Mac;
use crate::netns::Namespace;
use crate::pace::scaled;

impl Lab {
    /// Sends packets for a virtual address to a node, as the announcement of a load balancer would.
    /// The client's own device on the switch gets the same route, if the client is there.
    pub fn route_vip(&self, vip: IpAddr, node: &Node) -> Result<()> {
        let (prefix, gateway) = match vip {
            IpAddr::V4(_) => (32, IpAddr::V4(node.addresses.v4)),
            IpAddr::V6(_) => (128, IpAddr::V6(node.addresses.v6)),
        };
        if self.client.addresses == plan::client_on_switch() {
            self.client.netns.netlink(async |net| net.route(vip, prefix, gateway).await)?;
        }
        self.router.netlink(async |net| net.route(vip, prefix, gateway).await)
    }

    /// Makes the router spread connections for a virtual address over nodes, by a hash of addresses
    /// and ports. Another set of nodes moves connections of all of them.
    pub fn spread_vip(&self, vip: IpAddr, nodes: &[&Node]) -> Result<()> {
        let (prefix, family) = if vip.is_ipv4() { (32, Family::V4) } else { (128, Family::V6) };
        self.router.sysctls(&[
            ("net.ipv4.fib_multipath_hash_policy", "1"),
            ("net.ipv6.fib_multipath_hash_policy", "1"),
        ])?;
        let gateways: Vec<_> = nodes.iter().map(|node| node.address(family)).collect();
        self.router.netlink(async |net| net.route_by_any(vip, prefix, &gateways).await)
    }

    pub fn unroute_vip(&self, vip: IpAddr) -> Result<()> {
        let prefix = if vip.is_ipv4() { 32 } else { 128 };
        if self.client.addresses == plan::client_on_switch() {
            self.client.netns.netlink(async |net| net.delete_route(vip, prefix).await)?;
        }
        self.router.netlink(async |net| net.delete_route(vip, prefix).await)
    }

    /// Gives node-1 of a lab with two uplinks a routing rule for each of its addresses: packets
    /// with that source leave by its device.
    pub fn route_by_source(&self) -> Result<()> {
        let node = self.node(1);
        let second = node.second_uplink.context("the node has one uplink")?;
        node.netns.netlink(async |net| {
            for (uplink, own) in [(0, node.addresses), (1, second)] {
                let (table, gateway) = (100 + u32::from(uplink), plan::gateway(uplink));
                for family in Family::BOTH {
                    // Routes to clients only: the main table has those to other nodes' pods.
                    for client in [plan::client(0), plan::client(1)] {
                        let network = client.network().of(family);
                        net.route_in(table, network, family.prefix(), gateway.of(family)).await?;
                    }
                    net.rule_from(own.of(family), table, 1000).await?;
                }
            }
            Ok(())
        })
    }

    /// Gives the nodes' gateway another MAC address, as a failover does. `announce` determines
    /// whether it informs its neighbours (gratuitous ARP and unsolicited neighbour advertisement)
    /// or lets them find out.
    pub fn router_change_mac(&self, announce: bool) -> Result<Mac> {
        let announcement = if announce { "1" } else { "0" };
        self.router.sysctls(&[
            ("net.ipv4.conf.br0.arp_notify", announcement),
            ("net.ipv6.conf.br0.ndisc_notify", announcement),
        ])?;
        self.router.netlink(async |net| {
            let mut mac = net.mac("br0").await?;
            mac[1] = mac[1].wrapping_add(1);
            net.set_mac("br0", mac).await?;
            Ok(mac)
        })
    }

    /// Removes a node's uplink, as a driver reset does. Its port on the router is removed with it.
    pub fn remove_uplink(&self, node: &Node) -> Result<()> {
        node.netns.netlink(async |net| net.delete("eth0").await)
    }

    /// Cuts a node's link, as if the node had vanished without notice: its device stays, but no
    /// packet passes.
    pub fn cut(&self, node: &Node) -> Result<()> {
        self.router.netlink(async |net| net.down(&node.name).await)
    }

    /// Restores a link that was cut.
    pub fn mend(&self, node: &Node) -> Result<()> {
        self.router.netlink(async |net| net.up(&node.name).await)?;
        Self::settle(&[("router", &self.router), (&node.name, &node.netns)])
    }

    /// Waits until every link forwards. A datagram sent earlier would be lost, and an ARP request
    /// retransmitted only a second later.
    pub(super) fn settle(namespaces: &[(&str, &Namespace)]) -> Result<()> {
        let start = Instant::now();
        for (_, namespace) in namespaces {
            while let Some(device) = namespace.netlink(async |net| net.unsettled().await)? {
                let late = start.elapsed() > scaled(Duration::from_secs(5));
                ensure!(!late, "{device} of {} does not come up", namespace.name());
                sleep(Duration::from_millis(2));
            }
        }
        Ok(())
    }

    /// Flushes the learned neighbours of every machine.
    pub fn flush_neighbours(&self) -> Result<()> {
        for (_, namespace) in self.namespaces() {
            namespace.netlink(async |net| net.flush_neighbours().await)?;
        }
        Ok(())
    }
}
