//! Direct forwarding: packets that the node in front sends within outer packets, or to a MAC
//! address as they are; at the endpoint's node those that it opens or takes, and those that answer
//! them; and answers that come back through the node in front.
//!
//! Each row has a floor of its own: one look-up in a hash of the same size, and the outer header
//! written or removed, or the MAC addresses written. In TC each packet that gets or loses an outer
//! header is a run of its own, because the kernel puts a packet into another one only once: caches
//! are colder there than in XDP, for the floor as well. So is each first packet.

mod front;
mod home;

use anyhow::{Context, Result};
use traffic_policy_bench::{
    BenchNode, DirectFloor, Hook, Loaded, Method, Protocol, Restored, Room, Setup, Subject, direct::Dispatch,
};
use traffic_policy_ebpf::outcome::Outcome;
use traffic_policy_testing::packet::difference;

use super::{family, over_loads};
use crate::{
    Effort,
    report::{Goal, Report, Row, Unit},
};

const GROUP: &str = "direct";
/// Number of open flows.
const FLOWS: u32 = 1_000;
/// Number of new flows of one run, in XDP and in TC.
const NEW: [u32; 2] = [16_384, 2_048];
/// Times that each packet of a window is sent in a run in TC.
const PASSES: usize = 4;
/// Largest cost of an established request in front, relative to the floor: within an outer packet,
/// and to a MAC address.
const REQUEST: Goal = Goal::TimesAtMost(1.4);
const BY_MAC: Goal = Goal::TimesAtMost(1.2);

/// A kind of packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    /// A request, at the node in front.
    Request,
    New,
    /// A reply that comes back through it.
    Back,
    /// The former two by another balancer's method, in XDP over IPv4.
    RequestBy(Method),
    NewBy(Method),
    /// A request that arrives at the endpoint's node; the first packet of a flow there.
    Arrived,
    NewHere,
    Answer,
    /// A segment there of a connection that neither this node nor the stack of the pod knows.
    Unknown,
}

/// A row of the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    what: What,
    dispatch: Dispatch,
    ipv6: bool,
    protocol: Protocol,
    hook: Hook,
}

impl Wanted {
    fn name(self) -> String {
        let what = match self.what {
            What::Request => "in front, request",
            What::New => "in front, first packet",
            What::Back => "in front, reply",
            What::RequestBy(Method::Katran) => "Katran's method, request",
            What::NewBy(Method::Katran) => "Katran's method, first packet",
            What::RequestBy(Method::Cilium) => "Cilium's method, request",
            What::NewBy(Method::Cilium) => "Cilium's method, first packet",
            What::Arrived => "at the endpoint's node, request",
            What::NewHere => "at the endpoint's node, first packet",
            What::Answer => "at the endpoint's node, reply",
            What::Unknown => "at the endpoint's node, segment of no connection",
        };
        let way = match self.dispatch {
            Dispatch::Ip => "",
            Dispatch::Udp => " within UDP",
            Dispatch::ByMac => " by MAC address",
            Dispatch::Tunnel => " by tunnel",
        };
        format!("{what}{way}, {} {}, {}", family(self.ipv6), self.protocol.name(), self.hook.name())
    }

    /// Whether packets of this row run in a loop; otherwise each is a run of its own.
    fn in_a_loop(self) -> bool {
        self.hook == Hook::Xdp || (self.what, self.dispatch) == (What::Request, Dispatch::ByMac)
    }

    fn is_at_home(&self) -> bool {
        matches!(self.what, What::Arrived | What::NewHere | What::Answer | What::Unknown)
    }

    fn floor(self) -> Subject {
        let hook = self.hook;
        let floor = match (self.what, self.dispatch) {
            (What::Request, Dispatch::Udp) => DirectFloor::Udp(hook),
            (What::Request, Dispatch::ByMac) => DirectFloor::ByMac(hook),
            (What::Request | What::RequestBy(_), _) => DirectFloor::Request(hook),
            (What::New, Dispatch::Udp) => DirectFloor::NewUdp(hook),
            (What::New, Dispatch::ByMac) => DirectFloor::NewByMac(hook),
            (What::New | What::NewBy(_), _) => DirectFloor::New(hook),
            (What::Back, _) => DirectFloor::OpenReply,
            (What::Arrived, Dispatch::Udp) => DirectFloor::OpenUdp,
            (What::Arrived, Dispatch::ByMac) if hook == Hook::Xdp => DirectFloor::Deliver,
            (What::Arrived, Dispatch::Ip | Dispatch::Tunnel) | (What::Unknown, _) => DirectFloor::Open,
            (What::NewHere, Dispatch::Udp) => DirectFloor::OpenNewUdp,
            (What::NewHere, _) => DirectFloor::OpenNew,
            (What::Answer, Dispatch::Tunnel) => DirectFloor::SendBack,
            (What::Arrived | What::Answer, _) => DirectFloor::Back,
        };
        Subject::Direct(floor, self.ipv6)
    }

    fn subject(self) -> Subject {
        match self.what {
            What::RequestBy(method) | What::NewBy(method) => Subject::Other(method),
            _ => Subject::Ours(self.hook),
        }
    }

    fn goal(self) -> Option<Goal> {
        match (self.what, self.dispatch) {
            (What::Request, Dispatch::ByMac) => Some(BY_MAC),
            (What::Request, _) => Some(REQUEST),
            _ => None,
        }
    }
}

pub(super) fn wanted(effort: Effort, report: &mut Report) -> Vec<Wanted> {
    let mut all = Vec::new();
    let (both, front) = ([Protocol::Tcp, Protocol::Udp], [Hook::Xdp, Hook::Ingress]);
    let mut add = |what: What, dispatch: Dispatch, hooks: &[Hook], protocols: &[Protocol]| {
        for hook in hooks {
            for ipv6 in [false, true] {
                for protocol in protocols {
                    all.push(Wanted { what, dispatch, ipv6, protocol: *protocol, hook: *hook });
                }
            }
        }
    };
    // What is inside makes no difference to what is outside: both protocols only within IP.
    let tcp = &both[..1];
    add(What::Request, Dispatch::Ip, &front, &both);
    for dispatch in [Dispatch::Udp, Dispatch::ByMac, Dispatch::Tunnel] {
        add(What::Request, dispatch, &front, tcp);
    }
    add(What::New, Dispatch::Ip, &front, &both);
    for dispatch in [Dispatch::Udp, Dispatch::ByMac, Dispatch::Tunnel] {
        add(What::New, dispatch, &front, tcp);
    }
    add(What::Back, Dispatch::Tunnel, &[Hook::Ingress], tcp);
    // Before all rows that open flows here: no entry is to know its segments.
    add(What::Unknown, Dispatch::Ip, &[Hook::Ingress], tcp);
    add(What::Arrived, Dispatch::Ip, &[Hook::Ingress], &both);
    for dispatch in [Dispatch::Udp, Dispatch::Tunnel] {
        add(What::Arrived, dispatch, &[Hook::Ingress], tcp);
    }
    add(What::Arrived, Dispatch::ByMac, &front, tcp);
    for dispatch in [Dispatch::Ip, Dispatch::Udp, Dispatch::Tunnel] {
        add(What::NewHere, dispatch, &[Hook::Ingress], tcp);
    }
    add(What::Answer, Dispatch::Ip, &[Hook::Egress], &both);
    add(What::Answer, Dispatch::Tunnel, &[Hook::Egress], tcp);
    let (dispatch, ipv6, protocol, hook) = (Dispatch::Ip, false, Protocol::Tcp, Hook::Xdp);
    for method in [Method::Katran, Method::Cilium] {
        for what in [What::RequestBy(method), What::NewBy(method)] {
            all.push(Wanted { what, dispatch, ipv6, protocol, hook });
        }
    }
    // Runs of single packets count no instructions: the kernel reports their nanoseconds.
    all.retain(|row| !effort.counted || row.in_a_loop());
    all.retain(|row| report.wants(GROUP, &row.name()));
    all
}

pub(super) fn measure(
    wanted: &[Wanted],
    fixture: &BenchNode,
    effort: Effort,
    report: &mut Report,
) -> Result<()> {
    let (home, front): (Vec<Wanted>, Vec<Wanted>) = wanted.iter().partition(|row| row.is_at_home());
    for rows in [front, home] {
        if rows.is_empty() {
            continue;
        }
        report.measure(|| {
            let load = || load(fixture, rows[0].is_at_home());
            let costs = |loaded: &mut Loaded, row: &Wanted| {
                costs(loaded, *row, effort).with_context(|| format!("{GROUP}, {}", row.name()))
            };
            let all = over_loads(effort.loads(), &rows, load, costs)?;
            let row = |(row, [floor, own]): (&Wanted, [Vec<f64>; 2])| {
                let own = Row::new(GROUP, &row.name(), Unit::Nanoseconds, &own).beside("its floor", &floor);
                match row.goal() {
                    Some(goal) => own.goal(goal),
                    None => own,
                }
            };
            Ok(rows.iter().zip(all).map(row).collect())
        })?;
    }
    Ok(())
}

fn load(fixture: &BenchNode, home: bool) -> Result<Loaded> {
    let room = Room { direct_flows: 262_144, ..Room::default() };
    let setup = Setup { room, endpoints: if home { 1 } else { 8 }, ..Setup::default() };
    let mut loaded = Loaded::new(fixture, setup)?;
    if home { loaded.open_here() } else { loaded.forward_directly() }?;
    Ok(loaded)
}

/// Measures the floor's cost and that of the subject, in turns.
fn costs(loaded: &mut Loaded, row: Wanted, effort: Effort) -> Result<[Vec<f64>; 2]> {
    let rounds = effort.rounds_of(effort.loads());
    loaded.feeder.clear();
    loaded.feeder.restore(Restored::Head);
    match row.what {
        What::Request | What::RequestBy(_) => front::requests(loaded, row, effort, rounds),
        What::New | What::NewBy(_) => front::first_packets(loaded, row, rounds),
        What::Back => front::replies(loaded, row, rounds),
        What::NewHere => home::first_packets(loaded, row, rounds),
        What::Unknown => home::refused(loaded, row, rounds),
        What::Arrived | What::Answer => home::costs(loaded, row, effort, rounds),
    }
}

/// Measures packets of open flows, each in a run of its own; `last` is the expected form of the
/// last one, by the floor and by the subject.
fn each(
    loaded: &mut Loaded,
    row: Wanted,
    rounds: usize,
    sent: &[Vec<u8>],
    outcome: Outcome,
    last: &[Vec<u8>; 2],
) -> Result<[Vec<f64>; 2]> {
    let mut runs = [Vec::new(), Vec::new()];
    for _ in 0..rounds {
        for ((runs, subject), last) in runs.iter_mut().zip([row.floor(), row.subject()]).zip(last) {
            let (mut empty, mut all) = (Vec::new(), Vec::new());
            for _ in 0..PASSES {
                empty.extend(loaded.run_each(Subject::Empty(row.hook), sent, None)?.0);
            }
            for _ in 0..PASSES {
                let (times, took) = loaded.run_each(subject, sent, Some(outcome))?;
                as_expected(subject, last, &took.packet)?;
                all.extend(times);
            }
            runs.push(middle(all) - middle(empty));
        }
    }
    Ok(runs)
}

/// Returns the mean of the middle half: interrupts make single runs ten times as long.
fn middle(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    let half = &times[times.len() / 4..times.len() - times.len() / 4];
    half.iter().sum::<f64>() / half.len() as f64
}

fn as_expected(subject: Subject, expected: &[u8], packet: &[u8]) -> Result<()> {
    match difference(expected, packet) {
        None => Ok(()),
        Some(difference) => anyhow::bail!("{subject:?}: the packet is wrong:\n{difference}"),
    }
}
