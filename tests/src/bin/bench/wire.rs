//! What arrives: real frames from clients through the node to endpoints.
//!
//! Clients, node and endpoints share one CPU, as all that a packet needs happens where it was sent. What is counted is what
//! arrives as it should.

mod background;
mod conntrack;
mod cpu;
mod established;
mod fresh;
mod generator;
mod http;
mod load;
mod plan;
mod rules;
mod services;
mod stand;
mod subject;
mod threaded;

use anyhow::Result;
use traffic_policy_ebpf::bench::traffic::LENGTH;

use self::{
    generator::Traffic,
    plan::Plan,
    subject::{Kind, Subject},
};
use super::{Effort, report::Report};

/// Open flows.
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
    report.note("wire, frames", format!("{LENGTH} bytes, TCP over IPv4, {FLOWS} open flows"));
    report.note("wire, offloads", "checksum and segmentation off, GRO on");
    report.note(
        "wire, HTTP",
        "the node receives in threads (threaded NAPI, SCHED_FIFO) on one CPU that never sleeps",
    );
    for program in ["nft", "iptables-restore"] {
        match rules::version(program) {
            Ok(version) => report.note(&format!("wire, {program}"), version),
            Err(error) => report.note(&format!("wire, {program}"), format!("{error:#}")),
        }
    }
    let mut traffic = Traffic::load(cpu::busy()?)?;
    let mut subjects = Vec::new();
    for kind in plan.kinds() {
        match Subject::start(kind, &mut traffic) {
            Ok(subject) => subjects.push(subject),
            Err(error) => plan.skip(kind, &format!("{error:#}"), report),
        }
    }
    let of = |kinds: &[Kind]| -> Vec<&Subject> {
        kinds.iter().filter_map(|kind| subjects.iter().find(|subject| subject.kind == *kind)).collect()
    };
    established::measure(&of(&plan.established), &mut traffic, effort, report)?;
    fresh::openings(&of(&plan.openings), &mut traffic, effort, report)?;
    fresh::handshakes(&of(&plan.handshakes), &mut traffic, effort, report)?;
    load::measure(&of(&plan.load), &mut traffic, effort, report)?;
    http::measure(&of(&plan.http), &mut traffic, effort, report)
}
