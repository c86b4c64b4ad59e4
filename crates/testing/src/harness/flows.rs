//! The flow tables as tests see them: entries of both families alike.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use aya::maps::{HashMap, MapData};
use traffic_policy_dataplane::{FromWire, ToWire};
use traffic_policy_ebpf::abi::{
    Address, Address4, Address6, Flow, FlowKey, Fold, PROTOCOL_SCTP, PROTOCOL_UDP, Port, Ports, Tail, Tuple,
    kind,
};
use traffic_policy_ebpf::tcp::ASSURED;

use super::Harness;
use crate::bpf_map::BpfMap;
use crate::lab::Family;

/// An address of one family in the form of the maps, converted from one that may be of either
/// family.
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

/// The words of an address, in memory order.
pub(super) fn words(address: Ipv6Addr) -> [u32; 4] {
    let octets = address.octets();
    std::array::from_fn(|word| {
        let at = word * 4;
        u32::from_ne_bytes([octets[at], octets[at + 1], octets[at + 2], octets[at + 3]])
    })
}

/// One entry of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowEntry {
    pub protocol: u8,
    /// Source and destination of the packets that the entry matches.
    pub from: SocketAddr,
    pub to: SocketAddr,
    /// Source and destination of the translated packets.
    pub new_from: SocketAddr,
    pub new_to: SocketAddr,
    pub kind: u8,
    pub state: u8,
    pub hop: u16,
    pub epoch: u16,
    /// Time of the last packet, in jiffies.
    pub last: u32,
    /// Request entry: the time of a SYN that came while the flow was assured, in jiffies, or 0. Of
    /// an INIT it is the initiate tag, in memory order.
    pub syn: u32,
    /// Unassured UDP: the time at which the flow began, in jiffies.
    pub began: u32,
    /// Request entry of an unassured flow: its place in the queues.
    pub place: Option<u32>,
    /// SCTP: the initiate tag of the sender of this direction, and the tag that its packets carry;
    /// 0 if it is not known.
    pub tags: (u32, u32),
    pub service: u32,
    pub packets: u64,
    pub bytes: u64,
}

impl FlowEntry {
    fn read<A: Address + FromWire>(key: &FlowKey<A>, flow: &Flow<A>) -> Self {
        let tuple = key.tuple(flow);
        let request = matches!(flow.kind, kind::FORWARD | kind::DELIVER);
        let assured = flow.state & ASSURED != 0;
        let end = |address: A, port: Port| SocketAddr::new(address.to_ip(), port.to_host());
        Self {
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
            syn: if request && assured { flow.tail.syn() } else { 0 },
            began: if Self::has_beginning(tuple.protocol, flow) { flow.numbers as u32 } else { 0 },
            place: if request && !assured && flow.tail != Tail::NONE {
                Some(flow.tail.queue_place())
            } else {
                None
            },
            tags: match tuple.protocol {
                PROTOCOL_SCTP => {
                    (u32::from_be((flow.numbers >> 32) as u32), u32::from_be(flow.numbers as u32))
                }
                _ => (0, 0),
            },
            service: flow.service,
            packets: flow.traffic().0,
            bytes: flow.traffic().1,
        }
    }

    /// Whether the entry notes when its flow began.
    fn has_beginning<A: Address>(protocol: u32, flow: &Flow<A>) -> bool {
        use kind::{DELIVER, DIRECT, FORWARD, REPLY, REPLY_LOCAL};
        let known = [FORWARD, DELIVER, DIRECT, REPLY, REPLY_LOCAL].contains(&flow.kind);
        known && protocol == PROTOCOL_UDP && flow.state & ASSURED == 0
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

    /// Copies the fields that a test may change.
    fn write<A: Address>(&self, flow: &mut Flow<A>) {
        flow.kind = self.kind;
        flow.state = self.state;
        flow.hop = self.hop;
        flow.epoch = self.epoch;
        flow.last = self.last;
        flow.ports = Ports::from_host(self.new_from.port(), self.new_to.port());
        if Self::has_beginning(self.protocol.into(), flow) {
            flow.numbers = self.began.into();
        }
        if u32::from(self.protocol) == PROTOCOL_SCTP {
            flow.numbers = u64::from(self.tags.0.to_be()) << 32 | u64::from(self.tags.1.to_be());
        }
        if self.is_request() && self.state & ASSURED != 0 {
            flow.tail = Tail::of_syn(self.syn);
        }
    }

    /// Moves all recorded times back by `jiffies`.
    pub fn go_back(&mut self, jiffies: u32) {
        self.last = self.last.wrapping_sub(jiffies);
        self.began = self.began.wrapping_sub(jiffies);
        if self.syn != 0 && u32::from(self.protocol) != PROTOCOL_SCTP {
            self.syn = self.syn.wrapping_sub(jiffies);
        }
    }

    /// Whether this is a request entry.
    pub fn is_request(&self) -> bool {
        matches!(self.kind, kind::FORWARD | kind::DELIVER | kind::DIRECT)
    }
}

impl Harness {
    /// All entries of a family, requests first, ordered by the addresses that they match.
    pub fn flows(&self, family: Family) -> Vec<FlowEntry> {
        let mut entries = match family {
            Family::V4 => dump::<Address4>(self.map("tp_flows4")),
            Family::V6 => dump::<Address6>(self.map("tp_flows6")),
        };
        entries.sort_by_key(|entry| (!entry.is_request(), entry.from, entry.to, entry.protocol));
        entries
    }

    /// The only flow of a family: its request entry and its reply entry.
    pub fn flow(&self, family: Family) -> (FlowEntry, FlowEntry) {
        match self.flows(family).as_slice() {
            [request, reply] if request.is_request() && !reply.is_request() => (*request, *reply),
            other => panic!("not one pair of entries: {other:#?}"),
        }
    }

    /// Addresses and protocol of the flows in the queues of unassured flows, by their places.
    pub fn queued(&self, family: Family) -> BTreeMap<u32, (SocketAddr, SocketAddr, u8)> {
        match family {
            Family::V4 => queued::<Address4>(self.map("tp_unassured4")),
            Family::V6 => queued::<Address6>(self.map("tp_unassured6")),
        }
    }

    /// Changes an entry: `kind`, `state`, `hop`, `epoch`, `last`, `syn`, `began`, or the ports
    /// that its packets get.
    pub fn change(&mut self, entry: &FlowEntry, change: impl FnOnce(&mut FlowEntry)) {
        let mut entry = *entry;
        change(&mut entry);
        if entry.from.is_ipv4() {
            edit(&mut self.tables.v4.flows, &entry, |flow| entry.write(flow));
        } else {
            edit(&mut self.tables.v6.flows, &entry, |flow| entry.write(flow));
        }
    }

    /// Moves the beginning of an unassured UDP flow back by `jiffies`; its next packet takes the
    /// slow path.
    pub fn begin_earlier(&self, entry: &FlowEntry, jiffies: u32) {
        let entry = FlowEntry { began: entry.began.wrapping_sub(jiffies), ..*entry };
        if entry.from.is_ipv4() {
            rewrite::<Address4>(self.map("tp_flows4"), &entry);
        } else {
            rewrite::<Address6>(self.map("tp_flows6"), &entry);
        }
    }

    /// Puts the next examination of an unassured UDP flow off, from a second to 900 jiffies after
    /// its last packet: until then its datagrams need no slow path, however slow the machine is.
    /// One that is more than 1,000 jiffies ahead would be due at once.
    pub fn examine_late(&mut self, entry: &FlowEntry) {
        if entry.from.is_ipv4() {
            edit(&mut self.tables.v4.flows, entry, put_off);
        } else {
            edit(&mut self.tables.v6.flows, entry, put_off);
        }
    }

    /// Turns an IPv6 entry of the main table into that of packets to another address with the same
    /// key.
    pub fn exchange(&mut self, entry: &FlowEntry, to: Ipv6Addr) -> FlowEntry {
        let (table, key) = (&mut self.tables.v6.flows, entry.key());
        let mut flow = table.get(&key, 0).unwrap_or_else(|error| panic!("no entry {entry:?}: {error}"));
        flow.kept = to.to_wire().kept();
        table.insert(key, flow, 0).unwrap_or_else(|error| panic!("writing {entry:?}: {error}"));
        FlowEntry::read(&key, &flow)
    }

    /// Deletes one entry.
    pub fn evict(&mut self, entry: &FlowEntry) {
        if entry.from.is_ipv4() {
            self.tables.v4.flows.remove(&entry.key())
        } else {
            self.tables.v6.flows.remove(&entry.key())
        }
        .unwrap_or_else(|error| panic!("deleting {entry:?}: {error}"));
    }
}

/// Reads all entries of a map with one call, as a fuzzer compares tables most of the time.
fn dump<A: Address + FromWire>(map: &BpfMap) -> Vec<FlowEntry> {
    let entries = map.read().unwrap_or_else(|error| panic!("reading the flows: {error:#}"));
    let entries = entries.iter().map(|(key, value)| {
        assert_eq!((key.len(), value.len()), (size_of::<FlowKey<A>>(), size_of::<Flow<A>>()));
        // SAFETY: the values are plain numbers, with as many bytes as were read.
        let (key, flow) = unsafe {
            (
                key.as_ptr().cast::<FlowKey<A>>().read_unaligned(),
                value.as_ptr().cast::<Flow<A>>().read_unaligned(),
            )
        };
        (!key.is_milestone()).then(|| FlowEntry::read(&key, &flow))
    });
    entries.flatten().collect()
}

fn queued<A: Address + FromWire>(map: &BpfMap) -> BTreeMap<u32, (SocketAddr, SocketAddr, u8)> {
    let places = map.read().unwrap_or_else(|error| panic!("reading the queues: {error:#}"));
    let held = places.iter().map(|(place, value)| {
        assert_eq!((place.len(), value.len()), (size_of::<u32>(), size_of::<Tuple<A>>()));
        // SAFETY: the values are plain numbers, with as many bytes as were read.
        let (place, tuple) = unsafe {
            (
                place.as_ptr().cast::<u32>().read_unaligned(),
                value.as_ptr().cast::<Tuple<A>>().read_unaligned(),
            )
        };
        let from = SocketAddr::new(tuple.source.to_ip(), tuple.ports.source().to_host());
        let to = SocketAddr::new(tuple.destination.to_ip(), tuple.ports.destination().to_host());
        (place, (from, to, tuple.protocol as u8))
    });
    held.filter(|(_, (_, _, protocol))| *protocol != 0).collect()
}

fn edit<A: Address + Wire>(
    map: &mut HashMap<MapData, FlowKey<A>, Flow<A>>,
    entry: &FlowEntry,
    change: impl FnOnce(&mut Flow<A>),
) {
    let key = entry.key();
    let mut flow = map.get(&key, 0).unwrap_or_else(|error| panic!("no entry {entry:?}: {error}"));
    change(&mut flow);
    map.insert(key, flow, 0).unwrap_or_else(|error| panic!("writing {entry:?}: {error}"));
}

/// Writes the time of the next examination, the high half of `numbers`.
fn put_off<A: Address>(flow: &mut Flow<A>) {
    let next = u64::from(flow.last.wrapping_add(900) & !1);
    flow.numbers = flow.numbers & u64::from(u32::MAX) | next << 32;
}

/// A variant of [`edit`] that uses the descriptor of the map.
fn rewrite<A: Address + Wire>(map: &BpfMap, entry: &FlowEntry) {
    let wanted = entry.key::<A>();
    // SAFETY: plain numbers without padding.
    let wanted = unsafe {
        std::slice::from_raw_parts((&raw const wanted).cast::<u8>(), size_of::<FlowKey<A>>()).to_vec()
    };
    let entries = map.read().unwrap_or_else(|error| panic!("reading the flows: {error:#}"));
    let value = entries.get(&wanted).unwrap_or_else(|| panic!("no entry {entry:?}"));
    // SAFETY: the size is that of the bytes read, and any bytes are a valid value.
    let mut flow = unsafe { value.as_ptr().cast::<Flow<A>>().read_unaligned() };
    entry.write(&mut flow);
    // SAFETY: plain numbers without padding.
    let value = unsafe { std::slice::from_raw_parts((&raw const flow).cast::<u8>(), size_of::<Flow<A>>()) };
    map.write(&wanted, value).unwrap_or_else(|error| panic!("writing {entry:?}: {error:#}"));
}
