//! What the packet path knows of sockets, and they of this node.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    path::Path,
};

use anyhow::{Context as _, Result};
use aya::maps::{HashMap, Map, MapData};
use ipnet::IpNet;
use traffic_policy_ebpf::abi::{Node, Socket, SocketKey};

use super::{
    Dataplane,
    bpf::attach::cgroup,
    kernel,
    maps::keys::{GoneEndpoint, from_wide, wide},
};
use crate::model::Protocol;

/// UDP sockets that were connected to endpoints, for a thread of its own: the table may be long.
pub struct ConnectedUdp(HashMap<MapData, SocketKey, Socket>);

impl ConnectedUdp {
    /// Those of these endpoints by cookie, but not those that another Service connected to one of them. A socket that was connected to several of them in turn is in
    /// several maps, once in each.
    ///
    /// # Errors
    /// The table cannot be read.
    pub fn of(&self, endpoints: &BTreeSet<GoneEndpoint>) -> Result<Vec<BTreeMap<u64, SocketAddr>>> {
        let mut found: Vec<BTreeMap<u64, SocketAddr>> = Vec::new();
        for entry in &self.0 {
            let (key, socket) = entry.context("reading the table of sockets failed")?;
            let (endpoint, protocol) = (peer(&key), Protocol::Udp);
            if !endpoints.contains(&GoneEndpoint { service: socket.service, endpoint, protocol }) {
                continue;
            }
            match found.iter_mut().find(|map| !map.contains_key(&key.cookie)) {
                Some(map) => drop(map.insert(key.cookie, endpoint)),
                None => found.push(BTreeMap::from([(key.cookie, endpoint)])),
            }
        }
        Ok(found)
    }
}

/// The other end that an entry is about. IPv4-mapped ones are IPv4 in the table.
fn peer(key: &SocketKey) -> SocketAddr {
    SocketAddr::new(from_wide(key.address, key.ipv6 != 0), u16::from_be(key.port))
}

impl Dataplane {
    /// Serves the connections that processes of this node make, as `--cgroup` says.
    ///
    /// # Errors
    /// The programs cannot be attached.
    pub fn attach_cgroup(&mut self) -> Result<()> {
        let Some(folder) = &self.cgroup else { return Ok(()) };
        let links = self.pins.as_ref().context("programs on a cgroup need a place for their pins")?.links();
        cgroup::attach(&mut self.object, &links, folder)?;
        tracing::info!(cgroup = %folder.display(), "serving connections of its processes");
        Ok(())
    }

    /// The cgroup whose connections are served.
    pub fn cgroup(&self) -> Option<&Path> {
        self.cgroup.as_deref()
    }

    /// Tells the packet path what sockets without an address will probably use: the node's primary addresses, and for
    /// pods the first of their ranges.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn describe_node(&mut self, primary: &[IpAddr], pod_ranges: &[IpNet]) -> Result<()> {
        let pods: Vec<IpAddr> = pod_ranges.iter().map(IpNet::network).collect();
        let first = |addresses: &[IpAddr]| {
            [IpAddr::is_ipv4, IpAddr::is_ipv6]
                .map(|of_family| addresses.iter().copied().find(of_family).map_or([0; 2], wide))
        };
        let pod_bits = [false, true].map(|ipv6| {
            let range = pod_ranges.iter().find(|range| range.addr().is_ipv6() == ipv6);
            range.map_or(0, |range| u32::from(range.prefix_len()))
        });
        self.put_node(|node| Node { primary: first(primary), pods: first(&pods), pod_bits, ..node })
    }

    /// Tells the packet path which network namespace is the node's own: this process's.
    pub(super) fn name_namespace(&mut self) -> Result<()> {
        let netns = kernel::netns_cookie()?;
        self.put_node(|node| Node { netns, ..node })
    }

    fn put_node(&mut self, change: impl FnOnce(Node) -> Node) -> Result<()> {
        let held = self.tables.node.get(&0, 0).context("reading the description of the node failed")?;
        let node = change(held);
        if node == held {
            return Ok(());
        }
        self.tables.node.set(0, node, 0).context("writing the description of the node failed")
    }

    /// UDP endpoints that stopped serving since the last sweep: whoever is connected to one of them must be told.
    pub fn gone_udp(&self) -> BTreeSet<GoneEndpoint> {
        // What an earlier agent had named may serve again by now: nobody knows before the first sync.
        if !self.synced {
            return BTreeSet::new();
        }
        self.gone.iter().filter(|gone| gone.protocol == Protocol::Udp).copied().collect()
    }

    /// The table of connected UDP sockets, to be read elsewhere.
    ///
    /// # Errors
    /// No descriptor is free.
    pub fn connected_udp(&self) -> Result<ConnectedUdp> {
        let open = || -> Result<_> {
            let pins = self.pins.as_ref().context("it is not pinned")?;
            let data = MapData::from_pin(pins.maps().join("CONNECTED_UDP"))?;
            Ok(HashMap::try_from(Map::LruHashMap(data))?)
        };
        open().map(ConnectedUdp).context("opening the table of sockets failed")
    }

    /// Forgets links to cgroups of an earlier agent.
    pub(super) fn forget_other_cgroups(&self) -> Result<()> {
        match &self.pins {
            Some(pins) => cgroup::retain(&pins.links(), self.cgroup.as_deref()),
            None => Ok(()),
        }
    }
}
