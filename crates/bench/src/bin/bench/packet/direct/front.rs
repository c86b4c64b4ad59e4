//! Packets of direct forwarding at the node in front: requests of open flows and of new ones, and
//! replies that come back through it.

use anyhow::{Context, Result};
use traffic_policy_bench::{
    Case, Expected, Flow, Hook, Kind, Loaded, Restored, Subject,
    direct::{
        forget, learn, mirror,
        packets::{arriving, check_sent_by_floor, reply_within, sent, sent_by, sent_by_floor, sent_on},
        remove, remove_floor,
    },
    flows::{expected, flows, frames},
    frame::unpacked,
    turns::{self, low},
};
use traffic_policy_ebpf::outcome::{Outcome, Verdict};

use super::{FLOWS, NEW, Wanted, What, as_expected, each, middle};
use crate::Effort;

/// Measures packets of open flows.
pub(super) fn requests(
    loaded: &mut Loaded,
    row: Wanted,
    effort: Effort,
    rounds: usize,
) -> Result<[Vec<f64>; 2]> {
    let flows = open(loaded, row)?;
    let costs = of_open_flows(loaded, row, &flows, effort, rounds)?;
    // The next row begins as this one did.
    remove(loaded, &flows)?;
    remove_floor(loaded, &flows)?;
    if let What::RequestBy(method) = row.what {
        forget(loaded, method, &flows)?;
    }
    Ok(costs)
}

/// Opens flows, and gives the floor the same ones.
fn open(loaded: &mut Loaded, row: Wanted) -> Result<Vec<Flow>> {
    loaded.dispatch(row.dispatch)?;
    let mut flows = flows(row.ipv6, row.protocol, FLOWS);
    for kind in [Kind::Opening, Kind::Request] {
        let window = loaded.feeder.place(&arriving(&flows, kind, row.dispatch)?)?;
        loaded.run_to(Hook::Xdp, window, window.len, Outcome::ForwardedDirect).context("opening flows")?;
    }
    loaded.feeder.clear();
    learn(loaded, &mut flows)?;
    mirror(loaded, &flows)?;
    Ok(flows)
}

fn of_open_flows(
    loaded: &mut Loaded,
    row: Wanted,
    flows: &[Flow],
    effort: Effort,
    rounds: usize,
) -> Result<[Vec<f64>; 2]> {
    let requests = arriving(flows, Kind::Request, row.dispatch)?;
    let window = loaded.feeder.place(&requests)?;
    let outcome = Outcome::ForwardedDirect;
    let expected = |loaded: &Loaded, flow: usize| -> Result<[Vec<u8>; 2]> {
        let (frame, flow) = (unpacked(&requests[flow]), &flows[flow]);
        let floor = sent_by_floor(&frame, flow, row.dispatch)?;
        Ok([floor, sent(loaded, &frame, flow, Kind::Request, row.dispatch)?])
    };
    if !row.in_a_loop() {
        let sent: Vec<_> = requests.iter().map(unpacked).collect();
        let last = expected(loaded, flows.len() - 1)?;
        return each(loaded, row, rounds, &sent, outcome, &last);
    }
    let [floor, mut own] = expected(loaded, 0)?;
    if let What::RequestBy(method) = row.what {
        // It chooses by a hash of its own, and keeps what it chose.
        loaded.run(row.subject(), window, window.len)?;
        let took = loaded.run(row.subject(), window, 1)?;
        let first = unpacked(&requests[0]);
        own = sent_by(loaded, method, &first, &took.packet, &flows[0], Kind::Request)?;
    }
    if row.hook != Hook::Xdp {
        loaded.feeder.restore(Restored::Nothing);
    }
    let case = |subject, frame| {
        let expected = Expected { verdict: Verdict::Send, frame };
        Case { subject, window, outcome, expected }
    };
    turns::costs(loaded, rounds, effort.packets, &[case(row.floor(), floor), case(row.subject(), own)])
}

/// Measures the first packets of new flows.
pub(super) fn first_packets(loaded: &mut Loaded, row: Wanted, rounds: usize) -> Result<[Vec<f64>; 2]> {
    loaded.dispatch(row.dispatch)?;
    let number = NEW[usize::from(row.hook != Hook::Xdp)];
    let flows = flows(row.ipv6, row.protocol, number);
    let packets = arriving(&flows, Kind::Opening, row.dispatch)?;
    let sent: Vec<_> = packets.iter().map(unpacked).collect();
    let window = loaded.feeder.place(&packets)?;
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
            check_last(loaded, row, subject, &flows, &sent[sent.len() - 1], &packet)?;
            match subject {
                Subject::Ours(_) => remove(loaded, &flows)?,
                Subject::Other(method) => forget(loaded, method, &flows)?,
                _ => remove_floor(loaded, &flows)?,
            }
        }
    }
    Ok(runs)
}

/// Fails unless the last new flow's packet, `frame`, was sent as `packet` to the endpoint that was
/// chosen.
fn check_last(
    loaded: &Loaded,
    row: Wanted,
    subject: Subject,
    flows: &[Flow],
    frame: &[u8],
    packet: &[u8],
) -> Result<()> {
    let mut made = [flows[flows.len() - 1]];
    match subject {
        Subject::Ours(_) => {
            learn(loaded, &mut made)?;
            as_expected(subject, &sent(loaded, frame, &made[0], Kind::Opening, row.dispatch)?, packet)
        }
        Subject::Other(method) => sent_by(loaded, method, frame, packet, &made[0], Kind::Opening).map(drop),
        _ => check_sent_by_floor(loaded, frame, packet, &made[0], row.dispatch),
    }
}

/// Measures replies that another node sends back, which are opened and sent on to their clients.
pub(super) fn replies(loaded: &mut Loaded, row: Wanted, rounds: usize) -> Result<[Vec<f64>; 2]> {
    loaded.dispatch(row.dispatch)?;
    let flows = flows(row.ipv6, row.protocol, FLOWS);
    let translated: Vec<_> =
        flows.iter().map(|flow| Flow { endpoint: flow.frontend, node: flow.client, ..*flow }).collect();
    let replies: Vec<_> = frames(&translated, Kind::Reply)?.iter().map(unpacked).collect();
    let mut sent = Vec::new();
    for (reply, flow) in replies.iter().zip(&flows) {
        let [_, arrives] = reply_within(reply, flow)?;
        sent.push(arrives);
    }
    let last = flows.len() - 1;
    let right = [sent_on(&replies[last]), expected(&flows[last], Kind::Reply)?];
    each(loaded, row, rounds, &sent, Outcome::RepliedOpened, &right)
}
