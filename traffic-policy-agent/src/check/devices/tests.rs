use traffic_policy_dataplane::{
    Kernel,
    node::{Link, ethtool::Channels},
};

use super::*;
use crate::check::{Severity, other_end::OtherEnd};

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
            header: node::Header::Ethernet,
            wire: true,
            has_vlans: false,
            point_to_point: false,
        },
        addresses: Vec::new(),
        kind: None,
        driver: Some("ena".into()),
        xdp_features: None,
        checksum_offload: Some(true),
        channels: Some(Channels { used: 4, most: 8 }),
        virtio: None,
        other_end: None,
        stripped_vlans: Vec::new(),
        own_xdp: false,
        xdp: Vec::new(),
        tc: Ok(Vec::new()),
    }
}

fn facts(devices: Vec<Device>) -> DeviceFacts {
    let names = vec!["lo".into(), "eth0".into()];
    DeviceFacts {
        devices,
        names,
        attach: Mode::Auto,
        missing: Vec::new(),
        named: false,
        left_out: Vec::new(),
        idle: Vec::new(),
        of_pods: Vec::new(),
        page: 4096,
        kernel: Kernel { major: 6, minor: 1 },
        cpus: 4,
    }
}

/// Returns the one finding with a fix.
fn complaint(facts: &DeviceFacts) -> Finding {
    let mut findings = judge(facts);
    findings.retain(|finding| finding.severity != Severity::Ok);
    assert_eq!(findings.len(), 1, "{findings:#?}");
    findings.remove(0)
}

fn expect(facts: &DeviceFacts, severity: Severity, probe: &str, found: &str, fix: &str) {
    let finding = complaint(facts);
    assert_eq!((finding.severity, finding.probe), (severity, probe), "{finding:?}");
    assert!(finding.found.contains(found), "{finding:?}");
    assert!(finding.fix.as_ref().unwrap().contains(fix), "{finding:?}");
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
        DeviceFacts { attach, ..facts(vec![device]) }
    };
    // The features that the kernel reports take precedence over the list.
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

/// Severity, probe, and parts of the sentence and of the fix of the one finding with a fix; or
/// none.
type Expected<'a> = Option<(Severity, &'a str, &'a str, &'a str)>;

fn with_modes(device: &Device, rows: &[(Mode, Expected<'_>)]) {
    for (attach, expected) in rows {
        let facts = DeviceFacts { attach: *attach, ..facts(vec![device.clone()]) };
        match expected {
            Some((severity, probe, found, fix)) => expect(&facts, *severity, probe, found, fix),
            None => {
                let findings = judge(&facts);
                assert!(findings.iter().all(|f| f.severity == Severity::Ok), "{attach:?}: {findings:#?}");
            }
        }
    }
}

fn virtio() -> Device {
    Device {
        driver: Some("virtio_net".into()),
        // CTRL_GUEST_OFFLOADS, GUEST_CSUM, GUEST_TSO4
        virtio: Some(1 << 2 | 1 << 1 | 1 << 7),
        ..device("eth0")
    }
}

#[test]
fn mtus() {
    let jumbo = |driver: &str| {
        let mut device = Device { driver: Some(driver.into()), ..virtio() };
        device.link.mtu = 9001;
        device
    };
    let (error, warning) = (Severity::Error, Severity::Warning);
    for (driver, most) in [("virtio_net", "3506"), ("ena", "3498")] {
        let (up_to, fix) = (format!("takes XDP up to {most}"), format!("ip link set eth0 mtu {most}"));
        with_modes(
            &jumbo(driver),
            &[
                (Mode::Auto, Some((warning, "mtu", &up_to, &fix))),
                (Mode::Xdp, Some((error, "mtu", "then `run` fails", &fix))),
                (Mode::Tc, None),
            ],
        );
    }
    let unknown = jumbo("i40e");
    with_modes(
        &unknown,
        &[
            (Mode::Auto, Some((warning, "mtu", "about 3506", "ip link set eth0 mtu 3506"))),
            (Mode::Xdp, Some((warning, "mtu", "may refuse, then `run` fails", "--attach tc"))),
            (Mode::Tc, None),
        ],
    );
    let all = facts(vec![unknown]);
    assert!(complaint(&all).found.contains("then TC"));
    assert!(
        judge(&DeviceFacts { page: 16_384, ..all }).iter().all(|finding| finding.severity == Severity::Ok)
    );
    // The kernel supports frames of several buffers.
    let newer = Kernel { major: 6, minor: 3 };
    let long = facts(vec![jumbo("virtio_net")]);
    assert!(complaint(&long).found.contains("takes XDP up to 3506"));
    assert!(
        judge(&DeviceFacts { kernel: newer, ..long }).iter().all(|finding| finding.severity == Severity::Ok)
    );
    // The largest MTU that works.
    let mut fit = jumbo("virtio_net");
    fit.link.mtu = 3506;
    with_modes(&fit, &[(Mode::Xdp, None)]);

    let mut small = device("eth1");
    small.link.mtu = 1450;
    let both = facts(vec![device("eth0"), small]);
    expect(&both, Severity::Note, "mtu", "eth0 1500, eth1 1450", "ICMP");
}

#[test]
fn mtus_towards_endpoints() {
    let overlay = |mtu, header| {
        let mut device = Device { kind: Some("vxlan".into()), driver: None, ..device("flannel.1") };
        (device.link.mtu, device.link.wire, device.link.header) = (mtu, false, header);
        device
    };
    let vxlan = |mtu| overlay(mtu, node::Header::Ethernet);
    for narrow in [vxlan(1450), overlay(1450, node::Header::Ip("ipip".into()))] {
        let found =
            "flannel.1 (1450) towards endpoints of other nodes takes shorter packets than eth0 (1500)";
        let both = facts(vec![device("eth0"), narrow]);
        expect(&both, Severity::Warning, "mtu", found, "1500 inside the overlay");
        assert!(complaint(&both).found.contains("two pieces, or dropped"));
        assert!(complaint(&both).fix.unwrap().ends_with("1450 at the clients"));
    }
    let mut jumbo = device("eth0");
    jumbo.link.mtu = 3000;
    let with_pods = |of_pods: &[(&str, u32)]| {
        let of_pods = of_pods.iter().map(|(name, mtu)| ((*name).to_owned(), *mtu)).collect();
        DeviceFacts { of_pods, ..facts(vec![jumbo.clone()]) }
    };
    let narrow = with_pods(&[("cni0", 3000), ("cali1", 1450), ("cali2", 1440)]);
    let found = "cali2 (1440) and 1 more towards pods of this node takes shorter packets than eth0 (3000)";
    expect(&narrow, Severity::Note, "mtu", found, "ICMP");
    for well in [with_pods(&[("cni0", 3000)]), facts(vec![device("eth0"), vxlan(1500)])] {
        let findings = judge(&well);
        assert!(findings.iter().all(|finding| finding.severity == Severity::Ok), "{findings:#?}");
    }
}

#[test]
fn queues() {
    let with = |driver: &str, used, most| Device {
        driver: Some(driver.into()),
        channels: Some(Channels { used, most }),
        ..virtio()
    };
    let note = Severity::Note;
    // 4 CPUs.
    let few = with("virtio_net", 4, 6);
    let slower = "uses 4 of at most 6 queues, and its driver wants one more for each of 4 CPUs";
    with_modes(
        &few,
        &[
            (Mode::Auto, Some((note, "queues", slower, "ethtool -L eth0 combined 2; or give"))),
            (Mode::Xdp, Some((note, "queues", slower, "queues=8"))),
            (Mode::Tc, None),
        ],
    );
    with_modes(&Device { own_xdp: true, ..few.clone() }, &[(Mode::Xdp, None)]);
    with_modes(&Device { channels: None, ..few }, &[(Mode::Xdp, None)]);
    let single = facts(vec![with("virtio_net", 1, 1)]);
    expect(&single, note, "queues", "uses 1 of at most 1", "give the machine 5 queues");
    assert!(!complaint(&single).fix.unwrap().contains("ethtool"), "no number is small enough");
    with_modes(&with("virtio_net", 4, 8), &[(Mode::Auto, None), (Mode::Xdp, None)]);
    let refused = "wants as many again for XDP: it may refuse";
    with_modes(
        &with("ena", 8, 8),
        &[(Mode::Xdp, Some((Severity::Warning, "queues", refused, "ethtool -L eth0 combined 4")))],
    );
    with_modes(&with("ena", 4, 8), &[(Mode::Xdp, None)]);
    with_modes(&with("ixgbe", 8, 8), &[(Mode::Xdp, None)]);
}

#[test]
fn offloads_of_the_guest() {
    // GUEST_TSO4 alone.
    let fixed = Device { virtio: Some(1 << 7), ..virtio() };
    let found = "does not let that be changed: the driver refuses XDP";
    with_modes(
        &fixed,
        &[
            (Mode::Auto, Some((Severity::Warning, "guest-offloads", found, "ctrl_guest_offloads=on"))),
            (Mode::Xdp, Some((Severity::Error, "guest-offloads", "then `run` fails", "--attach tc"))),
            (Mode::Tc, None),
        ],
    );
    with_modes(&virtio(), &[(Mode::Auto, None), (Mode::Xdp, None)]);
    with_modes(&Device { virtio: Some(0), ..virtio() }, &[(Mode::Xdp, None)]);
}

#[test]
fn the_other_end_of_a_veth() {
    let with = |other_end| {
        let mut veth = Device {
            kind: Some("veth".into()),
            driver: Some("veth".into()),
            checksum_offload: Some(false),
            other_end,
            ..device("eth0")
        };
        veth.link.wire = false;
        veth
    };
    let lost = "(veth7 in another network namespace) has no XDP program";
    with_modes(
        &with(Some(OtherEnd::for_tests(false))),
        &[
            (Mode::Xdp, Some((Severity::Warning, "other-end", lost, "ip link set veth7 xdpdrv"))),
            (Mode::Auto, None),
            (Mode::Tc, None),
        ],
    );
    with_modes(&with(Some(OtherEnd::for_tests(true))), &[(Mode::Xdp, None)]);
    // A veth takes frames of several buffers in XDP on every supported kernel.
    let mut jumbo = with(Some(OtherEnd::for_tests(true)));
    jumbo.link.mtu = 9000;
    with_modes(&jumbo, &[(Mode::Auto, None), (Mode::Xdp, None), (Mode::Tc, None)]);
    let unseen = "could not be seen";
    with_modes(
        &with(None),
        &[(Mode::Xdp, Some((Severity::Warning, "other-end", unseen, "at the other end")))],
    );
}

#[test]
fn offload_of_a_veth() {
    let mut veth = device("eth0");
    veth.kind = Some("veth".into());
    veth.link.wire = false;
    let auto = facts(vec![veth]);
    expect(&auto, Severity::Note, "offload", "unfinished checksums", "nothing with TC");
    let xdp = DeviceFacts { attach: Mode::Xdp, ..auto.clone() };
    let findings = judge(&xdp);
    let finding = findings.iter().find(|finding| finding.probe == "offload").unwrap();
    assert_eq!(finding.severity, Severity::Warning);
    assert!(finding.fix.as_ref().unwrap().contains("ethtool -K eth0 tx off"));
    // A foreign program at the other end proves nothing about the checksums of its packets.
    for (other, found) in [(OtherEnd::for_tests(true), true), (OtherEnd::prepared(), false)] {
        let mut with = xdp.clone();
        with.devices[0].other_end = Some(other);
        assert_eq!(judge(&with).iter().any(|finding| finding.severity == Severity::Warning), found);
    }
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
    let tc = DeviceFacts { attach: Mode::Tc, ..auto.clone() };
    expect(&tc, Severity::Warning, "xdp-program", "sees packets first", "ip link set eth0 xdp off");
    let xdp = DeviceFacts { attach: Mode::Xdp, ..auto };
    expect(&xdp, Severity::Error, "xdp-program", "two cannot be", "--attach tc");
    let mut busy = device("eth0");
    busy.tc = Ok(vec!["tcx program cil_from_netdev (id 9) at ingress".into()]);
    expect(&facts(vec![busy]), Severity::Note, "tc-programs", "cil_from_netdev (id 9)", "clean-up");
    let mut unseen = device("eth0");
    unseen.tc = Err("Operation not permitted".into());
    expect(&facts(vec![unseen]), Severity::Warning, "tc-programs", "not permitted", "as root");
}

#[test]
fn vlan_tags_that_the_card_takes_out() {
    let table = "VLAN Dev name    | VLAN ID\nName-Type: VLAN_NAME_TYPE_RAW_PLUS_VID_NO_PAD\neth0.100       | 100  | eth0\nv7             | 7  | eth0\neth1.5         | 5  | eth1\n";
    assert_eq!(facts::vlans_over(table, "eth0"), ["eth0.100", "v7"]);
    assert_eq!(facts::vlans_over("", "eth0"), [""; 0]);
    let mut device = device("eth0");
    device.stripped_vlans = vec!["eth0.100".into()];
    with_modes(
        &device,
        &[
            (Mode::Auto, Some((Severity::Note, "vlan", "TC takes its packets", "rxvlan off"))),
            (Mode::Xdp, Some((Severity::Warning, "vlan", "what comes by eth0.100", "rxvlan off"))),
            (Mode::Tc, None),
        ],
    );
    let findings = judge(&facts(vec![device]));
    assert!(findings[0].found.ends_with(": TC takes its packets"), "{findings:#?}");
}

#[test]
fn tunnels_without_ethernet_are_served_by_tc() {
    let mut tunnel = device("tunl0");
    (tunnel.link.header, tunnel.link.wire) = (node::Header::Ip("ipip".into()), false);
    (tunnel.kind, tunnel.driver) = (Some("ipip".into()), None);
    let with = |attach, named| DeviceFacts { attach, named, ..facts(vec![tunnel.clone()]) };
    // A device found by its routes is served by TC whatever mode was requested.
    for (attach, named) in [
        (Mode::Auto, false),
        (Mode::Auto, true),
        (Mode::Tc, true),
        (Mode::Xdp, false),
        (Mode::XdpGeneric, false),
    ] {
        let findings = judge(&with(attach, named));
        assert!(findings.iter().all(|finding| finding.severity == Severity::Ok), "{findings:#?}");
        assert!(findings[0].found.contains("tunl0 (ipip) has no Ethernet header: TC"), "{findings:#?}");
    }
    for attach in [Mode::Xdp, Mode::XdpGeneric] {
        let refused = "tunl0 has no Ethernet header (type ipip)";
        expect(&with(attach, true), Severity::Error, "device", refused, "--attach auto");
    }
}

/// A second card that may lead to pods of other nodes: not found by a gateway, or not named.
#[test]
fn a_card_that_nothing_is_attached_to_is_named() {
    let card = |index, name: &str| Link { index, name: name.into(), ..device(name).link };
    let bridge = Link { wire: false, ..card(4, "cni0") };
    let links = [card(2, "eth0"), card(3, "eth1"), bridge, card(5, "eth2")];
    let routes = [2, 3, 4].map(|link| node::Route { link, default: link == 2, gateway: link == 2 });
    assert_eq!(facts::idle(&links, &[&links[0]], &routes), ["eth1"]);
    let idle = DeviceFacts { idle: vec!["eth1".into()], ..facts(vec![device("eth0")]) };
    expect(&idle, Severity::Note, "device", "eth1 has routes, and nothing is attached", "--device");
}

#[test]
fn what_an_overlay_leaves_to_tc_is_said() {
    let overlay = |attach, kind: &str| {
        let mut flannel = device("flannel.1");
        (flannel.kind, flannel.link.wire) = (Some(kind.into()), false);
        let facts = DeviceFacts { attach, ..facts(vec![device("eth0"), flannel]) };
        let found = judge(&facts).into_iter().find(|finding| finding.probe == "overlay");
        found.map(|finding| (finding.severity, finding.found))
    };
    let (severity, found) = overlay(Mode::Auto, "vxlan").unwrap();
    assert_eq!(severity, Severity::Ok);
    assert!(found.starts_with("flannel.1 takes no frames") && found.contains("by eth0 itself"), "{found}");
    assert_eq!(overlay(Mode::Tc, "vxlan"), None);
    assert_eq!(overlay(Mode::Auto, "vlan"), None);
}
