//! Packets of direct forwarding at the endpoint's node: requests that it opens, or that came as
//! they are, and replies, which go to the client or back to the node in front.

use anyhow::{Context, Result};
use traffic_policy_bench::{
    Case, Expected, Flow, Hook, Kind, Loaded, Subject,
    direct::{
        Dispatch, at_home, mirror_at_home,
        packets::{arriving_within, reply_within},
    },
    fixture::{MAC, ROUTER_MAC},
    flows::{flows, frames},
    frame::unpacked,
    turns,
};
use traffic_policy_ebpf::outcome::{Outcome, Verdict};

use traffic_policy_testing::packet::{Packet, flag};

use super::{FLOWS, Wanted, What, each};
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
    let sent: Result<Vec<_>> = inner
        .iter()
        .zip(&flows)
        .map(|(inner, flow)| arriving_within(&unpacked(inner), flow, row.dispatch))
        .collect();
    let last = flows[flows.len() - 1];
    let opened = unpacked(&frames(&[Flow { frontend: last.endpoint, ..last }], Kind::Request)?[0]);
    let [client, frontend] = [last.client, last.frontend].map(|end| (end.ip(), end.port()));
    let number = acknowledged(&inner[inner.len() - 1], row.ipv6);
    let answer = Packet::tcp(frontend, client, flag::RST).numbers(number, 0);
    let answer = answer.with(|packet| packet.tcp_mut().window = 0).macs(MAC, ROUTER_MAC).bytes();
    each(loaded, row, rounds, &sent?, Outcome::ResetNoFlow, &[opened, answer])
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
    // No flow begins by MAC address here: the endpoint's node would choose as the node in front.
    let way = if row.dispatch == Dispatch::ByMac { Dispatch::Ip } else { row.dispatch };
    let opened = |kind, dispatch| -> Result<Vec<Vec<u8>>> {
        let inner = frames(&flows, kind)?;
        let each = inner.iter().zip(&flows);
        each.map(|(inner, flow)| arriving_within(&unpacked(inner), flow, dispatch)).collect()
    };
    let answers = |kind| -> Result<Vec<Vec<u8>>> { Ok(frames(&flows, kind)?.iter().map(unpacked).collect()) };
    let (home, back) = (Subject::Ours(Hook::Ingress), Subject::Ours(Hook::Egress));
    let answered = if way == Dispatch::Tunnel { Outcome::RepliedToFront } else { Outcome::RepliedLocal };
    loaded.run_each(home, &opened(Kind::Opening, way)?, Some(Outcome::Delivered)).context("opening flows")?;
    loaded.run_each(back, &answers(Kind::Answer)?, Some(answered)).context("answering")?;
    loaded
        .run_each(home, &opened(Kind::Request, way)?, Some(Outcome::Delivered))
        .context("confirming flows")?;
    let last = flows[flows.len() - 1];
    let frame_of = |flow: Flow, kind| -> Result<Vec<u8>> { Ok(unpacked(&frames(&[flow], kind)?[0])) };
    if row.what == What::Answer {
        let translated = frame_of(Flow { endpoint: last.frontend, ..last }, Kind::Reply)?;
        let expected =
            if way == Dispatch::Tunnel { reply_within(&translated, &last)?[0].clone() } else { translated };
        let right = [expected.clone(), expected];
        return each(loaded, row, rounds, &answers(Kind::Reply)?, answered, &right);
    }
    let translated = |flow: Flow| frame_of(Flow { frontend: flow.endpoint, ..flow }, Kind::Request);
    if row.hook == Hook::Xdp {
        let window = loaded.feeder.place(&frames(&flows, Kind::Request)?)?;
        let expected = Expected { verdict: Verdict::Pass, frame: translated(flows[0])? };
        let case = |subject| {
            let expected = expected.clone();
            Case { subject, window, outcome: Outcome::Delivered, expected }
        };
        return turns::costs(loaded, rounds, effort.packets, &[case(row.floor()), case(row.subject())]);
    }
    let right = [translated(last)?, translated(last)?];
    each(loaded, row, rounds, &opened(Kind::Request, row.dispatch)?, Outcome::Delivered, &right)
}
