//! Packets to no Service: all other traffic of the node.

use std::{collections::BTreeSet, net::SocketAddr};

use anyhow::Result;
use traffic_policy_bench::{
    BenchNode, Content, Expected, Frame, Hook, Loaded, Protocol, Setup,
    fixture::{V4, later},
    flows::open,
    frame::frame,
    loaded::{NODE_PORT, SNAT_PORT, TARGET_PORT, pod_sharing},
};
use traffic_policy_ebpf::outcome::{Outcome, Verdict};

use super::{Packets, alone};
use crate::{
    Effort,
    report::{Goal, Report, Row, Unit},
};

const GROUP: &str = "other traffic";
const SENDERS: u32 = 1_000;
/// Number of Services in addition to those that packets go to.
const CLUSTER_IPS: u32 = 10_000;
/// Nanoseconds that a packet of a pod, to no Service, may cost in XDP; [`BOTH_HOOKS`] is the limit
/// for XDP and TC together.
const POD: f64 = 15.0;
const BOTH_HOOKS: f64 = 30.0;

/// A packet at a hook.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    name: &'static str,
    hook: Hook,
    to: To,
    /// Source port of the first packet, and destination port.
    ports: (u16, u16),
    content: Content,
    outcome: Outcome,
    goal: Option<f64>,
}

impl Wanted {
    fn name(&self) -> String {
        format!("{}, {}", self.name, self.hook.name())
    }

    /// Returns the name of the row that sums XDP's and TC's figures.
    fn together(&self) -> Option<String> {
        self.is_pods().then(|| format!("{}, both hooks together", self.name))
    }

    fn is_pods(&self) -> bool {
        matches!(self.to, To::Near | To::Pod(_))
    }

    fn frames(&self) -> Result<Vec<Frame>> {
        let pod = match self.to {
            To::Pod(bits) => pod_sharing(bits, CLUSTER_IPS)?,
            To::Near => later(V4.node, 8),
            To::Node | To::Outside => V4.node,
        };
        let one = |i: u32| {
            let other = later(V4.client, 1_000 + i);
            let (from, to) = self.ports;
            match self.to {
                To::Outside => {
                    let receiver = SocketAddr::new(other, to + i as u16);
                    frame(SocketAddr::new(V4.node, from), receiver, self.content)
                }
                _ => frame(SocketAddr::new(other, from + i as u16), SocketAddr::new(pod, to), self.content),
            }
        };
        (0..SENDERS).map(one).collect()
    }
}

/// Destination of a packet.
#[derive(Clone, Copy)]
enum To {
    Node,
    /// A pod of this node, in a network without Services; the packet may also be as XDP has
    /// delivered it, or as it comes from another node's pod.
    Near,
    /// A pod in the /16 of the ClusterIPs, which shares this number of its two bits with some of
    /// them.
    Pod(usize),
    /// Another host: the packet leaves the node.
    Outside,
}

fn all() -> Vec<Wanted> {
    let mut all = Vec::new();
    let coming = [
        ("no bit set", To::Node, 22, Content::Ack, Outcome::Passed, 10.0),
        ("a SNAT port", To::Node, SNAT_PORT, Content::Ack, Outcome::PassedNotService, 30.0),
        // The node has 10,000 Services.
        ("a pod's packet on a Service's port", To::Near, NODE_PORT, Content::Ack, Outcome::Passed, POD),
        ("a pod's packet on a SNAT port", To::Near, SNAT_PORT, Content::Ack, Outcome::Passed, POD),
        ("a pod beside the ClusterIPs", To::Pod(0), NODE_PORT, Content::Ack, Outcome::Passed, POD),
        ("a pod that shares one bit with them", To::Pod(1), NODE_PORT, Content::Ack, Outcome::Passed, POD),
        ("an echo request", To::Node, NODE_PORT, Content::Echo, Outcome::PassedUnsupportedProtocol, 10.0),
        ("a later fragment", To::Node, NODE_PORT, Content::LaterFragment, Outcome::PassedFragment, 40.0),
        ("a packet within IP", To::Near, 0, Content::WithinIp, Outcome::PassedUnsupportedProtocol, 15.0),
    ];
    for hook in [Hook::Xdp, Hook::Ingress] {
        for (name, to, port, content, outcome, goal) in coming {
            let goal = (hook == Hook::Xdp).then_some(goal);
            all.push(Wanted { name, hook, to, ports: (40_000, port), content, outcome, goal });
        }
    }
    // One address in 700 with 10,000 ClusterIPs.
    let (name, ports) = ("a pod that shares both bits with them", (40_000, NODE_PORT));
    let (content, outcome) = (Content::Ack, Outcome::PassedNotService);
    for hook in [Hook::Xdp, Hook::Ingress] {
        all.push(Wanted { name, hook, to: To::Pod(2), ports, content, outcome, goal: None });
    }
    let leaving = [
        ("no bit set", 22, Content::Ack, Outcome::Passed),
        ("an endpoint's port", TARGET_PORT, Content::Ack, Outcome::Passed),
        ("an echo request", TARGET_PORT, Content::Echo, Outcome::PassedUnsupportedProtocol),
    ];
    for (name, port, content, outcome) in leaving {
        let (hook, ports) = (Hook::Egress, (port, 40_000));
        all.push(Wanted { name, hook, to: To::Outside, ports, content, outcome, goal: None });
    }
    all
}

/// Rows that are measured, and the names of those that are reported.
pub(super) struct Plan {
    rows: Vec<Wanted>,
    names: BTreeSet<String>,
}

impl Plan {
    pub(super) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}

pub(super) fn wanted(report: &mut Report) -> Plan {
    let mut names = BTreeSet::new();
    let mut wants = |name: String| {
        let wanted = report.wants(GROUP, &name);
        if wanted {
            names.insert(name);
        }
        wanted
    };
    let mut rows = all();
    rows.retain(|row| {
        let together = row.together().is_some_and(&mut wants);
        wants(row.name()) || together
    });
    Plan { rows, names }
}

pub(super) fn measure(plan: &Plan, fixture: &BenchNode, effort: Effort, report: &mut Report) -> Result<()> {
    if plan.is_empty() {
        return Ok(());
    }
    report.measure(|| {
        let all = alone(
            &plan.rows,
            effort,
            || load(fixture),
            |row| {
                let frames = row.frames()?;
                let expected = Expected::unchanged(Verdict::Pass, &frames[0]);
                Ok(Packets { frames, hook: row.hook, outcome: row.outcome, expected })
            },
        )?;
        let mut rows = Vec::new();
        for (row, [ours]) in plan.rows.iter().zip(&all) {
            let own = Row::new(GROUP, &row.name(), Unit::Nanoseconds, ours);
            rows.push(row.goal.map(Goal::AtMost).into_iter().fold(own, Row::goal));
        }
        for (row, [xdp]) in plan.rows.iter().zip(&all).filter(|(row, _)| row.hook == Hook::Xdp) {
            let of_tc = |other: &Wanted| other.hook == Hook::Ingress && other.name == row.name;
            let tc = plan.rows.iter().zip(&all).find(|(other, _)| of_tc(other));
            if let (Some(name), Some((_, [tc]))) = (row.together(), tc) {
                let both: Vec<_> = xdp.iter().zip(tc).map(|(xdp, tc)| xdp + tc).collect();
                let own = Row::new(GROUP, &name, Unit::Nanoseconds, &both);
                rows.push(if row.goal.is_some() { own.goal(Goal::AtMost(BOTH_HOOKS)) } else { own });
            }
        }
        rows.retain(|row| plan.names.contains(&row.name));
        Ok(rows)
    })
}

fn load(fixture: &BenchNode) -> Result<Loaded> {
    // No other node has a Lease.
    let mut loaded = Loaded::new(fixture, Setup { opens: false, ..Setup::default() })?;
    loaded.add_cluster_ips(CLUSTER_IPS)?;
    open(&mut loaded, false, Protocol::Tcp, SENDERS)?;
    Ok(loaded)
}
