//! Packets of flows that are open.

use anyhow::Result;
use traffic_policy_ebpf::outcome::Outcome;

use super::{
    Effort,
    flows::{Flow, Kind, Protocol, flows, frames, mirror, open},
    frame::Frame,
    loaded::{Hook, Loaded, Subject},
    report::{Goal, Report},
    stand::Stand,
};

const FEW: u32 = 1_000;
const MANY: u32 = 65_536;

/// What every packet of an established flow may cost.
const XDP: Goal = Goal::Times(1.15);
const TC: Goal = Goal::Times(2.6);
const IPV6: Goal = Goal::Times(1.4);

pub(crate) fn measure(stand: &Stand, effort: Effort, report: &mut Report) -> Result<()> {
    let mut loaded = Loaded::new(stand)?;
    let mut tcp = flows(false, Protocol::Tcp, FEW);
    open(&mut loaded, Hook::Xdp, &mut tcp)?;
    mirror(&mut loaded, &tcp)?;
    let [floor_request, request] =
        both(&mut loaded, effort, &frames(&tcp, Kind::Request)?, Outcome::Forwarded)?;
    report.add("request, IPv4 TCP, 1k flows", request, Some(floor_request), Some(XDP));
    let [floor_reply, reply] = both(&mut loaded, effort, &frames(&tcp, Kind::Reply)?, Outcome::Replied)?;
    report.add("reply, IPv4 TCP, 1k flows", reply, Some(floor_reply), Some(XDP));

    let others = [
        ("IPv4 UDP", false, Protocol::Udp, XDP),
        ("IPv6 TCP", true, Protocol::Tcp, IPV6),
        ("IPv6 UDP", true, Protocol::Udp, IPV6),
    ];
    for (name, ipv6, protocol, goal) in others {
        let mut others = flows(ipv6, protocol, FEW);
        open(&mut loaded, Hook::Xdp, &mut others)?;
        let figures = one_way_each(&mut loaded, Hook::Xdp, effort, &others)?;
        report.add(&format!("request, {name}, 1k flows"), figures[0], Some(floor_request), Some(goal));
        report.add(&format!("reply, {name}, 1k flows"), figures[1], Some(floor_reply), Some(goal));
    }
    let figures = one_way_each(&mut loaded, Hook::Tc, effort, &tcp)?;
    report.add("request, IPv4 TCP, 1k flows, TC", figures[0], Some(floor_request), Some(TC));
    report.add("reply, IPv4 TCP, 1k flows, TC", figures[1], Some(floor_reply), Some(TC));
    if effort.large { large(stand, effort, report) } else { Ok(()) }
}

/// A table in which memory decides.
fn large(stand: &Stand, effort: Effort, report: &mut Report) -> Result<()> {
    let mut loaded = Loaded::new(stand)?;
    let mut tcp = flows(false, Protocol::Tcp, MANY);
    open(&mut loaded, Hook::Xdp, &mut tcp)?;
    mirror(&mut loaded, &tcp)?;
    let mut shuffled = tcp.clone();
    shuffle(&mut shuffled);
    for (order, flows) in [("in order of creation", &tcp), ("in random order", &shuffled)] {
        for (way, kind, outcome) in
            [("request", Kind::Request, Outcome::Forwarded), ("reply", Kind::Reply, Outcome::Replied)]
        {
            let [floor, ours] = both(&mut loaded, effort, &frames(flows, kind)?, outcome)?;
            report.add(&format!("{way}, IPv4 TCP, 64k flows, {order}"), ours, Some(floor), Some(XDP));
        }
    }
    Ok(())
}

/// Fisher–Yates with a fixed seed: every run of the bench sees the same order.
fn shuffle(flows: &mut [Flow]) {
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    for last in (1..flows.len()).rev() {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        flows.swap(last, (random % (last as u64 + 1)) as usize);
    }
}

fn one_way_each(loaded: &mut Loaded, hook: Hook, effort: Effort, flows: &[Flow]) -> Result<[f64; 2]> {
    let mut figures = [0.0; 2];
    let ways = [(Kind::Request, Outcome::Forwarded), (Kind::Reply, Outcome::Replied)];
    for (figure, (kind, outcome)) in figures.iter_mut().zip(ways) {
        let frames = frames(flows, kind)?;
        [*figure] = median_costs(loaded, effort, &frames, &[Subject::Ours(hook)], outcome)?;
    }
    Ok(figures)
}

fn both(loaded: &mut Loaded, effort: Effort, frames: &[Frame], outcome: Outcome) -> Result<[f64; 2]> {
    median_costs(loaded, effort, frames, &[Subject::Floor, Subject::Ours(Hook::Xdp)], outcome)
}

/// Nanoseconds per packet of each program, which take turns.
pub(crate) fn median_costs<const N: usize>(
    loaded: &mut Loaded,
    effort: Effort,
    frames: &[Frame],
    subjects: &[Subject; N],
    outcome: Outcome,
) -> Result<[f64; N]> {
    loaded.set_frames(frames)?;
    let packets = effort.packets.next_multiple_of(frames.len() as u32);
    let mut runs = [const { Vec::new() }; N];
    for _ in 0..effort.rounds {
        for (runs, subject) in runs.iter_mut().zip(subjects) {
            let empty = loaded.run(Subject::Empty(subject.hook()), packets)?;
            let took = match subject {
                Subject::Ours(hook) => loaded.run_to(*hook, packets, outcome)?,
                other => loaded.run(*other, packets)?,
            };
            runs.push((took.as_secs_f64() - empty.as_secs_f64()) * 1e9 / f64::from(packets));
        }
    }
    Ok(runs.map(median))
}

pub(crate) fn median(mut runs: Vec<f64>) -> f64 {
    runs.sort_by(f64::total_cmp);
    runs[runs.len() / 2]
}
