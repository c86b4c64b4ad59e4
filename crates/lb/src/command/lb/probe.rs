//! `lb --probe`: the answers of nodes to requests from this machine, compared with those that
//! follow from the objects.

mod ask;
mod print;

use std::{
    io::{self, IsTerminal, Write},
    time::Duration,
};

use anyhow::{Result, bail};
use clap::Args;
use serde::Serialize;

pub(super) use self::ask::{Limits, ask};
use crate::{
    Cluster, Finding, Judge, Judgement, Level, Span,
    probe::{NodeAddress, Probed, Questions, Scope},
};

/// Arguments for probing the nodes.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Questions to the nodes")]
pub(super) struct ProbeArguments {
    /// Probe the nodes from this machine: /healthz of the proxy on port 10256, and the
    /// healthCheckNodePort of each Service. An answer that does not follow from the objects is a
    /// finding.
    #[arg(long, env = "TRAFFIC_POLICY_PROBE")]
    pub(super) probe: bool,
    /// Also probe the node ports of TCP: a connection is opened and closed at once, nothing is
    /// sent. UDP and SCTP are not probed.
    #[arg(long, env = "TRAFFIC_POLICY_PROBE_TRAFFIC", requires = "probe")]
    traffic: bool,
    /// The address of a Node to probe: its InternalIP or its ExternalIP.
    #[arg(long, env = "TRAFFIC_POLICY_PROBE_NODE_ADDRESS", value_name = "TYPE", default_value = "internal")]
    node_address: NodeAddress,
    /// Time limit of each answer.
    #[arg(long, env = "TRAFFIC_POLICY_PROBE_ANSWER_WITHIN", value_name = "TIME", default_value = "2s")]
    answer_within: Span,
    /// Number of simultaneous probes.
    #[arg(long, env = "TRAFFIC_POLICY_PROBE_AT_ONCE", value_name = "N", default_value_t = 64,
        value_parser = clap::value_parser!(u16).range(1..=512))]
    at_once: u16,
    /// Number of connections to node ports per second.
    #[arg(long, env = "TRAFFIC_POLICY_PROBE_TRAFFIC_RATE", value_name = "N", default_value_t = 20,
        value_parser = clap::value_parser!(u16).range(1..=1000))]
    traffic_rate: u16,
}

impl ProbeArguments {
    fn scope(&self) -> Scope {
        Scope { address: self.node_address, traffic: self.traffic }
    }

    pub(super) fn limits(&self) -> Limits {
        // With a time limit of zero no node could answer.
        let within = self.answer_within.0.max(Duration::from_millis(10));
        Limits { within, at_once: self.at_once.into(), traffic_rate: self.traffic_rate.into() }
    }

    /// Returns the probes for these Services.
    ///
    /// # Errors
    /// There are no Nodes, or too many probes.
    pub(super) fn questions<'a>(
        &self,
        cluster: &Cluster,
        judge: &Judge<'a>,
        judgements: &[Judgement<'a>],
    ) -> Result<Questions> {
        if cluster.nodes_are_guessed {
            bail!("--probe needs Node objects: without them the nodes' addresses are not known");
        }
        Ok(judge.questions(judgements, self.scope())?)
    }

    /// Sends the probes, and adds what they show about a Service to its findings.
    pub(super) fn execute<'a>(
        &self,
        cluster: &Cluster,
        judge: &Judge<'a>,
        judgements: &mut [Judgement<'a>],
    ) -> Result<Report> {
        let questions = self.questions(cluster, judge, judgements)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let progress = Progress { shown: io::stderr().is_terminal() };
        let limits = self.limits();
        let probed =
            runtime.block_on(ask::twice(questions.askings, limits, |asked, of| progress.show(asked, of)));
        progress.end();
        for judgement in &mut *judgements {
            judgement.findings.extend(probed.findings(Some(&judgement.service.name)));
            judgement.findings.sort_by_key(|finding| finding.level);
        }
        let findings = probed.findings(None);
        let not_asked = questions.not_asked.iter().map(ToString::to_string).collect();
        Ok(Report { probed, findings, not_asked, within: limits.within })
    }
}

/// The result of `lb --probe`.
pub(super) struct Report {
    probed: Probed,
    /// Findings about the proxies; those about Services are with the Services.
    pub(super) findings: Vec<Finding>,
    /// Ports of UDP and SCTP, which are not probed.
    not_asked: Vec<String>,
    within: Duration,
}

impl Report {
    pub(super) fn errors(&self) -> usize {
        self.findings.iter().filter(|finding| finding.level == Level::Error).count()
    }

    pub(super) fn print(&self, out: &mut dyn Write, all_nodes: bool) -> io::Result<()> {
        print::print(self, out, all_nodes)
    }

    pub(super) fn document<D: Serialize>(&self, document: D) -> impl Serialize {
        WithProbe { document, probe: print::document(self) }
    }
}

#[derive(Serialize)]
struct WithProbe<D, P> {
    #[serde(flatten)]
    document: D,
    probe: P,
}

/// A progress line on standard error, on terminals only.
struct Progress {
    shown: bool,
}

impl Progress {
    fn show(&self, asked: usize, of: usize) {
        if self.shown && asked.is_multiple_of(16) {
            eprint!("\r\x1b[Kasking: {asked} of {of}");
        }
    }

    fn end(&self) {
        if self.shown {
            eprint!("\r\x1b[K");
        }
    }
}
