//! `lb --probe`: what nodes answer from here, beside what follows from the objects.

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

/// Questions to the nodes.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Questions to the nodes")]
pub(super) struct ProbeArguments {
    /// Ask the nodes, from this machine: /healthz of the proxy on port 10256, and the healthCheckNodePort of each Service. An answer
    /// that does not follow from the objects is a finding.
    #[arg(long, env = "TRAFFIC_POLICY_PROBE")]
    pub(super) probe: bool,
    /// Also the node ports of TCP: a connection is made and closed at once, nothing is sent. UDP and SCTP are not
    /// asked.
    #[arg(long, env = "TRAFFIC_POLICY_PROBE_TRAFFIC", requires = "probe")]
    traffic: bool,
    /// Which address of a Node is asked: its InternalIP or its ExternalIP.
    #[arg(long, env = "TRAFFIC_POLICY_PROBE_NODE_ADDRESS", value_name = "TYPE", default_value = "internal")]
    node_address: NodeAddress,
    /// Time limit of each answer.
    #[arg(long, env = "TRAFFIC_POLICY_PROBE_ANSWER_WITHIN", value_name = "TIME", default_value = "2s")]
    answer_within: Span,
    /// Number of questions at a time.
    #[arg(long, env = "TRAFFIC_POLICY_PROBE_AT_ONCE", value_name = "N", default_value_t = 64,
        value_parser = clap::value_parser!(u16).range(1..=512))]
    at_once: u16,
    /// Connections to node ports per second.
    #[arg(long, env = "TRAFFIC_POLICY_PROBE_TRAFFIC_RATE", value_name = "N", default_value_t = 20,
        value_parser = clap::value_parser!(u16).range(1..=1000))]
    traffic_rate: u16,
}

impl ProbeArguments {
    fn scope(&self) -> Scope {
        Scope { address: self.node_address, traffic: self.traffic }
    }

    pub(super) fn limits(&self) -> Limits {
        // Within no time nobody answers.
        let within = self.answer_within.0.max(Duration::from_millis(10));
        Limits { within, at_once: self.at_once.into(), traffic_rate: self.traffic_rate.into() }
    }

    /// Whom to ask about these Services.
    ///
    /// # Errors
    /// There are no Nodes, or too many questions.
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

    /// Asks, and puts what it tells of a Service to that one's findings.
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

/// Result of `lb --probe`.
pub(super) struct Report {
    probed: Probed,
    /// About the proxies; those about Services are theirs.
    pub(super) findings: Vec<Finding>,
    /// Ports of UDP and SCTP.
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
