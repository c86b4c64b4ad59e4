//! Frontends in the maps, with their endpoints, Maglev tables and allowed sources.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context as _, Result, ensure};
use aya::maps::lpm_trie::Key;
use aya::maps::{Array, HashMap, MapData};
use traffic_policy_cluster::model::Protocol;
use traffic_policy_cluster::model::maglev::{Member, table};
use traffic_policy_dataplane::{Maps, Words};
use traffic_policy_ebpf::abi::{
    Address, Frontend as FrontendEntry, FrontendKey, IndexRange, PROTOCOL_SCTP, PROTOCOL_TCP, PROTOCOL_UDP,
    Port, SLOT_HELD, SLOT_L2, SLOT_LOCAL, SLOT_OPENS, SLOT_REMOTE, SLOT_UDP, Slot, SourceRange, frontend,
    frontend_kind, maglev, scope,
};

use super::flows::{Wire, words};
use super::loaded::ELEMENTS;
use super::owners::write_former;
use super::{Frontend, Harness, Spot, prefilter};
use crate::lab::{Addresses, Family};

/// The number of slots of one frontend; each list has half of them.
pub(super) const SLOTS: u32 = 64;

impl Harness {
    /// Adds a frontend, or replaces one.
    pub fn put(&mut self, number: u32, frontend: &Frontend) {
        let written = self.write_frontend(number, frontend);
        // SAFETY: the element is mapped as long as the tables live, and no program runs meanwhile.
        unsafe { prefilter::name(self.loaded.tables.prefilter.pointer(), frontend) };
        written.unwrap_or_else(|error| panic!("writing a frontend: {error:#}"));
    }

    /// Removes a frontend.
    pub fn take_away(&mut self, frontend: &Frontend) {
        let tables = &mut self.loaded.tables;
        let first = remove(&mut tables.v4.frontends, frontend, Family::V4);
        let second = remove(&mut tables.v6.frontends, frontend, Family::V6);
        first.and(second).unwrap_or_else(|error| panic!("removing a frontend: {error:#}"));
    }

    /// Writes a frontend, without its bits of the prefilter.
    pub(super) fn write_frontend(&mut self, number: u32, frontend: &Frontend) -> Result<()> {
        let Maps { v4, v6, tables, .. } = &mut self.loaded.tables;
        write((&mut v4.frontends, &mut v4.slots, tables), number, frontend, Family::V4)?;
        write((&mut v6.frontends, &mut v6.slots, tables), number, frontend, Family::V6)?;
        self.write_sources(number, frontend)
    }

    /// Removes the frontends of SCTP, as where the agent has no programs for it.
    pub(super) fn remove_sctp(&mut self) -> Result<()> {
        remove_sctp(&mut self.loaded.tables.v4.frontends)?;
        remove_sctp(&mut self.loaded.tables.v6.frontends)
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

fn remove_sctp<A: Address>(frontends: &mut HashMap<MapData, FrontendKey<A>, FrontendEntry>) -> Result<()> {
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
