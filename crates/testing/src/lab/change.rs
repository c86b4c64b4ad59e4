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
    /// Sends packets for a virtual address to a node, as a load balancer's announcement would. The client's own device on
    /// the switch is told as well, if that is where it is.
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

    pub fn unroute_vip(&self, vip: IpAddr) -> Result<()> {
        let prefix = if vip.is_ipv4() { 32 } else { 128 };
        if self.client.addresses == plan::client_on_switch() {
            self.client.netns.netlink(async |net| net.delete_route(vip, prefix).await)?;
        }
        self.router.netlink(async |net| net.delete_route(vip, prefix).await)
    }

    /// Gives node-1 of a lab with two uplinks a way for each of its addresses: what has one as source leaves by its device.
    pub fn route_by_source(&self) -> Result<()> {
        let node = self.node(1);
        let second = node.second_uplink.context("the node has one uplink")?;
        node.netns.netlink(async |net| {
            for (uplink, own) in [(0, node.addresses), (1, second)] {
                let (table, gateway) = (100 + u32::from(uplink), plan::gateway(uplink));
                for family in Family::BOTH {
                    // To clients alone: the main table knows the way to other nodes' pods.
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

    /// Gives the nodes' gateway another MAC address, as a failover does. `announce` says whether it tells its neighbours
    /// (gratuitous ARP and unsolicited neighbour advertisement) or lets them find out.
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

    /// Takes a node's uplink away, as a driver reset does. Its port on the router goes with it.
    pub fn remove_uplink(&self, node: &Node) -> Result<()> {
        node.netns.netlink(async |net| net.delete("eth0").await)
    }

    /// Pulls a node's cable, as if it were gone without a word: its device stays, but nothing comes or goes.
    pub fn cut(&self, node: &Node) -> Result<()> {
        self.router.netlink(async |net| net.down(&node.name).await)
    }

    /// Puts the cable back.
    pub fn mend(&self, node: &Node) -> Result<()> {
        self.router.netlink(async |net| net.up(&node.name).await)?;
        Self::settle(&[("router", &self.router), (&node.name, &node.netns)])
    }

    /// Waits until every link forwards: a datagram sent before would be lost, and an ARP request sent again a second later.
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

    /// Lets every machine forget its learned neighbours.
    pub fn flush_neighbours(&self) -> Result<()> {
        for (_, namespace) in self.namespaces() {
            namespace.netlink(async |net| net.flush_neighbours().await)?;
        }
        Ok(())
    }
}
