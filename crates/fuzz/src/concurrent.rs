//! Two CPUs that handle packets of the same flows at the same time.
//!
//! The order of two packets is unknown, so no model predicts the outcome of each. Invariants hold
//! when both CPUs have finished: request entries have their reply entries, no two flows share a
//! port towards one endpoint, and a Service allows every flow. In the end, when all flows have
//! expired, nothing is left, including places of the directory, and the counts add up.

use std::net::SocketAddr;

use fastrand::Rng;
use traffic_policy_dataplane::Sweeper;
use traffic_policy_testing::{
    harness::{Device, FlowEntry, Harness, Hook, Input, SIZES, Spot},
    packet::Packet,
};

use crate::{
    model::{STEPS, TIMEOUTS},
    path::Path,
    run::sound,
    segment::{Chunk, Flags, Protocol, Segment, packet},
    topology::{self, CLIENT_PORTS, CLIENTS, Change, ENDPOINTS, SERVICES, TARGET},
    totals::Totals,
};

/// Number of rounds of one sequence; [`PACKETS`] is the number of packets of a round on each CPU.
const ROUNDS: usize = 50;
const PACKETS: usize = 40;
/// Deviation of a count that the sweep leaves as it is: two CPUs that see the client's first packet
/// at the same moment both count it.
const DRIFT: u64 = 1024;
/// Sequence number of every SYN and SYN-ACK, so that each later segment fits; and the initiate tag
/// of every INIT and INIT ACK.
const SYN: u32 = 1_000;
const ANSWER: u32 = 5_000;

const KINDS: [(Flags, Chunk); 8] = [
    (Flags::Syn, Chunk::Init),
    (Flags::Syn, Chunk::Init),
    (Flags::SynAck, Chunk::InitAck),
    (Flags::SynAck, Chunk::CookieAck),
    (Flags::Ack, Chunk::CookieEcho),
    (Flags::Ack, Chunk::Data),
    (Flags::FinAck, Chunk::Shutdown),
    (Flags::RstAck, Chunk::Abort),
];
const PROTOCOLS: [Protocol; 8] = [
    Protocol::Tcp,
    Protocol::Tcp,
    Protocol::Tcp,
    Protocol::Tcp,
    Protocol::Sctp,
    Protocol::Sctp,
    Protocol::Udp,
    Protocol::Udp,
];

/// Runs sequences until `enough` returns true. Returns false on a machine with one CPU.
pub fn fuzz(
    harness: &mut Harness,
    path: Path,
    rng: &mut Rng,
    totals: &mut Totals,
    mut enough: impl FnMut(&Totals) -> bool,
) -> Result<bool, String> {
    while !enough(totals) {
        if !sequence(harness, path, rng, totals)? {
            return Ok(false);
        }
    }
    Ok(true)
}

fn sequence(harness: &mut Harness, path: Path, rng: &mut Rng, totals: &mut Totals) -> Result<bool, String> {
    harness.set_up(&topology::setup());
    let mut services = SERVICES;
    let mut sweeper = Sweeper::new(TIMEOUTS, [SIZES.flows4, SIZES.flows6]);
    for _ in 0..ROUNDS {
        let entries = harness.flows(path.family);
        let one: Vec<_> = (0..PACKETS).map(|_| random(path, &entries, rng)).collect();
        let mut other = one.clone();
        if rng.bool() {
            rng.shuffle(&mut other);
        }
        let Some(sent) = harness.at_once([&one, &other]) else { return Ok(false) };
        totals.packets += 2 * PACKETS as u64;
        totals.translated += sent.iter().sum::<usize>() as u64;
        let entries = harness.flows(path.family);
        sound(&entries)?;
        allowed(path, &entries)?;
        match rng.u8(..8) {
            0 => {
                let number = rng.usize(..services.len());
                Change::random(rng).apply(&mut services[number], number as u32 + 1, harness);
            }
            1 => wait(harness, path, STEPS[rng.usize(..STEPS.len())]),
            2 => drop(harness.sweep(&mut sweeper, false)),
            _ => {}
        }
    }
    wait(harness, path, 2 * TIMEOUTS.established);
    for _ in 0..3 {
        harness.sweep(&mut sweeper, false);
    }
    nothing_left(harness, path)?;
    Ok(true)
}

fn wait(harness: &mut Harness, path: Path, jiffies: u32) {
    for entry in harness.flows(path.family) {
        harness.change(&entry, |entry| entry.go_back(jiffies));
    }
}

/// Returns a packet of a client to a Service, or of an endpoint by one of the entries.
fn random(path: Path, entries: &[FlowEntry], rng: &mut Rng) -> Input {
    let replies: Vec<_> = entries.iter().filter(|entry| !entry.is_request()).collect();
    let (flags, chunk) = KINDS[rng.usize(..KINDS.len())];
    let plain = |protocol| Segment::plain(protocol, flags, chunk);
    if rng.bool() && !replies.is_empty() {
        let entry = replies[rng.usize(..replies.len())];
        let protocol = PROTOCOLS.into_iter().find(|protocol| protocol.number() == entry.protocol);
        let segment = plain(protocol.unwrap_or(Protocol::Tcp));
        let packet = packet(entry.from, entry.to, segment, numbers(segment, (ANSWER, SYN)));
        let of = |spot: Spot| spot.of(path.family) == entry.from.ip();
        let route = ENDPOINTS.iter().find(|endpoint| of(endpoint.spot)).and_then(|endpoint| endpoint.route);
        return match route {
            Some((device, router)) => input(path.hook, device, &packet.macs(router.mac(), device.mac())),
            None => input(Hook::Egress, Device::Eth0, &packet),
        };
    }
    let client = CLIENTS[rng.usize(..CLIENTS.len())].of(path.family);
    let from = SocketAddr::new(client, CLIENT_PORTS[rng.usize(..CLIENT_PORTS.len())]);
    let to = SERVICES[rng.usize(..SERVICES.len())].at(path.family);
    let segment = plain(PROTOCOLS[rng.usize(..PROTOCOLS.len())]);
    let packet = packet(from, to, segment, numbers(segment, (SYN, ANSWER)));
    input(path.hook, Device::Eth0, &packet.macs(Spot::Router.mac(), Device::Eth0.mac()))
}

fn input(hook: Hook, device: Device, packet: &Packet) -> Input {
    Input { device, ..Input::new(hook, packet.bytes()) }
}

/// Returns the numbers of a packet: see [`packet`]. `own` and `other`: those of the SYN and of the
/// INIT of its sender and of its receiver.
fn numbers(segment: Segment, (own, other): (u32, u32)) -> (u32, u32) {
    match (segment.protocol, segment.flags, segment.chunk) {
        (Protocol::Sctp, _, Chunk::Init) => (0, own),
        (Protocol::Sctp, ..) => (other, own),
        (_, Flags::Syn, _) => (own, 0),
        (_, Flags::SynAck, _) => (own, other + 1),
        _ => (own + 1, other + 1),
    }
}

/// Verifies that every flow belongs to a Service and leads to one of its endpoints.
fn allowed(path: Path, entries: &[FlowEntry]) -> Result<(), String> {
    for request in entries.iter().filter(|entry| entry.is_request()) {
        let service = SERVICES.iter().any(|service| service.at(path.family) == request.to);
        let to = |spot: Spot| SocketAddr::new(spot.of(path.family), TARGET);
        let Some(endpoint) = ENDPOINTS.iter().find(|endpoint| to(endpoint.spot) == request.new_to) else {
            return Err(format!("to no endpoint: {request:?}"));
        };
        let source = endpoint.route.map_or(request.from.ip(), |(device, _)| device.spot().of(path.family));
        if !service || request.new_from.ip() != source {
            return Err(format!("of no Service, or from another source than {source}: {request:?}"));
        }
    }
    Ok(())
}

/// Verifies that no entries and directory places are left when all flows have expired.
fn nothing_left(harness: &Harness, path: Path) -> Result<(), String> {
    let entries = harness.flows(path.family);
    if !entries.is_empty() {
        return Err(format!("after the last sweep: {entries:?}"));
    }
    let places = harness.places(path.family);
    if places > 0 {
        return Err(format!("{places} places of the directory are taken by no flow"));
    }
    for tcp in [true, false] {
        let count = harness.unassured(path.family, tcp);
        if count.cast_signed().unsigned_abs() > DRIFT {
            return Err(format!("{} flows are not assured, of none", count.cast_signed()));
        }
    }
    Ok(())
}
