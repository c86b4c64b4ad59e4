//! The devices of this node's pods, as `explain` needs them: where a pod's packets to Services are
//! translated (`--pod-services on`), and by which of them packets go straight into a pod
//! (`--local-delivery direct`).

use std::collections::HashMap;

use anyhow::Result;
use traffic_policy_ebpf::abi::{PodDevice, pod_flags};

use super::simulator::{Entrance, PacketHook};
use crate::{
    inspect::{Link as Program, LinkHook, Pinned},
    node::Link,
};

/// The pods' devices of a node with an agent; none offline.
#[derive(Clone, Debug, Default)]
pub struct PodDevices {
    devices: Vec<Device>,
    /// Whether packets of established flows go straight to pods where that is possible.
    pub direct: bool,
    /// Whether sockets' calls are translated, for pods whose sockets this kernel has.
    pub sockets: bool,
}

#[derive(Clone, Debug)]
struct Device {
    ifindex: u32,
    name: String,
    /// The destination of frames that are for this node.
    mac: [u8; 6],
    /// The bridge that it is a port of, and its name.
    bridge: Option<(u32, String)>,
    flags: u16,
}

/// A pod's device, or one of several ports of a bridge behind which the pod is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    pub entrance: Entrance,
    pub name: String,
}

impl PodDevices {
    /// Reads what the agent that has pinned its maps there has attached to. `links`: the devices of
    /// this network namespace.
    pub fn read(pinned: &Pinned, links: &[Link]) -> Result<Self> {
        let by_index: HashMap<u32, &Link> = links.iter().map(|link| (link.index, link)).collect();
        let all = pinned.map("tp_pod_devices")?.entries::<u32, PodDevice>()?;
        let devices = all.into_iter().filter_map(|(ifindex, pod)| {
            let link = by_index.get(&ifindex)?;
            let bridge = by_index.get(&pod.bridge).map(|bridge| (pod.bridge, bridge.name.clone()));
            let mac = if bridge.is_some() { pod.bridge_mac } else { link.mac };
            Some(Device { ifindex, name: link.name.clone(), mac, bridge, flags: pod.flags })
        });
        let mut devices: Vec<Device> = devices.collect();
        devices.sort_unstable_by_key(|device| device.ifindex);
        let sockets = Program::all(pinned)?.iter().any(|program| matches!(program.hook, LinkHook::Cgroup));
        Ok(Self { devices, direct: pinned.config()?.local_delivery != 0, sockets })
    }

    /// Whether packets of pods to Services are translated at some device.
    pub fn serves(&self) -> bool {
        self.devices.iter().any(|device| device.flags & pod_flags::SERVICES != 0)
    }

    /// Returns where what a pod sends to Services is translated. `towards`: the device to which
    /// routes lead the pod's address.
    pub fn serving(&self, towards: u32) -> Option<Place> {
        self.place(towards, pod_flags::SERVICES)
    }

    /// Returns the device by which packets go straight into a pod.
    pub fn direct(&self, towards: u32) -> Option<Place> {
        self.place(towards, pod_flags::DIRECT)
    }

    fn place(&self, towards: u32, flag: u16) -> Option<Place> {
        let flagged = || self.devices.iter().filter(|device| device.flags & flag != 0);
        let entrance =
            |device: &Device| Entrance { ifindex: device.ifindex, mac: device.mac, hook: PacketHook::Pod };
        if let Some(device) = flagged().find(|device| device.ifindex == towards) {
            return Some(Place { entrance: entrance(device), name: device.name.clone() });
        }
        let mut ports = flagged().filter_map(|device| {
            device.bridge.as_ref().filter(|(index, _)| *index == towards).map(|(_, name)| (device, name))
        });
        // Which port a pod is behind makes no difference to the programs.
        let (port, bridge) = ports.next()?;
        let name = if ports.next().is_none() {
            format!("{}, a port of {bridge}", port.name)
        } else {
            format!("its port of {bridge}")
        };
        Some(Place { entrance: entrance(port), name })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(ifindex: u32, bridge: Option<u32>, flags: u16) -> Device {
        let bridge = bridge.map(|index| (index, format!("br{index}")));
        Device { ifindex, name: format!("veth{ifindex}"), mac: [2; 6], bridge, flags }
    }

    #[test]
    fn a_device_or_a_port_of_its_bridge() {
        let both = pod_flags::SERVICES | pod_flags::DIRECT;
        let devices = vec![
            device(3, None, pod_flags::SERVICES),
            device(4, Some(9), both),
            device(5, Some(9), pod_flags::SERVICES),
        ];
        let pods = PodDevices { devices, direct: true, sockets: false };
        let name = |place: Option<Place>| place.map(|place| (place.entrance.ifindex, place.name));
        assert!(pods.serves());
        assert_eq!(name(pods.serving(3)), Some((3, "veth3".into())));
        assert_eq!(name(pods.direct(3)), None);
        assert_eq!(name(pods.serving(9)), Some((4, "its port of br9".into())));
        assert_eq!(name(pods.direct(9)), Some((4, "veth4, a port of br9".into())));
        assert_eq!(name(pods.serving(7)), None);
        assert!(!PodDevices::default().serves());
    }
}
