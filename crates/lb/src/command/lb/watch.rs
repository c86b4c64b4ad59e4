//! `lb watch`: the judgement, updated on each change and shown as a view on a terminal, otherwise
//! as a line for each change.

mod end;
mod picture;
mod screen;

use std::{
    collections::{BTreeMap, VecDeque},
    io::{self, IsTerminal as _, Write},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use jiff::Timestamp;
use tokio::{
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval, sleep_until},
};
use traffic_policy_cluster::{
    model::{Index, ServiceName},
    source::{self, Source},
};

use self::{
    end::{Stop, is_gone},
    picture::Picture,
    screen::Screen,
};
use super::{
    AgentArguments, BalancerArguments, SourceArguments,
    probe::{ProbeArguments, ask},
};
use crate::{
    Balancer, Cluster, Judge, Overrides, Span,
    probe::{Asking, Heard, Probed},
    watch::{self, Snapshot},
};

/// Follow the cluster, and report which nodes turn healthy or unhealthy, and when.
///
/// On a terminal this is a view of 80 columns that is redrawn; otherwise, and when the view closes,
/// there is a line for each change, with its time (UTC). Ctrl-C stops it.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// Only this Service: NAME, or NAMESPACE/NAME.
    #[arg(value_name = "SERVICE")]
    service: Option<String>,
    /// Interval between two rounds of probes, with --probe.
    #[arg(long, env = "TRAFFIC_POLICY_WATCH_PROBE_EVERY", value_name = "TIME", default_value = "5s")]
    probe_every: Span,
    #[command(flatten)]
    agents: AgentArguments,
    #[command(flatten)]
    source: SourceArguments,
    #[command(flatten)]
    balancer: BalancerArguments,
    #[command(flatten)]
    probe: ProbeArguments,
}

/// The time within which changes are judged together, because they come in groups.
const GROUP: Duration = Duration::from_millis(200);
/// The interval of redrawing a view and of checking for its reader.
const TICK: Duration = Duration::from_secs(1);
/// The time until a probe whose answer differs is repeated.
const DOUBT: Duration = Duration::from_secs(1);
/// The number of lines kept for the view.
const KEPT: usize = 1000;

impl Arguments {
    pub(super) fn execute(self) -> Result<()> {
        let (named, overrides) = self.balancer.read()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let result = runtime.block_on(self.run(named, overrides));
        // A hanging check of a folder must not delay the exit.
        runtime.shutdown_background();
        match result {
            Err(error) if is_gone(&error) => Ok(()),
            result => result,
        }
    }

    async fn run(self, named: Option<&'static Balancer>, overrides: Overrides) -> Result<()> {
        let screen = io::stdout().is_terminal();
        let mut stop = Stop::new(screen).context("signals cannot be waited for")?;
        let mut source = tokio::select! {
            source = self.source.follow() => source?,
            () = stop.wait() => return Ok(()),
        };
        let mut watch = Watch {
            arguments: &self,
            named,
            overrides,
            cluster: Cluster::new(Index::default()),
            snapshot: None,
            picture: Picture::default(),
            heard: watch::Heard::default(),
            askings: Vec::new(),
            out: Out { screen: screen.then(Screen::enter).transpose()?, log: VecDeque::new() },
        };
        watch.cluster.set_agents(self.agents.forwarding, self.agents.algorithm);
        // A folder without Leases may just have none.
        let is_api = self.source.manifests.is_none();
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // The times of judging the changes that have come, and of probing the nodes.
        let mut due: Option<Instant> = None;
        let mut ask_at: Option<Instant> = None;
        // Nodes are not probed all the time, however often objects change.
        let mut earliest = Instant::now();
        let mut rounds: JoinSet<Vec<(Asking, Heard, Duration)>> = JoinSet::new();
        loop {
            tokio::select! {
                () = stop.wait() => return Ok(()),
                batch = source.next() => {
                    let Some(batch) = batch else { bail!("the source of objects has ended") };
                    let mut has_leases = batch.has_all_leases();
                    watch.cluster.change(|index| {
                        batch.apply(index);
                        while let Some(more) = source.try_next() {
                            has_leases |= more.has_all_leases();
                            more.apply(index);
                        }
                    });
                    if is_api && has_leases {
                        watch.cluster.leases_are_listed();
                    }
                    due.get_or_insert_with(|| Instant::now() + GROUP);
                }
                () = at(due) => {
                    due = None;
                    if watch.cluster.index().is_synced() {
                        watch.judge()?;
                        if self.probe.probe && rounds.is_empty() {
                            ask_at = Some(earliest);
                        }
                        watch.draw(&source)?;
                    }
                }
                () = at(ask_at) => {
                    ask_at = None;
                    earliest = Instant::now() + DOUBT;
                    let (askings, limits) = (watch.askings.clone(), self.probe.limits());
                    rounds.spawn(async move { ask(askings, limits, |_, _| ()).await });
                }
                Some(round) = rounds.join_next() => {
                    let probed = Probed::new(round.context("a round of questions has ended")?);
                    let lines = watch.heard.round(&probed);
                    watch.out.log(lines)?;
                    let pause = if watch.heard.doubts() { DOUBT } else { self.probe_every.0.max(DOUBT) };
                    ask_at = Some(Instant::now() + pause);
                    watch.draw(&source)?;
                }
                _ = ticks.tick() => {
                    if end::nobody_reads() {
                        return Ok(());
                    }
                    watch.draw(&source)?;
                }
            }
        }
    }
}

/// Waits until a time; without one, forever.
async fn at(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}

struct Watch<'w> {
    arguments: &'w Arguments,
    named: Option<&'static Balancer>,
    overrides: Overrides,
    cluster: Cluster,
    /// The result of the last judgement.
    snapshot: Option<Snapshot>,
    picture: Picture,
    heard: watch::Heard,
    /// The probes of the next round.
    askings: Vec<Asking>,
    out: Out,
}

impl Watch<'_> {
    fn judge(&mut self) -> Result<()> {
        let judge = Judge::new(&self.cluster, self.named, self.overrides.clone());
        let names: Vec<ServiceName> = match &self.arguments.service {
            None => self.cluster.exposed().cloned().collect(),
            Some(name) => self.cluster.named(name).iter().map(|service| service.name.clone()).collect(),
        };
        let judgements: Vec<_> = names.iter().filter_map(|name| judge.service(name)).collect();
        if self.arguments.probe.probe {
            self.askings = self.arguments.probe.questions(&self.cluster, &judge, &judgements)?.askings;
        }
        let snapshot = Snapshot::new(&judge, &judgements);
        self.picture = Picture::new(&judge, &judgements);
        let lines = match self.snapshot.take() {
            Some(old) => old.changes(&snapshot),
            None => {
                let mut lines = snapshot.beginning();
                if lines.is_empty() {
                    let what = self.arguments.service.as_deref().unwrap_or("any Service");
                    lines.push(format!("{what}: is not reached from outside"));
                }
                lines
            }
        };
        self.snapshot = Some(snapshot);
        self.out.log(lines)
    }

    fn draw(&mut self, source: &Source) -> Result<()> {
        let Some(screen) = &mut self.out.screen else { return Ok(()) };
        let status = source.status().get();
        let troubles: BTreeMap<_, _> = status.errors.into_iter().collect();
        let lines = self.picture.lines(screen.size(), &troubles, &self.out.log, |service, node| {
            self.arguments.probe.probe.then(|| self.heard.answers(service, node))
        });
        Ok(screen.draw(&lines)?)
    }
}

/// The destination of output lines.
struct Out {
    screen: Option<Screen>,
    /// The last lines, the oldest first.
    log: VecDeque<String>,
}

impl Out {
    fn log(&mut self, lines: Vec<String>) -> Result<()> {
        let time = Timestamp::now().strftime("%Y-%m-%dT%H:%M:%S%.3fZ").to_string();
        let mut out = io::stdout().lock();
        for line in lines {
            let line = format!("{time} {line}");
            if self.screen.is_none() {
                writeln!(out, "{line}")?;
            } else if self.log.len() == KEPT {
                self.log.pop_front();
            }
            if self.screen.is_some() {
                self.log.push_back(line);
            }
        }
        Ok(out.flush()?)
    }
}

impl Drop for Out {
    /// Prints the lines that the view has shown when it closes, so that they stay readable.
    fn drop(&mut self) {
        let Some(screen) = self.screen.take() else { return };
        let (width, _) = screen.size();
        drop(screen);
        let mut out = io::stdout().lock();
        for line in self.log.iter().flat_map(|line| picture::wrapped(line, width)) {
            // If the output has no reader any more, the lines are not needed.
            if writeln!(out, "{line}").is_err() {
                return;
            }
        }
    }
}

impl SourceArguments {
    /// Follows the source that [`Self::read`] reads once.
    async fn follow(&self) -> Result<Source> {
        match &self.manifests {
            Some(folder) => Ok(source::watch_folder(folder.clone())),
            None => Ok(source::watch_cluster(&self.access()).await?),
        }
    }
}
