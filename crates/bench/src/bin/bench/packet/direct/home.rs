//! Packets of direct forwarding at the endpoint's node: requests that it opens, or that came as
//! they are, and replies, which go to the client or back to the node in front.

use anyhow::{Context, Result};
use traffic_policy_bench::{
    Case, Expected, Flow, Hook, Kind, Loaded, Subject,
    direct::{
        Dispatch, at_home, mirror_at_home,
        packets::{arriving_within, reply_within},
        remove_floor_at_home,
    },
    fixture::{MAC, ROUTER_MAC},
    flows::{flows, frames, remove},
    frame::unpacked,
    turns,
};
use traffic_policy_ebpf::outcome::{Outcome, Verdict};

use traffic_policy_testing::packet::{Packet, flag};

use super::{FLOWS, NEW, Wanted, What, as_expected, each, middle};
use crate::{
    Effort,
    packet::refused::{ANSWERS_PER_JIFFY, acknowledged},
};

/// Measures segments of connections that are not known here, and that the pod is asked for.
pub(super) fn refused(loaded: &mut Loaded, row: Wanted, rounds: usize) -> Result<[Vec<f64>; 2]> {
    loaded.set_answers_per_jiffy(ANSWERS_PER_JIFFY);
    let flows = at_home(&flows(row.ipv6, row.protocol, FLOWS));
    mirror_at_home(loaded, &flows)?;
    let inner = frames(&flows, Kind::Request)?;
    let sent = arriving(&flows, Kind::Request, row.dispatch)?;
    let last = flows[flows.len() - 1];
    let opened = translated(last, Kind::Request)?;
    let [client, frontend] = [last.client, last.frontend].map(|end| (end.ip(), end.port()));
    let number = acknowledged(&inner[inner.len() - 1], row.ipv6);
    let answer = Packet::tcp(frontend, client, flag::RST).numbers(number, 0);
    let answer = answer.with(|packet| packet.tcp_mut().window = 0).macs(MAC, ROUTER_MAC).bytes();
    let costs = each(loaded, row, rounds, &sent, Outcome::ResetNoFlow, &[opened, answer])?;
    remove_floor_at_home(loaded, &flows)?;
    Ok(costs)
}

/// Returns packets of flows as they arrive from the node in front.
fn arriving(flows: &[Flow], kind: Kind, dispatch: Dispatch) -> Result<Vec<Vec<u8>>> {
    let inner = frames(flows, kind)?;
    let each = inner.iter().zip(flows);
    each.map(|(inner, flow)| arriving_within(&unpacked(inner), flow, dispatch)).collect()
}

/// Returns a packet of a flow as the endpoint gets it.
fn translated(flow: Flow, kind: Kind) -> Result<Vec<u8>> {
    Ok(unpacked(&frames(&[Flow { frontend: flow.endpoint, ..flow }], kind)?[0]))
}

/// Measures the first packets of new flows, each in a run of its own.
pub(super) fn first_packets(loaded: &mut Loaded, row: Wanted, rounds: usize) -> Result<[Vec<f64>; 2]> {
    let flows = at_home(&flows(row.ipv6, row.protocol, NEW[1]));
    let sent = arriving(&flows, Kind::Opening, row.dispatch)?;
    let right = translated(flows[flows.len() - 1], Kind::Opening)?;
    let mut runs = [Vec::new(), Vec::new()];
    for _ in 0..rounds {
        for (runs, subject) in runs.iter_mut().zip([row.floor(), row.subject()]) {
            let (empty, _) = loaded.run_each(Subject::Empty(row.hook), &sent, None)?;
            let (times, took) = loaded.run_each(subject, &sent, Some(Outcome::Delivered))?;
            as_expected(subject, &right, &took.packet)?;
            runs.push(middle(times) - middle(empty));
            match subject {
                Subject::Ours(_) => remove(loaded, &flows)?,
                _ => remove_floor_at_home(loaded, &flows)?,
            }
        }
    }
    Ok(runs)
}

/// Measures packets of open flows.
pub(super) fn costs(
    loaded: &mut Loaded,
    row: Wanted,
    effort: Effort,
    rounds: usize,
) -> Result<[Vec<f64>; 2]> {
    let flows = at_home(&flows(row.ipv6, row.protocol, FLOWS));
    mirror_at_home(loaded, &flows)?;
    let costs = of_open_flows(loaded, row, &flows, effort, rounds)?;
    // The next row begins as this one did.
    remove(loaded, &flows)?;
    remove_floor_at_home(loaded, &flows)?;
    Ok(costs)
}

fn of_open_flows(
    loaded: &mut Loaded,
    row: Wanted,
    flows: &[Flow],
    effort: Effort,
    rounds: usize,
) -> Result<[Vec<f64>; 2]> {
    // No flow begins by MAC address here: the endpoint's node would choose as the node in front.
    let way = if row.dispatch == Dispatch::ByMac { Dispatch::Ip } else { row.dispatch };
    let opened = |kind, dispatch| arriving(flows, kind, dispatch);
    let answers = |kind| -> Result<Vec<Vec<u8>>> { Ok(frames(flows, kind)?.iter().map(unpacked).collect()) };
    let (home, back) = (Subject::Ours(Hook::Ingress), Subject::Ours(Hook::Egress));
    let answered = if way == Dispatch::Tunnel { Outcome::RepliedToFront } else { Outcome::RepliedLocal };
    loaded.run_each(home, &opened(Kind::Opening, way)?, Some(Outcome::Delivered)).context("opening flows")?;
    loaded.run_each(back, &answers(Kind::Answer)?, Some(answered)).context("answering")?;
    loaded
        .run_each(home, &opened(Kind::Request, way)?, Some(Outcome::Delivered))
        .context("confirming flows")?;
    let last = flows[flows.len() - 1];
    if row.what == What::Answer {
        let reply = unpacked(&frames(&[Flow { endpoint: last.frontend, ..last }], Kind::Reply)?[0]);
        let expected = if way == Dispatch::Tunnel { reply_within(&reply, &last)?[0].clone() } else { reply };
        let right = [expected.clone(), expected];
        return each(loaded, row, rounds, &answers(Kind::Reply)?, answered, &right);
    }
    if row.hook == Hook::Xdp {
        let window = loaded.feeder.place(&frames(flows, Kind::Request)?)?;
        let expected = Expected { verdict: Verdict::Pass, frame: translated(flows[0], Kind::Request)? };
        let case = |subject| {
            let expected = expected.clone();
            Case { subject, window, outcome: Outcome::Delivered, expected }
        };
        return turns::costs(loaded, rounds, effort.packets, &[case(row.floor()), case(row.subject())]);
    }
    let right = translated(last, Kind::Request)?;
    let right = [right.clone(), right];
    each(loaded, row, rounds, &opened(Kind::Request, row.dispatch)?, Outcome::Delivered, &right)
}
