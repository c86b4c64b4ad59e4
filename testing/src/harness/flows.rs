//! The flow tables in the terms of a test: halves of both families alike.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use aya::maps::{HashMap, MapData};
use traffic_policy_agent::dataplane::{FromWire, ToWire};
use traffic_policy_ebpf::abi::{Address, Address4, Address6, Flow, FlowKey, Fold, Port, Ports, Tuple, kind};

use super::Harness;
use crate::bpf_map::BpfMap;
use crate::lab::Family;

/// An address of one family in the form of the maps, from one that may be of either.
pub(super) trait Wire: FromWire {
    fn from_ip(address: IpAddr) -> Self;
}

impl Wire for Address4 {
    fn from_ip(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(address) => address.to_wire(),
            IpAddr::V6(address) => panic!("{address} is no IPv4 address"),
        }
    }
}

impl Wire for Address6 {
    fn from_ip(address: IpAddr) -> Self {
        match address {
            IpAddr::V6(address) => address.to_wire(),
            IpAddr::V4(address) => panic!("{address} is no IPv6 address"),
        }
    }
}

/// The table that holds a half.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    Main,
    Pending,
}

/// One half of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Half {
    pub place: Place,
    pub protocol: u8,
    /// The packets that it matches.
    pub from: SocketAddr,
    pub to: SocketAddr,
    /// What they become.
    pub new_from: SocketAddr,
    pub new_to: SocketAddr,
    pub kind: u8,
    pub state: u8,
    pub hop: u16,
    pub epoch: u16,
    /// Jiffies of its last packet.
    pub last: u32,
    /// Request half: jiffies of a SYN that came when the flow was assured, or 0.
    pub asked: u32,
    pub service: u32,
    pub packets: u64,
    pub bytes: u64,
}

impl Half {
    fn read<A: Address + FromWire>(place: Place, key: &FlowKey<A>, flow: &Flow<A>) -> Self {
        let tuple = key.tuple(flow);
        let end = |address: A, port: Port| SocketAddr::new(address.to_ip(), port.to_host());
        Self {
            place,
            protocol: tuple.protocol as u8,
            from: end(tuple.source, tuple.ports.source()),
            to: end(tuple.destination, tuple.ports.destination()),
            new_from: end(flow.source, flow.ports.source()),
            new_to: end(flow.destination, flow.ports.destination()),
            kind: flow.kind,
            state: flow.state,
            hop: flow.hop,
            epoch: flow.epoch,
            last: flow.last,
            asked: if matches!(flow.kind, kind::FORWARD | kind::DELIVER) {
                u32::from_ne_bytes(flow.mac_tail)
            } else {
                0
            },
            service: flow.service,
            packets: flow.packets,
            bytes: flow.bytes,
        }
    }

    fn tuple<A: Address + Wire>(&self) -> Tuple<A> {
        Tuple {
            source: A::from_ip(self.from.ip()),
            destination: A::from_ip(self.to.ip()),
            ports: Ports::from_host(self.from.port(), self.to.port()),
            protocol: u32::from(self.protocol),
        }
    }

    fn key<A: Address + Wire>(&self) -> FlowKey<A> {
        FlowKey::of(&self.tuple())
    }

    /// Takes over what a test may change.
    fn write<A: Address>(&self, flow: &mut Flow<A>) {
        flow.kind = self.kind;
        flow.state = self.state;
        flow.hop = self.hop;
        flow.epoch = self.epoch;
        flow.last = self.last;
        flow.ports = Ports::from_host(self.new_from.port(), self.new_to.port());
        if self.is_request() {
            flow.mac_tail = self.asked.to_ne_bytes();
        }
    }

    /// As if all that it has noted had been so many jiffies earlier.
    pub fn go_back(&mut self, jiffies: u32) {
        self.last = self.last.wrapping_sub(jiffies);
        if self.asked != 0 {
            self.asked = self.asked.wrapping_sub(jiffies);
        }
    }

    /// Whether it is a request half.
    pub fn is_request(&self) -> bool {
        matches!(self.kind, kind::FORWARD | kind::DELIVER)
    }
}

impl Harness {
    /// All halves of a family, requests first, by the addresses that they match.
    pub fn flows(&self, family: Family) -> Vec<Half> {
        let mut halves = match family {
            Family::V4 => [
                dump::<Address4>(Place::Main, self.map("tp_flows4")),
                dump::<Address4>(Place::Pending, self.map("tp_pending4")),
            ],
            Family::V6 => [
                dump::<Address6>(Place::Main, self.map("tp_flows6")),
                dump::<Address6>(Place::Pending, self.map("tp_pending6")),
            ],
        }
        .concat();
        halves.sort_by_key(|half| (!half.is_request(), half.place, half.from, half.to, half.protocol));
        halves
    }

    /// The only flow of a family: its request half and its reply half.
    pub fn flow(&self, family: Family) -> (Half, Half) {
        match self.flows(family).as_slice() {
            [request, reply] if request.is_request() && !reply.is_request() => (*request, *reply),
            other => panic!("not one pair of halves: {other:#?}"),
        }
    }

    /// Changes a half: `kind`, `state`, `hop`, `epoch`, `last`, `asked`, or the ports that its packets get.
    pub fn change(&mut self, half: &Half, change: impl FnOnce(&mut Half)) {
        let mut half = *half;
        change(&mut half);
        match (half.from.is_ipv4(), half.place) {
            (true, Place::Main) => edit(&mut self.tables.v4.flows, &half),
            (true, Place::Pending) => edit(&mut self.pending4, &half),
            (false, Place::Main) => edit(&mut self.tables.v6.flows, &half),
            (false, Place::Pending) => edit(&mut self.pending6, &half),
        }
    }

    /// Makes the entry of an IPv6 half in the main table that of packets to another address whose key is the same.
    pub fn exchange(&mut self, half: &Half, to: Ipv6Addr) -> Half {
        let (table, key) = (&mut self.tables.v6.flows, half.key());
        let mut flow = table.get(&key, 0).unwrap_or_else(|error| panic!("no half {half:?}: {error}"));
        flow.kept = to.to_wire().kept();
        table.insert(key, flow, 0).unwrap_or_else(|error| panic!("writing {half:?}: {error}"));
        Half::read(half.place, &key, &flow)
    }

    /// Deletes one half, as the kernel may in the pending table.
    pub fn evict(&mut self, half: &Half) {
        match (half.from.is_ipv4(), half.place) {
            (true, Place::Main) => self.tables.v4.flows.remove(&half.key()),
            (true, Place::Pending) => self.pending4.remove(&half.key()),
            (false, Place::Main) => self.tables.v6.flows.remove(&half.key()),
            (false, Place::Pending) => self.pending6.remove(&half.key()),
        }
        .unwrap_or_else(|error| panic!("deleting {half:?}: {error}"));
    }
}

/// All entries of a map, read by one call: a comparison of tables is what a fuzzer does most.
fn dump<A: Address + FromWire>(place: Place, map: &BpfMap) -> Vec<Half> {
    let entries = map.read().unwrap_or_else(|error| panic!("reading the flows: {error:#}"));
    let halves = entries.iter().map(|(key, value)| {
        assert_eq!((key.len(), value.len()), (size_of::<FlowKey<A>>(), size_of::<Flow<A>>()));
        // SAFETY: plain numbers, as many bytes as were read.
        let (key, flow) = unsafe {
            (
                key.as_ptr().cast::<FlowKey<A>>().read_unaligned(),
                value.as_ptr().cast::<Flow<A>>().read_unaligned(),
            )
        };
        Half::read(place, &key, &flow)
    });
    halves.collect()
}

fn edit<A: Address + Wire>(map: &mut HashMap<MapData, FlowKey<A>, Flow<A>>, half: &Half) {
    let key = half.key();
    let mut flow = map.get(&key, 0).unwrap_or_else(|error| panic!("no half {half:?}: {error}"));
    half.write(&mut flow);
    map.insert(key, flow, 0).unwrap_or_else(|error| panic!("writing {half:?}: {error}"));
}
