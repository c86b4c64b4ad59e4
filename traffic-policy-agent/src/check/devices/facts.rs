//! Facts about the devices that packets arrive on, gathered by netlink and ethtool.

use std::{collections::BTreeSet, net::IpAddr};

use anyhow::Result;
use traffic_policy_dataplane::{
    Kernel, Mode, drivers, introspect,
    node::{
        self, Header, Link, Network,
        ethtool::{self, Channels},
    },
};

use crate::check::{other_end::OtherEnd, settings::Settings};

/// Facts by which devices are judged.
#[derive(Clone, Debug)]
pub struct DeviceFacts {
    pub devices: Vec<Device>,
    /// The names of all devices of this network namespace.
    pub names: Vec<String>,
    pub attach: Mode,
    /// Devices that were named and do not exist.
    pub missing: Vec<String>,
    /// Whether devices were named.
    pub named: bool,
    /// Devices that lead out and that `run` does not attach to.
    pub left_out: Vec<node::Refusal>,
    /// Hardware devices with routes that `run` does not attach to.
    pub idle: Vec<String>,
    /// Devices that lead to pods of this node, as far as routes show, by name and MTU.
    pub of_pods: Vec<(String, u32)>,
    /// Size of a memory page, in bytes.
    pub page: usize,
    pub kernel: Kernel,
    /// Number of possible CPUs: drivers also count those that are not plugged in yet.
    pub cpus: u32,
}

/// A device that `run` would attach to.
#[derive(Clone, Debug)]
pub struct Device {
    pub link: Link,
    /// Global addresses.
    pub addresses: Vec<IpAddr>,
    /// Kind of the link (`veth`, `vxlan` …); `None` for hardware.
    pub kind: Option<String>,
    pub driver: Option<String>,
    /// XDP features of the driver, which Linux 6.3 and newer report.
    pub xdp_features: Option<u64>,
    /// Whether checksum offload is on; `None` if that could not be read.
    pub checksum_offload: Option<bool>,
    pub channels: Option<Channels>,
    /// Features of a virtio device.
    pub virtio: Option<u64>,
    /// The other end of a veth, if it could be inspected.
    pub other_end: Option<OtherEnd>,
    /// VLAN devices over this device, if it strips the tags from frames before XDP sees them.
    pub stripped_vlans: Vec<String>,
    /// Whether a program of this agent is attached.
    pub own_xdp: bool,
    /// Programs of others: id, and name if there is one.
    pub xdp: Vec<(u32, Option<String>)>,
    /// Programs of others at the TC hooks, as users would call them, or the reason why they could
    /// not be listed.
    pub tc: Result<Vec<String>, String>,
}

impl DeviceFacts {
    pub async fn look(settings: &Settings, node_addresses: &[IpAddr]) -> Result<Self> {
        let (network, links, addresses, routes) = network().await?;
        let (wanted, missing) = node::wanted(&settings.devices, &links, &addresses, &routes, node_addresses);
        let left_out = node::left_out(&settings.devices, &links, &addresses, &routes, node_addresses);
        let idle = idle(&links, &wanted, &routes);
        let of_pods = of_pods(&links, &wanted, &routes);
        let own = introspect::pinned_programs(&settings.pins);
        // The file does not exist without the module 8021q, nor without VLANs.
        let vlans = std::fs::read_to_string("/proc/self/net/vlan/config").unwrap_or_default();
        let mut devices = Vec::new();
        for link in wanted {
            let details = network.details(link.index).await?;
            let driver = introspect::driver(&link.name);
            let offloads = ethtool::offloads(link.index).ok();
            let others = details.xdp.iter().filter(|id| !own.contains(id));
            let global = addresses.iter().filter(|address| address.link == link.index && address.global);
            let strips = offloads.as_ref().is_some_and(|offloads| ethtool::strip_vlans(offloads));
            devices.push(Device {
                stripped_vlans: if strips { vlans_over(&vlans, &link.name) } else { Vec::new() },
                addresses: global.map(|address| address.address).collect(),
                xdp_features: ethtool::xdp_features(link.index).ok(),
                // The other names (`tx-checksum-…`) are those of cards that know the protocol; such
                // cards are on a real wire.
                checksum_offload: offloads
                    .map(|offloads| offloads.iter().any(|name| name == "tx-checksum-ip-generic")),
                channels: ethtool::channels(link.index).ok(),
                virtio: drivers::virtio_features(&link.name, link.index, driver.as_deref()),
                other_end: OtherEnd::of(link.index).ok().filter(|_| details.kind.as_deref() == Some("veth")),
                driver,
                own_xdp: details.xdp.iter().any(|id| own.contains(id)),
                xdp: others.map(|id| (*id, introspect::program_name(*id))).collect(),
                tc: tc(&link.name, &details.filters, &own).map_err(|error| format!("{error:#}")),
                kind: details.kind,
                link: link.clone(),
            });
        }
        let names = links.iter().map(|link| link.name.clone()).collect();
        Ok(Self {
            devices,
            names,
            attach: settings.attach,
            missing,
            named: !settings.devices.is_empty(),
            left_out,
            idle,
            of_pods,
            page: introspect::page_size(),
            kernel: Kernel::found()?.0,
            cpus: introspect::possible_cpus(),
        })
    }
}

/// Returns cards with routes that are not wanted: they may still lead to pods of other nodes.
pub fn idle(links: &[Link], wanted: &[&Link], routes: &[node::Route]) -> Vec<String> {
    let is_idle = |link: &&Link| {
        link.wire
            && link.up
            && !link.loopback
            && link.header == Header::Ethernet
            && !wanted.iter().any(|wanted| wanted.index == link.index)
            && routes.iter().any(|route| route.link == link.index)
    };
    links.iter().filter(is_idle).map(|link| link.name.clone()).collect()
}

/// Returns devices with routes that `run` does not attach to and that are not cards.
pub fn of_pods(links: &[Link], wanted: &[&Link], routes: &[node::Route]) -> Vec<(String, u32)> {
    let is_of_pods = |link: &&Link| {
        !link.wire
            && link.up
            && !link.loopback
            && link.header == Header::Ethernet
            && !wanted.iter().any(|wanted| wanted.index == link.index)
            && routes.iter().any(|route| route.link == link.index && !route.default && !route.gateway)
    };
    links.iter().filter(is_of_pods).map(|link| (link.name.clone(), link.mtu)).collect()
}

/// Returns the VLAN devices over a device, from lines like `eth0.100       | 100  | eth0`.
pub fn vlans_over(table: &str, device: &str) -> Vec<String> {
    let rows = table.lines().filter_map(|line| {
        let [name, _, over] = line.split('|').map(str::trim).collect::<Vec<_>>().try_into().ok()?;
        (over == device).then(|| name.to_owned())
    });
    rows.collect()
}

/// Returns the programs of others at the TC hooks of a device.
fn tc(device: &str, filters: &[node::Filter], own: &BTreeSet<u32>) -> Result<Vec<String>> {
    let mut found = Vec::new();
    let (kernel, _) = Kernel::found()?;
    let tcx = if kernel.has_tcx() { introspect::tcx_programs(device)? } else { [Vec::new(), Vec::new()] };
    for (hook, programs) in ["ingress", "egress"].iter().zip(tcx) {
        let others = programs.into_iter().filter(|program| !own.contains(&program.id));
        found.extend(others.map(|program| {
            let name = if program.name.is_empty() { "without a name" } else { &program.name };
            format!("tcx program {name} (id {}) at {hook}", program.id)
        }));
    }
    for filter in filters.iter().filter(|filter| !introspect::is_own_filter(filter.info, filter.handle)) {
        let hook = if filter.ingress { "ingress" } else { "egress" };
        let name = filter.program.as_ref().map_or_else(String::new, |name| format!(" {name}"));
        found.push(format!("{} filter{name} (priority {}) at {hook}", filter.kind, filter.info >> 16));
    }
    Ok(found)
}

/// Common drivers with XDP, as `ethtool -i` names them, for kernels before 6.3, which do not report
/// features.
const WITH_XDP: [&str; 20] = [
    "atlantic",
    "bnxt_en",
    "ena",
    "hv_netvsc",
    "i40e",
    "ice",
    "igb",
    "igc",
    "ixgbe",
    "ixgbevf",
    "mana",
    "mlx4_en",
    "mlx5_core",
    "mvneta",
    "nfp",
    "qede",
    "sfc",
    "veth",
    "vif",
    "virtio_net",
];

/// The mode in which the agent will attach to a device: `auto` is decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResolvedMode {
    Xdp,
    Generic,
    Tc,
}

impl Device {
    pub fn resolved_mode(&self, attach: Mode) -> ResolvedMode {
        if self.link.header != Header::Ethernet {
            return ResolvedMode::Tc;
        }
        match attach {
            Mode::Xdp => ResolvedMode::Xdp,
            Mode::XdpGeneric => ResolvedMode::Generic,
            Mode::Tc => ResolvedMode::Tc,
            Mode::Auto
                if self.stripped_vlans.is_empty() && self.link.wire && self.native() != Some(false) =>
            {
                ResolvedMode::Xdp
            }
            Mode::Auto => ResolvedMode::Tc,
        }
    }

    /// Whether the device encapsulates packets for pods of other nodes.
    pub fn is_overlay(&self) -> bool {
        const ETHERNET_INSIDE: [&str; 4] = ["vxlan", "geneve", "gretap", "ip6gretap"];
        self.link.header != Header::Ethernet
            || self.kind.as_deref().is_some_and(|kind| ETHERNET_INSIDE.contains(&kind))
    }

    /// Whether the driver has XDP, if that is known.
    pub fn native(&self) -> Option<bool> {
        const BASIC: u64 = 1;
        if let Some(features) = self.xdp_features {
            return Some(features & BASIC != 0);
        }
        WITH_XDP.contains(&self.driver.as_deref()?).then_some(true)
    }

    /// Returns the device as `eth0 (driver ena)` or `eth0 (veth)`.
    pub fn described(&self) -> String {
        match (&self.kind, &self.driver) {
            (Some(kind), _) => format!("{} ({kind})", self.link.name),
            (None, Some(driver)) => format!("{} (driver {driver})", self.link.name),
            (None, None) => self.link.name.clone(),
        }
    }
}

/// Devices, addresses and routes of the namespace that the calling thread is in.
async fn network() -> Result<(Network, Vec<Link>, Vec<node::Address>, Vec<node::Route>)> {
    let (network, _events) = Network::connect()?;
    let (links, addresses, routes) =
        (network.links().await?, network.addresses().await?, network.routes().await?);
    Ok((network, links, addresses, routes))
}
