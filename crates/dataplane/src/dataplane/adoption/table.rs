//! Entries of adopted connections in the flow tables: their insertion and removal.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use anyhow::{Context, Result};
use aya::maps::{HashMap, MapData, MapError};
use traffic_policy_cluster::model::Protocol;
use traffic_policy_ebpf::{
    abi::{Address, Address4, Address6, Flow, FlowKey, Multipliers, Ports, Tuple, kind},
    tcp::{ANSWERED, ASSURED},
};

use super::Adopted;
use crate::{
    dataplane::{
        maps::keys::{RemovedEndpoint, ToWire, number},
        sys::{self, BPF_NOEXIST},
    },
    node::conntrack::Connection,
};

/// The result of adopting one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Entered,
    Known,
    BegunAnew,
    Clash,
    NoRoom,
}

/// Inserts an entry if there is none; returns `None` if it was inserted.
fn insert<A: Address>(
    flows: &mut HashMap<MapData, FlowKey<A>, Flow<A>>,
    tuple: &Tuple<A>,
    entry: Flow<A>,
    by: Multipliers,
) -> Result<Option<Fate>>
where
    FlowKey<A>: aya::Pod,
    Flow<A>: aya::Pod,
{
    let inserted = flows.insert(FlowKey::folded(tuple, by), entry.keeping(tuple), BPF_NOEXIST);
    let Err(error) = inserted else { return Ok(None) };
    match sys::error_number(&error) {
        Some(libc::EEXIST) => Ok(Some(Fate::Clash)),
        Some(libc::E2BIG) => Ok(Some(Fate::NoRoom)),
        _ => Err(error).context("the flow table cannot be written"),
    }
}

/// Returns the request and the reply tuple of a connection.
fn tuples<A: Address>(connection: &Connection, wire: impl Fn(IpAddr) -> A) -> [Tuple<A>; 2] {
    let tuple = |source: SocketAddr, destination: SocketAddr| Tuple {
        source: wire(source.ip()),
        destination: wire(destination.ip()),
        ports: Ports::from_host(source.port(), destination.port()),
        protocol: number(connection.protocol),
    };
    [tuple(connection.client, connection.frontend), tuple(connection.endpoint, connection.source)]
}

fn enter<A: Address>(
    flows: &mut HashMap<MapData, FlowKey<A>, Flow<A>>,
    [request, reply]: [Tuple<A>; 2],
    service: u32,
    last: u32,
    by: Multipliers,
) -> Result<Fate>
where
    FlowKey<A>: aya::Pod,
    Flow<A>: aya::Pod,
{
    match flows.get(&FlowKey::folded(&request, by), 0) {
        Ok(entry) if entry.kind == kind::LEFT => return Ok(Fate::Known),
        Ok(_) => return Ok(Fate::BegunAnew),
        Err(MapError::KeyNotFound) => {}
        Err(error) => return Err(error).context("the flow table cannot be read"),
    }
    // The tuple after conntrack's translation, so that each entry names the other.
    let entry = |kind, state, becomes: Tuple<A>| Flow {
        source: becomes.source,
        destination: becomes.destination,
        ports: becomes.ports,
        kind,
        state,
        last,
        service,
        ..Flow::default()
    };
    let reply_entry = entry(kind::LEFT_REPLY, ASSURED | ANSWERED, request.reversed());
    match insert(flows, &reply, reply_entry, by)? {
        Some(Fate::Clash) => {
            let held = flows.get(&FlowKey::folded(&reply, by), 0);
            if held.is_ok_and(|held| held.kind != kind::LEFT_REPLY) {
                return Ok(Fate::Clash);
            }
        }
        Some(fate) => return Ok(fate),
        None => {}
    }
    match insert(flows, &request, entry(kind::LEFT, ASSURED, reply.reversed()), by)? {
        None => Ok(Fate::Entered),
        Some(fate) => {
            // A packet has created the entry first.
            remove(flows, &reply, by)?;
            Ok(if fate == Fate::Clash { Fate::BegunAnew } else { fate })
        }
    }
}

fn remove<A: Address>(
    flows: &mut HashMap<MapData, FlowKey<A>, Flow<A>>,
    tuple: &Tuple<A>,
    by: Multipliers,
) -> Result<()>
where
    FlowKey<A>: aya::Pod,
    Flow<A>: aya::Pod,
{
    let key = FlowKey::folded(tuple, by);
    match flows.get(&key, 0) {
        Ok(entry) if matches!(entry.kind, kind::LEFT | kind::LEFT_REPLY) => {}
        // The entry belongs to another flow by now.
        Ok(_) | Err(MapError::KeyNotFound) => return Ok(()),
        Err(error) => return Err(error).context("the flow table cannot be read"),
    }
    match flows.remove(&key) {
        Ok(()) | Err(MapError::KeyNotFound) => Ok(()),
        Err(error) => Err(error).context("the flow table cannot be written"),
    }
}

/// The flow tables of both families.
pub(super) struct Tables<'a> {
    pub(super) v4: &'a mut HashMap<MapData, FlowKey<Address4>, Flow<Address4>>,
    pub(super) v6: &'a mut HashMap<MapData, FlowKey<Address6>, Flow<Address6>>,
    /// The multipliers with which IPv6 keys are folded.
    pub(super) by: Multipliers,
}

const fn v4(address: IpAddr) -> Option<Ipv4Addr> {
    match address {
        IpAddr::V4(address) => Some(address),
        IpAddr::V6(_) => None,
    }
}

/// Converts an address whose family the caller has checked.
fn wire4(address: IpAddr) -> Address4 {
    v4(address).unwrap_or(Ipv4Addr::UNSPECIFIED).to_wire()
}

fn wire6(address: IpAddr) -> Address6 {
    match address {
        IpAddr::V6(address) => address.to_wire(),
        IpAddr::V4(address) => address.to_ipv6_mapped().to_wire(),
    }
}

impl Tables<'_> {
    fn enter(&mut self, connection: &Connection, service: u32, last: u32) -> Result<Fate> {
        if connection.frontend.is_ipv4() {
            enter(self.v4, tuples(connection, wire4), service, last, self.by)
        } else {
            enter(self.v6, tuples(connection, wire6), service, last, self.by)
        }
    }

    /// Removes both entries, the request entry first: without it no packet uses the pair.
    pub(super) fn remove(&mut self, connection: &Connection) -> Result<()> {
        if connection.frontend.is_ipv4() {
            tuples(connection, wire4).iter().try_for_each(|tuple| remove(self.v4, tuple, self.by))
        } else {
            tuples(connection, wire6).iter().try_for_each(|tuple| remove(self.v6, tuple, self.by))
        }
    }

    /// Enters one connection, if it is to be adopted. `service`: the Service port of its frontend;
    /// `removed`: whether UDP flows to this endpoint are to choose a new one. Counts the
    /// connection, and returns whether it is in the table now.
    pub(super) fn adopt(
        &mut self,
        connection: &Connection,
        service: Option<u32>,
        removed: impl Fn(&RemovedEndpoint) -> bool,
        last: u32,
        adopted: &mut Adopted,
    ) -> Result<bool> {
        let (protocol, endpoint) = (connection.protocol, connection.endpoint);
        let Some(service) = service else {
            adopted.others += 1;
            return Ok(false);
        };
        let udp = protocol == Protocol::Udp;
        if connection.over || udp && removed(&RemovedEndpoint { service, endpoint, protocol }) {
            adopted.over += 1;
            return Ok(false);
        }
        let fate = self.enter(connection, service, last)?;
        match fate {
            Fate::Entered | Fate::Known => {
                *match protocol {
                    Protocol::Tcp => &mut adopted.tcp,
                    Protocol::Udp => &mut adopted.udp,
                    Protocol::Sctp => &mut adopted.sctp,
                } += 1;
                adopted.entered += u64::from(fate == Fate::Entered);
            }
            Fate::BegunAnew => adopted.begun_anew += 1,
            Fate::Clash => adopted.clash += 1,
            Fate::NoRoom => adopted.no_room += 1,
        }
        Ok(matches!(fate, Fate::Entered | Fate::Known))
    }
}
