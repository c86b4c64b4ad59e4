//! A packet path without a kernel.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    net::{IpAddr, SocketAddr},
    path::Path,
    sync::{Arc, Mutex, MutexGuard},
};

use anyhow::{bail, ensure};
use ipnet::IpNet;
use traffic_policy_cluster::model::{Changes, Desired, Limits, ServicePort, ServicePortKey};
use traffic_policy_dataplane::{
    Adopted, Attached, CgroupPrograms, Changed, ConnectionAdoption, DataplaneUsage, DevicePrograms, Figures,
    FlowSweeps, Followed, IdleTimes, Interface, Lack, LeftOut, Lost, NextHop, NextHops, NodeDescription,
    PodPrograms, ReadConnected, RemovedEndpoint, Replaced, Replacement, SctpReplies, ServiceMaps,
    SnatPortRange, SnatPorts, Suspect, Written,
    node::{HopAddress, RouteMtus, conntrack::Connection},
};

use super::super::*;

/// Calls of the controller, and the answers to them.
#[derive(Debug, Default)]
pub(super) struct Calls {
    /// Service ports that each sync named as changed, and those that were desired.
    pub syncs: Vec<[BTreeSet<ServicePortKey>; 2]>,
    /// Number of syncs that are yet to fail.
    pub failing: usize,
    /// Number of connections that are yet to be adopted.
    pub connections: usize,
    /// Delay that each sync requests before the next one.
    pub pause: Duration,
    /// Number of syncs without room for what changed.
    pub full: usize,
    /// Ranges of cluster IPs that the last sync was given.
    pub service_cidrs: BTreeSet<IpNet>,
    pub sweeps: usize,
    /// Idle times that were set while it ran.
    pub idle: Vec<IdleTimes>,
    /// Whether a flow has found no room.
    pub no_room: bool,
    /// Number of pieces that are to be swept.
    pub pieces: usize,
    /// Whether each piece takes a while.
    pub slow: bool,
    pub refreshed: usize,
    /// Whether programs of another layout version serve, or are not wholly replaced.
    pub others: bool,
    /// Whether their links were taken over.
    pub adopted: bool,
    /// Number of reads of the next hops that are yet to fail, once the links were taken over.
    pub failing_hops: usize,
    /// Whether those links had been taken over, for each call that forgets unattached devices.
    pub forgotten: Vec<bool>,
    /// Number of times that the other version's maps were freed.
    pub dropped: usize,
    /// Devices that were attached to, by their names at that time.
    pub attached: Vec<String>,
    /// The epochs that were raised.
    pub raised: Vec<Changed>,
    /// Devices that lack programs until they are attached to.
    pub lost: Vec<Lost>,
    /// Calls of the cgroup's processes that lack programs until those are attached.
    pub lost_calls: Vec<&'static str>,
    /// Whether the state of those calls is unknown.
    pub blind: bool,
    /// Whether attaching to the cgroup fails.
    pub refusing: bool,
    /// UDP endpoints that stopped serving.
    pub removed: BTreeSet<RemovedEndpoint>,
    /// Endpoints of each walk through the connected UDP sockets; the fake has no sockets.
    pub walks: Vec<BTreeSet<RemovedEndpoint>>,
    /// Whether a walk blocks, until this is false.
    pub walks_slowly: bool,
    /// Unanswered SYNs after which a node is suspected.
    pub suspect_syns: u32,
    /// Nodes that may be suspected again.
    pub suspected_again: Vec<String>,
    /// Numbers of nodes with their names.
    pub numbered: Vec<(u16, String)>,
    /// Nodes that are yet to be suspected.
    pub suspicions: VecDeque<Suspect>,
    /// The next hops of endpoints.
    pub ways: BTreeMap<IpAddr, HopAddress>,
    /// Addresses that do not answer; the gateway has none of them.
    pub silent: BTreeSet<IpAddr>,
    /// Whether the gateway answers.
    pub gateway: bool,
    /// Nodes that were set dead, or alive again, in this order.
    pub dead: Vec<(String, bool)>,
    /// The endpoints for new flows that the last sync was given, by Service.
    pub listed: BTreeMap<String, Vec<SocketAddr>>,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Fake {
    calls: Arc<Mutex<Calls>>,
    attached: Vec<Interface>,
}

impl Fake {
    pub fn calls(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap()
    }
}

impl ServiceMaps for Fake {
    fn sync(&mut self, desired: &Desired, changes: &Changes, _: &BTreeSet<IpAddr>) -> Result<Written> {
        let mut calls = self.calls();
        calls.service_cidrs.clone_from(&desired.service_cidrs);
        let addresses = |port: &ServicePort| port.cluster.iter().map(|endpoint| endpoint.address).collect();
        let listed = desired.ports.iter().map(|(key, port)| (key.service.name.clone(), addresses(port)));
        calls.listed = listed.collect();
        calls.syncs.push([changes.ports.clone(), desired.ports.keys().cloned().collect()]);
        if calls.failing > 0 {
            calls.failing -= 1;
            bail!("the maps cannot be written");
        }
        let lack = Lack::Frontends { needed: 10, free: 5 };
        let left_out = |key| LeftOut::new(key, lack, &[], &[]);
        let left_out = if calls.full > 0 { changes.ports.iter().map(left_out).collect() } else { Vec::new() };
        calls.full = calls.full.saturating_sub(1);
        Ok(Written { elements: changes.ports.len(), left_out, refused: None })
    }

    fn compares_all(&self) -> bool {
        self.calls().syncs.is_empty()
    }

    fn pause(&self) -> Duration {
        self.calls().pause
    }

    fn limits(&self) -> Limits {
        Limits::default()
    }

    fn opens_not_all(&self) -> Option<String> {
        None
    }
}

impl NodeDescription for Fake {
    fn describe_node(&mut self, _: &[IpAddr], _: &[IpNet]) -> Result<()> {
        Ok(())
    }
}

impl SnatPorts for Fake {
    fn snat_port_range(&self) -> SnatPortRange {
        SnatPortRange::default()
    }

    fn use_snat_ports(&mut self, ports: Vec<u16>) {
        self.calls().refreshed += usize::from(!ports.is_empty());
    }
}

impl FlowSweeps for Fake {
    fn set_idle_times(&mut self, idle: IdleTimes) {
        self.calls().idle.push(idle);
    }

    fn sweep(&mut self) -> Result<()> {
        let mut calls = self.calls();
        calls.sweeps += 1;
        calls.pieces += 100;
        Ok(())
    }

    fn found_no_room(&mut self) -> bool {
        std::mem::take(&mut self.calls().no_room)
    }

    fn is_sweeping(&self) -> bool {
        self.calls().pieces > 0
    }

    fn sweep_on(&mut self) -> Result<bool> {
        let mut calls = self.calls();
        if calls.slow {
            // Time that a piece of a large table takes.
            std::thread::sleep(Duration::from_millis(1));
        }
        calls.pieces -= 1;
        Ok(calls.pieces == 0)
    }

    fn removed_udp(&self) -> BTreeSet<RemovedEndpoint> {
        self.calls().removed.clone()
    }
}

impl Replacement for Fake {
    fn is_replacing(&self) -> bool {
        let calls = self.calls();
        calls.others && !calls.adopted
    }

    fn has_others(&self) -> bool {
        self.calls().others
    }

    fn adopt(&mut self) -> Result<()> {
        self.calls().adopted = true;
        Ok(())
    }

    fn drop_replaced(&mut self) -> Result<Replaced> {
        let mut calls = self.calls();
        calls.others = false;
        calls.dropped += 1;
        Ok(Replaced::default())
    }

    fn forget_others(&mut self) -> Result<()> {
        let mut calls = self.calls();
        let adopted = calls.adopted;
        calls.forgotten.push(adopted);
        Ok(())
    }
}

impl ConnectionAdoption for Fake {
    fn begin_adopting(&mut self) {}

    fn adopt_connections(&mut self, connections: Vec<Connection>) {
        self.calls().connections = connections.len();
    }

    fn adopt_on(&mut self) -> Result<Option<Adopted>> {
        let mut calls = self.calls();
        calls.connections = calls.connections.saturating_sub(1);
        // A piece takes some time.
        std::thread::sleep(Duration::from_micros(100));
        Ok((calls.connections == 0).then(|| Adopted { tcp: 1, ..Adopted::default() }))
    }

    fn end_adopting(&mut self) -> bool {
        false
    }
}

impl DevicePrograms for Fake {
    fn attach(&mut self, interface: &Interface) -> Result<Attached> {
        self.attached.retain(|held| held.ifindex != interface.ifindex);
        self.attached.push(interface.clone());
        let mut calls = self.calls();
        calls.lost.retain(|lost| lost.ifindex != interface.ifindex);
        calls.attached.push(interface.name.clone());
        Ok(Attached::Tc)
    }

    fn detach(&mut self, ifindex: u32) -> Result<()> {
        self.attached.retain(|interface| interface.ifindex != ifindex);
        Ok(())
    }

    fn is_settled(&self, interface: &Interface) -> bool {
        let lost = self.calls().lost.iter().any(|lost| lost.ifindex == interface.ifindex);
        !lost && self.attached.contains(interface)
    }

    fn unsettle(&mut self, _: u32) {}

    fn attached(&self) -> impl Iterator<Item = (&Interface, Attached)> {
        self.attached.iter().map(|interface| (interface, Attached::Tc))
    }

    fn lost(&self) -> Vec<Lost> {
        self.calls().lost.clone()
    }

    fn filters(&self) -> Option<(u16, u32)> {
        None
    }
}

impl CgroupPrograms for Fake {
    fn attach_cgroup(&mut self) -> Result<()> {
        let mut calls = self.calls();
        ensure!(!calls.refusing, "the cgroup takes no programs");
        calls.lost_calls.clear();
        Ok(())
    }

    fn lost_calls(&self) -> Result<Vec<&'static str>> {
        let calls = self.calls();
        ensure!(!calls.blind, "too many open files");
        Ok(calls.lost_calls.clone())
    }

    fn cgroup(&self) -> Option<&Path> {
        Some(Path::new("/sys/fs/cgroup"))
    }

    fn connected_udp(&self) -> Result<ReadConnected> {
        let fake = self.clone();
        Ok(Box::new(move |endpoints| {
            fake.calls().walks.push(endpoints.clone());
            // The test ends the walk; nothing else tells this thread.
            while fake.calls().walks_slowly {
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok(Vec::new())
        }))
    }
}

impl PodPrograms for Fake {
    fn follow_pods(&mut self, _: Option<String>) -> Result<Followed> {
        Ok(Followed::default())
    }
}

impl SctpReplies for Fake {
    fn follow_divider(&mut self) {}

    fn tunnels_sctp(&self) -> bool {
        false
    }
}

impl NextHops for Fake {
    fn raise(&mut self, changed: Changed) {
        self.calls().raised.push(changed);
    }

    fn compare_network(&mut self, _: u32) -> bool {
        false
    }

    fn note_network(&mut self, _: u32) {}

    fn next_hops(&self) -> Result<Vec<NextHop>> {
        let mut calls = self.calls();
        if calls.adopted && calls.failing_hops > 0 {
            calls.failing_hops -= 1;
            bail!("the maps cannot be read");
        }
        Ok(Vec::new())
    }

    fn set_route_mtus(&mut self, _: &RouteMtus) -> Result<bool> {
        Ok(false)
    }
}

impl Figures for Fake {
    fn usage(&self) -> DataplaneUsage {
        DataplaneUsage::default()
    }

    fn refused_unattached(&self) -> Result<u64> {
        Ok(0)
    }
}
