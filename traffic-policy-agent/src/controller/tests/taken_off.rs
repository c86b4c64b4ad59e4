//! Programs that others detach are attached again, or the node reports that they are missing.

use traffic_policy_dataplane::{
    DevicePrograms, Lost, Mode,
    node::{Header, Link},
};

use super::{
    super::{
        devices::{Devices, Surroundings},
        *,
    },
    fake::Fake,
};

/// A node with one device, which was named.
struct Node {
    netlink: Network,
    devices: Devices,
    fake: Fake,
    link: Link,
}

impl Node {
    fn new() -> Self {
        let link = Link {
            index: 7,
            name: "eth0".to_owned(),
            mac: [2; 6],
            mtu: 1500,
            up: true,
            running: true,
            loopback: false,
            header: Header::Ethernet,
            wire: false,
            has_vlans: false,
            point_to_point: false,
        };
        let (netlink, _events) = Network::connect().unwrap();
        let devices = Devices::new(vec![link.name.clone()], Mode::Auto);
        let mut node = Self { netlink, devices, fake: Fake::default(), link };
        node.look_at_devices();
        node
    }

    fn look_at_devices(&mut self) {
        let seen = Surroundings { links: std::slice::from_ref(&self.link), ..Surroundings::default() };
        self.devices.follow(&mut self.fake, &seen, &[], false).unwrap();
    }

    fn take_off(&self) {
        let lost = Lost { ifindex: self.link.index, name: self.link.name.clone(), places: vec!["XDP"] };
        self.fake.calls().lost.push(lost);
    }

    async fn look(&mut self) {
        self.devices.look_for_programs(&mut self.fake, &self.netlink).await;
    }

    fn events(&mut self) -> Vec<(String, String)> {
        self.devices.take_events().into_iter().map(|event| (event.reason, event.message)).collect()
    }

    fn known(&self) -> (u64, Option<String>) {
        (self.devices.attachments().restored(), self.devices.attachments().broken())
    }
}

#[tokio::test]
async fn a_named_device_has_them_back_under_another_name() {
    let mut node = Node::new();
    node.link.name = "uplink9".to_owned();
    node.look_at_devices();
    node.take_off();
    node.look().await;
    assert!(node.devices.needs_rescan());
    node.look_at_devices();
    assert_eq!(node.fake.calls().attached, ["eth0", "uplink9"]);
    assert_eq!(node.known(), (1, None));
    let told = "somebody has taken programs off uplink9 (XDP): they are attached again".to_owned();
    assert_eq!(node.events(), [("ProgramsTakenOff".to_owned(), told)]);
    assert_eq!(node.events(), []);
}

/// TC in place of XDP in the driver is reported once where `auto` was to use the latter.
#[tokio::test]
async fn a_wire_without_driver_xdp_is_told() {
    let mut node = Node::new();
    assert_eq!(node.events(), [], "a virtual device is served by TC");
    node.link.wire = true;
    node.look_at_devices();
    let told = node.events();
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(
        told[0].0 == "NoDriverXdp" && told[0].1.starts_with("eth0 takes no XDP in its driver"),
        "{told:?}"
    );
    node.link.mtu = 9000;
    node.look_at_devices();
    assert_eq!((node.events(), node.fake.calls().attached.len()), (Vec::new(), 3));
}

/// A card that strips VLAN tags is served by TC as long as a VLAN is on it: XDP would take packets
/// of the VLAN for the card's own.
#[tokio::test]
async fn a_wire_that_hides_its_vlans_is_no_wire_for_auto() {
    for (strips, has_vlans, by_xdp) in [(true, true, false), (true, false, true), (false, true, true)] {
        let mut node = Node::new();
        node.devices = node.devices.stripping(if strips { |index| index == 7 } else { |_| false });
        // A device that has changed in any respect is attached to anew.
        (node.link.wire, node.link.has_vlans, node.link.mtu) = (true, has_vlans, 9000);
        node.look_at_devices();
        let wires: Vec<_> = node.fake.attached().map(|(interface, _)| interface.wire).collect();
        assert_eq!(wires, [by_xdp], "strips {strips}, VLANs {has_vlans}");
        let told = node.events();
        let hidden = told.iter().any(|(_, message)| message.contains("takes VLAN tags out of frames"));
        assert_eq!(hidden, !by_xdp, "{told:?}");
        // The VLAN is removed.
        node.link.has_vlans = false;
        node.look_at_devices();
        assert!(node.fake.attached().all(|(interface, _)| interface.wire), "strips {strips}");
    }
}

/// A rescan may fail before it reaches the devices.
#[tokio::test]
async fn what_nobody_has_put_back_by_the_next_look_is_broken() {
    let mut node = Node::new();
    node.take_off();
    node.look().await;
    assert_eq!(node.known(), (0, None), "the look at the devices comes now");
    node.look().await;
    let why = "the programs of eth0 were taken off and are not put back yet".to_owned();
    assert_eq!(node.known(), (0, Some(why)));
    node.look_at_devices();
    assert_eq!(node.known(), (1, None));
}

#[tokio::test]
async fn a_cgroup_that_cannot_be_looked_at_has_lost_nothing() {
    let mut node = Node::new();
    node.fake.calls().blind = true;
    node.look().await;
    let why = "the programs of the cgroup cannot be looked at: too many open files".to_owned();
    assert_eq!(node.known(), (0, Some(why)));
    node.fake.calls().blind = false;
    node.look().await;
    assert_eq!(node.known(), (0, None), "nothing was put back");
}

#[tokio::test]
async fn a_cgroup_has_them_back() {
    let mut node = Node::new();
    node.fake.calls().lost_calls.push("connect4");
    node.fake.calls().refusing = true;
    node.look().await;
    let why =
        "the programs of the cgroup were taken off and cannot be put back: the cgroup takes no programs";
    assert_eq!(node.known(), (0, Some(why.to_owned())));
    node.fake.calls().refusing = false;
    node.look().await;
    assert_eq!(node.known(), (1, None));
}
