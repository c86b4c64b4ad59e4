//! The sockets that the packet path translates: the cgroup that its programs are attached to, and
//! UDP sockets that were connected to endpoints.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use aya::maps::{HashMap, Map, MapData};
use traffic_policy_cluster::model::Protocol;
use traffic_policy_ebpf::abi::{SocketKey, TranslatedSocket};

use super::{
    Dataplane,
    bpf::{attach::cgroup, pins::Pins},
    maps::keys::{RemovedEndpoint, from_wide},
};

/// Reads the table of connected UDP sockets, in another thread: the table may be long. Returns the
/// sockets connected to these endpoints, by cookie, except for those that another Service connected
/// to one of them. A socket that was connected to several of them in turn is in several maps, once
/// in each. The error is that of a bpf(2) lookup.
pub type ReadConnected =
    Box<dyn Fn(&BTreeSet<RemovedEndpoint>) -> Result<Vec<BTreeMap<u64, SocketAddr>>> + Send>;

/// The programs on the cgroup of `--cgroup`, which handle calls of its processes' sockets.
pub trait CgroupPrograms {
    /// Attaches the programs; does nothing without a cgroup.
    ///
    /// # Errors
    /// There is no place for pins, the kernel refuses a program (BPF_LINK_CREATE), or its link
    /// cannot be pinned.
    fn attach_cgroup(&mut self) -> Result<()>;

    /// Returns the calls of the cgroup's processes whose programs were detached.
    fn lost_calls(&self) -> Result<Vec<&'static str>>;

    /// Returns the cgroup whose connections are translated.
    fn cgroup(&self) -> Option<&Path>;

    /// Returns a reader of the table of connected UDP sockets.
    fn connected_udp(&self) -> Result<ReadConnected>;
}

/// Returns the sockets of `table` that a [`ReadConnected`] looks for.
fn connected(
    table: &HashMap<MapData, SocketKey, TranslatedSocket>,
    endpoints: &BTreeSet<RemovedEndpoint>,
) -> Result<Vec<BTreeMap<u64, SocketAddr>>> {
    let mut found: Vec<BTreeMap<u64, SocketAddr>> = Vec::new();
    for entry in table {
        let (key, socket) = entry.context("reading the table of sockets failed")?;
        let (endpoint, protocol) = (peer(&key), Protocol::Udp);
        if !endpoints.contains(&RemovedEndpoint { service: socket.service, endpoint, protocol }) {
            continue;
        }
        match found.iter_mut().find(|map| !map.contains_key(&key.cookie)) {
            Some(map) => drop(map.insert(key.cookie, endpoint)),
            None => found.push(BTreeMap::from([(key.cookie, endpoint)])),
        }
    }
    Ok(found)
}

/// Returns the peer of an entry. IPv4-mapped addresses are IPv4 in the table.
fn peer(key: &SocketKey) -> SocketAddr {
    SocketAddr::new(from_wide(key.address, key.ipv6 != 0), key.port.to_host())
}

/// The cgroup whose processes' connections are translated, and the table of their connected UDP
/// sockets.
#[derive(Debug)]
pub struct Sockets {
    /// The resolved value of `--cgroup`.
    cgroup: Option<PathBuf>,
    pins: Option<Folders>,
}

#[derive(Debug)]
struct Folders {
    links: PathBuf,
    maps: PathBuf,
}

impl Sockets {
    pub fn new(cgroup: Option<PathBuf>, pins: Option<&Pins>) -> Self {
        let pins = pins.map(|pins| Folders { links: pins.links(), maps: pins.maps() });
        Self { cgroup, pins }
    }

    /// Removes the links of an earlier agent to other cgroups.
    pub fn forget_others(&self) -> Result<()> {
        match &self.pins {
            Some(pins) => cgroup::retain(&pins.links, self.cgroup.as_deref()),
            None => Ok(()),
        }
    }
}

impl CgroupPrograms for Dataplane {
    fn attach_cgroup(&mut self) -> Result<()> {
        let Sockets { cgroup: Some(folder), pins } = &self.sockets else { return Ok(()) };
        let pins = pins.as_ref().context("programs on a cgroup need a place for their pins")?;
        cgroup::attach(&mut self.object, &pins.links, folder)?;
        tracing::info!(cgroup = %folder.display(), "serving connections of its processes");
        Ok(())
    }

    fn lost_calls(&self) -> Result<Vec<&'static str>> {
        match &self.sockets {
            Sockets { cgroup: Some(folder), pins: Some(pins) } => {
                cgroup::lost(&self.object, &pins.links, folder)
            }
            _ => Ok(Vec::new()),
        }
    }

    fn cgroup(&self) -> Option<&Path> {
        self.sockets.cgroup.as_deref()
    }

    fn connected_udp(&self) -> Result<ReadConnected> {
        let open = || -> Result<_> {
            let pins = self.sockets.pins.as_ref().context("it is not pinned")?;
            let data = MapData::from_pin(pins.maps.join("tp_conn_udp"))?;
            Ok(HashMap::try_from(Map::LruHashMap(data))?)
        };
        let table = open().context("opening the table of sockets failed")?;
        Ok(Box::new(move |endpoints| connected(&table, endpoints)))
    }
}
