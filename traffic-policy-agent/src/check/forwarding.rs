//! Findings about the sysctls that let this node forward packets.

use std::{fs, net::IpAddr};

use anyhow::{Context, Result};

use super::{Finding, devices::Device};

/// Facts about IP forwarding.
#[derive(Clone, Debug)]
pub(super) struct Facts {
    devices: Vec<Setting>,
    /// Value of net.ipv4.conf.all.rp_filter; the larger of it and the device's value applies.
    rp_filter_all: u8,
}

/// The settings of one device.
#[derive(Clone, Debug)]
struct Setting {
    name: String,
    /// Whether forwarding is on, by family; `None` if the kernel or the device has no IPv6.
    forwarding: [Option<bool>; 2],
    /// Whether the device has a global address, by family.
    used: [bool; 2],
    rp_filter: u8,
}

impl Facts {
    pub(super) fn look(devices: &[Device]) -> Result<Self> {
        let number = |path: &str| -> Result<u8> {
            let path = format!("/proc/sys/net/{path}");
            let text = fs::read_to_string(&path).with_context(|| format!("{path} cannot be read"))?;
            text.trim().parse().with_context(|| format!("{path} is not understood: `{text}`"))
        };
        let devices = devices.iter().map(|device| {
            let name = &device.link.name;
            Ok(Setting {
                name: name.clone(),
                forwarding: [
                    Some(number(&format!("ipv4/conf/{name}/forwarding"))? != 0),
                    number(&format!("ipv6/conf/{name}/forwarding")).ok().map(|value| value != 0),
                ],
                used: [
                    device.addresses.iter().any(IpAddr::is_ipv4),
                    device.addresses.iter().any(IpAddr::is_ipv6),
                ],
                rp_filter: number(&format!("ipv4/conf/{name}/rp_filter"))?,
            })
        });
        Ok(Self {
            devices: devices.collect::<Result<_>>()?,
            rp_filter_all: number("ipv4/conf/all/rp_filter")?,
        })
    }
}

/// Strict mode of RFC 3704: linux/ip.h and Documentation/networking/ip-sysctl.rst.
const STRICT: u8 = 1;

pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (at, family, all) in [(0, "IPv4", "net.ipv4.ip_forward"), (1, "IPv6", "net.ipv6.conf.all.forwarding")]
    {
        let off =
            facts.devices.iter().filter(|device| device.forwarding[at] == Some(false) && device.used[at]);
        let off: Vec<_> = off.map(|device| device.name.as_str()).collect();
        let used = facts.devices.iter().any(|device| device.used[at]);
        let found = format!(
            "{family} forwarding is off on {}: packets to endpoints are not delivered (outcome dropped-forwarding-disabled)",
            off.join(", ")
        );
        findings.extend(match (off.is_empty(), at) {
            (true, _) => used.then(|| Finding::ok("forwarding", format!("{family} forwarding is on"))),
            (false, 0) => Some(Finding::error("forwarding", found, format!("sysctl -w {all}=1"))),
            // Many clusters are IPv4-only on nodes that have IPv6 addresses as well.
            (false, _) => Some(Finding::warning(
                "forwarding",
                found,
                format!(
                    "sysctl -w {all}=1, if the cluster has IPv6 Services (and net.ipv6.conf.{}.accept_ra=2, if its routes come by router advertisements)",
                    in_sysctl(off[0])
                ),
            )),
        });
    }
    findings.extend(rp_filter(facts));
    findings
}

fn rp_filter(facts: &Facts) -> Option<Finding> {
    let strict: Vec<_> = facts
        .devices
        .iter()
        .filter(|device| device.used[0] && device.rp_filter.max(facts.rp_filter_all) == STRICT)
        .map(|device| device.name.as_str())
        .collect();
    let uplinks = facts.devices.iter().filter(|device| device.used[0]).count();
    if uplinks < 2 || strict.is_empty() {
        let fine = if uplinks < 2 { "there is one uplink only" } else { "it is not strict" };
        return (uplinks > 0)
            .then(|| Finding::ok("rp-filter", format!("no packet is lost to rp_filter: {fine}")));
    }
    let set = strict.iter().map(|name| format!("net.ipv4.conf.{}.rp_filter=2", in_sysctl(name)));
    let set: Vec<_> = set.collect();
    Some(Finding::warning(
        "rp-filter",
        format!(
            "rp_filter is strict on {}, and there are {uplinks} uplinks: a request to an endpoint of this node that comes by one while the route back to the client leads by another is dropped by the kernel",
            strict.join(", ")
        ),
        format!("sysctl -w {}", set.join(" ")),
    ))
}

/// Returns a device's name as sysctl keys spell it, with dots and slashes exchanged: flannel.1 is
/// flannel/1.
fn in_sysctl(name: &str) -> String {
    name.replace('.', "/")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::Severity;

    fn setting(name: &str) -> Setting {
        Setting { name: name.into(), forwarding: [Some(true); 2], used: [true; 2], rp_filter: 0 }
    }

    fn complaints(facts: &Facts) -> Vec<Finding> {
        let mut findings = judge(facts);
        findings.retain(|finding| finding.severity != Severity::Ok);
        findings
    }

    #[test]
    fn forwarding_off_is_named_by_device_and_family() {
        let mut facts = Facts { devices: vec![setting("eth0"), setting("eth1")], rp_filter_all: 0 };
        assert_eq!(complaints(&facts), []);
        facts.devices[1].forwarding[0] = Some(false);
        let [finding] = complaints(&facts).try_into().unwrap();
        assert_eq!(finding.severity, Severity::Error);
        assert!(finding.found.contains("IPv4 forwarding is off on eth1"), "{finding:?}");
        assert_eq!(finding.fix.unwrap(), "sysctl -w net.ipv4.ip_forward=1");
        facts.devices[1].forwarding = [Some(true), Some(false)];
        let [finding] = complaints(&facts).try_into().unwrap();
        assert_eq!(finding.severity, Severity::Warning);
        assert!(finding.fix.unwrap().contains("net.ipv6.conf.eth1.accept_ra=2"));
        // A device without an address has nothing to forward, and a kernel without IPv6 has no such
        // sysctl.
        facts.devices[1].used[1] = false;
        assert_eq!(complaints(&facts), []);
        facts.devices[1].forwarding[1] = None;
        assert_eq!(complaints(&facts), []);
    }

    #[test]
    fn strict_rp_filter_matters_with_several_uplinks() {
        let mut facts = Facts { devices: vec![setting("eth0")], rp_filter_all: 1 };
        assert_eq!(complaints(&facts), []);
        facts.devices.push(setting("eth1"));
        facts.devices[0].rp_filter = 2;
        let [finding] = complaints(&facts).try_into().unwrap();
        assert!(finding.found.contains("strict on eth1, and there are 2"), "{finding:?}");
        assert_eq!(finding.fix.unwrap(), "sysctl -w net.ipv4.conf.eth1.rp_filter=2");
        facts.devices[1].name = "flannel.1".into();
        assert_eq!(
            complaints(&facts)[0].fix.as_deref(),
            Some("sysctl -w net.ipv4.conf.flannel/1.rp_filter=2")
        );
        facts.rp_filter_all = 0;
        assert_eq!(complaints(&facts), []);
    }
}
