//! The simulator of `explain`: a copy of the programs processes packets and calls of sockets, next
//! to a running packet path or without one.

mod live;
mod offline;

use std::net::SocketAddr;

use anyhow::Result;
use traffic_policy_cluster::model::{Dispatch, ServicePortKey};
use traffic_policy_ebpf::abi::{Frontend, IndexRange, SLOT_LOCAL, SocketQuestion};

pub use crate::dataplane::tracing_copy::{Judged, PacketHook};
use crate::{
    dataplane::{
        maps::keys::{FromWire, FrontendId},
        sync::apply,
        tracing_copy::TracingCopy,
    },
    dispatch,
    inspect::{external_policy, falls_back, service_key},
};

/// An endpoint of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    pub address: SocketAddr,
    /// Whether it is on this node, by its `nodeName` or as the node's own address.
    pub local: bool,
    /// The number of its node in [`Nodes`][crate::inspect::Nodes]; 0 if it has none.
    pub node: u16,
    /// The outer packet of what is forwarded to it directly; `None`: nothing is.
    pub opens: Option<Dispatch>,
}

/// A device on which packets may arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entrance {
    pub ifindex: u32,
    pub mac: [u8; 6],
    pub hook: PacketHook,
}

/// A packet path that answers questions.
pub struct Simulator {
    copy: TracingCopy,
    entrances: Vec<Entrance>,
    /// Whether every Service is treated as having the external policy Cluster.
    as_cluster: bool,
}

impl Simulator {
    /// Returns the devices on which packets arrive; offline, a single one stands for all.
    pub fn entrances(&self) -> &[Entrance] {
        &self.entrances
    }

    /// Runs the programs of a hook on a frame that arrived on a device, as the first packet of its
    /// flow.
    pub fn packet(&mut self, hook: PacketHook, ifindex: u32, frame: &[u8]) -> Result<Judged> {
        self.copy.packet(hook, ifindex, frame)
    }

    /// Runs the program of sockets for a call.
    pub fn socket(&mut self, question: SocketQuestion) -> Result<Judged> {
        self.copy.socket(question)
    }

    /// Copies the affinity with the endpoint to which the running packet path sent this client
    /// last; returns whether there is one.
    pub fn remember_client(&mut self, client: [u64; 2], kind: u16, service: u32) -> Result<bool> {
        self.copy.remember_client(client, kind, service)
    }

    /// Returns the Service port of an index; `None` if there is none.
    pub fn service(&self, index: u32) -> Option<ServicePortKey> {
        self.copy.maps.services.get(&index, 0).ok().and_then(|info| service_key(&info))
    }

    /// Whether a frontend with these flags is forwarded as under policy Cluster although its
    /// Service has policy Local.
    pub fn falls_back(&self, index: u32, flags: u32) -> bool {
        let info = self.copy.maps.services.get(&index, 0).ok().filter(|_| !self.as_cluster);
        info.is_some_and(|info| falls_back(external_policy(&info), flags))
    }

    /// Returns the endpoints of a list.
    pub fn candidates(&self, ipv6: bool, range: IndexRange) -> Result<Vec<Candidate>> {
        (range.base..range.base.saturating_add(range.len)).map(|index| self.endpoint(ipv6, index)).collect()
    }

    /// Returns the endpoint in a slot.
    pub fn endpoint(&self, ipv6: bool, index: u32) -> Result<Candidate> {
        let (address, port, flags, node) = if ipv6 {
            let slot = self.copy.maps.v6.slots.get(&index, 0)?;
            (slot.address.to_ip(), slot.port, slot.flags, slot.node)
        } else {
            let slot = self.copy.maps.v4.slots.get(&index, 0)?;
            (slot.address.to_ip(), slot.port, slot.flags, slot.node)
        };
        let address = SocketAddr::new(address, port.to_host());
        Ok(Candidate { address, local: flags & SLOT_LOCAL != 0, node, opens: dispatch::of(flags) })
    }

    /// Returns the frontend at an address, as the maps hold it.
    pub fn frontend(&self, id: &FrontendId) -> Option<Frontend> {
        apply::frontend(&self.copy.maps, id)
    }
}
