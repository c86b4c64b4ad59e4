//! The devices that packets come by: how they will be taken, and what is in the way.

mod native;

use std::{collections::BTreeSet, net::IpAddr};

use anyhow::Result;

use super::{Finding, Settings, ethtool, network, other_end::OtherEnd};
use crate::{
    dataplane::{
        Kernel, Mode,
        drivers::{self, Channels},
        introspect,
    },
    node::{self, Link},
};

/// What judging needs.
#[derive(Clone, Debug)]
pub(super) struct Facts {
    pub(super) devices: Vec<Device>,
    /// The names of all devices of this network namespace.
    pub(super) names: Vec<String>,
    attach: Mode,
    /// Named devices that do not exist.
    missing: Vec<String>,
    /// Those that lead out, and that `run` cannot attach to.
    left_out: Vec<node::WithoutEthernet>,
    /// Bytes.
    page: usize,
    /// That there may be: drivers count those that are not plugged in yet, too.
    cpus: u32,
}

/// A device that `run` would attach to.
#[derive(Clone, Debug)]
pub(super) struct Device {
    pub(super) link: Link,
    /// Global ones.
    pub(super) addresses: Vec<IpAddr>,
    /// `veth`, `vxlan` …; `None` for hardware.
    kind: Option<String>,
    driver: Option<String>,
    /// Linux 6.3 and newer say what the driver can do.
    xdp_features: Option<u64>,
    /// `None` if it could not be asked for.
    checksum_offload: Option<bool>,
    channels: Option<Channels>,
    /// Features of a virtio device.
    virtio: Option<u64>,
    /// Of a veth, if it could be seen.
    other_end: Option<OtherEnd>,
    /// A program of ours is on it.
    own_xdp: bool,
    /// Programs that are not ours: id, and name if it has one.
    xdp: Vec<(u32, Option<String>)>,
    /// As people would call them; or why they could not be listed.
    tc: Result<Vec<String>, String>,
}

impl Facts {
    pub(super) async fn look(settings: &Settings, node_addresses: &[IpAddr]) -> Result<Self> {
        let (network, links, addresses, routes) = network().await?;
        let (wanted, missing) = node::wanted(&settings.devices, &links, &addresses, &routes, node_addresses);
        let left_out = node::left_out(&settings.devices, &links, &addresses, &routes, node_addresses);
        let own = introspect::pinned_programs(&settings.pins);
        let mut devices = Vec::new();
        for link in wanted {
            let details = network.details(link.index).await?;
            let driver = introspect::driver(&link.name);
            let offloads = ethtool::offloads(link.index).ok();
            let others = details.xdp.iter().filter(|id| !own.contains(id));
            let global = addresses.iter().filter(|address| address.link == link.index && address.global);
            devices.push(Device {
                addresses: global.map(|address| address.address).collect(),
                xdp_features: ethtool::xdp_features(link.index).ok(),
                // Its other names are of cards that know the protocol: those are on a real wire.
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
            left_out,
            page: introspect::page_size(),
            cpus: introspect::possible_cpus(),
        })
    }
}

/// What others have at the TC hooks of a device.
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

/// Common drivers with XDP, as `ethtool -i` names them, for kernels that do not tell themselves (before 6.3).
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

/// How a device's packets will be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Xdp,
    Generic,
    Tc,
}

impl Device {
    fn way(&self, attach: Mode) -> Way {
        match attach {
            Mode::Xdp => Way::Xdp,
            Mode::XdpGeneric => Way::Generic,
            Mode::Tc => Way::Tc,
            Mode::Auto if self.link.wire && self.native() != Some(false) => Way::Xdp,
            Mode::Auto => Way::Tc,
        }
    }

    /// Whether the driver has XDP, if that can be known.
    fn native(&self) -> Option<bool> {
        const BASIC: u64 = 1;
        if let Some(features) = self.xdp_features {
            return Some(features & BASIC != 0);
        }
        WITH_XDP.contains(&self.driver.as_deref()?).then_some(true)
    }

    /// `eth0 (driver ena)`, `eth0 (veth)`.
    fn described(&self) -> String {
        match (&self.kind, &self.driver) {
            (Some(kind), _) => format!("{} ({kind})", self.link.name),
            (None, Some(driver)) => format!("{} (driver {driver})", self.link.name),
            (None, None) => self.link.name.clone(),
        }
    }
}

pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    let mut findings: Vec<_> = facts
        .missing
        .iter()
        .map(|name| {
            let found = format!("there is no device {name} (there are: {})", facts.names.join(", "));
            Finding::error("device", found, "correct --device")
        })
        .collect();
    findings.extend(facts.left_out.iter().map(|device| {
        let found = format!(
            "{}: what comes by it from outside or from other nodes' pods is not served",
            device.found()
        );
        Finding::warning("device", found, device.fix())
    }));
    if facts.devices.is_empty() && facts.missing.is_empty() {
        findings.push(Finding::error(
            "device",
            "no device leads to the outside: there is no default route, and no Node with addresses is known",
            "name the devices with --device",
        ));
    }
    for device in &facts.devices {
        findings.extend(way(device, facts.attach));
    }
    let each = |judge: fn(&Device, &Facts) -> Option<Finding>, probe, fine: &str| {
        let judged = facts.devices.iter().filter_map(|device| judge(device, facts));
        let mut judged: Vec<_> = judged.collect();
        if judged.is_empty() && !facts.devices.is_empty() {
            judged.push(Finding::ok(probe, fine));
        }
        judged
    };
    let mut mtu = each(native::long_frames, "mtu", "the devices' MTUs are fit, and the same");
    if let Some(finding) = different_mtus(&facts.devices) {
        mtu.retain(|finding| finding.fix.is_some());
        mtu.push(finding);
    }
    findings.extend(mtu);
    findings.extend(each(native::queues, "queues", "the devices have queues enough, as far as is known"));
    findings.extend(each(
        native::guest_offloads,
        "guest-offloads",
        "no host hands over frames that XDP could not treat",
    ));
    findings.extend(each(native::other_end, "other-end", "no veth loses what XDP sends by it"));
    findings.extend(each(offload, "offload", "no device delivers frames with unfinished checksums"));
    findings.extend(each(other_xdp, "xdp-program", "no other XDP program is on the devices"));
    findings.extend(each(other_tc, "tc-programs", "no other TC programs are on the devices"));
    findings
}

fn way(device: &Device, attach: Mode) -> Vec<Finding> {
    const PROBE: &str = "device";
    let (name, described) = (&device.link.name, device.described());
    let mut findings = Vec::new();
    if let Err(refusal) = node::WithoutEthernet::refuse(&device.link) {
        findings.push(Finding::error(PROBE, refusal.found(), refusal.fix()));
        return findings;
    }
    if !device.link.up {
        let found = format!("{described} is switched off");
        findings.push(Finding::warning(PROBE, found, format!("ip link set {name} up")));
    }
    findings.push(match (attach, device.native()) {
        (Mode::Auto, Some(false)) if device.link.wire => Finding::note(
            PROBE,
            format!("{described} has no XDP: TC takes its packets, at more than twice the cost"),
            "nothing, or a network card whose driver has XDP",
        ),
        (Mode::Auto, None) if device.link.wire => Finding::note(
            PROBE,
            format!("whether {described} has XDP shows when it is attached to; if not, TC takes its packets"),
            "nothing; `run` says which it is",
        ),
        (Mode::Xdp, Some(false)) => Finding::error(
            PROBE,
            format!("{described} has no XDP: --attach xdp cannot work"),
            "--attach auto, or --attach xdp-generic",
        ),
        (Mode::Xdp, None) => Finding::warning(
            PROBE,
            format!("{described} is not known to have XDP: --attach xdp may not work"),
            "--attach auto takes TC where XDP is not possible",
        ),
        (Mode::XdpGeneric, _) => Finding::note(
            PROBE,
            format!("{described}: XDP in the stack, which is slower than TC"),
            "--attach auto",
        ),
        (_, _) if device.way(attach) == Way::Xdp => {
            Finding::ok(PROBE, format!("{described}: XDP in the driver takes its packets"))
        }
        (_, _) => Finding::ok(PROBE, format!("{described}: TC takes its packets")),
    });
    findings
}

fn different_mtus(devices: &[Device]) -> Option<Finding> {
    let first = devices.first()?.link.mtu;
    devices.iter().any(|device| device.link.mtu != first).then(|| {
        let mtus: Vec<_> =
            devices.iter().map(|device| format!("{} {}", device.link.name, device.link.mtu)).collect();
        Finding::note(
            "mtu",
            format!(
                "the devices have different MTUs ({}): what is too long for the way out is answered with \"fragmentation needed\", which clients must get to see",
                mtus.join(", ")
            ),
            "nothing if ICMP reaches the clients (overlays have a smaller MTU by nature), else the same MTU everywhere",
        )
    })
}

fn offload(device: &Device, facts: &Facts) -> Option<Finding> {
    // Between two ends of a veth nobody computes a checksum: it is left to a card that never comes.
    if device.kind.as_deref() != Some("veth") || device.checksum_offload == Some(false) {
        return None;
    }
    let name = &device.link.name;
    let off = format!("ethtool -K {name} tx off, and the same at the veth's other end");
    let is = if device.checksum_offload.is_some() {
        format!("{name} is a veth with checksum offload (its other end, which sends, most likely too)")
    } else {
        format!("{name} is a veth, and whether with checksum offload could not be seen; if so")
    };
    Some(if device.way(facts.attach) == Way::Tc {
        Finding::note(
            "offload",
            format!(
                "{is}: frames come with unfinished checksums, which TC knows how to treat and XDP would spoil"
            ),
            format!("nothing with TC; before --attach xdp: {off}"),
        )
    } else {
        Finding::warning(
            "offload",
            format!("{is}: frames come with unfinished checksums, which XDP cannot tell and spoils"),
            format!("--attach auto or tc; or {off}"),
        )
    })
}

fn other_xdp(device: &Device, facts: &Facts) -> Option<Finding> {
    let (id, program) = device.xdp.first()?;
    let name = &device.link.name;
    let program = program.as_ref().map_or_else(String::new, |program| format!(" {program}"));
    let is = format!("another XDP program{program} (id {id}) is on {name}");
    let off = format!(
        "stop what attached it, or `ip link set {name} xdp off` (`bpftool prog show id {id}` tells more)"
    );
    Some(match facts.attach {
        Mode::Xdp | Mode::XdpGeneric => Finding::error(
            "xdp-program",
            format!("{is}: two cannot be on one device"),
            format!("{off}; or --attach tc"),
        ),
        Mode::Auto if device.way(facts.attach) == Way::Xdp => Finding::warning(
            "xdp-program",
            format!("{is}: TC will take the packets, of which that program takes its share first"),
            off,
        ),
        _ => Finding::warning("xdp-program", format!("{is}: it sees packets first, and may take them"), off),
    })
}

fn other_tc(device: &Device, _facts: &Facts) -> Option<Finding> {
    let name = &device.link.name;
    let others = match &device.tc {
        Ok(others) => others,
        Err(error) => {
            let found = format!("the TC programs on {name} could not be listed: {error}");
            return Some(Finding::warning("tc-programs", found, "run `check` as root"));
        }
    };
    (!others.is_empty()).then(|| {
        Finding::note(
            "tc-programs",
            format!("others are at the TC hooks of {name}, too, and may take packets: {}", others.join(", ")),
            format!(
                "nothing if they are wanted; what an earlier CNI or proxy left: its own clean-up, or `tc qdisc del dev {name} clsact` (filters), `bpftool net detach tcx_ingress dev {name}` (tcx)"
            ),
        )
    })
}

#[cfg(test)]
mod tests;
