//! Connections that began under an earlier proxy, in the flow tables.
//!
//! Conntrack goes on translating them ([`crate::node::kept_nat`]), so all that the packet path has to do is to leave their packets
//! alone: their entries are of kinds that do nothing else. A second translator would meet the first: behind a masquerade the replies of
//! a pod on this node come by no device with programs, and a new tuple of the same packets would clash with conntrack's own.

mod table;

use std::{
    collections::{HashMap, HashSet},
    net::SocketAddr,
    path::Path,
};

use anyhow::{Context, Result};
use aya::maps::{self, Map, MapData};
use traffic_policy_cluster::model::Protocol;
use traffic_policy_ebpf::abi::{
    Address, Address4, Address6, AgentHeartbeat, Flow, FlowKey, Frontend, FrontendKey, Multipliers, Port,
    RuntimeConfig, kind, scope,
};

use self::table::Tables;
use super::{
    Dataplane,
    bpf::pins,
    maps::{
        keys::{self, FromWire, FrontendId, GoneEndpoint},
        mmap::{config, heartbeat},
        reader::Reader,
    },
};
use crate::node::conntrack::Connection;

/// Counts of adopted connections, and of those left out by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Adopted {
    /// By TCP, by UDP and by SCTP, those of earlier calls among them.
    pub tcp: u64,
    pub udp: u64,
    pub sctp: u64,
    /// Of these, entered by this call.
    pub entered: u64,
    /// To addresses that are no frontends: of others.
    pub others: u64,
    /// Closed, or about to expire.
    pub over: u64,
    /// Their client has begun anew here meanwhile.
    pub begun_anew: u64,
    /// A flow of ours has the same addresses and ports towards the endpoint.
    pub clash: u64,
    /// The flow table is full.
    pub no_room: u64,
}

impl Adopted {
    /// Those that go on.
    #[must_use]
    pub const fn live(&self) -> u64 {
        self.tcp + self.udp + self.sctp
    }

    /// Sentences about connections that were not adopted, by reason; empty if there are none.
    #[must_use]
    pub fn not_adopted(&self) -> Vec<String> {
        [
            (self.begun_anew, "have begun anew here meanwhile"),
            (self.clash, "share the addresses and ports of another flow towards their endpoint"),
            (self.no_room, "find no room in the flow table: raise --flow-entries"),
        ]
        .into_iter()
        .filter(|(count, _)| *count > 0)
        .map(|(count, reason)| format!("{count} {reason}"))
        .collect()
    }
}

/// Key of a request entry: protocol, client, frontend.
type RequestId = (Protocol, SocketAddr, SocketAddr);

fn id_of(connection: &Connection) -> RequestId {
    (connection.protocol, connection.client, connection.frontend)
}

fn frontend_of(connection: &Connection) -> FrontendId {
    FrontendId { address: connection.frontend, protocol: connection.protocol }
}

/// The adopted connections that the table has.
#[derive(Debug, Default)]
pub(super) struct Adoption {
    /// The first sync is to come: see [`traffic_policy_ebpf::abi::frontend::ADOPTING`].
    pending: bool,
    /// `None`: the table has not been read.
    known: Option<HashMap<RequestId, Connection>>,
    /// State of [`Dataplane::adopt_on`].
    pass: Option<Pass>,
}

/// Connections of a piece: each takes some system calls.
const PIECE: usize = 128;

/// One comparison of the table with what conntrack has.
#[derive(Debug, Default)]
struct Pass {
    connections: Vec<Connection>,
    /// So many of them have been looked at.
    done: usize,
    live: HashSet<RequestId>,
    adopted: Adopted,
    /// Known connections that are to be removed yet; `None` before all others have been looked at.
    ended: Option<Vec<RequestId>>,
}

impl Adoption {
    pub(super) fn is_pending(&self) -> bool {
        self.pending
    }
}

impl Dataplane {
    /// The next sync is the first, and [`Self::adopt_connections`] follows it: until then what has no flow and opens none is the
    /// stack's. Nothing changes where an earlier agent's frontends are in the maps: its flows are, too.
    pub fn begin_adopting(&mut self) {
        self.adoption.pending = self.planner.frontends().is_empty();
    }

    /// Lets [`Self::adopt_on`] enter connections that conntrack translates for our frontends, and remove those that were entered before
    /// and have ended or gone by now.
    pub fn adopt_connections(&mut self, connections: Vec<Connection>) {
        self.adoption.pass = Some(Pass { connections, ..Pass::default() });
    }

    /// Does a piece of that, in fractions of a millisecond; what came of it, when it is done.
    ///
    /// # Errors
    /// The maps cannot be read or written. What is left of the pass is given up.
    pub fn adopt_on(&mut self) -> Result<Option<Adopted>> {
        let Some(mut pass) = self.adoption.pass.take() else { return Ok(Some(Adopted::default())) };
        let mut known = match self.adoption.known.take() {
            Some(known) => known,
            None => self.left()?,
        };
        let last = self.maps.heartbeat.load(heartbeat::jiffies);
        let planner = &self.planner;
        let by = Multipliers::of(self.maps.config.load(config::seed));
        let mut tables = Tables { v4: &mut self.maps.v4.flows, v6: &mut self.maps.v6.flows, by };
        for connection in pass.connections.iter().skip(pass.done).take(PIECE) {
            let id = id_of(connection);
            let frontend = planner.frontends().get(&frontend_of(connection));
            // A connection outlives its Service.
            let service = frontend.map(|frontend| frontend.service);
            let service = service.or_else(|| known.contains_key(&id).then_some(0));
            let gone = |endpoint: &GoneEndpoint| !planner.is_serving(endpoint);
            if tables.adopt(connection, service, gone, last, &mut pass.adopted)? {
                known.insert(id, *connection);
                pass.live.insert(id);
            }
        }
        pass.done += PIECE;
        if pass.done >= pass.connections.len() {
            let ended = pass
                .ended
                .get_or_insert_with(|| known.keys().filter(|id| !pass.live.contains(id)).copied().collect());
            for id in ended.split_off(ended.len().saturating_sub(PIECE)) {
                if let Some(connection) = known.remove(&id) {
                    tables.remove(&connection)?;
                }
            }
        }
        self.adoption.known = Some(known);
        if pass.ended.as_ref().is_some_and(Vec::is_empty) {
            return Ok(Some(pass.adopted));
        }
        self.adoption.pass = Some(pass);
        Ok(None)
    }

    /// The next sync makes frontends what they are without [`Self::begin_adopting`]; whether there is anything to write.
    pub fn end_adopting(&mut self) -> bool {
        let pending = std::mem::take(&mut self.adoption.pending);
        self.stale |= pending;
        pending
    }

    /// The adopted connections that the tables hold.
    fn left(&self) -> Result<HashMap<RequestId, Connection>> {
        let mut left = HashMap::new();
        if let Some(pins) = &self.pins {
            let folder = pins.maps();
            left_of_family::<Address4>(&folder, "tp_flows4", &mut left)?;
            left_of_family::<Address6>(&folder, "tp_flows6", &mut left)?;
        }
        Ok(left)
    }
}

/// The multipliers by which programs whose maps are pinned in `folder` fold IPv6 keys.
fn multipliers(folder: &Path) -> Result<Multipliers> {
    let config: RuntimeConfig = Reader::open(folder, "tp_config")?.value(0)?;
    Ok(Multipliers::of(config.seed))
}

fn left_of_family<A: Address + FromWire>(
    folder: &Path,
    name: &str,
    left: &mut HashMap<RequestId, Connection>,
) -> Result<()>
where
    FlowKey<A>: aya::Pod,
    Flow<A>: aya::Pod,
{
    let by = multipliers(folder)?;
    Reader::open(folder, name)?.each(|key: FlowKey<A>, entry: Flow<A>| {
        if entry.kind != kind::LEFT {
            return;
        }
        let address = |address: A, port: Port| SocketAddr::new(address.to_ip(), port.to_host());
        let tuple = key.unfolded(&entry, by);
        let Some(protocol) = keys::protocol(tuple.protocol) else { return };
        let connection = Connection {
            protocol,
            client: address(tuple.source, tuple.ports.source()),
            frontend: address(tuple.destination, tuple.ports.destination()),
            endpoint: address(entry.destination, entry.ports.destination()),
            source: address(entry.source, entry.ports.source()),
            over: false,
        };
        left.insert(id_of(&connection), connection);
    })
}

/// Enters connections into the tables that an agent has pinned below `root`.
///
/// # Errors
/// The maps cannot be read or written.
pub fn adopt_pinned(root: &Path, connections: &[Connection]) -> Result<Adopted> {
    let folder = pins::maps_below(root);
    let mut frontends = HashMap::new();
    frontends_of::<Address4>(&folder, "tp_frontends4", &mut frontends)?;
    frontends_of::<Address6>(&folder, "tp_frontends6", &mut frontends)?;
    let open = |name: &str| -> Result<Map> {
        let path = folder.join(name);
        let data =
            MapData::from_pin(&path).with_context(|| format!("{} cannot be opened", path.display()))?;
        Map::from_map_data(data).with_context(|| format!("{} is not understood", path.display()))
    };
    let heartbeat: AgentHeartbeat = Reader::open(&folder, "tp_heartbeat")?.value(0)?;
    let mut flows4 = maps::HashMap::try_from(open("tp_flows4")?)?;
    let mut flows6 = maps::HashMap::try_from(open("tp_flows6")?)?;
    let by = multipliers(&folder)?;
    let mut tables = Tables { v4: &mut flows4, v6: &mut flows6, by };
    let mut adopted = Adopted::default();
    for connection in connections {
        let service = frontends.get(&frontend_of(connection)).copied();
        tables.adopt(connection, service, |_| false, heartbeat.jiffies, &mut adopted)?;
    }
    Ok(adopted)
}

/// The Service port of each frontend.
fn frontends_of<A: Address + FromWire>(
    folder: &Path,
    name: &str,
    frontends: &mut HashMap<FrontendId, u32>,
) -> Result<()>
where
    FrontendKey<A>: aya::Pod,
{
    Reader::open(folder, name)?.each(|key: FrontendKey<A>, frontend: Frontend| {
        let Some(protocol) = keys::protocol(key.protocol.into()) else { return };
        if key.scope != scope::CLUSTER_IP {
            let address = SocketAddr::new(key.address.to_ip(), key.port.to_host());
            frontends.insert(FrontendId { address, protocol }, frontend.service);
        }
    })
}
