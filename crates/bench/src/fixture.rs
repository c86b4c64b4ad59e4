//! The test fixture: a namespace with one uplink, behind which clients and endpoints are.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::atomic::{AtomicU32, Ordering},
};

use anyhow::{Context, Result};
use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};

use traffic_policy_testing::{
    netlink::{Mac, VethEnd, index},
    netns::{Namespace, Owned},
};

const UPLINK: &str = "uplink";
const IDLE: [[[&str; 2]; 2]; 3] = [
    [["idle0", "idle1"], ["idle2", "idle3"]],
    [["idle4", "idle5"], ["idle6", "idle7"]],
    [["idle8", "idle9"], ["idle10", "idle11"]],
];
/// MAC address of the node.
pub const MAC: Mac = [2, 0, 0, 0, 0, 1];
/// MAC address of the router that leads to clients and to endpoints on other nodes.
pub const ROUTER_MAC: Mac = [2, 0, 0, 0, 0, 2];

/// Addresses of one family.
#[derive(Clone, Copy)]
pub struct Addresses {
    pub node: IpAddr,
    pub router: IpAddr,
    /// The first client and the first endpoint; the others follow.
    pub client: IpAddr,
    pub endpoint: IpAddr,
}

pub const V4: Addresses = Addresses {
    node: IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)),
    router: IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2)),
    client: IpAddr::V4(Ipv4Addr::new(172, 16, 0, 1)),
    endpoint: IpAddr::V4(Ipv4Addr::new(10, 1, 0, 1)),
};
pub const V6: Addresses = Addresses {
    node: IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1)),
    router: IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2)),
    client: IpAddr::V6(Ipv6Addr::new(0xfd01, 0, 0, 0, 0, 0, 0, 1)),
    endpoint: IpAddr::V6(Ipv6Addr::new(0xfd02, 0, 0, 0, 0, 0, 0, 1)),
};

/// The namespaces, which are removed with this value.
pub struct BenchNode {
    node: Owned,
    /// The other end of the uplink.
    _wire: Owned,
    /// Index of the uplink.
    pub ifindex: u32,
    /// Devices that no packet ever arrives on, for three feeds at once: see
    /// [`Feeder::keep_ready`][super::Feeder::keep_ready].
    pub idle: [[u32; 4]; 3],
}

impl BenchNode {
    /// Builds the fixture.
    pub fn build() -> Result<Self> {
        static BUILT: AtomicU32 = AtomicU32::new(0);
        let id = format!("{}-{}", std::process::id(), BUILT.fetch_add(1, Ordering::Relaxed));
        let node = Namespace::create(&format!("tp-bench-{id}"))?;
        let wire = Namespace::create(&format!("tp-bench-{id}-wire"))?;
        let (ifindex, idle) = node.netlink(async |net| {
            net.up("lo").await?;
            let uplink = VethEnd { name: UPLINK, mac: Some(MAC), mtu: None };
            let end = VethEnd { name: "end", mac: Some(ROUTER_MAC), mtu: None };
            net.veth(&uplink, None, &end, &wire).await?;
            for Addresses { node, router, client, endpoint } in [V4, V6] {
                let (local, all) = if node.is_ipv4() { (24, 16) } else { (64, 64) };
                net.address(UPLINK, node, local).await?;
                net.neighbour(UPLINK, router, ROUTER_MAC).await?;
                net.route(network(client), all, router).await?;
                net.route(network(endpoint), all, router).await?;
            }
            let mut idle = [[0; 4]; 3];
            for (pairs, numbers) in IDLE.iter().zip(&mut idle) {
                for names in pairs {
                    let [one, other] = names.map(|name| VethEnd { name, mac: None, mtu: None });
                    net.veth(&one, None, &other, &node).await?;
                }
                for (device, number) in pairs.as_flattened().iter().zip(numbers) {
                    net.down(device).await?;
                    *number = index(device)?;
                }
            }
            Ok((index(UPLINK)?, idle))
        })?;
        // By it the packet path finds the namespace, in place of a pod's.
        wire.netlink(async |net| net.address("end", V4.router, 24).await)?;
        node.sysctls(&[("net.ipv4.ip_forward", "1"), ("net.ipv6.conf.all.forwarding", "1")])?;
        Ok(Self { node, _wire: wire, ifindex, idle })
    }

    /// Sets the MTU of the device that packets arrive on.
    pub fn set_mtu(&self, mtu: u32) -> Result<()> {
        self.node.netlink(async |net| net.set_mtu(UPLINK, mtu).await)
    }

    /// Runs `work` inside, on one CPU: flow elements and caches belong to a CPU.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        self.node.run(|| {
            let mut one = CpuSet::new();
            let cpu = nix::sched::sched_getcpu().context("no number of this CPU")?;
            one.set(cpu)?;
            sched_setaffinity(Pid::from_raw(0), &one).context("staying on one CPU failed")?;
            work()
        })
    }
}

/// Returns the address that is `number` after this one.
pub fn later(address: IpAddr, number: u32) -> IpAddr {
    match address {
        IpAddr::V4(address) => Ipv4Addr::from(u32::from(address) + number).into(),
        IpAddr::V6(address) => Ipv6Addr::from(u128::from(address) + u128::from(number)).into(),
    }
}

/// Returns the base address of the /16 or /64 that contains an address.
fn network(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(address) => {
            let [a, b, _, _] = address.octets();
            Ipv4Addr::new(a, b, 0, 0).into()
        }
        IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments();
            Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
        }
    }
}
