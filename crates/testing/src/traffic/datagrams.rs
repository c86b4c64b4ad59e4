//! A meter of numbered datagrams: which ones were lost or duplicated, on the way to the server and
//! on the way back.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tokio::net::UdpSocket;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};

use super::answer::Answer;
use super::ledger::{Label, Ledger, count};
use crate::netns::{Namespace, Running, Stop};
use crate::pace::scaled;

/// The time limit of an answer at the end; after it the answer counts as lost.
const PATIENCE: Duration = Duration::from_secs(1);

/// A running meter.
#[derive(Debug)]
pub struct Datagrams(Running<Result<Report>>);

/// The counts of a meter.
#[derive(Clone, Debug, Default)]
pub struct Report {
    pub sent: u64,
    /// Datagrams that arrived at some server, each counted once.
    pub at_server: u64,
    /// Datagrams that came back, each counted once.
    pub back: u64,
    pub lost_there: u64,
    pub lost_back: u64,
    pub doubled_there: u64,
    pub doubled_back: u64,
    /// The longest time during which no datagram came back.
    pub longest_silence: Duration,
    /// Datagrams that came back from each pod.
    pub by_pod: BTreeMap<String, u64>,
    /// Errors of the sockets, such as ICMP's "port unreachable".
    pub errors: BTreeMap<String, u64>,
}

impl Datagrams {
    /// Sends numbered datagrams from `namespace`, evenly over `flows` sockets, until it is
    /// finished. The servers must share `ledger`.
    pub fn start(
        namespace: &Namespace,
        target: SocketAddr,
        flows: usize,
        per_second: u32,
        ledger: &Ledger,
    ) -> Result<Self> {
        let sockets: Result<Vec<_>> = namespace.run(|| (0..flows.max(1)).map(|_| connect(target)).collect());
        let (sockets, ledger) = (sockets?, ledger.clone());
        let work = async move |stop| meter(sockets, per_second, &ledger, stop).await;
        Ok(Self(namespace.start("datagrams", work)))
    }

    /// Stops sending, waits for outstanding answers, and counts.
    pub fn finish(self) -> Result<Report> {
        self.0.finish()
    }
}

impl Report {
    /// Whether nothing was lost and nothing was duplicated.
    pub fn is_clean(&self) -> bool {
        let faults = [self.lost_there, self.lost_back, self.doubled_there, self.doubled_back];
        self.sent > 0 && faults == [0; 4] && self.errors.is_empty()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { sent, at_server, back, lost_there, lost_back, doubled_there, doubled_back, .. } = self;
        write!(
            f,
            "{sent} datagrams sent, {at_server} at the server ({lost_there} lost, {doubled_there} doubled), "
        )?;
        write!(f, "{back} back ({lost_back} lost, {doubled_back} doubled), silent for at most ")?;
        write!(f, "{:?}, answered by {:?}, errors {:?}", self.longest_silence, self.by_pod, self.errors)
    }
}

/// Enlarges the receive buffers to hold a second of a meter's traffic: a busy machine must not look
/// like a lossy network.
pub(super) fn enlarge_buffers(socket: &Socket) -> Result<()> {
    nix::sys::socket::setsockopt(socket, nix::sys::socket::sockopt::RcvBufForce, &(16 << 20))
        .context("SO_RCVBUFFORCE")
}

#[derive(Debug, Default)]
struct Seen {
    back: Vec<u8>,
    by_pod: BTreeMap<String, u64>,
    errors: BTreeMap<String, u64>,
    last: Option<Instant>,
    longest_silence: Duration,
}

async fn meter(sockets: Vec<Socket>, per_second: u32, ledger: &Ledger, stop: Stop) -> Result<Report> {
    let sockets: Result<Vec<_>> =
        sockets.into_iter().map(|socket| Ok(Arc::new(UdpSocket::from_std(socket.into())?))).collect();
    let sockets = sockets?;
    let seen = Arc::new(Mutex::new(Seen { last: Some(Instant::now()), ..Seen::default() }));
    let mut receivers = JoinSet::new();
    let meter = Label::unused_meter();
    for socket in sockets.clone() {
        receivers.spawn(receive(socket, meter, seen.clone()));
    }
    let sent = send(&sockets, meter, per_second, &seen, &stop).await;
    let deadline = Instant::now() + scaled(PATIENCE);
    let missing = || lock(&seen).back.iter().filter(|count| **count > 0).count() < sent;
    while missing() && Instant::now() < deadline {
        sleep(Duration::from_millis(10)).await;
    }
    // A duplicated answer may be the last of all.
    sleep(Duration::from_millis(50)).await;
    receivers.shutdown().await;
    let mut there = ledger.arrivals(meter);
    let seen = lock(&seen);
    let mut back = seen.back.clone();
    ensure!(there.len().max(back.len()) <= sent, "an answer to a datagram that was never sent");
    there.resize(sent, 0);
    back.resize(sent, 0);
    let times =
        |counts: &[u8], wanted: fn(u8) -> bool| counts.iter().filter(|count| wanted(**count)).count() as u64;
    let (at_server, returned) = (times(&there, |count| count > 0), times(&back, |count| count > 0));
    let lost_back = there.iter().zip(&back).filter(|(there, back)| **there > 0 && **back == 0).count() as u64;
    Ok(Report {
        sent: sent as u64,
        at_server,
        back: returned,
        lost_there: sent as u64 - at_server,
        lost_back,
        doubled_there: times(&there, |count| count > 1),
        doubled_back: times(&back, |count| count > 1),
        longest_silence: seen.longest_silence,
        by_pod: seen.by_pod.clone(),
        errors: seen.errors.clone(),
    })
}

async fn send(
    sockets: &[Arc<UdpSocket>],
    meter: u64,
    per_second: u32,
    seen: &Mutex<Seen>,
    stop: &Stop,
) -> usize {
    let start = Instant::now();
    let mut tick = interval(Duration::from_millis(1));
    tick.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut sent = 0;
    while !stop.is_requested() {
        tick.tick().await;
        let due = (start.elapsed().as_secs_f64() * f64::from(per_second)) as usize;
        // After a pause of this machine the rest follows slowly: a burst of thousands would cause
        // losses of the meter's own.
        let until = due.min(sent + 50);
        for number in sent..until {
            let socket = &sockets[number % sockets.len()];
            if let Err(error) = socket.send(Label { meter, number }.text().as_bytes()).await {
                note(seen, &error);
            }
        }
        sent = sent.max(until);
    }
    sent
}

async fn receive(socket: Arc<UdpSocket>, meter: u64, seen: Arc<Mutex<Seen>>) {
    let mut buffer = [0; 2048];
    loop {
        let length = match socket.recv(&mut buffer).await {
            Ok(length) => length,
            Err(error) => {
                note(&seen, &error);
                continue;
            }
        };
        let answer = Answer::parse(&String::from_utf8_lossy(&buffer[..length]));
        let label = answer.as_ref().ok().and_then(|answer| Label::parse(&answer.said));
        let mut seen = lock(&seen);
        let (Ok(answer), Some(label)) = (answer, label.filter(|label| label.meter == meter)) else {
            *seen.errors.entry("an answer that is not ours".to_owned()).or_default() += 1;
            continue;
        };
        count(&mut seen.back, label.number);
        *seen.by_pod.entry(answer.pod).or_default() += 1;
        let now = Instant::now();
        let silence = seen.last.replace(now).map(|last| now - last);
        seen.longest_silence = seen.longest_silence.max(silence.unwrap_or_default());
    }
}

fn note(seen: &Mutex<Seen>, error: &std::io::Error) {
    *lock(seen).errors.entry(error.to_string()).or_default() += 1;
}

fn lock(seen: &Mutex<Seen>) -> std::sync::MutexGuard<'_, Seen> {
    seen.lock().unwrap_or_else(PoisonError::into_inner)
}

fn connect(target: SocketAddr) -> Result<Socket> {
    let any = if target.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = Socket::new(Domain::for_address(target), Type::DGRAM, Some(Protocol::UDP))?;
    enlarge_buffers(&socket)?;
    socket.bind(&SocketAddr::new(any, 0).into())?;
    socket.connect(&target.into()).with_context(|| format!("no way to {target}"))?;
    SockRef::from(&socket).set_nonblocking(true)?;
    Ok(socket)
}
