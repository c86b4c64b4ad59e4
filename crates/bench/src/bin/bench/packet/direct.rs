//! Direct forwarding: packets that the node in front sends within outer packets, and at the
//! endpoint's node those that it opens and those that answer them.
//!
//! Each row has a floor of its own: one look-up in a hash of the same size, and the outer header
//! written or removed. In TC each packet is a run of its own, because the kernel puts a packet into
//! another one only once: caches are colder there than in XDP, for the floor as well.

use anyhow::{Context, Result, ensure};
use traffic_policy_bench::{
    BenchNode, Case, DirectFloor, Expected, Flow, Hook, Kind, Loaded, Protocol, Restored, Room, Setup,
    Subject,
    direct::{
        arriving_within, at_home, endpoint_of, forget_katrans, learn, mirror, mirror_at_home, remove,
        remove_floor, sent_within,
    },
    flows::{flows, frames},
    frame::unpacked,
    turns::{self, low},
};
use traffic_policy_ebpf::outcome::{Outcome, Verdict};
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
/// Largest cost of an established request in front, relative to the floor.
const REQUEST: Goal = Goal::TimesAtMost(1.4);

/// A kind of packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    /// In front.
    Request,
    New,
    /// The same by Katran's method, in XDP over IPv4.
    KatranRequest,
    KatranNew,
    /// At the endpoint's node.
    Opened,
    Answer,
}

/// A row of the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    what: What,
    ipv6: bool,
    protocol: Protocol,
    hook: Hook,
}

impl Wanted {
    fn name(self) -> String {
        let what = match self.what {
            What::Request => "in front, request",
            What::New => "in front, first packet",
            What::KatranRequest => "Katran's method, request",
            What::KatranNew => "Katran's method, first packet",
            What::Opened => "at the endpoint's node, request",
            What::Answer => "at the endpoint's node, reply",
        };
        format!("{what}, {} {}, {}", family(self.ipv6), self.protocol.name(), self.hook.name())
    }

    fn is_at_home(&self) -> bool {
        matches!(self.what, What::Opened | What::Answer)
    }

    fn floor(self) -> Subject {
        let floor = match self.what {
            What::Request | What::KatranRequest => DirectFloor::Request(self.hook),
            What::New | What::KatranNew => DirectFloor::New(self.hook),
            What::Opened => DirectFloor::Open,
            What::Answer => DirectFloor::Back,
        };
        Subject::Direct(floor, self.ipv6)
    }

    fn subject(self) -> Subject {
        match self.what {
            What::KatranRequest | What::KatranNew => Subject::Katran,
            _ => Subject::Ours(self.hook),
        }
    }
}

pub(super) fn wanted(effort: Effort, report: &mut Report) -> Vec<Wanted> {
    let mut all = Vec::new();
    for what in [What::Request, What::New] {
        for hook in [Hook::Xdp, Hook::Ingress] {
            for ipv6 in [false, true] {
                for protocol in [Protocol::Tcp, Protocol::Udp] {
                    all.push(Wanted { what, ipv6, protocol, hook });
                }
            }
        }
    }
    for what in [What::KatranRequest, What::KatranNew] {
        all.push(Wanted { what, ipv6: false, protocol: Protocol::Tcp, hook: Hook::Xdp });
    }
    for (what, hook) in [(What::Opened, Hook::Ingress), (What::Answer, Hook::Egress)] {
        for ipv6 in [false, true] {
            for protocol in [Protocol::Tcp, Protocol::Udp] {
                all.push(Wanted { what, ipv6, protocol, hook });
            }
        }
    }
    // Runs of single packets count no instructions: the kernel reports their nanoseconds.
    all.retain(|row| !effort.counted || row.hook == Hook::Xdp);
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
                if row.what == What::Request { own.goal(REQUEST) } else { own }
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
    loaded.feeder.restore(Restored::Head);
    Ok(loaded)
}

/// Measures the floor's cost and that of the subject, in turns.
fn costs(loaded: &mut Loaded, row: Wanted, effort: Effort) -> Result<[Vec<f64>; 2]> {
    let rounds = effort.rounds_of(effort.loads());
    loaded.feeder.clear();
    match row.what {
        What::Request | What::KatranRequest => {
            let flows = open(loaded, row)?;
            let costs = requests(loaded, row, &flows, effort, rounds)?;
            // The next row begins as this one did.
            remove(loaded, &flows)?;
            remove_floor(loaded, &flows)?;
            if row.what == What::KatranRequest {
                forget_katrans(loaded, &flows)?;
            }
            Ok(costs)
        }
        What::New | What::KatranNew => first_packets(loaded, row, rounds),
        What::Opened | What::Answer => at_the_endpoint(loaded, row, rounds),
    }
}

/// Opens flows in front, and gives the floor the same ones.
fn open(loaded: &mut Loaded, row: Wanted) -> Result<Vec<Flow>> {
    let mut flows = flows(row.ipv6, row.protocol, FLOWS);
    for kind in [Kind::Opening, Kind::Request] {
        let window = loaded.feeder.place(&frames(&flows, kind)?)?;
        loaded.run_to(Hook::Xdp, window, window.len, Outcome::ForwardedDirect).context("opening flows")?;
    }
    loaded.feeder.clear();
    learn(loaded, &mut flows)?;
    mirror(loaded, &flows)?;
    Ok(flows)
}

fn requests(
    loaded: &mut Loaded,
    row: Wanted,
    flows: &[Flow],
    effort: Effort,
    rounds: usize,
) -> Result<[Vec<f64>; 2]> {
    let requests = frames(flows, Kind::Request)?;
    let window = loaded.feeder.place(&requests)?;
    let first = unpacked(&requests[0]);
    if row.hook == Hook::Xdp {
        let case = |subject, flow: &Flow| -> Result<Case> {
            let expected = Expected { verdict: Verdict::Send, frame: sent_within(&first, flow)? };
            Ok(Case { subject, window, outcome: Outcome::ForwardedDirect, expected })
        };
        let mut own = flows[0];
        if row.what == What::KatranRequest {
            // It chooses by a hash of its own, and keeps what it chose.
            loaded.run(Subject::Katran, window, window.len)?;
            let took = loaded.run(Subject::Katran, window, 1)?;
            own.endpoint.set_ip(endpoint_of(loaded, &first, &took.packet, &own)?);
        }
        return turns::costs(
            loaded,
            rounds,
            effort.packets,
            &[case(row.floor(), &flows[0])?, case(row.subject(), &own)?],
        );
    }
    let sent: Vec<_> = requests.iter().map(unpacked).collect();
    let last = sent_within(&sent[sent.len() - 1], &flows[flows.len() - 1])?;
    each(loaded, row, rounds, &sent, Outcome::ForwardedDirect, &last)
}

/// Measures packets of open flows, each in a run of its own; `last` is the expected form of the
/// last one.
fn each(
    loaded: &mut Loaded,
    row: Wanted,
    rounds: usize,
    sent: &[Vec<u8>],
    outcome: Outcome,
    last: &[u8],
) -> Result<[Vec<f64>; 2]> {
    let mut runs = [Vec::new(), Vec::new()];
    for _ in 0..rounds {
        for (runs, subject) in runs.iter_mut().zip([row.floor(), row.subject()]) {
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

fn first_packets(loaded: &mut Loaded, row: Wanted, rounds: usize) -> Result<[Vec<f64>; 2]> {
    let number = NEW[usize::from(row.hook != Hook::Xdp)];
    let flows = flows(row.ipv6, row.protocol, number);
    let packets = frames(&flows, Kind::Opening)?;
    let sent: Vec<_> = packets.iter().map(unpacked).collect();
    let window = loaded.feeder.place(&packets)?;
    let last = flows[flows.len() - 1];
    let frame = &sent[sent.len() - 1];
    let mut runs = [Vec::new(), Vec::new()];
    for _ in 0..rounds {
        for (runs, subject) in runs.iter_mut().zip([row.floor(), row.subject()]) {
            let outcome = Outcome::ForwardedDirect;
            let (cost, packet) = if row.hook == Hook::Xdp {
                let mut empty = Vec::new();
                for _ in 0..3 {
                    empty.push(loaded.run(Subject::Empty(row.hook), window, window.len)?.on_average);
                }
                let took = match subject {
                    Subject::Ours(hook) => loaded.run_to(hook, window, window.len, outcome)?,
                    _ => loaded.run(subject, window, window.len)?,
                };
                (took.on_average - low(empty), took.packet)
            } else {
                let (empty, _) = loaded.run_each(Subject::Empty(row.hook), &sent, None)?;
                let (times, took) = loaded.run_each(subject, &sent, Some(outcome))?;
                (middle(times) - middle(empty), took.packet)
            };
            runs.push(cost);
            let endpoint =
                endpoint_of(loaded, frame, &packet, &last).with_context(|| format!("{subject:?}"))?;
            match subject {
                Subject::Ours(_) => {
                    let mut made = flows.clone();
                    learn(loaded, &mut made)?;
                    ensure!(made[made.len() - 1].endpoint.ip() == endpoint, "a flow leads elsewhere");
                    remove(loaded, &flows)?;
                }
                Subject::Katran => forget_katrans(loaded, &flows)?,
                _ => remove_floor(loaded, &flows)?,
            }
        }
    }
    Ok(runs)
}

fn at_the_endpoint(loaded: &mut Loaded, row: Wanted, rounds: usize) -> Result<[Vec<f64>; 2]> {
    let flows = at_home(&flows(row.ipv6, row.protocol, FLOWS));
    mirror_at_home(loaded, &flows)?;
    let opened = |kind| -> Result<Vec<Vec<u8>>> {
        let inner = frames(&flows, kind)?;
        inner.iter().zip(&flows).map(|(inner, flow)| arriving_within(&unpacked(inner), flow)).collect()
    };
    let answers = |kind| -> Result<Vec<Vec<u8>>> { Ok(frames(&flows, kind)?.iter().map(unpacked).collect()) };
    let (home, back) = (Subject::Ours(Hook::Ingress), Subject::Ours(Hook::Egress));
    loaded.run_each(home, &opened(Kind::Opening)?, Some(Outcome::Delivered)).context("opening flows")?;
    loaded.run_each(back, &answers(Kind::Answer)?, Some(Outcome::RepliedLocal)).context("answering")?;
    loaded.run_each(home, &opened(Kind::Request)?, Some(Outcome::Delivered)).context("confirming flows")?;
    let last = flows[flows.len() - 1];
    let (sent, outcome, kind, translated) = if row.what == What::Opened {
        let flow = Flow { frontend: last.endpoint, ..last };
        (opened(Kind::Request)?, Outcome::Delivered, Kind::Request, flow)
    } else {
        let flow = Flow { endpoint: last.frontend, ..last };
        (answers(Kind::Reply)?, Outcome::RepliedLocal, Kind::Reply, flow)
    };
    let expected = unpacked(&frames(&[translated], kind)?[0]);
    each(loaded, row, rounds, &sent, outcome, &expected)
}
