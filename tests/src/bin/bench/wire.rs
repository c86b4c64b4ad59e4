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
    let mut traffic = Traffic::load(cpu::busy()?)?;
    let mut subjects = Vec::new();
    for kind in plan.kinds() {
        match Subject::start(kind, &mut traffic) {
            Ok(subject) => subjects.push(subject),
            Err(error) => report.skip("wire", &kind.to_string(), format!("{error:#}")),
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
