//! The sockets that the packet path translates: the cgroup that its programs are attached to, and
//! UDP sockets that were connected to endpoints.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use aya::{
    Ebpf,
    maps::{HashMap, Map, MapData},
};
use traffic_policy_cluster::model::Protocol;
use traffic_policy_ebpf::abi::{SocketKey, TranslatedSocket};

use super::{
    bpf::{attach::cgroup, pins::Pins},
    maps::keys::{GoneEndpoint, from_wide},
};

/// The UDP sockets that were connected to endpoints, for reading in a separate thread: the table
/// may be long.
pub struct ConnectedUdp(HashMap<MapData, SocketKey, TranslatedSocket>);

impl ConnectedUdp {
    /// Returns the sockets connected to these endpoints, by cookie, except for those that another
    /// Service connected to one of them. A socket that was connected to several of them in turn is
    /// in several maps, once in each.
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

    /// Attaches the programs to the cgroup.
    ///
    /// # Errors
    /// The programs cannot be attached.
    pub fn attach(&self, object: &mut Ebpf) -> Result<()> {
        let Some(folder) = &self.cgroup else { return Ok(()) };
        let pins = self.pins.as_ref().context("programs on a cgroup need a place for their pins")?;
        cgroup::attach(object, &pins.links, folder)?;
        tracing::info!(cgroup = %folder.display(), "serving connections of its processes");
        Ok(())
    }

    /// Returns the calls of processes in the cgroup that are no longer handled, because their
    /// programs were detached.
    ///
    /// # Errors
    /// The cgroup is gone.
    pub fn lost(&self, object: &Ebpf) -> Result<Vec<&'static str>> {
        match (&self.cgroup, &self.pins) {
            (Some(folder), Some(pins)) => cgroup::lost(object, &pins.links, folder),
            _ => Ok(Vec::new()),
        }
    }

    /// Removes the links of an earlier agent to other cgroups.
    ///
    /// # Errors
    /// A pin cannot be removed.
    pub fn forget_others(&self) -> Result<()> {
        match &self.pins {
            Some(pins) => cgroup::retain(&pins.links, self.cgroup.as_deref()),
            None => Ok(()),
        }
    }

    /// Returns the cgroup whose connections are translated.
    pub fn cgroup(&self) -> Option<&Path> {
        self.cgroup.as_deref()
    }

    /// Returns the table of connected UDP sockets, for a reader in another thread.
    ///
    /// # Errors
    /// No file descriptor is available.
    pub fn connected_udp(&self) -> Result<ConnectedUdp> {
        let open = || -> Result<_> {
            let pins = self.pins.as_ref().context("it is not pinned")?;
            let data = MapData::from_pin(pins.maps.join("tp_conn_udp"))?;
            Ok(HashMap::try_from(Map::LruHashMap(data))?)
        };
        open().map(ConnectedUdp).context("opening the table of sockets failed")
    }
}
