//! New flows: what all packets until a flow is confirmed cost more than as many of an open flow, and each packet of a flood.

use anyhow::{Result, ensure};
use aya::Pod;
use traffic_policy_agent::dataplane::Sizes;
use traffic_policy_ebpf::{
    abi::{self, Address, Tuple},
    bench::FloorFlow,
    outcome::Outcome,
};
use traffic_policy_tests::bench::{
    Flow, Hook, Kind, Loaded, Protocol, Setup, Stand, Subject, Took, Window,
    flows::{check_new, expected, flows, frames, learn, remove, remove_floor},
    turns::low,
};
use traffic_policy_tests::packet::difference;

use crate::{
    Effort,
    report::{Goal, Report, Row, Unit},
};

const GROUP: &str = "new flow";

/// Flows of one run: fewer than may be unconfirmed.
const NEW: u32 = 512;
/// Of all that the table of IPv4 or IPv6 holds, so many are in use when it is "filled".
const FILLED: f64 = 0.97;
/// Flows that a flood tries: many times as many as are kept apart.
const FLOOD: u32 = 65_536;

/// What the tables hold beforehand.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Empty,
    Filled,
    /// So many flows are not confirmed that new ones are kept apart.
    Flood,
}

/// A kind of flow at a hook; several rows.
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
        let family = if self.ipv6 { "IPv6" } else { "IPv4" };
        let protocol = if self.protocol == Protocol::Tcp { "TCP" } else { "UDP" };
        let state = match self.state {
            State::Empty => "tables empty",
            State::Filled => "tables 97 % full",
            State::Flood => "flood of SYNs",
        };
        format!("{state}, {family} {protocol}, {}: {part}", self.hook.name())
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
    for state in [State::Empty, State::Filled, State::Flood] {
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
    stand: &Stand,
    effort: Effort,
    report: &mut Report,
) -> Result<()> {
    for (kind, rows) in wanted {
        let setup = match kind.ipv6 {
            // As large as that of IPv4: the default is filled by a quarter as many.
            true => Setup { sizes: Sizes { flows6: 262_144, ..Sizes::default() }, ..Setup::default() },
            false => Setup::default(),
        };
        let mut loaded = Loaded::new(stand, setup)?;
        if kind.state == State::Filled {
            fill(&mut loaded, kind.ipv6)?;
        }
        report.measure(|| {
            let mut all = match kind.state {
                State::Flood => flood(*kind, &mut loaded, effort)?,
                State::Empty | State::Filled => opened(*kind, &mut loaded, effort)?,
            };
            // They are measured together; what was not asked for is not told.
            all.retain(|row| rows.contains(&row.name));
            Ok(all)
        })?;
    }
    Ok(())
}

/// Fills the tables with flows of nobody.
fn fill(loaded: &mut Loaded, ipv6: bool) -> Result<()> {
    fn some<A: Address>(number: u32, address: A) -> Tuple<A> {
        Tuple { source: address, destination: A::default(), ports: number, protocol: 6 }
    }
    fn insert<A: Address>(
        table: &mut aya::maps::HashMap<aya::maps::MapData, Tuple<A>, abi::Flow<A>>,
        tuple: Tuple<A>,
    ) -> Result<()>
    where
        Tuple<A>: Pod,
        abi::Flow<A>: Pod,
    {
        Ok(table.insert(tuple, abi::Flow::default(), 0)?)
    }
    let size = if ipv6 { loaded.tables.v6.size } else { loaded.tables.v4.size };
    for number in 0..(f64::from(size) * FILLED) as u32 {
        if ipv6 {
            insert(&mut loaded.tables.v6.flows, some(number, [1, 1]))?;
        } else {
            insert(&mut loaded.tables.v4.flows, some(number, 1))?;
        }
        loaded.feeder.floor.insert(some(number, 1u32), FloorFlow::default(), 0)?;
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
    let mut own = flows(kind.ipv6, kind.protocol, NEW);
    let floors = flows(false, Protocol::Tcp, NEW);
    let mut runs = Runs::default();
    for _ in 0..effort.rounds * 4 {
        round(kind.hook, loaded, &mut own, &floors, &mut runs)?;
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

fn round(
    hook: Hook,
    loaded: &mut Loaded,
    flows: &mut [Flow],
    floors: &[Flow],
    runs: &mut Runs,
) -> Result<()> {
    runs.floor.push(floor(loaded, Subject::FloorNew, floors)?);
    runs.floor_fib.push(floor(loaded, Subject::FloorNewFib, floors)?);

    loaded.feeder.clear();
    let window = loaded.feeder.place(&frames(flows, Kind::Opening)?)?;
    let (first, took) =
        timed(loaded, hook, window, |loaded| loaded.run_to(hook, window, NEW, Outcome::Forwarded))?;
    learn(loaded, flows)?;
    check(flows, Kind::Opening, &took)?;
    let second = next(loaded, hook, flows, Kind::Answer)?;
    let third = next(loaded, hook, flows, Kind::Request)?;
    let open = next(loaded, hook, flows, Kind::Request)?;
    let reply = next(loaded, hook, flows, Kind::Reply)?;
    remove(loaded, flows)?;
    runs.opening.push(first);
    runs.answer.push(second);
    runs.confirmation.push(third);
    runs.more.push(first + second + third - 2.0 * open - reply);
    Ok(())
}

/// The floor's first packets, whose flows are removed after it.
fn floor(loaded: &mut Loaded, subject: Subject, flows: &[Flow]) -> Result<f64> {
    loaded.feeder.clear();
    let window = loaded.feeder.place(&frames(flows, Kind::Opening)?)?;
    let (cost, took) = timed(loaded, Hook::Xdp, window, |loaded| loaded.run(subject, window, NEW))?;
    check_new(&flows[flows.len() - 1], &took.packet, loaded.setup.endpoints)?;
    remove_floor(loaded, flows)?;
    Ok(cost)
}

/// The next packet of each flow.
fn next(loaded: &mut Loaded, hook: Hook, flows: &[Flow], kind: Kind) -> Result<f64> {
    loaded.feeder.clear();
    let window = loaded.feeder.place(&frames(flows, kind)?)?;
    let (cost, took) =
        timed(loaded, hook, window, |loaded| loaded.run_to(hook, window, NEW, kind.outcome()))?;
    check(flows, kind, &took)?;
    Ok(cost)
}

/// Compares the last packet of a run with what it must be.
fn check(flows: &[Flow], kind: Kind, took: &Took) -> Result<()> {
    match difference(&expected(&flows[flows.len() - 1], kind)?, &took.packet) {
        None => Ok(()),
        Some(difference) => anyhow::bail!("the packet is wrong:\n{difference}"),
    }
}

/// Nanoseconds per packet of a run that cannot be repeated, less those of the feed.
fn timed(
    loaded: &mut Loaded,
    hook: Hook,
    window: Window,
    run: impl FnOnce(&mut Loaded) -> Result<Took>,
) -> Result<(f64, Took)> {
    let mut empty = Vec::new();
    for _ in 0..3 {
        empty.push(loaded.run(Subject::Empty(hook), window, NEW)?.by_kernel);
    }
    let took = run(loaded)?;
    Ok((took.by_kernel - low(empty), took))
}

/// First packets that come faster than flows are confirmed: they are kept apart, and push each other out.
fn flood(kind: Wanted, loaded: &mut Loaded, effort: Effort) -> Result<Vec<Row>> {
    loaded.set_unconfirmed_limit(0);
    loaded.feeder.clear();
    let all = flows(kind.ipv6, kind.protocol, FLOOD);
    let window = loaded.feeder.place(&frames(&all, Kind::Opening)?)?;
    let mut runs = Vec::new();
    for round in 0..effort.rounds {
        let empty = loaded.run(Subject::Empty(kind.hook), window, FLOOD)?;
        let took = loaded.run_to(kind.hook, window, FLOOD, Outcome::Forwarded)?;
        check_new(&all[all.len() - 1], &took.packet, loaded.setup.endpoints)?;
        // The first round fills the table.
        if round > 0 {
            runs.push(took.on_average - empty.on_average);
        }
    }
    ensure!(!runs.is_empty(), "a flood needs two rounds");
    Ok(vec![Row::new(GROUP, &kind.name(FIRST), Unit::Nanoseconds, &runs)])
}
