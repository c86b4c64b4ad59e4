//! Adoption of connections that began under an earlier proxy into the flow tables.
//!
//! Conntrack continues to translate them ([`crate::node::kept_nat`]), so the packet path only has
//! to leave their packets alone: their entries have kinds that do nothing else. A second translator
//! would conflict with the first: behind a masquerade, replies of a pod on this node pass no device
//! with programs, and a new tuple of the same packets would clash with conntrack's own.

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
    bpf::pins::{self, Pins},
    maps::{
        keys::{self, FromWire, FrontendId, Removal, RemovedEndpoint},
        mmap::{config, heartbeat},
        reader::Reader,
    },
};
use crate::node::conntrack::Connection;

/// The numbers of adopted connections, and of those not adopted by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Adopted {
    /// Adopted TCP, UDP and SCTP connections, including those of earlier calls.
    pub tcp: u64,
    pub udp: u64,
    pub sctp: u64,
    /// The part of them that this call entered.
    pub entered: u64,
    /// Connections to addresses that are not our frontends.
    pub others: u64,
    /// Connections that are closed or about to expire.
    pub over: u64,
    /// Connections whose client has since started a new flow here.
    pub begun_anew: u64,
    /// Connections with the same addresses and ports towards the endpoint as one of our flows.
    pub clash: u64,
    /// Connections for which the flow table had no room.
    pub no_room: u64,
}

impl Adopted {
    /// Returns the number of adopted connections.
    #[must_use]
    pub const fn live(&self) -> u64 {
        self.tcp + self.udp + self.sctp
    }

    /// Returns sentences about the connections that were not adopted, by reason; empty if there are
    /// none.
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

/// The adoption of connections that an earlier proxy has begun.
pub trait ConnectionAdoption {
    /// Marks the next sync as the first one, which [`Self::adopt_connections`] follows: until then
    /// the stack gets every packet that has no flow and opens none. Nothing changes if the maps
    /// hold an earlier agent's frontends: they hold its flows, too.
    fn begin_adopting(&mut self);

    /// Starts a pass in which [`Self::adopt_on`] enters connections that conntrack translates for
    /// our frontends, and removes entered ones that have since ended or vanished.
    fn adopt_connections(&mut self, connections: Vec<Connection>);

    /// Processes one piece of the pass, in fractions of a millisecond. Returns the result when the
    /// pass is complete.
    ///
    /// # Errors
    /// A bpf(2) call on the flow tables fails. The rest of the pass is abandoned.
    fn adopt_on(&mut self) -> Result<Option<Adopted>>;

    /// Makes the next sync write frontends without [`Self::begin_adopting`]'s mark. Returns whether
    /// there is anything to write.
    fn end_adopting(&mut self) -> bool;
}

/// The key of a request entry: protocol, client, frontend.
type RequestId = (Protocol, SocketAddr, SocketAddr);

fn id_of(connection: &Connection) -> RequestId {
    (connection.protocol, connection.client, connection.frontend)
}

fn frontend_of(connection: &Connection) -> FrontendId {
    FrontendId { address: connection.frontend, protocol: connection.protocol }
}

/// The adopted connections in the flow tables.
#[derive(Debug, Default)]
pub(super) struct Adoption {
    /// Whether the first sync is still to come: see
    /// [`traffic_policy_ebpf::abi::frontend::ADOPTING`].
    pending: bool,
    /// The adopted connections; `None` if the table has not been read.
    known: Option<HashMap<RequestId, Connection>>,
    /// The state of [`ConnectionAdoption::adopt_on`].
    pass: Option<Pass>,
}

/// The number of connections in a piece; each takes some system calls.
const PIECE: usize = 128;

/// One comparison of the flow table with conntrack's connections.
#[derive(Debug, Default)]
struct Pass {
    connections: Vec<Connection>,
    /// The number of connections that have been processed.
    done: usize,
    live: HashSet<RequestId>,
    adopted: Adopted,
    /// The known connections that remain to be removed; `None` until all others have been
    /// processed.
    ended: Option<Vec<RequestId>>,
}

impl Adoption {
    pub(super) fn is_pending(&self) -> bool {
        self.pending
    }
}

impl ConnectionAdoption for Dataplane {
    fn begin_adopting(&mut self) {
        self.adoption.pending = self.planner.frontends().is_empty();
    }

    fn adopt_connections(&mut self, connections: Vec<Connection>) {
        self.adoption.pass = Some(Pass { connections, ..Pass::default() });
    }

    fn adopt_on(&mut self) -> Result<Option<Adopted>> {
        let Some(mut pass) = self.adoption.pass.take() else { return Ok(Some(Adopted::default())) };
        let mut known = match self.adoption.known.take() {
            Some(known) => known,
            None => left(self.pins.as_ref())?,
        };
        let last = self.maps.heartbeat.load(heartbeat::jiffies);
        let planner = &self.planner;
        let by = Multipliers::of(self.maps.config.load(config::seed));
        let mut tables = Tables { v4: &mut self.maps.v4.flows, v6: &mut self.maps.v6.flows, by };
        for connection in pass.connections.iter().skip(pass.done).take(PIECE) {
            let id = id_of(connection);
            let frontend = planner.frontends().get(&frontend_of(connection));
            // A connection can outlive its Service.
            let service = frontend.map(|frontend| frontend.service);
            let service = service.or_else(|| known.contains_key(&id).then_some(0));
            let removed = |endpoint: &RemovedEndpoint| !planner.is_serving(endpoint, Removal::Service);
            if tables.adopt(connection, service, removed, last, &mut pass.adopted)? {
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

    fn end_adopting(&mut self) -> bool {
        let pending = std::mem::take(&mut self.adoption.pending);
        self.stale |= pending;
        pending
    }
}

/// Returns the adopted connections that pinned flow tables hold.
fn left(pins: Option<&Pins>) -> Result<HashMap<RequestId, Connection>> {
    let mut left = HashMap::new();
    if let Some(pins) = pins {
        let folder = pins.maps();
        left_of_family::<Address4>(&folder, "tp_flows4", &mut left)?;
        left_of_family::<Address6>(&folder, "tp_flows6", &mut left)?;
    }
    Ok(left)
}

/// Returns the multipliers with which programs whose maps are pinned in `folder` fold IPv6 keys.
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

/// Enters connections into the flow tables that an agent has pinned below `root`.
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

/// Returns the Service port of each frontend.
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
