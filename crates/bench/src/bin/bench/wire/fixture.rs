//! The fixture of one subject: clients – node – endpoints, each in a namespace of its own.
//!
//! ```text
//!   client ── eth0  node  eth1 ── endpoint
//! ```
//!
//! The floods' endpoints are on other nodes, behind the same uplink as the clients, so packets that
//! arrive on eth0 leave through it. The endpoint that answers HTTP is behind eth1.

use std::net::{IpAddr, Ipv4Addr};

use anyhow::Result;
use traffic_policy_bench::fixture::{MAC, ROUTER_MAC};
use traffic_policy_testing::{
    lab::Folder,
    netlink::{Mac, VethEnd},
    netns::{Namespace, Owned},
};

pub(crate) const UPLINK: &str = "eth0";
pub(crate) const DOWNLINK: &str = "eth1";
/// The device of clients, and that of the endpoint.
pub(crate) const END: &str = "wire";

pub(crate) const NODE: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
const ROUTER: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
/// Addresses of the HTTP clients: several, so that there are enough ports for all their
/// connections.
pub(crate) const CLIENTS: [Ipv4Addr; 8] = [
    ROUTER,
    Ipv4Addr::new(10, 0, 0, 3),
    Ipv4Addr::new(10, 0, 0, 4),
    Ipv4Addr::new(10, 0, 0, 5),
    Ipv4Addr::new(10, 0, 0, 6),
    Ipv4Addr::new(10, 0, 0, 7),
    Ipv4Addr::new(10, 0, 0, 8),
    Ipv4Addr::new(10, 0, 0, 9),
];
const INNER: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 1);
/// Address of the endpoint that answers HTTP.
pub(crate) const SERVER: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 2);

/// Network of the flood's senders, a /16.
pub(crate) const SENDERS: Ipv4Addr = Ipv4Addr::new(172, 16, 0, 0);
/// Network of the flood's endpoints, a /16.
pub(crate) const ENDPOINTS: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 0);

const INNER_MAC: Mac = [2, 0, 0, 0, 1, 1];
const SERVER_MAC: Mac = [2, 0, 0, 0, 1, 2];

pub(crate) struct WireTestbed {
    pub(crate) client: Owned,
    pub(crate) node: Owned,
    pub(crate) endpoint: Owned,
    pub(crate) folder: Folder,
}

impl WireTestbed {
    /// Builds the fixture; `name` is that of the subject, short and unique.
    pub(crate) fn build(name: &str) -> Result<Self> {
        let id = format!("tp-{}-wire-{name}", std::process::id());
        let fixture = Self {
            client: Namespace::create(&format!("{id}-client"))?,
            node: Namespace::create(&format!("{id}-node"))?,
            endpoint: Namespace::create(&format!("{id}-endpoint"))?,
            folder: Folder::create(&id)?,
        };
        fixture.node.netlink(async |net| {
            net.up("lo").await?;
            let links = [
                (UPLINK, MAC, ROUTER_MAC, &fixture.client, NODE, ROUTER),
                (DOWNLINK, INNER_MAC, SERVER_MAC, &fixture.endpoint, INNER, SERVER),
            ];
            for (device, mac, end_mac, namespace, address, neighbour) in links {
                let here = VethEnd { name: device, mac: Some(mac), mtu: None };
                let there = VethEnd { name: END, mac: Some(end_mac), mtu: None };
                net.veth(&here, None, &there, namespace).await?;
                net.address(device, address.into(), 24).await?;
                net.neighbour(device, neighbour.into(), end_mac).await?;
            }
            for client in CLIENTS {
                net.neighbour(UPLINK, client.into(), ROUTER_MAC).await?;
            }
            net.route(SENDERS.into(), 16, ROUTER.into()).await?;
            net.route(ENDPOINTS.into(), 16, ROUTER.into()).await
        })?;
        end(&fixture.client, &CLIENTS, NODE, MAC, Ipv4Addr::new(10, 0, 1, 0))?;
        end(&fixture.endpoint, &[SERVER], INNER, INNER_MAC, Ipv4Addr::new(10, 0, 0, 0))?;
        fixture.node.sysctls(&[
            ("net.ipv4.ip_forward", "1"),
            // A router that sends packets back through the device they arrived on would also send
            // redirects.
            ("net.ipv4.conf.all.send_redirects", "0"),
            ("net.ipv4.conf.eth0.send_redirects", "0"),
            ("net.ipv4.conf.all.rp_filter", "0"),
            ("net.ipv4.conf.eth0.rp_filter", "0"),
        ])?;
        for (namespace, device) in [
            (&fixture.node, UPLINK),
            (&fixture.node, DOWNLINK),
            (&fixture.client, END),
            (&fixture.endpoint, END),
        ] {
            // Live frames have no checksum to be finished, and all other packets must be treated
            // alike.
            namespace.set_offloads(device, false)?;
            namespace.set_gro(device, true)?;
        }
        Ok(fixture)
    }
}

/// Sets the addresses of one end, and its route to the other.
fn end(namespace: &Namespace, own: &[Ipv4Addr], node: Ipv4Addr, mac: Mac, other: Ipv4Addr) -> Result<()> {
    namespace.netlink(async |net| {
        net.up("lo").await?;
        for address in own {
            net.address(END, (*address).into(), 24).await?;
        }
        let node: IpAddr = node.into();
        net.neighbour(END, node, mac).await?;
        net.route(other.into(), 24, node).await
    })
}
