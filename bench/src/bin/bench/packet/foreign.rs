//! Packets to no Service: all other traffic of the node.

use std::net::SocketAddr;

use anyhow::Result;
use traffic_policy_bench::{
    BenchNode, Content, Expected, Frame, Hook, Loaded, Protocol, Setup,
    fixture::V4,
    flows::{flows, later, open},
    frame::frame,
    loaded::{NODE_PORT, POOL_PORT, TARGET_PORT},
};
use traffic_policy_ebpf::outcome::{Outcome, Verdict};

use super::{Packets, alone};
use crate::{
    Effort,
    report::{Goal, Report, Row, Unit},
};

const GROUP: &str = "other traffic";
const SENDERS: u32 = 1_000;
/// Services beside those that packets go to.
const CLUSTER_IPS: u32 = 10_000;

/// A packet at a hook.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    name: &'static str,
    hook: Hook,
    /// Whom it is for, the first of them, and from which port.
    to: Option<u32>,
    ports: (u16, u16),
    content: Content,
    outcome: Outcome,
    goal: Option<f64>,
}

impl Wanted {
    fn name(&self) -> String {
        format!("{}, {}", self.name, self.hook.name())
    }

    fn frames(&self) -> Result<Vec<Frame>> {
        let one = |i: u32| {
            let other = later(V4.client, 1_000 + i);
            let (from, to) = self.ports;
            match self.to {
                Some(own) => {
                    let sender = SocketAddr::new(other, from + i as u16);
                    frame(sender, SocketAddr::new(later(V4.node, own), to), self.content)
                }
                // One that leaves.
                None => {
                    let receiver = SocketAddr::new(other, to + i as u16);
                    frame(SocketAddr::new(V4.node, from), receiver, self.content)
                }
            }
        };
        (0..SENDERS).map(one).collect()
    }
}

fn all() -> Vec<Wanted> {
    let mut all = Vec::new();
    let coming = [
        ("no bit set", 0, 22, Content::Ack, Outcome::Passed, 10.0),
        ("a port of the pool", 0, POOL_PORT, Content::Ack, Outcome::PassedNotService, 30.0),
        // With 10,000 Services on the node; by both hooks together at most 30 ns.
        ("a pod's packet on a Service's port", 8, NODE_PORT, Content::Ack, Outcome::Passed, 15.0),
        ("a pod's packet on a port of the pool", 8, POOL_PORT, Content::Ack, Outcome::Passed, 15.0),
        ("an echo request", 0, NODE_PORT, Content::Echo, Outcome::PassedUnsupportedProtocol, 10.0),
        ("a later fragment", 0, NODE_PORT, Content::LaterFragment, Outcome::PassedFragment, 40.0),
    ];
    for hook in [Hook::Xdp, Hook::Ingress] {
        for (name, own, port, content, outcome, goal) in coming {
            let (to, ports) = (Some(own), (40_000, port));
            let goal = (hook == Hook::Xdp).then_some(goal);
            all.push(Wanted { name, hook, to, ports, content, outcome, goal });
        }
    }
    let leaving = [
        ("no bit set", 22, Content::Ack, Outcome::Passed),
        ("an endpoint's port", TARGET_PORT, Content::Ack, Outcome::Passed),
        ("an echo request", TARGET_PORT, Content::Echo, Outcome::PassedUnsupportedProtocol),
    ];
    for (name, port, content, outcome) in leaving {
        let (hook, ports) = (Hook::Egress, (port, 40_000));
        all.push(Wanted { name, hook, to: None, ports, content, outcome, goal: None });
    }
    all
}

pub(super) fn wanted(report: &mut Report) -> Vec<Wanted> {
    all().into_iter().filter(|row| report.wants(GROUP, &row.name())).collect()
}

pub(super) fn measure(
    wanted: &[Wanted],
    fixture: &BenchNode,
    effort: Effort,
    report: &mut Report,
) -> Result<()> {
    if wanted.is_empty() {
        return Ok(());
    }
    report.measure(|| {
        let all = alone(
            wanted,
            effort,
            || load(fixture),
            |row| {
                let frames = row.frames()?;
                let expected = Expected::unchanged(Verdict::Pass, &frames[0]);
                Ok(Packets { frames, hook: row.hook, outcome: row.outcome, expected })
            },
        )?;
        let row = |(row, [ours]): (&Wanted, [Vec<f64>; 1])| {
            let own = Row::new(GROUP, &row.name(), Unit::Nanoseconds, &ours);
            row.goal.map(Goal::AtMost).into_iter().fold(own, Row::goal)
        };
        Ok(wanted.iter().zip(all).map(row).collect())
    })
}

fn load(fixture: &BenchNode) -> Result<Loaded> {
    let mut loaded = Loaded::new(fixture, Setup::default())?;
    loaded.add_cluster_ips(CLUSTER_IPS)?;
    open(&mut loaded, Hook::Xdp, &mut flows(false, Protocol::Tcp, SENDERS))?;
    Ok(loaded)
}
