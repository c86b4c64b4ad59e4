//! Writes a [`Setup`] into the maps, over whatever an earlier test left there.

use std::net::IpAddr;
use std::time::Duration;

use anyhow::Result;
use aya::maps::lpm_trie::{Key, LpmTrie};
use aya::maps::{HashMap, MapData};
use traffic_policy_dataplane::{ToWire as _, wide};
use traffic_policy_ebpf::abi::{
    AgentHeartbeat, DEVICE_XDP, DeviceInfo, EndpointKey, HOP_NO_ETHERNET, HOP_XDP, LocalNode, NodeSilence,
    PROTOCOL_SCTP, PROTOCOL_TCP, PROTOCOL_UDP, PodDevice, Port, RouteConfig, RoutePrefix, RuntimeConfig,
    ServiceCidr, TableUsage, WideAddress, pod_flags, source_check,
};

use super::flows::words;
use super::frontends::SLOTS;
use super::loaded::ELEMENTS;
use super::{Device, Harness, Setup, SourceCheck, Spot, prefilter};
use crate::lab::{Addresses, Family};

impl Harness {
    /// Writes `setup` into the maps, without any flow, counter or hop.
    pub fn set_up(&mut self, setup: &Setup) {
        self.try_set_up(setup).unwrap_or_else(|error| panic!("writing the maps: {error:#}"));
    }

    fn try_set_up(&mut self, setup: &Setup) -> Result<()> {
        self.clear()?;
        for (number, frontend) in (1..).zip(&setup.frontends) {
            self.write_frontend(number, frontend)?;
        }
        if !setup.sctp {
            self.remove_sctp()?;
        }
        let config = RuntimeConfig {
            snat_port_count: setup.snat_ports.len() as u32,
            seed: setup.seed,
            answers_per_jiffy: setup.answers_per_jiffy,
            ..RuntimeConfig::default()
        };
        // SAFETY: the elements are mapped as long as the tables live, and no program runs
        // meanwhile. The indices are below the lengths of the arrays.
        unsafe {
            self.tables.config.pointer().write_volatile(config);
            self.tables
                .heartbeat
                .pointer()
                .write_volatile(AgentHeartbeat { hz: setup.hz, ..AgentHeartbeat::default() });
            self.tables.usage.pointer().write_volatile(TableUsage::default());
            prefilter::fill(self.tables.prefilter.pointer(), setup);
            for (index, port) in setup.snat_ports.iter().enumerate() {
                self.tables.snat_ports.pointer().cast::<u16>().add(index).write_volatile(*port);
            }
        }
        for spot in &setup.service_cidrs {
            let Addresses { v4, v6 } = spot.addresses().network();
            let key = ServiceCidr { address: [u32::from_ne_bytes(v4.octets())] };
            self.tables.v4.service_cidrs.insert(&Key::new(Family::V4.prefix().into(), key), 1, 0)?;
            let key = ServiceCidr { address: words(v6) };
            self.tables.v6.service_cidrs.insert(&Key::new(Family::V6.prefix().into(), key), 1, 0)?;
        }
        self.write_route_mtus(setup)?;
        self.describe_node(setup)?;
        for (device, xdp) in &setup.devices {
            let v6 = wide(device.spot().of(Family::V6)).wire();
            let entry = DeviceInfo {
                mac: device.mac(),
                flags: match (device, xdp) {
                    (Device::Tun0, _) => HOP_NO_ETHERNET,
                    (_, true) => HOP_XDP | DEVICE_XDP,
                    (_, false) => 0,
                },
                mtu: if *device == Device::Tun0 { 1400 } else { 0 },
                addresses: [wide(device.spot().of(Family::V4)).wire()[0], v6[0], v6[1]],
                ..DeviceInfo::default()
            };
            let index = self.ifindex(*device);
            self.tables.devices.insert(index, entry, 0)?;
        }
        Ok(())
    }

    /// Describes pod0 as a pod's device for direct delivery, with this MTU in bytes.
    pub fn serve_pods(&mut self, mtu: u32) {
        self.describe_pod0(PodDevice { mtu, flags: pod_flags::DIRECT, ..PodDevice::default() });
    }

    /// Describes pod0 as a pod's device at which what the pod sends to Services is translated.
    pub fn serve_pod_clients(&mut self) {
        self.describe_pod0(PodDevice { mtu: 1500, flags: pod_flags::SERVICES, ..PodDevice::default() });
    }

    fn describe_pod0(&mut self, device: PodDevice) {
        let index = self.ifindex(Device::Pod0);
        let written = self.tables.pod_devices.insert(index, device, 0);
        written.unwrap_or_else(|error| panic!("writing a pod's device: {error}"));
    }

    /// Writes the MTUs that routes name, in addition to those that exist.
    pub fn write_route_mtus(&mut self, setup: &Setup) -> Result<()> {
        for (spot, mtu) in &setup.route_mtus {
            let Addresses { v4, v6 } = spot.addresses().network();
            let prefix = RoutePrefix { address: [u32::from_ne_bytes(v4.octets())] };
            self.tables.v4.route_mtus.insert(&Key::new(Family::V4.prefix().into(), prefix), *mtu, 0)?;
            let prefix = RoutePrefix { address: words(v6) };
            self.tables.v6.route_mtus.insert(&Key::new(Family::V6.prefix().into(), prefix), *mtu, 0)?;
        }
        Ok(())
    }

    /// Describes the node as the agent does: the pods of this node are behind pod0.
    fn describe_node(&mut self, setup: &Setup) -> Result<()> {
        let pods = Spot::NodePod0.addresses().network();
        let masks = [wide(IpAddr::from([255, 255, 255, 0])), WideAddress::from_wire([u64::MAX, 0])];
        let mut node = LocalNode {
            pods: [wide(pods.v4.into()), wide(pods.v6.into())],
            primary: [wide(Spot::Node.of(Family::V4)), wide(Spot::Node.of(Family::V6))],
            pod_masks: masks,
            source_check: match setup.source_check {
                SourceCheck::Off => source_check::OFF,
                SourceCheck::Martian => source_check::MARTIAN,
                SourceCheck::Strict => source_check::STRICT,
            },
            ..LocalNode::default()
        };
        for device in Device::ALL {
            let Addresses { v4, v6 } = device.spot().addresses();
            node.note_address(0, v4.to_wire());
            node.note_address(1, v6.to_wire());
            self.tables.v4.node_addresses.insert(v4.to_wire(), 1, 0)?;
            self.tables.v6.node_addresses.insert(v6.to_wire(), 1, 0)?;
        }
        self.tables.local_node.set(0, node, 0)?;
        Ok(())
    }

    fn clear(&mut self) -> Result<()> {
        clear(&mut self.tables.v4.flows)?;
        clear(&mut self.tables.v6.flows)?;
        clear(&mut self.tables.v4.frontends)?;
        clear(&mut self.tables.v6.frontends)?;
        clear(&mut self.affinity)?;
        forget(&mut self.tables.v4.sources)?;
        forget(&mut self.tables.v6.sources)?;
        forget(&mut self.tables.v4.service_cidrs)?;
        forget(&mut self.tables.v6.service_cidrs)?;
        forget(&mut self.tables.v4.route_mtus)?;
        forget(&mut self.tables.v6.route_mtus)?;
        clear(&mut self.tables.hop_index)?;
        clear(&mut self.tables.devices)?;
        clear(&mut self.tables.pod_devices)?;
        clear(&mut self.tables.removed)?;
        for name in [
            "tp_own_sent4",
            "tp_own_sent6",
            "tp_fragments4",
            "tp_fragments6",
            "tp_direct_from4",
            "tp_direct_eps4",
            "tp_direct_from6",
            "tp_direct_macs",
            "tp_direct_eps6",
        ] {
            self.map(name).empty()?;
        }
        for name in ["tp_scratch4", "tp_scratch6"] {
            self.map(name).renew(1)?;
        }
        for name in ["tp_direct_node4", "tp_direct_node6"] {
            self.map(name).renew(4)?;
        }
        for name in ["tp_ep_routes4", "tp_ep_routes6"] {
            self.map(name).renew(SLOTS * 8)?;
        }
        for name in ["tp_flow_dir4", "tp_flow_dir6", "tp_unassured4", "tp_unassured6"] {
            self.map(name).renew(ELEMENTS)?;
        }
        self.fill_buckets(0)
    }

    /// A copy of the words that the packet path writes.
    pub fn usage(&self) -> TableUsage {
        // SAFETY: the element is mapped as long as the tables live.
        unsafe { self.tables.usage.pointer().read_volatile() }
    }

    /// Clears the record of searches for a source port that failed in the last jiffies.
    pub fn forget_failed_searches(&mut self) {
        // SAFETY: the element is mapped as long as the tables live, and no program runs meanwhile.
        unsafe { (*self.tables.usage.pointer()).no_port = TableUsage::default().no_port };
    }

    /// Moves the last failed searches for a source port to the present.
    pub fn fail_searches_now(&mut self) {
        let now = u64::from(self.now());
        // SAFETY: as in `forget_failed_searches`.
        let words = unsafe { &mut (*self.tables.usage.pointer()).no_port };
        words.iter_mut().filter(|word| **word != 0).for_each(|word| *word = *word >> 32 << 32 | now);
    }

    /// The number of unassured flows of a family and protocol, as their queues count them.
    pub fn unassured(&self, family: Family, tcp: bool) -> u64 {
        let wanted = if tcp { PROTOCOL_TCP } else { PROTOCOL_UDP };
        let queued = self.queued(family);
        queued.values().filter(|(_, _, protocol)| u32::from(*protocol) == wanted).count() as u64
    }

    /// Makes every client with session affinity older by `seconds`.
    pub fn age_affinity(&mut self, seconds: u32) {
        assert!(self.affinity.keys().next().is_some(), "no client has an endpoint of its own");
        self.go_back_with_affinity(Duration::from_secs(seconds.into()));
    }

    /// Does the same as [`Self::age_affinity`], but accepts that there is no client.
    pub fn go_back_with_affinity(&mut self, time: Duration) {
        let entries: Vec<_> =
            self.affinity.iter().map(|entry| entry.unwrap_or_else(|error| panic!("{error}"))).collect();
        for (key, mut value) in entries {
            value.used = value.used.wrapping_sub(time.as_nanos() as u64);
            self.affinity.insert(key, value, 0).unwrap_or_else(|error| panic!("{error}"));
        }
    }

    /// Changes the words that the agent writes.
    pub fn change_config(&mut self, change: impl FnOnce(&mut RuntimeConfig)) {
        // SAFETY: the element is mapped as long as the tables live; no program runs meanwhile.
        unsafe { change(&mut *self.tables.config.pointer()) }
    }

    /// Returns the SYNs to the node of an endpoint, and its answers.
    pub fn node_silence(&self, spot: Spot) -> NodeSilence {
        let place = u32::from(spot.node_number());
        self.node_silence.get(&place, 0).unwrap_or_else(|error| panic!("{error}"))
    }

    pub fn change_node_silence(&mut self, spot: Spot, change: impl FnOnce(&mut NodeSilence)) {
        let mut signs = self.node_silence(spot);
        change(&mut signs);
        let place = u32::from(spot.node_number());
        self.loaded.node_silence.set(place, signs, 0).unwrap_or_else(|error| panic!("{error}"));
    }

    /// Changes the words about routes and next hops that the agent writes.
    pub fn change_routes(&mut self, change: impl FnOnce(&mut RouteConfig)) {
        // SAFETY: as above.
        unsafe { change(&mut (*self.tables.prefilter.pointer()).routes) }
    }

    /// Records an endpoint that takes no more new flows of a frontend, for sweeps.
    pub fn name_removed(&mut self, number: u32, spot: Spot, port: u16) {
        for (family, protocol) in Family::BOTH
            .into_iter()
            .flat_map(|family| [PROTOCOL_TCP, PROTOCOL_UDP, PROTOCOL_SCTP].map(|protocol| (family, protocol)))
        {
            let key = EndpointKey {
                address: wide(spot.of(family)),
                port: Port::from_host(port),
                protocol: protocol as u8,
                ipv6: (family == Family::V6) as u8,
                service: number,
            };
            let named = self.tables.removed.insert(key, 1, 0);
            named.unwrap_or_else(|error| panic!("naming an endpoint that is gone: {error}"));
        }
    }

    pub fn forget_removed(&mut self) {
        clear(&mut self.tables.removed).unwrap_or_else(|error| panic!("{error:#}"));
    }
}

fn clear<K: aya::Pod, V: aya::Pod>(map: &mut HashMap<MapData, K, V>) -> Result<()> {
    let keys: Vec<K> = map.keys().collect::<Result<_, _>>()?;
    for key in keys {
        map.remove(&key)?;
    }
    Ok(())
}

fn forget<K: aya::Pod>(map: &mut LpmTrie<MapData, K, u32>) -> Result<()> {
    let keys: Vec<_> = map.keys().collect::<Result<_, _>>()?;
    for key in keys {
        map.remove(&key)?;
    }
    Ok(())
}
