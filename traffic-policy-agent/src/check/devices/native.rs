//! Findings about XDP in the driver: long frames, too few queues, guest offloads, the other end of
//! a veth.

use traffic_policy_dataplane::{
    Mode,
    drivers::{self, TooFew},
};

use super::facts::{Device, DeviceFacts, ResolvedMode};
use crate::check::{finding::Finding, other_end};

/// Returns the consequence of the driver's refusal.
fn effect(attach: Mode) -> &'static str {
    if attach == Mode::Auto { "then TC takes its packets" } else { "then `run` fails" }
}

/// Returns a warning under `auto`, which falls back to another hook, or else an error.
fn refused(attach: Mode, probe: &'static str, found: String, fix: String) -> Finding {
    if attach == Mode::Auto { Finding::warning(probe, found, fix) } else { Finding::error(probe, found, fix) }
}

pub(super) fn long_frames(device: &Device, facts: &DeviceFacts) -> Option<Finding> {
    const PROBE: &str = "mtu";
    if device.resolved_mode(facts.attach) != ResolvedMode::Xdp {
        return None;
    }
    let (name, mtu, page) = (&device.link.name, device.link.mtu, facts.page);
    let effect = effect(facts.attach);
    let Some(most) =
        device.driver.as_deref().and_then(|driver| drivers::most_mtu(driver, page, facts.kernel))
    else {
        let most = drivers::page_mtu(page);
        return (mtu > most).then(|| {
            Finding::warning(
                PROBE,
                format!(
                    "{name} has MTU {mtu}, and drivers that keep each frame in one page of {page} bytes for XDP have room for an MTU of about {most}: its driver may refuse, {effect}"
                ),
                format!("ip link set {name} mtu {most} (some drivers want a little less), or --attach tc"),
            )
        });
    };
    (mtu > most).then(|| {
        refused(
            facts.attach,
            PROBE,
            format!(
                "{name} has MTU {mtu}, and {} takes XDP up to {most}, for a frame must fit into a page: it refuses, {effect}",
                device.described()
            ),
            format!("ip link set {name} mtu {most}, or --attach tc or xdp-generic"),
        )
    })
}

pub(super) fn queues(device: &Device, facts: &DeviceFacts) -> Option<Finding> {
    const PROBE: &str = "queues";
    // With a program of this agent attached, the queues that XDP uses are counted, too.
    if device.resolved_mode(facts.attach) != ResolvedMode::Xdp || device.own_xdp {
        return None;
    }
    let (name, channels) = (&device.link.name, device.channels?);
    let TooFew { fit, needed, refuses } =
        drivers::too_few_queues(device.driver.as_deref()?, channels, facts.cpus)?;
    let fewer = if fit > 0 { format!("ethtool -L {name} combined {fit}; or ") } else { String::new() };
    let fix = format!(
        "{fewer}give the machine {needed} queues (QEMU: queues={needed} of the netdev and mq=on; libvirt: <driver queues='{needed}'/>), or --attach tc"
    );
    let has = format!("{} uses {} of at most {} queues", device.described(), channels.used, channels.most);
    Some(if refuses {
        let found = format!(
            "{has}, and its driver wants as many again for XDP: it may refuse, {}",
            effect(facts.attach)
        );
        Finding::warning(PROBE, found, fix)
    } else {
        let found = format!(
            "{has}, and its driver wants one more for each of {} CPUs: XDP works, but the CPUs wait for each other whenever they send (of which only the kernel's log tells)",
            facts.cpus
        );
        Finding::note(PROBE, found, fix)
    })
}

pub(super) fn guest_offloads(device: &Device, facts: &DeviceFacts) -> Option<Finding> {
    let fixed = device.resolved_mode(facts.attach) == ResolvedMode::Xdp
        && drivers::fixed_guest_offloads(device.virtio?);
    fixed.then(|| {
        refused(
            facts.attach,
            "guest-offloads",
            format!(
                "the host hands merged or unfinished frames to {} (guest offloads) and does not let that be changed: the driver refuses XDP, {}",
                device.described(),
                effect(facts.attach)
            ),
            format!("{}; or --attach tc or xdp-generic", drivers::FREE_GUEST_OFFLOADS),
        )
    })
}

pub(super) fn other_end(device: &Device, facts: &DeviceFacts) -> Option<Finding> {
    let veth =
        device.resolved_mode(facts.attach) == ResolvedMode::Xdp && device.kind.as_deref() == Some("veth");
    veth.then(|| other_end::judge(&device.link.name, device.other_end.as_ref()))?
}
