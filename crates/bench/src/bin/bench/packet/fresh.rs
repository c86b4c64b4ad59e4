//! New flows: the extra cost of all packets until a flow is assured, compared with as many packets
//! of an open flow, and the cost of each packet of a flood.

use anyhow::{Result, ensure};
use aya::Pod;
use traffic_policy_bench::{
    BenchNode, Flow, Hook, Kind, Loaded, Protocol, Room, Setup, Subject, Took, Window,
    flows::{check_new, expected, flows, flows_of_many, frames, learn, remove, remove_floor},
    turns::low,
};
use traffic_policy_bench_ebpf::FloorFlow;
use traffic_policy_dataplane::MapSizes;
use traffic_policy_ebpf::{
    abi::{self, Address, Address4, Address6, FlowKey, Ports, Tuple},
    outcome::Outcome,
};
use traffic_policy_testing::packet::difference;

use super::family;
use crate::{
    Effort,
    report::{Goal, Report, Row, Unit},
};

const GROUP: &str = "new flow";

/// Number of flows of one run where instructions are counted, by a processor a hundred times
/// slower.
const COUNTED_FLOWS: u32 = 2_048;
/// Fraction of the IPv4 or IPv6 table's capacity that is in use when it is "filled".
const FILLED: f64 = 0.97;
/// Number of places in the IPv4 queue during a flood, twice as many as in the IPv6 queue. The
/// flood's flows evict each other many times a round.
const FLOOD_PLACES: u32 = 16_384;

/// Fill level of the tables before the run.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Empty,
    /// Empty tables as in [`Self::Empty`], with a client of its own for each flow. In the other
    /// states few clients have all flows, as behind a load balancer that shows its own address.
    Strangers,
    Filled,
    /// The queue of unassured flows is full: each new one evicts the oldest.
    Flood,
}

impl State {
    fn name(self) -> &'static str {
        match self {
            Self::Empty => "tables from empty to a quarter full",
            Self::Strangers => "each of another client",
            Self::Filled => "tables 97 % full",
            Self::Flood => "flood of SYNs",
        }
    }

    /// Returns the number of flows of one run.
    fn flows(self) -> u32 {
        match self {
            Self::Empty | Self::Strangers => 32_768,
            // Nearly as many as fit into the rest.
            Self::Filled => 3_584,
            // Many times the number of places of the queue.
            Self::Flood => 4 * FLOOD_PLACES,
        }
    }
}

/// A kind of flow at a hook; it has several rows.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Wanted {
    ipv6: bool,
    protocol: Protocol,
    hook: Hook,
    state: State,
}

const FIRST: &str = "first packet";
const SECOND: &str = "second packet";
const THIRD: &str = "third packet";
const ALL: &str = "these three less three of an open flow";
const ALL_FIB: &str = "the same, beside a floor that asks the FIB";

impl Wanted {
    fn name(self, part: &str) -> String {
        let (family, protocol) = (family(self.ipv6), self.protocol.name());
        format!("{}, {family} {protocol}, {}: {part}", self.state.name(), self.hook.name())
    }

    fn parts(self) -> &'static [&'static str] {
        if self.state == State::Flood { &[FIRST] } else { &[FIRST, SECOND, THIRD, ALL, ALL_FIB] }
    }

    fn quick(self) -> bool {
        let plain = !self.ipv6 && self.protocol == Protocol::Tcp;
        plain && (self.hook == Hook::Xdp || self.state == State::Empty)
            || self.hook == Hook::Xdp && self.state == State::Empty && self.protocol == Protocol::Tcp
    }
}

pub(super) fn wanted(effort: Effort, report: &mut Report) -> Vec<(Wanted, Vec<String>)> {
    let mut wanted = Vec::new();
    for state in [State::Empty, State::Strangers, State::Filled, State::Flood] {
        for (ipv6, protocol) in
            [(false, Protocol::Tcp), (true, Protocol::Tcp), (false, Protocol::Udp), (true, Protocol::Udp)]
        {
            for hook in [Hook::Xdp, Hook::Ingress] {
                let kind = Wanted { ipv6, protocol, hook, state };
                if !effort.full && !kind.quick() || state == State::Flood && protocol == Protocol::Udp {
                    continue;
                }
                let rows: Vec<_> = kind.parts().iter().map(|part| kind.name(part)).collect();
                let rows: Vec<_> = rows.into_iter().filter(|row| report.wants(GROUP, row)).collect();
                if !rows.is_empty() {
                    wanted.push((kind, rows));
                }
            }
        }
    }
    wanted
}

pub(super) fn measure(
    wanted: &[(Wanted, Vec<String>)],
    fixture: &BenchNode,
    effort: Effort,
    report: &mut Report,
) -> Result<()> {
    for (kind, rows) in wanted {
        let mut setup = MapSizes::default();
        if kind.ipv6 {
            // The table is as large as that of IPv4: the default is filled by a quarter as many
            // flows.
            setup.flows6 = 262_144;
        }
        if kind.state == State::Flood {
            setup.unassured = FLOOD_PLACES;
        }
        let room = Room { frames: 262_144, ..Room::default() };
        let setup = Setup { sizes: setup, room, ..Setup::default() };
        let mut loaded = Loaded::new(fixture, setup)?;
        if kind.state == State::Filled {
            fill(&mut loaded, kind.ipv6)?;
        }
        report.measure(|| {
            let mut all = match kind.state {
                State::Flood => flood(*kind, &mut loaded, effort)?,
                State::Empty | State::Strangers | State::Filled => opened(*kind, &mut loaded, effort)?,
            };
            // The rows are measured together; those that were not requested are not reported.
            all.retain(|row| rows.contains(&row.name));
            Ok(all)
        })?;
    }
    Ok(())
}

/// Fills the tables with flows that send no packet.
fn fill(loaded: &mut Loaded, ipv6: bool) -> Result<()> {
    fn some<A: Address>(number: u32, address: A) -> Tuple<A> {
        Tuple { source: address, destination: A::default(), ports: Ports::from_wire(number), protocol: 6 }
    }
    fn insert<A: Address>(
        table: &mut aya::maps::HashMap<aya::maps::MapData, FlowKey<A>, abi::Flow<A>>,
        tuple: Tuple<A>,
    ) -> Result<()>
    where
        Tuple<A>: Pod,
        abi::Flow<A>: Pod,
    {
        Ok(table.insert(FlowKey::of(&tuple), abi::Flow::default().keeping(&tuple), 0)?)
    }
    let size = if ipv6 { loaded.tables.v6.size } else { loaded.tables.v4.size };
    for number in 0..(f64::from(size) * FILLED) as u32 {
        if ipv6 {
            insert(&mut loaded.tables.v6.flows, some(number, Address6::from_wire([1, 1])))?;
        } else {
            insert(&mut loaded.tables.v4.flows, some(number, Address4::from_wire(1)))?;
        }
        loaded.feeder.floor.insert(some(number, Address4::from_wire(1)), FloorFlow::default(), 0)?;
    }
    Ok(())
}

/// Nanoseconds per packet of each step, and of the floors.
#[derive(Default)]
struct Runs {
    floor: Vec<f64>,
    floor_fib: Vec<f64>,
    opening: Vec<f64>,
    answer: Vec<f64>,
    confirmation: Vec<f64>,
    more: Vec<f64>,
}

fn opened(kind: Wanted, loaded: &mut Loaded, effort: Effort) -> Result<Vec<Row>> {
    loaded.feeder.clear();
    let number = if effort.counted { COUNTED_FLOWS } else { kind.state.flows() };
    let flows = if kind.state == State::Strangers { flows_of_many } else { flows };
    let floors = Opening::new(loaded, flows(false, Protocol::Tcp, number))?;
    let own = Opening::new(loaded, flows(kind.ipv6, kind.protocol, number))?;
    let mut runs = Runs::default();
    for _ in 0..effort.rounds {
        runs.floor.push(floor(loaded, Subject::FloorNew, &floors, effort)?);
        runs.floor_fib.push(floor(loaded, Subject::FloorNewFib, &floors, effort)?);
        round(loaded, kind.hook, &own, effort, &mut runs)?;
    }
    let row = |part: &str, runs: &[f64]| Row::new(GROUP, &kind.name(part), Unit::Nanoseconds, runs);
    let goal = |row: Row| {
        // The goal was set for XDP over IPv4.
        if kind.hook == Hook::Xdp && !kind.ipv6 { row.goal(Goal::TimesAtMost(1.5)) } else { row }
    };
    Ok(vec![
        row(FIRST, &runs.opening),
        row(SECOND, &runs.answer),
        row(THIRD, &runs.confirmation),
        goal(row(ALL, &runs.more).beside("floor without FIB", &runs.floor)),
        goal(row(ALL_FIB, &runs.more).beside("floor with FIB", &runs.floor_fib)),
    ])
}

/// Flows that are opened again and again.
struct Opening {
    flows: Vec<Flow>,
    window: Window,
}

impl Opening {
    fn new(loaded: &mut Loaded, flows: Vec<Flow>) -> Result<Self> {
        let window = loaded.feeder.place(&frames(&flows, Kind::Opening)?)?;
        Ok(Self { flows, window })
    }

    fn last(&self) -> &Flow {
        &self.flows[self.flows.len() - 1]
    }
}

/// Returns the number of turns of each program, of which the last is timed: the caches then hold
/// what the program itself left there. Caches do not matter to a count of instructions, which has
/// one turn.
fn turns(effort: Effort) -> usize {
    if effort.counted { 1 } else { 2 }
}

/// Measures the floor's first packets.
fn floor(loaded: &mut Loaded, subject: Subject, opening: &Opening, effort: Effort) -> Result<f64> {
    let mut cost = 0.0;
    for _ in 0..turns(effort) {
        let took = loaded.run(subject, opening.window, opening.window.len)?;
        check_new(opening.last(), &took.packet, loaded.setup.endpoints)?;
        remove_floor(loaded, &opening.flows)?;
        cost = less_feed(loaded, Hook::Xdp, opening.window, &took)?;
    }
    Ok(cost)
}

/// Opens flows with the packet path, and removes them.
fn round(loaded: &mut Loaded, hook: Hook, opening: &Opening, effort: Effort, runs: &mut Runs) -> Result<()> {
    let kept = loaded.feeder.mark();
    let turns = turns(effort);
    for turn in 0..turns {
        let took = first_packets(loaded, hook, opening.window, Evicted::None)?;
        check_new(opening.last(), &took.packet, loaded.setup.endpoints)?;
        let mut flows = opening.flows.clone();
        learn(loaded, &mut flows)?;
        if turn + 1 == turns {
            let first = less_feed(loaded, hook, opening.window, &took)?;
            let answers = loaded.feeder.place(&frames(&flows, Kind::Answer)?)?;
            let second = next(loaded, hook, &flows, answers, Kind::Answer)?;
            let requests = loaded.feeder.place(&frames(&flows, Kind::Request)?)?;
            let third = next(loaded, hook, &flows, requests, Kind::Request)?;
            let open = next(loaded, hook, &flows, requests, Kind::Request)?;
            let replies = loaded.feeder.place(&frames(&flows, Kind::Reply)?)?;
            let reply = next(loaded, hook, &flows, replies, Kind::Reply)?;
            runs.opening.push(first);
            runs.answer.push(second);
            runs.confirmation.push(third);
            runs.more.push(first + second + third - 2.0 * open - reply);
        }
        remove(loaded, &flows)?;
    }
    loaded.feeder.rewind(kept);
    Ok(())
}

/// Flows that make room for a window's.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Evicted {
    None,
    /// One flow for each new one.
    Each,
    /// Any number of flows, as the queue fills.
    Some,
}

/// Sends the first packet of each flow; fails unless each of them makes a flow.
fn first_packets(loaded: &mut Loaded, hook: Hook, window: Window, evicted: Evicted) -> Result<Took> {
    let [made, removed] = loaded.made_and_removed()?;
    let took = loaded.run_to(hook, window, window.len, Outcome::Forwarded)?;
    let [made_then, removed_then] = loaded.made_and_removed()?;
    let (made, removed, all) = (made_then - made, removed_then - removed, u64::from(window.len));
    let room = match evicted {
        Evicted::None => removed == 0,
        Evicted::Each => removed == all,
        Evicted::Some => true,
    };
    ensure!(
        made == all && room,
        "{all} first packets made {made} flows, and {removed} were removed for them"
    );
    Ok(took)
}

/// Sends the next packet of each flow.
fn next(loaded: &mut Loaded, hook: Hook, flows: &[Flow], window: Window, kind: Kind) -> Result<f64> {
    let took = loaded.run_to(hook, window, window.len, kind.outcome())?;
    match difference(&expected(&flows[flows.len() - 1], kind)?, &took.packet) {
        None => less_feed(loaded, hook, window, &took),
        Some(difference) => anyhow::bail!("the packet is wrong:\n{difference}"),
    }
}

/// Returns the nanoseconds per packet of a run, less those of the feed.
fn less_feed(loaded: &mut Loaded, hook: Hook, window: Window, took: &Took) -> Result<f64> {
    let mut empty = Vec::new();
    for _ in 0..3 {
        empty.push(loaded.run(Subject::Empty(hook), window, window.len)?.on_average);
    }
    Ok(took.on_average - low(empty))
}

/// Measures first packets that come faster than flows are assured: each evicts the oldest flow.
fn flood(kind: Wanted, loaded: &mut Loaded, effort: Effort) -> Result<Vec<Row>> {
    loaded.feeder.clear();
    let all = flows(kind.ipv6, kind.protocol, kind.state.flows());
    let window = loaded.feeder.place(&frames(&all, Kind::Opening)?)?;
    let mut runs = Vec::new();
    for round in 0..effort.rounds {
        let empty = loaded.run(Subject::Empty(kind.hook), window, window.len)?;
        // The first round fills the queue. After it the last flows of the previous round remain,
        // which are evicted before their turn comes.
        let evicted = if round == 0 { Evicted::Some } else { Evicted::Each };
        let took = first_packets(loaded, kind.hook, window, evicted)?;
        check_new(&all[all.len() - 1], &took.packet, loaded.setup.endpoints)?;
        if round > 0 {
            runs.push(took.on_average - empty.on_average);
        }
    }
    ensure!(!runs.is_empty(), "a flood needs two rounds");
    Ok(vec![Row::new(GROUP, &kind.name(FIRST), Unit::Nanoseconds, &runs)])
}
