//! Findings about the devices that packets arrive on: which hook takes their packets, and what
//! prevents a faster one.

mod facts;
mod native;

use traffic_policy_dataplane::{Mode, node};

use self::facts::ResolvedMode;
pub(super) use self::facts::{Device, DeviceFacts};
use super::finding::Finding;

pub(super) fn judge(facts: &DeviceFacts) -> Vec<Finding> {
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
            "{}: what comes by it from outside is not served, and connections to endpoints behind it are refused (dropped-unattached-device)",
            device.found()
        );
        Finding::warning("device", found, device.fix())
    }));
    findings.extend(facts.idle.iter().map(|name| {
        let found = format!(
            "{name} has routes, and nothing is attached to it: what comes by it from outside is not served, and connections to endpoints of other nodes behind it are refused (dropped-unattached-device)"
        );
        let fix = "nothing if neither clients nor pods of other nodes are behind it; else name all devices with --device, this one too";
        Finding::note("device", found, fix)
    }));
    if facts.devices.is_empty() && facts.missing.is_empty() {
        findings.push(Finding::error(
            "device",
            "no device leads to the outside: there is no default route, and no Node with addresses is known",
            "name the devices with --device",
        ));
    }
    for device in &facts.devices {
        findings.extend(attach_mode(device, facts.attach, facts.named));
    }
    let each = |judge: fn(&Device, &DeviceFacts) -> Option<Finding>, probe, fine: &str| {
        let judged = facts.devices.iter().filter_map(|device| judge(device, facts));
        let mut judged: Vec<_> = judged.collect();
        if judged.is_empty() && !facts.devices.is_empty() {
            judged.push(Finding::ok(probe, fine));
        }
        judged
    };
    let mut mtu = each(native::long_frames, "mtu", "the devices' MTUs are fit, and the same");
    let different = different_mtus(&facts.devices).into_iter();
    let different: Vec<_> =
        different.chain(narrow_overlay(&facts.devices)).chain(narrow_pods(facts)).collect();
    if !different.is_empty() {
        mtu.retain(|finding| finding.fix.is_some());
        mtu.extend(different);
    }
    findings.extend(mtu);
    findings.extend(left_to_tc(facts));
    findings.extend(each(native::queues, "queues", "the devices have queues enough, as far as is known"));
    findings.extend(each(
        native::guest_offloads,
        "guest-offloads",
        "no host hands over frames that XDP could not treat",
    ));
    findings.extend(each(native::other_end, "other-end", "no veth loses what XDP sends by it"));
    findings.extend(each(offload, "offload", "no device delivers frames with unfinished checksums"));
    findings.extend(each(vlans, "vlan", "no device hides VLAN tags from XDP"));
    findings.extend(each(other_xdp, "xdp-program", "no other XDP program is on the devices"));
    findings.extend(each(other_tc, "tc-programs", "no other TC programs are on the devices"));
    findings
}

fn attach_mode(device: &Device, attach: Mode, named: bool) -> Vec<Finding> {
    const PROBE: &str = "device";
    let (name, described) = (&device.link.name, device.described());
    let mut findings = Vec::new();
    let xdp = named && attach.is_xdp();
    let fit = node::Refusal::of(&device.link);
    if let Err(refusal) = fit.and_then(|()| if xdp { node::Refusal::of_xdp(&device.link) } else { Ok(()) }) {
        findings.push(Finding::error(PROBE, refusal.found(), refusal.fix()));
        return findings;
    }
    if !device.link.up {
        let found = format!("{described} is switched off");
        findings.push(Finding::warning(PROBE, found, format!("ip link set {name} up")));
    }
    if device.link.header != node::Header::Ethernet {
        let found = format!("{described} has no Ethernet header: TC takes its packets");
        findings.push(Finding::ok(PROBE, found));
        return findings;
    }
    findings.push(match (attach, device.native()) {
        (Mode::Auto, Some(false)) if device.link.wire => Finding::note(
            PROBE,
            format!("{described} has no XDP: TC takes its packets, at more than twice the cost"),
            "nothing, or a network card whose driver has XDP",
        ),
        (Mode::Auto, None) if device.link.wire && device.stripped_vlans.is_empty() => Finding::note(
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
        (_, _) if device.resolved_mode(attach) == ResolvedMode::Xdp => {
            Finding::ok(PROBE, format!("{described}: XDP in the driver takes its packets"))
        }
        (_, _) => Finding::ok(PROBE, format!("{described}: TC takes its packets")),
    });
    findings
}

/// Devices on which clients' packets may arrive.
fn of_clients(devices: &[Device]) -> impl Iterator<Item = &Device> {
    devices.iter().filter(|device| !device.is_overlay())
}

fn widest(devices: &[Device]) -> Option<&Device> {
    of_clients(devices).max_by_key(|device| device.link.mtu)
}

fn different_mtus(devices: &[Device]) -> Option<Finding> {
    let first = of_clients(devices).next()?.link.mtu;
    of_clients(devices).any(|device| device.link.mtu != first).then(|| {
        let mtus: Vec<_> = of_clients(devices)
            .map(|device| format!("{} {}", device.link.name, device.link.mtu))
            .collect();
        Finding::note(
            "mtu",
            format!(
                "the devices have different MTUs ({}): what is too long for the way out is answered with \"fragmentation needed\", which clients must get to see",
                mtus.join(", ")
            ),
            "nothing if ICMP reaches the clients, else the same MTU everywhere",
        )
    })
}

/// Reports devices towards endpoints on other nodes whose MTU is smaller than that of client
/// devices.
fn narrow_overlay(devices: &[Device]) -> Option<Finding> {
    let widest = widest(devices)?;
    let (name, mtu) = (&widest.link.name, widest.link.mtu);
    let narrow: Vec<_> =
        devices.iter().filter(|device| device.is_overlay() && device.link.mtu < mtu).collect();
    let least = narrow.iter().map(|device| device.link.mtu).min()?;
    let narrow: Vec<_> =
        narrow.iter().map(|device| format!("{} ({})", device.link.name, device.link.mtu)).collect();
    Some(Finding::warning(
        "mtu",
        format!(
            "{} towards endpoints of other nodes takes shorter packets than {name} ({mtu}), by which clients come: of longer ones those with DF, and IPv6, are answered by ICMP; IPv4 without DF is sent in two pieces, or dropped where two do not suffice or it has IPv4 options (dropped-mtu-exceeded)",
            narrow.join(", ")
        ),
        format!(
            "let ICMP through to clients (IPv4 type 3, IPv6 type 2). Where they send long datagrams (RADIUS, SIP, GELF): {mtu} inside the overlay, by a larger MTU of the network below it, or {least} at the clients"
        ),
    ))
}

/// Reports overlays next to devices with XDP: no overlay device accepts frames that XDP redirects.
/// `auto` keeps XDP on the cards all the same: see docs/operating.md.
fn left_to_tc(facts: &DeviceFacts) -> Option<Finding> {
    let names = |mut devices: Vec<&Device>| {
        devices.sort_by_key(|device| &device.link.name);
        devices.iter().map(|device| device.link.name.as_str()).collect::<Vec<_>>().join(", ")
    };
    let (overlays, others): (Vec<_>, Vec<_>) = facts.devices.iter().partition(|device| device.is_overlay());
    let by_xdp: Vec<_> =
        others.into_iter().filter(|device| device.resolved_mode(facts.attach) != ResolvedMode::Tc).collect();
    if overlays.is_empty() || by_xdp.is_empty() {
        return None;
    }
    let found = format!(
        "{} takes no frames from XDP: requests to endpoints behind it are handed on to TC; what is dropped, refused or goes to other nodes by {} itself is done by XDP",
        names(overlays),
        names(by_xdp)
    );
    Some(Finding::ok("overlay", found))
}

/// Reports devices towards pods of this node whose MTU is smaller than that of client devices.
fn narrow_pods(facts: &DeviceFacts) -> Option<Finding> {
    let widest = widest(&facts.devices)?;
    let (name, mtu) = (&widest.link.name, widest.link.mtu);
    let narrow: Vec<_> = facts.of_pods.iter().filter(|(_, of_pods)| *of_pods < mtu).collect();
    let (first, least) = narrow.iter().min_by_key(|(_, mtu)| mtu)?;
    let others = match narrow.len() - 1 {
        0 => String::new(),
        number => format!(" and {number} more"),
    };
    Some(Finding::note(
        "mtu",
        format!(
            "{first} ({least}){others} towards pods of this node takes shorter packets than {name} ({mtu}), by which clients come: the stack answers longer ones with DF, and IPv6, by ICMP, and fragments IPv4 without DF"
        ),
        "nothing if ICMP reaches the clients (IPv4 type 3, IPv6 type 2), else the same MTU everywhere",
    ))
}

fn offload(device: &Device, facts: &DeviceFacts) -> Option<Finding> {
    // No checksum is computed between the two ends of a veth: it is left to a card that the packet
    // never reaches.
    if device.kind.as_deref() != Some("veth") || device.checksum_offload == Some(false) {
        return None;
    }
    if device.other_end.as_ref().is_some_and(|other| other.prepared) {
        // Packets from the other end have finished checksums.
        return None;
    }
    let name = &device.link.name;
    let off = format!("ethtool -K {name} tx off, and the same at the veth's other end");
    let is = if device.checksum_offload.is_some() {
        format!("{name} is a veth with checksum offload (its other end, which sends, most likely too)")
    } else {
        format!("{name} is a veth, and whether with checksum offload could not be seen; if so")
    };
    Some(if device.resolved_mode(facts.attach) == ResolvedMode::Tc {
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
            format!(
                "--attach auto or tc; or {off} (`traffic-policy-agent veth-peer --attach` there does that)"
            ),
        )
    })
}

/// Reports VLANs over a device. XDP does not see a tag that the card has stripped: a frame of
/// eth0.100 looks like one of eth0.
fn vlans(device: &Device, facts: &DeviceFacts) -> Option<Finding> {
    if device.stripped_vlans.is_empty() || facts.attach == Mode::Tc {
        return None;
    }
    let (name, vlans) = (&device.link.name, device.stripped_vlans.join(", "));
    if device.resolved_mode(facts.attach) == ResolvedMode::Tc {
        return device.link.wire.then(|| {
            Finding::note(
                "vlan",
                format!("{name} takes the VLAN tags of {vlans} out of frames before XDP sees them: TC takes its packets"),
                format!("nothing; or ethtool -K {name} rxvlan off, which lets XDP take them at less than half the cost"),
            )
        });
    }
    Some(Finding::warning(
        "vlan",
        format!(
            "{name} takes VLAN tags out of frames before XDP sees them: what comes by {vlans} is taken for {name}'s own"
        ),
        format!("ethtool -K {name} rxvlan off; or --attach tc"),
    ))
}

fn other_xdp(device: &Device, facts: &DeviceFacts) -> Option<Finding> {
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
        Mode::Auto if device.resolved_mode(facts.attach) == ResolvedMode::Xdp => Finding::warning(
            "xdp-program",
            format!("{is}: TC will take the packets, of which that program takes its share first"),
            off,
        ),
        _ => Finding::warning("xdp-program", format!("{is}: it sees packets first, and may take them"), off),
    })
}

fn other_tc(device: &Device, _facts: &DeviceFacts) -> Option<Finding> {
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
