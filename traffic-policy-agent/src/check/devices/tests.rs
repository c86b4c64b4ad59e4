use super::*;
use crate::check::Severity;

fn device(name: &str) -> Device {
    Device {
        link: Link {
            index: 2,
            name: name.into(),
            mac: [2, 0, 0, 0, 0, 1],
            mtu: 1500,
            up: true,
            running: true,
            loopback: false,
            ethernet: true,
            wire: true,
        },
        addresses: Vec::new(),
        kind: None,
        driver: Some("ena".into()),
        xdp_features: None,
        checksum_offload: Some(true),
        xdp: Vec::new(),
        tc: Ok(Vec::new()),
    }
}

fn facts(devices: Vec<Device>) -> Facts {
    let names = vec!["lo".into(), "eth0".into()];
    Facts { devices, names, attach: Mode::Auto, missing: Vec::new(), page: 4096 }
}

/// The one finding that asks for something.
fn complaint(facts: &Facts) -> Finding {
    let mut findings = judge(facts);
    findings.retain(|finding| finding.severity != Severity::Ok);
    assert_eq!(findings.len(), 1, "{findings:#?}");
    findings.remove(0)
}

fn expect(facts: &Facts, severity: Severity, probe: &str, found: &str, cure: &str) {
    let finding = complaint(facts);
    assert_eq!((finding.severity, finding.probe), (severity, probe), "{finding:?}");
    assert!(finding.found.contains(found), "{finding:?}");
    assert!(finding.cure.as_ref().unwrap().contains(cure), "{finding:?}");
}

#[test]
fn a_card_with_xdp_has_no_complaints() {
    let findings = judge(&facts(vec![device("eth0")]));
    assert!(findings.iter().all(|finding| finding.severity == Severity::Ok), "{findings:#?}");
    assert!(findings[0].found.contains("eth0 (driver ena): XDP in the driver"), "{findings:#?}");
}

#[test]
fn devices_that_are_not_there() {
    let mut facts = facts(Vec::new());
    expect(&facts, Severity::Error, "device", "no default route", "--device");
    facts.missing.push("eth9".into());
    expect(&facts, Severity::Error, "device", "no device eth9 (there are: lo, eth0)", "--device");
}

#[test]
fn how_packets_are_taken() {
    let with = |attach, features, driver: Option<&str>| {
        let mut device = device("eth0");
        device.xdp_features = features;
        device.driver = driver.map(str::to_owned);
        Facts { attach, ..facts(vec![device]) }
    };
    // The kernel's word counts more than the list.
    expect(&with(Mode::Auto, Some(0), Some("ena")), Severity::Note, "device", "has no XDP: TC", "card");
    expect(&with(Mode::Xdp, Some(0), Some("ena")), Severity::Error, "device", "cannot work", "--attach auto");
    expect(&with(Mode::Auto, None, Some("e1000")), Severity::Note, "device", "shows when", "run");
    expect(&with(Mode::Xdp, None, None), Severity::Warning, "device", "may not work", "--attach auto");
    expect(&with(Mode::XdpGeneric, None, Some("ena")), Severity::Note, "device", "slower", "--attach auto");
    for good in [with(Mode::Xdp, Some(3), Some("e1000")), with(Mode::Tc, Some(0), None)] {
        assert!(judge(&good).iter().all(|finding| finding.severity == Severity::Ok));
    }
    let mut off = device("eth0");
    off.link.up = false;
    expect(&facts(vec![off]), Severity::Warning, "device", "switched off", "ip link set eth0 up");
}

#[test]
fn mtus() {
    let mut jumbo = device("eth0");
    jumbo.link.mtu = 9001;
    let all = facts(vec![jumbo.clone()]);
    expect(&all, Severity::Warning, "mtu", "about 3506", "ip link set eth0 mtu 3506");
    assert!(complaint(&all).found.contains("then TC"));
    let forced = Facts { attach: Mode::Xdp, ..all.clone() };
    assert!(complaint(&forced).found.contains("`run` fails"));
    for good in [Facts { attach: Mode::Tc, ..all.clone() }, Facts { page: 16_384, ..all }] {
        assert!(judge(&good).iter().all(|finding| finding.severity == Severity::Ok));
    }
    let mut small = device("flannel.1");
    small.link.mtu = 1450;
    let both = facts(vec![device("eth0"), small]);
    expect(&both, Severity::Note, "mtu", "eth0 1500, flannel.1 1450", "ICMP");
}

#[test]
fn offload_of_a_veth() {
    let mut veth = device("eth0");
    veth.kind = Some("veth".into());
    veth.link.wire = false;
    let auto = facts(vec![veth]);
    expect(&auto, Severity::Note, "offload", "unfinished checksums", "nothing with TC");
    let xdp = Facts { attach: Mode::Xdp, ..auto.clone() };
    let findings = judge(&xdp);
    let finding = findings.iter().find(|finding| finding.probe == "offload").unwrap();
    assert_eq!(finding.severity, Severity::Warning);
    assert!(finding.cure.as_ref().unwrap().contains("ethtool -K eth0 tx off"));
    let mut off = auto;
    off.devices[0].checksum_offload = Some(false);
    assert!(judge(&off).iter().all(|finding| finding.severity == Severity::Ok));
}

#[test]
fn programs_of_others() {
    let mut busy = device("eth0");
    busy.xdp.push((7, Some("firewall".into())));
    let auto = facts(vec![busy]);
    expect(
        &auto,
        Severity::Warning,
        "xdp-program",
        "firewall (id 7) is on eth0: TC will",
        "ip link set eth0 xdp off",
    );
    let tc = Facts { attach: Mode::Tc, ..auto.clone() };
    expect(&tc, Severity::Warning, "xdp-program", "sees packets first", "ip link set eth0 xdp off");
    let xdp = Facts { attach: Mode::Xdp, ..auto };
    expect(&xdp, Severity::Error, "xdp-program", "two cannot be", "--attach tc");
    let mut busy = device("eth0");
    busy.tc = Ok(vec!["tcx program cil_from_netdev (id 9) at ingress".into()]);
    expect(&facts(vec![busy]), Severity::Note, "tc-programs", "cil_from_netdev (id 9)", "clean-up");
    let mut unseen = device("eth0");
    unseen.tc = Err("Operation not permitted".into());
    expect(&facts(vec![unseen]), Severity::Warning, "tc-programs", "not permitted", "as root");
}
