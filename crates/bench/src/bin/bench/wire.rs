//! Throughput: real frames from clients through the node to endpoints.
//!
//! Clients, node and endpoints share one CPU, as all the work for a packet happens where it was
//! sent. Packets are counted that arrive as expected.

mod background;
mod conntrack;
mod cpu;
mod established;
mod fixture;
mod fresh;
mod generator;
mod http;
mod kube_proxy;
mod load;
pub(crate) mod one_shot;
mod plan;
pub(crate) mod pods;
mod rules;
mod services;
mod subject;
mod threaded;

use anyhow::Result;
use traffic_policy_bench_ebpf::FRAME_LENGTH;
use traffic_policy_testing::lab::remove_leftovers;

use self::{
    generator::Traffic,
    plan::Plan,
    subject::{Kind, Subject},
};
use super::{
    Effort,
    report::{Report, Row},
};

/// Number of open flows.
const FLOWS: u32 = 1_000;

pub(crate) fn measure(effort: Effort, report: &mut Report) -> Result<()> {
    let plan = Plan::of(effort, report);
    if plan.kinds().is_empty() {
        return Ok(());
    }
    report.note(
        "wire, topology",
        "clients – veth – node – veth – endpoints; one receive queue, native XDP, 1500 bytes MTU",
    );
    report.note("wire, frames", format!("{FRAME_LENGTH} bytes, TCP over IPv4, {FLOWS} open flows"));
    report.note("wire, offloads", "checksum and segmentation off, GRO on");
    report.note(
        "wire, HTTP",
        "the node receives in threads (threaded NAPI, SCHED_FIFO) on one CPU that never sleeps",
    );
    report.note(
        "wire, kube-proxy",
        kube_proxy::program().map_or_else(
            || "rules of the same shape, written by the bench (KUBE_PROXY names none)".to_owned(),
            |program| format!("rules written by {}", program.display()),
        ),
    );
    for program in ["nft", "iptables-restore"] {
        match rules::version(program) {
            Ok(version) => report.note(&format!("wire, {program}"), version),
            Err(error) => report.note(&format!("wire, {program}"), format!("{error:#}")),
        }
    }
    remove_leftovers()?;
    let mut traffic = Traffic::load(cpu::busy()?)?;
    let mut subjects = Vec::new();
    for kind in plan.kinds() {
        match Subject::start(kind, &mut traffic) {
            Ok(subject) => subjects.push(subject),
            Err(error) => plan.skip(kind, &format!("{error:#}"), report),
        }
    }
    type Measure = fn(&[&Subject], &mut Traffic, Effort) -> Result<Vec<Row>>;
    let groups: [(&[Kind], Measure); 5] = [
        (&plan.established, established::measure),
        (&plan.openings, fresh::openings),
        (&plan.handshakes, fresh::handshakes),
        (&plan.load, load::measure),
        // This part is last: it changes how a node receives.
        (&plan.http, http::measure),
    ];
    for (kinds, measure) in groups {
        let those: Vec<_> =
            kinds.iter().filter_map(|kind| subjects.iter().find(|subject| subject.kind == *kind)).collect();
        if !those.is_empty() {
            report.measure(|| Ok(plan.wanted(measure(&those, &mut traffic, effort)?)))?;
        }
    }
    traffic.notes.iter().for_each(|(key, value)| report.note(key, value));
    traffic.losses.into_iter().for_each(|loss| report.warn(loss));
    Ok(())
}
