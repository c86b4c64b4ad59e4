//! Writes a [`Setup`] into the maps, over whatever an earlier test left there.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use aya::maps::lpm_trie::{Key, LpmTrie};
use aya::maps::{Array, HashMap, MapData};
use traffic_policy_cluster::model::Protocol;
use traffic_policy_cluster::model::maglev::{Member, table};
use traffic_policy_dataplane::{Maps, ToWire as _, Words, wide};
use traffic_policy_ebpf::abi::{
    Address, AgentHeartbeat, DEVICE_XDP, DeviceInfo, EndpointKey, Frontend as FrontendEntry, FrontendKey,
    HOP_NO_ETHERNET, HOP_XDP, IndexRange, LocalNode, NodeSilence, PROTOCOL_SCTP, PROTOCOL_TCP, PROTOCOL_UDP,
    PodDevice, Port, RouteConfig, RoutePrefix, RuntimeConfig, SLOT_HELD, SLOT_L2, SLOT_LOCAL, SLOT_OPENS,
    SLOT_REMOTE, SLOT_UDP, ServiceCidr, Slot, SourceRange, TableUsage, WideAddress, frontend, frontend_kind,
    maglev, pod_flags, scope, source_check,
};

use super::flows::Wire;
use super::loaded::ELEMENTS;
use super::owners::write_former;
use super::{Device, Frontend, Harness, Setup, SourceCheck, Spot, prefilter};
use crate::lab::{Addresses, Family};

/// The number of slots of one frontend; each list has half of them.
const SLOTS: u32 = 64;

impl Harness {
    /// Writes `setup` into the maps, without any flow, counter or hop.
    pub fn set_up(&mut self, setup: &Setup) {
        self.try_set_up(setup).unwrap_or_else(|error| panic!("writing the maps: {error:#}"));
    }

    fn try_set_up(&mut self, setup: &Setup) -> Result<()> {
        self.clear()?;
        for (number, frontend) in (1..).zip(&setup.frontends) {
            let Maps { v4, v6, tables, .. } = &mut self.loaded.tables;
            write((&mut v4.frontends, &mut v4.slots, tables), number, frontend, Family::V4)?;
            write((&mut v6.frontends, &mut v6.slots, tables), number, frontend, Family::V6)?;
            self.write_sources(number, frontend)?;
        }
        if !setup.sctp {
            forget_sctp(&mut self.loaded.tables.v4.frontends)?;
            forget_sctp(&mut self.loaded.tables.v6.frontends)?;
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

    /// Adds a frontend, or replaces one.
    pub fn put(&mut self, number: u32, frontend: &Frontend) {
        let Maps { v4, v6, tables, .. } = &mut self.loaded.tables;
        let first = write((&mut v4.frontends, &mut v4.slots, tables), number, frontend, Family::V4);
        let second = write((&mut v6.frontends, &mut v6.slots, tables), number, frontend, Family::V6);
        let third = self.write_sources(number, frontend);
        // SAFETY: as in `try_set_up`.
        unsafe { prefilter::name(self.loaded.tables.prefilter.pointer(), frontend) };
        first.and(second).and(third).unwrap_or_else(|error| panic!("writing a frontend: {error:#}"));
    }

    /// Removes a frontend.
    pub fn take_away(&mut self, frontend: &Frontend) {
        let tables = &mut self.loaded.tables;
        let first = remove(&mut tables.v4.frontends, frontend, Family::V4);
        let second = remove(&mut tables.v6.frontends, frontend, Family::V6);
        first.and(second).unwrap_or_else(|error| panic!("removing a frontend: {error:#}"));
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

    fn write_sources(&mut self, number: u32, frontend: &Frontend) -> Result<()> {
        for Addresses { v4, v6 } in frontend.sources.iter().map(|spot| spot.addresses()) {
            let key = SourceRange { service: number, address: [u32::from_ne_bytes(v4.octets())] };
            self.tables.v4.sources.insert(&Key::new(32 + 32, key), 1, 0)?;
            let key = SourceRange { service: number, address: words(v6) };
            self.tables.v6.sources.insert(&Key::new(32 + 128, key), 1, 0)?;
        }
        Ok(())
    }
}

/// The words of an address, in memory order.
fn words(address: Ipv6Addr) -> [u32; 4] {
    let octets = address.octets();
    std::array::from_fn(|word| {
        let at = word * 4;
        u32::from_ne_bytes([octets[at], octets[at + 1], octets[at + 2], octets[at + 3]])
    })
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

fn forget_sctp<A: Address>(frontends: &mut HashMap<MapData, FrontendKey<A>, FrontendEntry>) -> Result<()> {
    let keys: Vec<_> = frontends.keys().collect::<Result<_, _>>()?;
    let mut of_sctp = keys.iter().filter(|key| u32::from(key.protocol) == PROTOCOL_SCTP);
    Ok(of_sctp.try_for_each(|key| frontends.remove(key))?)
}

fn key_of<A: Address + Wire>(frontend: &Frontend, protocol: u32, family: Family) -> FrontendKey<A> {
    FrontendKey {
        address: A::from_ip(frontend.address.of(family)),
        port: Port::from_host(frontend.port),
        protocol: protocol as u16,
        scope: scope::ADDRESS,
    }
}

fn remove<A: Address + Wire>(
    frontends: &mut HashMap<MapData, FrontendKey<A>, FrontendEntry>,
    frontend: &Frontend,
    family: Family,
) -> Result<()> {
    for protocol in [PROTOCOL_TCP, PROTOCOL_UDP, PROTOCOL_SCTP] {
        frontends.remove(&key_of(frontend, protocol, family))?;
    }
    Ok(())
}

/// The maps that a frontend is written into: frontends, slots, elements of Maglev tables.
type Places<'a, A> =
    (&'a mut HashMap<MapData, FrontendKey<A>, FrontendEntry>, &'a mut Array<MapData, Slot<A>>, &'a mut Words);

fn write<A: Address + Wire>(
    (frontends, slots, tables): Places<'_, A>,
    number: u32,
    frontend: &Frontend,
    family: Family,
) -> Result<()> {
    let base = number * SLOTS;
    ensure!(
        base + SLOTS <= ELEMENTS,
        "frontend {number}: what its slots hold would be left to the next test"
    );
    let mut list = |base: u32, endpoints: &[(Spot, u16)]| -> Result<IndexRange> {
        for (index, (spot, port)) in (base..).zip(endpoints) {
            let address: IpAddr = spot.of(family);
            // The agent decides so, too: by `nodeName`, and for the node's own addresses.
            let own = matches!(spot, Spot::Local | Spot::LocalTyped | Spot::Node | Spot::NodeEth1);
            let remote = matches!(spot, Spot::RemoteBehindPod0);
            let flags = if own {
                SLOT_LOCAL
            } else if remote {
                SLOT_REMOTE
            } else if frontend.is_direct() {
                SLOT_OPENS
                    | if frontend.within_udp { SLOT_UDP } else { 0 }
                    | if frontend.by_mac { SLOT_L2 } else { 0 }
                    | if frontend.held { SLOT_HELD } else { 0 }
            } else {
                0
            };
            let node = if own { 0 } else { spot.node_number() };
            let slot =
                Slot { address: A::from_ip(address), port: Port::from_host(*port), flags, node, zero: 0 };
            slots.set(index, slot, 0)?;
        }
        Ok(IndexRange { base, len: endpoints.len() as u32 })
    };
    let entry = FrontendEntry {
        service: number,
        flags: frontend.flags,
        cluster: list(base, &frontend.cluster)?,
        local: list(base + SLOTS / 2, &frontend.local)?,
        former_list: list(base + SLOTS / 4 * 3, &frontend.former)?,
        former_until: frontend.former_until,
        drain_until: frontend.drain_until,
        affinity: frontend.affinity,
        ..FrontendEntry::default()
    };
    let protocols =
        [(PROTOCOL_TCP, Protocol::Tcp), (PROTOCOL_UDP, Protocol::Udp), (PROTOCOL_SCTP, Protocol::Sctp)];
    for (place, (protocol, name)) in (0..).zip(protocols) {
        let mut entry = entry;
        if let Some(size) = frontend.maglev {
            let address = |(spot, port): &(Spot, u16)| SocketAddr::new(spot.of(family), *port);
            let endpoints = frontend.cluster.iter();
            let members: Vec<_> =
                endpoints.map(|endpoint| Member::new(address(endpoint), name, Member::WEIGHT)).collect();
            let base =
                (number * 6 + u32::from(family == Family::V6) * 3 + place) * maglev::elements(size.slots());
            let places = table(&members, size).context("there is no such table")?;
            tables.write(base, &maglev::pack(&places).collect::<Vec<_>>())?;
            entry.maglev = IndexRange { base, len: size.slots() };
            entry.former = write_former(tables, size, frontend.former.len() as u32)?;
        }
        let key = key_of(frontend, protocol, family);
        frontends.insert(key, entry, 0)?;
        if frontend::kind(frontend.flags) == frontend_kind::NODE_PORT {
            let key = FrontendKey { address: A::default(), scope: scope::NODE_PORT, ..key };
            // As by default, and as with `--node-port-addresses` of another network.
            let own = frontend.address == Spot::Node;
            let kind = if own { frontend_kind::LOOPBACK } else { frontend_kind::OPENED };
            entry.flags ^= (frontend_kind::NODE_PORT ^ kind) << frontend::KIND_SHIFT;
            frontends.insert(key, entry, 0)?;
        }
    }
    if frontend.is_cluster_ip() {
        let key = FrontendKey {
            address: A::from_ip(frontend.address.of(family)),
            port: Port::NONE,
            protocol: 0,
            scope: scope::CLUSTER_IP,
        };
        frontends.insert(key, FrontendEntry::default(), 0)?;
    }
    Ok(())
}
