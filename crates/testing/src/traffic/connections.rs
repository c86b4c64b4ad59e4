//! A meter of new connections: how many fail, and how many lost a packet and needed a
//! retransmission. Durations are reported, but prove nothing: a busy machine is slow, too.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

use super::answer::Answer;
use super::closing;
use super::retransmissions;
use crate::netns::{Namespace, Running, Stop};
use crate::pace::scaled;

/// The time limit of a whole request.
const PATIENCE: Duration = Duration::from_secs(5);

/// A running meter.
#[derive(Debug)]
pub struct NewConnections {
    running: Running<Report>,
    under_way: UnderWay,
}

/// Numbers of the requests that were sent and have not ended.
type UnderWay = Arc<Mutex<BTreeSet<u64>>>;

/// The counts of a meter.
#[derive(Clone, Debug, Default)]
pub struct Report {
    pub ok: u64,
    pub failed: u64,
    /// The number of successful connections of which a segment was lost, a SYN included, as the
    /// kernel counts them at each end.
    pub resent: u64,
    pub slowest: Duration,
    /// The number of times at which no target could be chosen; they count as failed.
    pub without_target: u64,
    /// The first failures.
    pub failures: Vec<Failure>,
    /// The number of answers of each pod.
    pub by_pod: BTreeMap<String, u64>,
    /// The number of requests sent to each target.
    pub by_target: BTreeMap<SocketAddr, u64>,
    /// All requests that had a target, in the order in which they ended.
    pub ended: Vec<Ended>,
}

/// One request that has ended.
#[derive(Clone, Debug)]
pub struct Ended {
    /// The time since the meter's start at which it was sent.
    pub at: Duration,
    pub target: SocketAddr,
    /// The pod that answered; `None`: it failed.
    pub pod: Option<String>,
    /// Whether the connection was established: a pod had it.
    pub established: bool,
    /// Whether a segment was lost, and sent again.
    pub resent: bool,
}

#[derive(Clone, Debug)]
pub struct Failure {
    /// The time since the meter's start.
    pub at: Duration,
    pub target: SocketAddr,
    pub reason: String,
}

impl NewConnections {
    /// Opens connections at a rate, each for one request, to the target that `choose` returns for
    /// the n-th.
    pub fn start(
        namespace: &Namespace,
        per_second: u32,
        choose: impl Fn(u64) -> Option<SocketAddr> + Send + 'static,
    ) -> Self {
        Self::start_bounded(namespace, per_second, u64::MAX, choose)
    }

    /// A variant of [`Self::start`] that stops by itself after `total` connections; [`Self::wait`]
    /// then returns the report.
    pub fn start_bounded(
        namespace: &Namespace,
        per_second: u32,
        total: u64,
        choose: impl Fn(u64) -> Option<SocketAddr> + Send + 'static,
    ) -> Self {
        Self::start_patient(namespace, per_second, total, scaled(PATIENCE), choose)
    }

    /// A variant of [`Self::start_bounded`] for clients that give up after `patience`, whatever the
    /// pace of this machine.
    pub fn start_patient(
        namespace: &Namespace,
        per_second: u32,
        total: u64,
        patience: Duration,
        choose: impl Fn(u64) -> Option<SocketAddr> + Send + 'static,
    ) -> Self {
        let under_way = UnderWay::default();
        let shared = under_way.clone();
        let work = async move |stop| {
            let load = Load { per_second, total, patience };
            meter(load, choose, &shared, stop).await
        };
        Self { running: namespace.start("new connections", work), under_way }
    }

    /// Whether the first `first` requests have ended.
    pub fn are_over(&self, first: u64) -> bool {
        lock(&self.under_way).first().is_none_or(|oldest| *oldest >= first)
    }

    pub fn finish(self) -> Report {
        self.running.finish()
    }

    pub fn wait(self) -> Report {
        self.running.wait()
    }
}

impl Report {
    /// Whether no connection failed and none lost a packet.
    pub fn is_clean(&self) -> bool {
        self.ok > 0 && self.failed == 0 && self.resent == 0
    }

    fn add(&mut self, outcome: Outcome) {
        let Outcome { at, target, established, .. } = outcome;
        let mut ended = Ended { at, target, pod: None, established, resent: false };
        match outcome.result {
            Ok((answer, resent)) => {
                ended.resent = resent + answer.lost > 0;
                ended.pod = Some(answer.pod.clone());
                self.ok += 1;
                self.resent += u64::from(ended.resent);
                self.slowest = self.slowest.max(outcome.took);
                *self.by_pod.entry(answer.pod).or_default() += 1;
            }
            Err(error) => {
                self.failed += 1;
                if self.failures.len() < 20 {
                    let reason = format!("{error:#}");
                    self.failures.push(Failure { at: outcome.at, target: outcome.target, reason });
                }
            }
        }
        self.ended.push(ended);
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ok, failed, resent, slowest, by_pod, .. } = self;
        write!(
            f,
            "{ok} connections ok, {failed} failed, {resent} sent a segment again, slowest {slowest:?}, "
        )?;
        write!(f, "answered by {by_pod:?}")?;
        let mut failures = self.failures.iter().take(3);
        failures.try_for_each(|Failure { at, target, reason }| write!(f, "; {target} at {at:?}: {reason}"))
    }
}

/// The requests of a meter.
#[derive(Clone, Copy)]
struct Load {
    per_second: u32,
    total: u64,
    /// The time limit of each.
    patience: Duration,
}

struct Outcome {
    target: SocketAddr,
    at: Duration,
    took: Duration,
    established: bool,
    /// The answer, and the number of segments of the client's end that were lost.
    result: Result<(Answer, u32)>,
}

async fn meter(
    load: Load,
    choose: impl Fn(u64) -> Option<SocketAddr>,
    numbers: &UnderWay,
    stop: Stop,
) -> Report {
    let Load { per_second, total, patience } = load;
    let mut report = Report::default();
    let mut under_way = JoinSet::new();
    let mut tick = interval(Duration::from_secs(1) / per_second.max(1));
    tick.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let start = Arc::new(Instant::now());
    for number in 0..total {
        if stop.is_requested() {
            break;
        }
        tick.tick().await;
        lock(numbers).insert(number);
        if let Some(target) = choose(number) {
            *report.by_target.entry(target).or_default() += 1;
            let (start, numbers) = (start.clone(), numbers.clone());
            under_way.spawn(async move {
                let outcome = request(target, start, patience).await;
                lock(&numbers).remove(&number);
                outcome
            });
        } else {
            lock(numbers).remove(&number);
            report.without_target += 1;
            report.failed += 1;
        }
        while let Some(outcome) = under_way.try_join_next() {
            report.add(outcome.expect("a request does not panic"));
        }
    }
    for outcome in under_way.join_all().await {
        report.add(outcome);
    }
    report
}

fn lock(under_way: &UnderWay) -> MutexGuard<'_, BTreeSet<u64>> {
    under_way.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn request(target: SocketAddr, meter_start: Arc<Instant>, patience: Duration) -> Outcome {
    let at = meter_start.elapsed();
    let start = Instant::now();
    let mut established = false;
    let exchange = exchange(target, || established = true);
    let result = timeout(patience, exchange).await.context("no answer").and_then(|result| result);
    let took = start.elapsed();
    let result = match result {
        Ok((answer, lost, stream)) => {
            closing::close(stream).await;
            Ok((answer, lost))
        }
        Err(error) => Err(error),
    };
    Outcome { target, at, took, established, result }
}

/// Sends one request on a connection of its own.
pub async fn ask(target: SocketAddr) -> Result<Answer> {
    exchange(target, || ()).await.map(|(answer, _, _)| answer)
}

/// Sends a request; returns its answer, the number of the client's segments that were lost, and the
/// connection. `established` is told of the connection.
async fn exchange(target: SocketAddr, established: impl FnOnce()) -> Result<(Answer, u32, TcpStream)> {
    let mut stream = BufReader::new(TcpStream::connect(target).await?);
    established();
    stream.write_all(b"hello\n").await?;
    let mut line = String::new();
    ensure!(stream.read_line(&mut line).await? > 0, "closed without an answer");
    let stream = stream.into_inner();
    Ok((Answer::parse(&line)?, retransmissions::lost(&stream)?, stream))
}

/// A variant of [`ask`] with a namespace and a limit.
pub fn ask_from(namespace: &Namespace, target: SocketAddr, limit: Duration) -> Result<Answer> {
    namespace.block_on(async || {
        let answer = timeout(limit, ask(target)).await;
        answer.with_context(|| format!("no answer from {target} within {limit:?}"))?
    })
}
