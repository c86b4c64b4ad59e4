//! What arrives: real frames from clients through the node to endpoints.
//!
//! Clients, node and endpoints share one CPU, as all that a packet needs happens where it was sent. What is counted is what
//! arrives as it should.

mod established;
mod generator;
mod rules;
mod services;
mod stand;
mod subject;

use anyhow::Result;

use self::{
    generator::Traffic,
    subject::{Kind, Subject},
};
use super::{Effort, report::Report};

/// Open flows.
const FLOWS: u32 = 1_000;
/// Services, where nothing else is said.
const SERVICES: u32 = 1_000;

pub(crate) fn measure(effort: Effort, report: &mut Report) -> Result<()> {
    let cpu = std::thread::available_parallelism()?.get() - 1;
    let mut traffic = Traffic::load(cpu)?;
    let kinds = [
        Kind::Bounce,
        Kind::Floor,
        Kind::Xdp(SERVICES),
        Kind::Tc(SERVICES),
        Kind::Router,
        Kind::Nftables(1),
        Kind::Nftables(SERVICES),
        Kind::Iptables(1),
        Kind::Iptables(SERVICES),
    ];
    let mut subjects = Vec::new();
    for kind in kinds {
        if std::env::var("ONLY_KIND").is_ok_and(|only| !kind.to_string().contains(&only)) { continue; }
        match Subject::start(kind, &mut traffic) {
            Ok(subject) => subjects.push(subject),
            Err(error) => eprintln!("not measured: {kind}: {error:#}"),
        }
    }
    established::measure(&subjects, &mut traffic, effort, report)?;
    Ok(())
}
