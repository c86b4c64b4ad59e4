//! `lb`: which nodes load balancers consider healthy, and how much traffic each pod gets.

mod document;
mod html;
mod print;
mod probe;
mod proxy;
mod simulate;
mod watch;
mod what_if;

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand, builder::PossibleValuesParser};
use traffic_policy_cluster::{
    command::{
        api::ApiArguments,
        listing,
        view::{self, Output, OutputArguments},
    },
    model::{Algorithm, Forwarding, Index, ServiceName, object::Service},
    source::{self, Access, WholeCluster},
};

use super::FoundErrors;
use crate::{Balancer, Cluster, Judge, Judgement, Level, Overrides, PROFILES, by_name};

/// Show which nodes load balancers consider healthy, what happens to a request at each, how much
/// traffic each pod gets, and what is wrong with it.
///
/// Reads the Kubernetes API or a folder of manifests; needs neither a node nor root. Without a
/// name: every Service that is reached from outside. Exit code 3 if there is a finding of level
/// error.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(super) struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    /// Only this Service: NAME, or NAMESPACE/NAME.
    #[arg(value_name = "SERVICE")]
    service: Option<String>,
    /// Also show for each row where it comes from, and what is assumed about the balancer.
    #[arg(long, env = "TRAFFIC_POLICY_WHY")]
    why: bool,
    /// Name every node, even where many are alike.
    #[arg(long, env = "TRAFFIC_POLICY_ALL_NODES")]
    all_nodes: bool,
    #[command(flatten)]
    output: OutputArguments,
    #[command(flatten)]
    html: html::HtmlArguments,
    #[command(flatten)]
    agents: AgentArguments,
    #[command(flatten)]
    source: SourceArguments,
    #[command(flatten)]
    balancer: BalancerArguments,
    #[command(flatten)]
    probe: probe::ProbeArguments,
}

#[derive(Debug, Subcommand)]
enum Command {
    WhatIf(Box<what_if::Arguments>),
    Watch(Box<watch::Arguments>),
    Simulate(Box<simulate::Arguments>),
}

/// The source of the objects.
#[derive(Debug, Args)]
#[command(next_help_heading = "Objects")]
struct SourceArguments {
    /// A folder of ordinary Kubernetes YAML or JSON (Service, EndpointSlice, Node, Lease), instead
    /// of the API.
    #[arg(long, env = "TRAFFIC_POLICY_LB_MANIFESTS", value_name = "DIR")]
    manifests: Option<PathBuf>,
    #[command(flatten)]
    api: ApiArguments,
}

/// The settings that the agents run with.
#[derive(Debug, Args)]
#[command(next_help_heading = "The agents")]
struct AgentArguments {
    /// The agents' --forwarding, for Services without the annotation traffic-policy.io/forwarding:
    /// snat, direct or tunnel. Default: as the Leases of all nodes say that have one, else snat.
    #[arg(long, env = "TRAFFIC_POLICY_LB_FORWARDING", value_name = "WAY", value_parser = what_if::forwarding)]
    forwarding: Option<Forwarding>,
    /// The agents' --algorithm, for Services without the annotation traffic-policy.io/algorithm:
    /// random or maglev. Default: as for --forwarding, else random.
    #[arg(long, env = "TRAFFIC_POLICY_LB_ALGORITHM", value_name = "ALGORITHM")]
    algorithm: Option<Algorithm>,
}

/// The load balancer in front of the nodes.
#[derive(Debug, Args)]
#[command(next_help_heading = "The balancer")]
struct BalancerArguments {
    /// The balancer's name. Default: guessed for each Service from its class, annotations and
    /// hostname, and from the Nodes' providerID.
    #[arg(long, env = "TRAFFIC_POLICY_BALANCER", value_name = "NAME",
        value_parser = PossibleValuesParser::new(PROFILES.map(|balancer| balancer.name)))]
    balancer: Option<String>,
    /// A YAML file that sets the following flags of the balancer, under the same names:
    /// `check-interval: 5s`.
    #[arg(long, env = "TRAFFIC_POLICY_BALANCER_FILE", value_name = "FILE")]
    balancer_file: Option<PathBuf>,
    #[command(flatten)]
    overrides: Overrides,
}

impl Arguments {
    pub(super) fn execute(mut self) -> Result<()> {
        match self.command.take() {
            Some(Command::WhatIf(arguments)) => return arguments.execute(),
            Some(Command::Watch(arguments)) => return arguments.execute(),
            Some(Command::Simulate(arguments)) => return arguments.execute(),
            None => {}
        }
        self.html.check()?;
        let (named, overrides) = self.balancer.read()?;
        let mut cluster = self.source.read()?;
        cluster.set_agents(self.agents.forwarding, self.agents.algorithm);
        if cluster.nodes_are_guessed {
            tracing::warn!(
                "there are no Node objects: the nodes are those that endpoints name, and those without a pod are missing"
            );
        }
        let wanted = self.wanted(&cluster)?;
        let judge = Judge::new(&cluster, named, overrides);
        let mut judgements: Vec<_> = wanted.iter().filter_map(|name| judge.service(name)).collect();
        if judgements.is_empty()
            && let Some(name) = &self.service
        {
            bail!(
                "Service {name} is not reached from outside: it is of type ClusterIP without externalIPs, or has no port that is served"
            );
        }
        let asked =
            self.probe.probe.then(|| self.probe.execute(&cluster, &judge, &mut judgements)).transpose()?;
        let view = print::View { judge: &judge, why: self.why, all_nodes: self.all_nodes };
        self.html.write(|| document::page(&view, &judgements))?;
        match (self.output.output, &asked) {
            (Output::Json, None) => view::print_json(&document::Document::new(&view, &judgements))?,
            (Output::Json, Some(asked)) => {
                view::print_json(&asked.document(document::Document::new(&view, &judgements)))?;
            }
            (Output::Table, _) => view::print(|out| {
                view.print(out, &judgements, self.service.is_some())?;
                asked.iter().try_for_each(|asked| asked.print(out, self.all_nodes))
            })?,
        }
        fail_on_errors(&judgements, asked.as_ref().map_or(0, probe::Report::errors))
    }

    fn wanted(&self, cluster: &Cluster) -> Result<Vec<ServiceName>> {
        let Some(name) = &self.service else { return Ok(cluster.exposed().cloned().collect()) };
        let found: Vec<_> = cluster.named(name).iter().map(|service| service.name.clone()).collect();
        if found.is_empty() {
            let all = cluster.index().services().count();
            bail!(
                "there is no Service {name} among {all}: see `lb` without a name for those that are reached from outside"
            );
        }
        Ok(found)
    }
}

/// Fails if there are errors; `more` is the number of errors that do not concern a Service.
fn fail_on_errors(judgements: &[Judgement<'_>], more: usize) -> Result<()> {
    let findings = judgements.iter().flat_map(|judgement| &judgement.findings);
    match more + findings.filter(|finding| finding.level == Level::Error).count() {
        0 => Ok(()),
        count => Err(FoundErrors { count }.into()),
    }
}

impl SourceArguments {
    fn read(&self) -> Result<Cluster> {
        let mut index = Index::default();
        if let Some(folder) = &self.manifests {
            source::read_cluster(folder).context("the manifests are not understood")?.apply(&mut index);
            return Ok(Cluster::new(index));
        }
        let WholeCluster { batch, no_leases } = listing::cluster(&self.api.access(), None)?;
        batch.apply(&mut index);
        let mut cluster = Cluster::new(index);
        match no_leases {
            None => cluster.leases_are_listed(),
            Some(why) if cluster.index().services().any(is_direct) => tracing::warn!(
                "the Leases of direct forwarding may not be listed (list on leases.coordination.k8s.io is needed), all nodes are taken to \
                 open packets: {why}"
            ),
            Some(_) => {}
        }
        Ok(cluster)
    }

    fn access(&self) -> Access {
        self.api.access()
    }
}

/// Whether a Service is to be forwarded directly by its annotation.
fn is_direct(service: &Service) -> bool {
    service.forwarding.is_some_and(Forwarding::is_direct)
}

impl BalancerArguments {
    fn read(&self) -> Result<(Option<&'static Balancer>, Overrides)> {
        let mut overrides = match &self.balancer_file {
            None => Overrides::default(),
            Some(file) => {
                let text = std::fs::read_to_string(file)
                    .with_context(|| format!("{} cannot be read", file.display()))?;
                serde_yaml_ng::from_str(&text)
                    .with_context(|| format!("{} is not a balancer: see docs/balancers.md", file.display()))?
            }
        };
        overrides.prefer(&self.overrides);
        Ok((self.balancer.as_deref().and_then(by_name), overrides))
    }
}
