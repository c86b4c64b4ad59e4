//! A meter of connections that stay open and keep sending requests: none may break, and none may
//! lose a segment.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::answer::Answer;
use super::closing;
use super::retransmissions;
use crate::netns::{Namespace, Running, Stop};
use crate::pace::scaled;

/// The time limit of an answer; after it the connection counts as broken.
const PATIENCE: Duration = Duration::from_secs(10);

/// A running meter.
#[derive(Debug)]
pub struct HeldConnections(Running<Report>);

/// The counts of a meter.
#[derive(Clone, Debug, Default)]
pub struct Report {
    pub connections: u64,
    pub requests: u64,
    /// The error of each broken connection.
    pub broken: Vec<String>,
    /// Segments of the client's ends that were lost.
    pub lost_of_client: u64,
    /// Segments of the pods' ends that were lost.
    pub lost_of_pods: u64,
    /// The times since a connection was open after which more of its segments were lost.
    pub lost_after: Vec<Duration>,
    pub slowest: Duration,
    /// The addresses that pods saw as the client's.
    pub clients: BTreeSet<IpAddr>,
    /// The connections of each pod.
    pub by_pod: BTreeMap<String, u64>,
    /// The broken ones among them.
    pub broken_by_pod: BTreeMap<String, u64>,
}

impl HeldConnections {
    /// Opens `connections` to the targets in turn; each sends a request once per `pause`. All are
    /// open when this returns.
    pub fn start(
        namespace: &Namespace,
        targets: &[SocketAddr],
        connections: usize,
        pause: Duration,
    ) -> Result<Self> {
        ensure!(!targets.is_empty(), "no target");
        let targets: Vec<_> = targets.iter().copied().cycle().take(connections).collect();
        let (ready, opened) = std::sync::mpsc::channel();
        let running = namespace.start("held connections", async move |stop: Stop| {
            let mut all = JoinSet::new();
            for target in targets {
                match open(target).await {
                    Ok(stream) => all.spawn(hold(stream, target, pause, stop.clone())),
                    Err(error) => {
                        ready.send(Err(error)).ok();
                        return Report::default();
                    }
                };
            }
            ready.send(Ok(())).ok();
            all.join_all().await.into_iter().fold(Report::default(), Report::add)
        });
        opened.recv().context("the meter ended")??;
        Ok(Self(running))
    }

    pub fn finish(self) -> Report {
        self.0.finish()
    }

    /// Whether all connections are broken.
    pub fn is_finished(&self) -> bool {
        self.0.is_finished()
    }
}

impl Report {
    /// Whether nothing broke and nothing was lost.
    pub fn is_clean(&self) -> bool {
        self.requests > 0 && self.broken.is_empty() && self.lost_of_client + self.lost_of_pods == 0
    }

    fn add(mut self, other: Self) -> Self {
        self.connections += other.connections;
        self.requests += other.requests;
        self.broken.extend(other.broken);
        self.lost_of_client += other.lost_of_client;
        self.lost_of_pods += other.lost_of_pods;
        self.lost_after.extend(other.lost_after);
        self.slowest = self.slowest.max(other.slowest);
        self.clients.extend(other.clients);
        for (sum, of_other) in
            [(&mut self.by_pod, other.by_pod), (&mut self.broken_by_pod, other.broken_by_pod)]
        {
            for (pod, connections) in of_other {
                *sum.entry(pod).or_default() += connections;
            }
        }
        self
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { connections, requests, broken, slowest, .. } = self;
        let (client, pods) = (self.lost_of_client, self.lost_of_pods);
        write!(f, "{connections} connections held, {requests} requests, slowest {slowest:?}, ")?;
        write!(f, "segments lost: {client} of the client, {pods} of pods")?;
        if !self.lost_after.is_empty() {
            write!(f, " (after {:?})", &self.lost_after[..self.lost_after.len().min(3)])?;
        }
        write!(f, "; {} broken", broken.len())?;
        broken.iter().take(3).try_for_each(|reason| write!(f, "; {reason}"))
    }
}

async fn open(target: SocketAddr) -> Result<BufReader<TcpStream>> {
    let stream = timeout(scaled(PATIENCE), TcpStream::connect(target))
        .await
        .with_context(|| format!("opening {target}"))?;
    let stream = stream.with_context(|| format!("opening {target}"))?;
    stream.set_nodelay(true)?;
    Ok(BufReader::new(stream))
}

async fn hold(mut stream: BufReader<TcpStream>, target: SocketAddr, pause: Duration, stop: Stop) -> Report {
    let mut report = Report { connections: 1, ..Report::default() };
    let start = Instant::now();
    while !stop.is_requested() {
        let asked = Instant::now();
        match timeout(scaled(PATIENCE), ask(&mut stream, report.requests)).await {
            Ok(Ok(answer)) => {
                let lost = retransmissions::lost(stream.get_ref()).unwrap_or(0).into();
                if lost > report.lost_of_client || u64::from(answer.lost) > report.lost_of_pods {
                    report.lost_after.push(start.elapsed());
                }
                (report.lost_of_client, report.lost_of_pods) = (lost, answer.lost.into());
                report.clients.insert(answer.client.ip());
                report.by_pod.insert(answer.pod, 1);
            }
            Ok(Err(error)) => report.broken.push(format!("{target} after {:?}: {error:#}", start.elapsed())),
            Err(_) => report.broken.push(format!("{target} after {:?}: no answer", start.elapsed())),
        }
        report.slowest = report.slowest.max(asked.elapsed());
        if !report.broken.is_empty() {
            report.broken_by_pod = report.by_pod.clone();
            break;
        }
        report.requests += 1;
        sleep(pause).await;
    }
    report.lost_of_client = retransmissions::lost(stream.get_ref()).unwrap_or(0).into();
    if report.broken.is_empty() {
        closing::close(stream.into_inner()).await;
    }
    report
}

async fn ask(stream: &mut BufReader<TcpStream>, number: u64) -> Result<Answer> {
    let said = format!("request {number}");
    stream.write_all(format!("{said}\n").as_bytes()).await?;
    let mut line = String::new();
    ensure!(stream.read_line(&mut line).await? > 0, "closed by the other side");
    let answer = Answer::parse(&line)?;
    ensure!(answer.said == said, "asked {said:?}, answered {:?}", answer.said);
    Ok(answer)
}
