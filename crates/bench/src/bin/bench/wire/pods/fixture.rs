//! The fixture of one subject.
//!
//! ```text
//!   client ── eth0  node  pod0 ── pod                        a pod of the node that is asked
//!
//!   client ── eth0  front  eth1 ── eth0  home  pod0 ── pod   a pod of another node, which has a
//!     └──────────────── back ───── eth1 ─┘                   way of its own to the client
//! ```

use std::net::{IpAddr, Ipv4Addr};

use anyhow::{Context, Result, ensure};
use traffic_policy_bench::fixture::{MAC, ROUTER_MAC};
use traffic_policy_testing::{
    lab::Folder,
    netlink::{Mac, VethEnd},
    netns::{Namespace, Owned},
};

use super::super::{
    fixture::{CLIENTS, DOWNLINK, END, ENDPOINTS, NODE, SENDERS, UPLINK},
    threaded::receive_on,
};

/// The client's second device, and the host side of the pod's.
pub(super) const BACK: &str = "back";
const HOST_SIDE: &str = "pod0";
/// Address of the pod that the sink answers for, and that at which HTTP is answered.
pub(super) const POD: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 1);
pub(super) const POD_SERVER: Ipv4Addr = Ipv4Addr::new(10, 2, 0, 1);
/// Addresses of both nodes towards each other: in front, and at the pod.
pub(super) const FRONT: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 1);
pub(super) const HOME: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 2);
/// Addresses of the pod's node and of the client on the way back.
const HOME_BACK: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 1);
const CLIENT_BACK: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);
/// The pod's gateway, an address that no host has.
const GATEWAY: Ipv4Addr = Ipv4Addr::new(169, 254, 1, 1);
/// The main routing table (RT_TABLE_MAIN).
const MAIN: u32 = 254;

pub(super) const HOST_SIDE_MAC: Mac = [2, 0, 0, 0, 2, 1];
pub(super) const POD_MAC: Mac = [2, 0, 0, 0, 2, 2];

pub(super) struct PodTestbed {
    pub(super) client: Owned,
    /// The node in front, if it is not the pod's.
    pub(super) front: Option<Owned>,
    pub(super) home: Owned,
    pub(super) pod: Owned,
    pub(super) folder: Folder,
}

/// One end of a pair of devices.
struct End<'a> {
    namespace: &'a Namespace,
    device: &'a str,
    mac: Mac,
    addresses: &'a [Ipv4Addr],
}

impl PodTestbed {
    /// Gives the receiver of each device a thread on this CPU, so that the CPU time of one node can
    /// be told from that of the others; returns those of the node in front. A receiver without a
    /// thread would do its work in that of the device that has sent to it.
    pub(super) fn receive_in_threads(&self, cpu: usize) -> Result<Vec<i32>> {
        let Self { client, front, home, pod, .. } = self;
        let others: [(&Namespace, &[&str]); 3] =
            [(client, &[END, BACK]), (home, &[UPLINK, DOWNLINK, HOST_SIDE]), (pod, &[UPLINK])];
        for (namespace, devices) in others {
            for device in devices {
                receive_on(namespace, device, cpu)?;
            }
        }
        let front = front.as_ref().context("no node is in front")?;
        let mut threads = receive_on(front, UPLINK, cpu)?;
        threads.extend(receive_on(front, DOWNLINK, cpu)?);
        ensure!(threads.len() == 2, "{} threads receive for two devices", threads.len());
        Ok(threads)
    }

    /// Builds the fixture; `name` is that of the subject, short and unique. `floods`: for the
    /// generator, else for sockets.
    pub(super) fn build(name: &str, of_another_node: bool, floods: bool) -> Result<Self> {
        let id = format!("tp-{}-pods-{name}", std::process::id());
        let create = |what: &str| Namespace::create(&format!("{id}-{what}"));
        let fixture = Self {
            client: create("client")?,
            front: of_another_node.then(|| create("front")).transpose()?,
            home: create("home")?,
            pod: create("pod")?,
            folder: Folder::create(&id)?,
        };
        let Self { client, front, home, pod, .. } = &fixture;
        for namespace in [client, home, pod].into_iter().chain(front) {
            namespace.netlink(async |net| net.up("lo").await)?;
        }
        let asked: &Namespace = front.as_ref().unwrap_or(home);
        connect(
            &End { namespace: asked, device: UPLINK, mac: MAC, addresses: &[NODE] },
            &End { namespace: client, device: END, mac: ROUTER_MAC, addresses: &CLIENTS },
            floods,
        )?;
        let back = if let Some(front) = front {
            connect(
                &End { namespace: front, device: DOWNLINK, mac: [2, 0, 0, 0, 1, 1], addresses: &[FRONT] },
                &End { namespace: home, device: UPLINK, mac: [2, 0, 0, 0, 1, 2], addresses: &[HOME] },
                floods,
            )?;
            connect(
                &End { namespace: home, device: DOWNLINK, mac: [2, 0, 0, 0, 3, 1], addresses: &[HOME_BACK] },
                &End { namespace: client, device: BACK, mac: [2, 0, 0, 0, 3, 2], addresses: &[CLIENT_BACK] },
                floods,
            )?;
            front.netlink(async |net| {
                net.route(SENDERS.into(), 16, CLIENTS[0].into()).await?;
                net.route(ENDPOINTS.into(), 16, HOME.into()).await
            })?;
            CLIENT_BACK
        } else {
            CLIENTS[0]
        };
        connect_pod(home, pod, floods)?;
        // For HTTP without a Service.
        client.netlink(async |net| net.route(POD_SERVER.into(), 32, NODE.into()).await)?;
        home.netlink(async |net| net.route(SENDERS.into(), 16, back.into()).await)?;
        for node in front.iter().chain([home]) {
            node.sysctls(&[
                ("net.ipv4.ip_forward", "1"),
                ("net.ipv4.conf.all.send_redirects", "0"),
                ("net.ipv4.conf.all.rp_filter", "0"),
                ("net.ipv4.conf.eth0.rp_filter", "0"),
            ])?;
        }
        Ok(fixture)
    }
}

/// Makes a pair of devices whose ends know each other.
fn connect(one: &End<'_>, other: &End<'_>, floods: bool) -> Result<()> {
    let end = |end: &End<'_>| -> (Mac, Vec<IpAddr>) {
        (end.mac, end.addresses.iter().copied().map(IpAddr::from).collect())
    };
    one.namespace.netlink(async |net| {
        let here = VethEnd { name: one.device, mac: Some(one.mac), mtu: None };
        let there = VethEnd { name: other.device, mac: Some(other.mac), mtu: None };
        net.veth(&here, None, &there, other.namespace).await
    })?;
    for (own, (mac, addresses)) in [(one, end(other)), (other, end(one))] {
        own.namespace.netlink(async |net| {
            for address in own.addresses {
                net.address(own.device, (*address).into(), 24).await?;
            }
            for address in addresses {
                net.neighbour(own.device, address, mac).await?;
            }
            Ok(())
        })?;
        if floods {
            plain(own.namespace, own.device)?;
        } else {
            // As a network card has it.
            own.namespace.set_gro(own.device, true)?;
        }
    }
    Ok(())
}

/// Makes the pod's device, which the node routes to; for sockets as the kernel makes it.
fn connect_pod(home: &Namespace, pod: &Namespace, floods: bool) -> Result<()> {
    home.netlink(async |net| {
        let here = VethEnd { name: HOST_SIDE, mac: Some(HOST_SIDE_MAC), mtu: None };
        let there = VethEnd { name: UPLINK, mac: Some(POD_MAC), mtu: None };
        net.veth(&here, None, &there, pod).await?;
        for address in [POD, POD_SERVER] {
            net.route_by_device(MAIN, address.into(), 32, HOST_SIDE).await?;
            net.neighbour(HOST_SIDE, address.into(), POD_MAC).await?;
        }
        Ok(())
    })?;
    pod.netlink(async |net| {
        for address in [POD, POD_SERVER] {
            net.address(UPLINK, address.into(), 32).await?;
        }
        net.neighbour(UPLINK, GATEWAY.into(), HOST_SIDE_MAC).await?;
        net.route_on_link(Ipv4Addr::UNSPECIFIED.into(), 0, GATEWAY.into(), UPLINK).await
    })?;
    if floods {
        plain(home, HOST_SIDE)?;
        plain(pod, UPLINK)?;
    }
    Ok(())
}

/// Frames of the generator have no checksum to be finished, and all others must be treated alike.
fn plain(namespace: &Namespace, device: &str) -> Result<()> {
    namespace.set_offloads(device, false)?;
    namespace.set_gro(device, true)
}

const _: () = assert!(u32::from_be_bytes(POD.octets()) == u32::from_be_bytes(ENDPOINTS.octets()) + 1);
