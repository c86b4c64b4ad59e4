//! A steady stream through a node port while everything else is measured, and the loss in it.

use std::net::SocketAddr;

use anyhow::Result;
use traffic_policy_testing::{
    lab::Lab,
    traffic::{Datagrams, Ledger, Server},
};

use super::{Rows, add, named};
use crate::report::{Goal, Report, Row, Unit};

const FLOWS: usize = 20;
const PER_SECOND: u32 = 1_000;

const GROUP: &str = "scale, forwarding";

fn name(services: u32) -> String {
    format!("datagrams lost while all that is measured, {}", named(services))
}

pub(super) fn rows(services: u32) -> Rows {
    vec![(GROUP, name(services))]
}

pub(super) struct Stream {
    _server: Server,
    meter: Datagrams,
}

impl Stream {
    pub(super) fn start(lab: &Lab, port: u16, target: SocketAddr) -> Result<Self> {
        let ledger = Ledger::default();
        let server = Server::start(lab.node(1).pod(1), port, &ledger)?;
        let meter = Datagrams::start(lab.client().netns(), target, FLOWS, PER_SECOND, &ledger)?;
        Ok(Self { _server: server, meter })
    }

    pub(super) fn finish(self, services: u32, report: &mut Report) -> Result<()> {
        let counted = self.meter.finish()?;
        let lost = counted.lost_there + counted.lost_back;
        if !counted.is_clean() {
            eprintln!("  the stream beside {}: {counted}", named(services));
        }
        let row = Row::new(GROUP, &name(services), Unit::Packets, &[lost as f64]);
        add(report, row.goal(Goal::AtMost(0.0)));
        Ok(())
    }
}
