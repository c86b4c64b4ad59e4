//! Packets that are none of ours: all other traffic of the node.

use std::net::SocketAddr;

use anyhow::Result;
use traffic_policy_ebpf::outcome::Outcome;

use super::{
    established::{Case, costs},
    flows::{Protocol, flows, later, open},
    frame::{Content, Frame, frame},
    loaded::{Hook, Loaded, NODE_PORT, POOL_PORT, Subject},
    stand::{Stand, V4},
};
use crate::{
    Effort,
    report::{Goal, Report, Row, Unit},
};

const SENDERS: u32 = 1_000;

pub(crate) fn measure(stand: &Stand, effort: Effort, report: &mut Report) -> Result<()> {
    let mut loaded = Loaded::new(stand)?;
    // Without a flow, pool ports are not asked about at all.
    open(&mut loaded, Hook::Xdp, &mut flows(false, Protocol::Tcp, SENDERS))?;
    let rows = [
        ("no bit set", V4.node, 22, Outcome::Passed, 10.0),
        ("a port of the pool", V4.node, POOL_PORT, Outcome::PassedNotService, 30.0),
        ("a frontend's port", later(V4.node, 8), NODE_PORT, Outcome::PassedNotService, 50.0),
    ];
    let frames = |address, port, content| {
        let sender = |i| SocketAddr::new(later(V4.client, 1_000 + i), 40_000 + i as u16);
        (0..SENDERS)
            .map(|i| frame(sender(i), SocketAddr::new(address, port), content))
            .collect::<Result<Vec<Frame>>>()
    };
    let mut cases = Vec::new();
    for (name, address, port, outcome, goal) in rows {
        cases.push((name, frames(address, port, Content::Ack)?, outcome, goal));
    }
    let echo = frames(V4.node, NODE_PORT, Content::Echo)?;
    cases.push(("an echo request", echo, Outcome::PassedProtocol, 10.0));
    let fragments = frames(V4.node, NODE_PORT, Content::LaterFragment)?;
    cases.push(("a later fragment", fragments, Outcome::PassedFragment, 40.0));
    for (name, frames, outcome, goal) in cases {
        for (hook, suffix, goal) in [(Hook::Xdp, "", Some(Goal::AtMost(goal))), (Hook::Tc, ", TC", None)] {
            let case = Case { subject: Subject::Ours(hook), frames: &frames, outcome };
            let [ours] = costs(&mut loaded, effort, &[case])?;
            let row = Row::new("none of ours", &format!("{name}{suffix}"), Unit::Nanoseconds, &ours);
            report.add(goal.into_iter().fold(row, Row::goal));
        }
    }
    Ok(())
}
